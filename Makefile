# Every target but gpu makes .venv by itself. The first start installs (a few minutes), later ones start at once.
#
#   make demo ARGS="--num-prompts 4 --trace"      make check
#   make matrix ARGS="--seconds 60 --seed 1"      make museum BUG=32
#   make demo ARGS=--mine                         (with the functions that you have written)
#   make task EVENING=3                           (writes tonight's files, with holes, into my/)
#   make task N=3.2                               make task N=3.2 ARGS=--hint
#   make watch ARGS="--film 3"                    make test ARGS="-k scheduler"
#   make gpu ARGS=rehearse                        (uses PYTHON as it is, and installs nothing)
#   make test PYTHON=python3.12                   (which Python makes .venv, when there is none yet)

PYTHON ?= python3
ARGS ?=
BUG ?=
N ?=
EVENING ?=
# Of tests. One more than there are cores: some tests wait for a browser, a rank, a time limit. Each
# takes up to 2 GB, so no more than eight.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell expr $(CORES) + 1 \& $(CORES) \< 8 \| 8)
TORCH_VERSION := 2.13.0
TRITON_VERSION := 3.9.0
TRITON_VERSION_310 := 3.8.0

VENV := .venv
PY := $(VENV)/bin/python
# What is installed, in five layers, each upon the one before: `run` to serve from Python and to test
# a chapter, `server` to serve over HTTP, `practice` to try what is written, `test` to check it all,
# `work` to change the book. `book`, upon `practice`, builds its site.
RUN := $(VENV)/.run
SERVER := $(VENV)/.server
PRACTICE := $(VENV)/.practice
TEST := $(VENV)/.test
WORK := $(VENV)/.work
BOOK := $(VENV)/.book
HALF_MADE := $(VENV)/.half-made
# Every version but those of torch and triton, for each Python and system. With
# `rm -rf .venv && make test PINS=` the newest ones are taken instead.
LOCK := requirements.lock
PINS ?= -c $(LOCK)
# pip shows its progress to a person and is quiet in a log.
PIP = $(PY) -m pip --disable-pip-version-check install $$([ -t 2 ] || echo -q)
# Without isolation hatchling, too, is the locked one.
INSTALL = $(PIP) $(PINS) --no-build-isolation -e

# What a failed installation says before it ends.
NOT_INSTALLED = echo "make: the project's requirements could not be installed; see pip's message above, then start again."; exit 1
BROKEN = echo "make: $(VENV) is broken. Remove it (rm -rf $(VENV)) and start again."; exit 1

WHAT_help := list what can be made
WHAT_demo := serve a batch of prompts with the shipped checkpoint and print the text
WHAT_serve := serve the shipped checkpoint, or ARGS='--model M', to clients of OpenAI's API, on port 8000
WHAT_check := run the rules and the tests of the texts, the chapters' roots and the engine's parts, before each commit
WHAT_test := run the tests of the engine, chapters, server and page on $(JOBS) processes; with ARGS='-m slow' those of minutes
WHAT_test-book := run the tests of what is made of the code: texts, drawings, notebooks, tasks, museum, measurements, site
WHAT_matrix := serve with random settings for ten minutes and compare every token with transformers
WHAT_museum := list real bugs of real engines; with BUG=N, put one back in a copy and watch it
WHAT_task := list the tasks of COURSE.md; EVENING=3 writes its files, N=3.2 begins one or grades your answer
WHAT_watch := write a page that steps through a run of the engine; with ARGS='--film 3', of chapter 3
WHAT_lint := check the code and its layout with ruff, and its types; nothing is changed
WHAT_format := lay out the code and repair what ruff can repair
WHAT_notebooks := write the .ipynb of every NN_*/*_demo.py, without outputs
WHAT_figures := redraw every measured figure from its committed record
WHAT_bench := measure, write a record and print a table
WHAT_ladder := measure the engine with one chapter more at a time, and print the README's first table
WHAT_records := measure again what is older than its code, in three hours at most; ARGS=--list only lists it
WHAT_gpu := check and measure everything on this GPU in minutes: ARGS=look, record or rehearse
WHAT_book := build the web site of the book, both languages, in build/book; ARGS=--check tests it in a browser
WHAT_sync := renew what is derived: quotations, tables, counts, pages made of tables, notebooks
WHAT_lock := write the newest version of every package, for each Python, to requirements.lock
WHAT_clean := remove caches and dist/; .venv and build/ stay

TARGETS := demo serve check test test-book matrix museum watch task lint format notebooks figures bench ladder records gpu book sync lock clean

# Where it is set, each of the tests' hundreds of processes would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

UNKNOWN := $(filter-out help say-% $(VENV)/% $(TARGETS),$(MAKECMDGOALS))
$(if $(UNKNOWN),$(error no target '$(UNKNOWN)'; numbers are settings: BUG=32, N=4.3, EVENING=4))

.NOTPARALLEL:
.PHONY: help $(TARGETS)
.DEFAULT_GOAL := help

# `say-NAME` is the first prerequisite of NAME, so that its line is printed before any installation.
# With a setting there is nothing to say: the line is about the target without one.
say-%:
	@$(if $(ARGS)$(BUG)$(N)$(EVENING),:,echo "make $*: $(WHAT_$*)")

# With ARGS=--mine a program runs with the functions that you have written, after it has tested them.
MINE = $(if $(filter --mine,$(ARGS)),workshop.tasks.mine)

help: say-help
	@$(foreach t,$(TARGETS),printf '  make %-10s %s\n' '$(t)' "$(WHAT_$(t))";)

demo: say-demo $(if $(MINE),$(PRACTICE),$(RUN))
	@$(PY) -m $(MINE) common.demo $(ARGS)

serve: say-serve $(SERVER)
	@$(PY) -m common.serve $(ARGS)

RUN_TESTS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(JOBS) --dist worksteal
TESTS_FAILED = { echo "make $@: failed. Repeat one alone with: $(PY) -m pytest PATH::TEST"; exit 1; }

# Which tests: conftest.py. Each process is given tests that follow each other (`worksteal`), so that
# what a module or a folder prepares once is prepared by one of them.
check: say-check $(TEST)
	@$(RUN_TESTS) -m check $(ARGS) || $(TESTS_FAILED)

# Together with test-book: every test that is not slow. With paths in ARGS: those of the paths.
test: say-test $(TEST)
	@$(RUN_TESTS) -m "not book and not slow" $(ARGS) || $(TESTS_FAILED)

test-book: say-test-book $(TEST)
	@$(RUN_TESTS) -m "book and not slow" $(ARGS) || $(TESTS_FAILED)

# A failure ends with the command that repeats it: settings in ARGS run that one combination.
matrix: say-matrix $(PRACTICE)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m $(MINE) common.tests.equivalence $(ARGS) || \
	  { echo "make matrix: failed. What is printed above says with which settings."; exit 1; }

museum: say-museum $(PRACTICE)
	@$(PY) -m workshop.museum $(BUG) $(ARGS)

# An answer that is not right yet (1) is no error of make.
task: say-task $(PRACTICE)
	@$(PY) -m workshop.tasks $(N) $(if $(EVENING),--evening $(EVENING)) $(ARGS) || [ $$? -eq 1 ]

watch: say-watch $(if $(MINE),$(PRACTICE),$(RUN))
	@$(PY) -m workshop.watch $(ARGS)

# Without ruff's cache: it keeps a file's verdict on import order after a neighbour that the file
# imports was added, so what passes here could fail in a fresh clone.
lint: say-lint $(WORK)
	@$(PY) -m ruff check --no-cache . && $(PY) -m ruff format --check . || \
	  { echo "make lint: failed. 'make format' repairs most of it; the rest is listed above."; exit 1; }
	@echo "make lint: the code is in order; now its types (about two minutes)"
	@$(VENV)/bin/basedpyright --project pyproject.toml --pythonpath $(PY) || \
	  { echo "make lint: the types do not fit. Each line above names file, line and rule; repair it by hand."; \
	    exit 1; }

format: say-format $(WORK)
	@$(PY) -m ruff check --no-cache --fix . ; checked=$$? ; $(PY) -m ruff format . && exit $$checked || \
	  { echo "make format: what is listed above has to be repaired by hand."; exit 1; }

notebooks: say-notebooks $(WORK)
	@$(PY) -m workshop.notebooks

figures: say-figures $(WORK)
	@for script in workshop/*/plot_*.py; do \
	  [ -e "$$script" ] || continue; \
	  echo "  $$script"; \
	  $(PY) "$$script" || { echo "make figures: $$script failed; run it alone to see why."; exit 1; }; \
	done

bench: say-bench $(RUN)
	@$(PY) -m workshop.bench $(ARGS)

ladder: say-ladder $(RUN)
	@$(PY) -m workshop.ladder $(ARGS)

# Resumed where it ended: a record that no commit has made old is kept.
records: say-records $(WORK)
	@$(PY) -m workshop.records $(ARGS)

gpu: say-gpu
	@$(PYTHON) -m workshop.bench.gpu $(ARGS)

sync: say-sync $(WORK)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m workshop.sync $(ARGS) || \
	  { echo "make sync: what is listed above wants a reader."; exit 1; }

book: say-book $(BOOK) $(if $(filter --check,$(ARGS)),$(TEST))
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m workshop.make_book $(ARGS)

# uv reads metadata only, and knows nothing of pip's settings. torch decides what others may be, but it
# and its CUDA packages are not in the file, because which build of them is taken is chosen below.
lock: say-lock
	@[ -x $(PY) ] || $(MAKE) $(RUN)
	@$(PIP) uv && echo "torch==$(TORCH_VERSION)" | $(PY) -m uv pip compile - pyproject.toml --all-extras --universal \
	  --python-version 3.10 --no-python-downloads --no-header --no-annotate --no-emit-index-url --upgrade \
	  -q -o $(VENV)/$(LOCK) || { echo "make lock: failed; $(LOCK) is unchanged."; exit 1; }
	@grep -Ev '^(torch|triton|(nvidia|cuda)-[a-z0-9-]+)==' $(VENV)/$(LOCK) > $(LOCK)

clean: say-clean
	@rm -rf dist .pytest_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -path ./build -prune -o -type d \
	  \( -name __pycache__ -o -name .ipynb_checkpoints -o -name .ruff_cache -o -name .pytest_cache \) \
	  -prune -exec rm -rf {} +

# A stamp is written last. A .venv whose first installation was interrupted carries HALF_MADE
# and is begun anew; one that is complete but older than pyproject.toml or the lock is brought up to
# date in place. torch comes first and by its exact version, so that nothing else decides which build
# is taken.
$(RUN): pyproject.toml $(LOCK)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "make: '$(PYTHON)' is not found. Install Python 3.10 or newer, or say which one: make PYTHON=/path/to/python3"; \
	  exit 1; }
	@if [ -e $(HALF_MADE) ]; then \
	  echo "make: $(VENV) was left half-made; beginning anew"; \
	  rm -rf $(VENV) || { echo "make: cannot remove $(VENV). Remove it by hand and start again."; exit 1; }; \
	fi
	@if [ ! -x $(PY) ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); 3.10 or newer is needed. Name one: make PYTHON=python3.12"; \
	    exit 1; }; \
	  echo "make: creating $(VENV) with $$($(PYTHON) --version 2>&1)"; \
	  mkdir -p $(VENV) && touch $(HALF_MADE) || { \
	    echo "make: cannot write to this folder; clone the repository where you may write."; exit 1; }; \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "make: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: sudo apt install python3-venv; then start again."; \
	    exit 1; }; \
	fi
	@rm -f $(RUN)
	@echo "make: installing torch $(TORCH_VERSION) (the large one: some minutes)"
	@$(PIP) $(PINS) "torch==$(TORCH_VERSION)" || { \
	  echo "make: torch $(TORCH_VERSION) could not be installed. Check the network and free disk space (about 2 GB;"; \
	  echo "      8 GB for a CUDA build) and that $$($(PY) --version) has a wheel of it, then start again."; \
	  exit 1; }
	@if [ "$$(uname -s)" = Linux ] && \
	    $(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then \
	  echo "make: installing triton (this torch is a CPU build and brings none)"; \
	  $(PIP) $(PINS) "triton==$(TRITON_VERSION); python_version >= '3.11'" \
	    "triton==$(TRITON_VERSION_310); python_version < '3.11'" || { \
	    echo "make: triton could not be installed; see pip's message above, then start again."; \
	    exit 1; }; \
	fi
	@echo "make: installing this project"
	@$(PIP) $(PINS) hatchling && $(INSTALL) '.[grammar,chapters]' || { $(NOT_INSTALLED); }
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "make: there is no C++ compiler, so decode attention is not compiled and its tests are skipped (optional)."; \
	  echo "      On Debian and Ubuntu: sudo apt-get install g++"; }
	@$(PY) -c 'import torch, transformers, request, common' || { $(BROKEN); }
	@rm -f $(HALF_MADE)
	@touch $(RUN)

$(SERVER): $(RUN)
	@echo "make: installing what the server needs"
	@$(INSTALL) '.[server]' || { $(NOT_INSTALLED); }
	@$(PY) -c 'import fastapi, prometheus_client, uvicorn, zmq' || { $(BROKEN); }
	@touch $(SERVER)

$(PRACTICE): $(SERVER)
	@echo "make: installing what the tests need"
	@$(INSTALL) '.[test]' || { $(NOT_INSTALLED); }
	@$(PY) -c 'import pytest, jupytext' || { $(BROKEN); }
	@touch $(PRACTICE)

$(TEST): $(PRACTICE)
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && $(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then \
	  echo "make: installing the Mooncake store (optional: chapter 3 works without it)"; \
	  $(INSTALL) '.[mooncake]' || \
	    echo "make: it could not be installed; see pip's message above. Its tests will be skipped."; \
	  $(PY) -c 'import mooncake.store' || { \
	    echo "make: the Mooncake store does not load, so its tests will be skipped. On Debian and Ubuntu it wants:"; \
	    echo "      sudo apt-get install libibverbs1 libnuma1 libcurl4"; }; \
	fi
	@echo "make: installing playwright (optional: it tests the page of 'make watch' in a browser)"
	@$(INSTALL) '.[browser]' || \
	  echo "make: it could not be installed; see pip's message above. Its tests will be skipped."
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  command -v google-chrome >/dev/null || { \
	  echo "make: there is no Chromium, so the page of 'make watch' is not tested in a browser (optional)."; \
	  echo "      On Debian and Ubuntu: sudo apt-get install chromium"; }
	@touch $(TEST)

$(WORK): $(TEST)
	@echo "make: installing what notebooks and lint need"
	@$(INSTALL) '.[notebooks,dev]' || { $(NOT_INSTALLED); }
	@touch $(WORK)

$(BOOK): $(PRACTICE)
	@echo "make: installing what the book's site is built with"
	@$(INSTALL) '.[book]' || { $(NOT_INSTALLED); }
	@$(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 11))' || \
	  $(PY) -c 'import furo, myst_nb, pagefind, sphinx' || { $(BROKEN); }
	@touch $(BOOK)
