"""The rules about the repository hold, by a tool where there is one. What starts make, pytest or a
build is in `test_commands.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from deptry.cli import cli as deptry
from tach import extension as tach
from tach.parsing import parse_project_config

import conftest
from common.tests import house as rules
from common.tests.forked import Forked
from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]
HOUSE = House(ROOT)
Rule = Callable[[House], list[str]]
RULES: list[Rule] = [
    rules.rule_of_floors,
    rules.rule_of_circles,
    rules.rule_of_names,
    rules.rule_of_single_assignments,
    rules.rule_of_one_definition,
    rules.rule_of_quotation,
    rules.rule_of_no_machine,
    rules.rule_of_lists,
    rules.rule_of_notebooks,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_this_repository(rule: Rule) -> None:
    broken = rule(HOUSE)
    assert len(HOUSE.imports) > 300 and len(HOUSE.files) > 600
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_the_layers_hold() -> None:
    """`[tool.tach]`: common imports its own layer and lower ones; `tach check` says the same."""
    found = tach.check(ROOT, parse_project_config(ROOT), dependencies=True, interfaces=False)
    assert not found, tach.format_diagnostics(found)


# -- what is imported


def test_nothing_heavy_is_loaded_before_it_is_used() -> None:
    """`from common.llm import LLM` costs nothing, policies and memory are plain Python."""
    modules = "paged_fcfs_scheduler, scheduler, chunk_policy, draft_plugin, prefill_first_scheduler"
    loaded = "print(*{'torch', 'transformers', 'triton'} & {*sys.modules}, sep='')"
    command = [sys.executable, "-c", f"import sys, common.llm, {modules}; {loaded}"]
    folders = os.pathsep.join(str(ROOT / room) for room in [".", *HOUSE.rooms()])
    run = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONPATH": folders})
    assert (run.returncode, run.stdout) == (0, b"\n"), run.stderr


def test_what_a_reader_runs_first_needs_nothing_of_the_tests() -> None:
    """`make demo`, `make watch`, `make bench` and `make ladder` install no more than the engine."""
    assert Forked(import_what_a_reader_runs_first).wait(300) == 0


def import_what_a_reader_runs_first() -> None:
    hidden = ("pytest", "hypothesis", "matplotlib", "jupytext", "scipy", "peft", "fastapi")
    sys.modules |= dict.fromkeys(hidden)
    for name in ("common.demo", "workshop.watch.watch_command", "workshop.measure.ladder"):
        import_module(name)
    for name in ("bench", "ladder_bench"):
        import_module(f"workshop.measure.bench.{name}")


def undeclared(report: Path, *options: str) -> dict[str, set[str]]:
    """Return the modules that deptry finds for each code, with nothing allowed."""
    command = [*HOUSE.pyproject()["tool"]["hatch"]["build"]["dev-mode-dirs"], "-o", str(report)]
    with pytest.raises(SystemExit):
        deptry.main([*command, "--per-rule-ignores", "DEP001=-", *options])
    found: dict[str, set[str]] = {}
    for violation in json.loads(report.read_text(encoding="utf-8")):
        found.setdefault(violation["error"]["code"], set()).add(violation["module"])
    return found


def test_what_is_imported_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And used, but for the lists in pyproject.toml, which name nothing in vain. `make serve`
    installs all that the chapters and `common` import."""
    monkeypatch.chdir(ROOT)
    found = undeclared(tmp_path / "report.json")
    allowed = HOUSE.pyproject()["tool"]["deptry"]["per_rule_ignores"]
    assert found.pop("DEP001", set()) | found.pop("DEP003", set()) == {*allowed["DEP001"]}
    assert found == {"DEP002": {*allowed["DEP002"]}}
    others = "chapters,test,notebooks,browser,dev,book"
    aside = ".*test_|.*conftest|workshop|common/tests|.*/testing/|.*_demo|hatch_build"
    options = ["--optional-dependencies-dev-groups", others, "--extend-exclude", aside]
    assert undeclared(tmp_path / "report.json", *options).get("DEP004", set()) == set()


def test_the_lock_has_a_version_of_each_declared_package() -> None:
    """`make lock` was run after the last one was added. The file names no host and no folder."""
    names = set()
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        pin = re.fullmatch(r"([a-z0-9-]+)==[\w.]+(?: ; [^;#/@]+)?", line)
        assert pin, line
        names.add(pin[1])
    assert rules.distributions(HOUSE) - names == {"torch", "triton", "vllm-from-scratch"}
    assert not [name for name in names if name.startswith(("torch", "triton", "nvidia-", "cuda-"))]


def test_every_case_is_of_make_test_or_of_make_test_book() -> None:
    """And of one of them only, unless it is slow."""
    makefile = (ROOT / "Makefile").read_text()
    both = (conftest.TEST, conftest.TEST_BOOK)
    assert all(f'-m "{words}"' in makefile for words in both)
    for marks in ({}, {"book"}, {"slow"}, {"book", "slow"}):
        asked = [Expression.compile(each).evaluate(lambda m, **_: m in marks) for each in both]
        assert asked.count(True) == ("slow" not in marks)
    for path in (path for path in HOUSE.python_files() if path.match("test_*.py")):
        is_of_the_book = conftest.is_of_the_book(path)
        assert is_of_the_book == conftest.is_left_out(path, conftest.TEST)
        assert not (is_of_the_book and conftest.is_left_out(path, conftest.TEST_BOOK))
