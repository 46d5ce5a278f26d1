"""The laws of the house hold here, and each of them can be broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from deptry.cli import cli as deptry

from common.tests import house as laws
from common.tests import house_rooms as rooms
from common.tests.budgets import Amounts, rule_of_budgets
from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]
Law = Callable[[House], list[str]]

LAWS: list[Law] = [
    laws.law_of_floors,
    laws.rule_of_helpers,
    rooms.law_of_rooms,
    rooms.law_of_words,
    rule_of_budgets,
    rooms.rule_of_layers,
    rooms.law_of_circles,
    laws.law_of_one_definition,
    laws.law_of_composition,
    laws.law_of_names,
    laws.law_of_demos,
    laws.law_of_quotation,
    laws.law_of_no_machine,
    laws.law_of_text,
    laws.law_of_lists,
    laws.law_of_pairs,
]


@pytest.fixture(scope="module")
def this_house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_holds_in_this_repository(law: Law, this_house: House) -> None:
    broken = law(this_house)
    assert not broken, f"{law.__doc__}\n" + "\n".join(broken)


def test_the_laws_see_this_repository(this_house: House) -> None:
    """A law that looks at nothing holds always: what is known to be here is seen."""
    modules = {path.name for path in this_house.chapter_modules()}
    assert {"request.py", "engine_core.py", "block_pool.py"} <= modules
    assert {"01_batching", "02_paged_kv"} <= {path.name for path in this_house.chapters()}
    assert this_house.root / "pyproject.toml" in this_house.files
    assert not any(".venv" in path.parts for path in this_house.files)


PYPROJECT = """
[project]
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
triton = ["triton; sys_platform == 'linux'"]
[tool.hatch.build]
dev-mode-dirs = [".", "01_a", "02_b"]
[tool.pytest.ini_options]
pythonpath = [".", "01_a", "02_b"]
"""


@pytest.fixture
def build(tmp_path: Path) -> Callable[[dict[str, str]], House]:
    """A small sound repository, changed by the files given."""

    def _build(changes: dict[str, str]) -> House:
        files = {
            "pyproject.toml": PYPROJECT,
            "01_a/README.md": "# One\n",
            "02_b/README.md": "# Two\n",
            "01_a/low.py": "import os\nimport torch\n\nclass Low:\n    x = 1\n\n    y = 2\n",
            "02_b/high.py": "from low import Low\n\nclass High(Low):\n    pass\n",
            "02_b/test_high.py": "from common.engine import Whole\nfrom high import High\n",
            "common/__init__.py": "",
            "common/engine.py": "from high import High\n\nclass Whole:\n    pass\n",
            **changes,
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return House(tmp_path)

    return _build


def test_an_unpacked_archive_is_read_without_what_git_would_ignore(build: Callable) -> None:
    ignored = {"my/low.py": "raise\n", "build/lib/high.py": "", "x.py": "", "01_a/y.tmp": ""}
    kept = {"02_b/my_own.py": "", "02_b/x.py": "", "01_a/my": ""}
    small = build({})
    sound = {small.name(path) for path in small.files}
    house = build({".gitignore": "my/\nbuild/\n/x*.py\n*.tmp\n", **ignored, **kept})
    assert {*map(house.name, house.files)} == {".gitignore", *kept} | sound


def budgets_of_the_small_tree(house: House) -> list[str]:
    budgets = {
        "01_a": Amounts(code=5, pages=1, words=2),
        "02_b": Amounts(code=4, tests=2, tables=1, words=2),
        "common": Amounts(code=3),
    }
    return rule_of_budgets(house, budgets, all_python_lines=20)


def lists_of_the_small_tree(house: House) -> list[str]:
    return laws.law_of_lists(house, planned=("01_a", "02_b"))


# These two speak of the real folders: here they are asked about the small tree's.
SMALL_LAWS = [law for law in LAWS if law not in (laws.law_of_lists, rule_of_budgets)]
SMALL_LAWS += [lists_of_the_small_tree, budgets_of_the_small_tree]


@pytest.mark.parametrize("law", SMALL_LAWS, ids=lambda law: law.__name__)
def test_law_holds_in_a_sound_tree(law: Law, build: Callable) -> None:
    assert law(build({})) == []


BREACHES: dict[str, tuple[Law, dict[str, str], str]] = {
    "higher chapter": (laws.law_of_floors, {"01_a/low.py": "import high\n"}, "higher chapter"),
    "inside a function": (
        laws.law_of_floors,
        {"01_a/low.py": "def f():\n    from high import High\n    return High\n"},
        "01_a/low.py:2",
    ),
    "common": (
        laws.law_of_floors,
        {"02_b/high.py": "from common.engine import Whole\n"},
        "`common`",
    ),
    "common under TYPE_CHECKING": (
        laws.law_of_floors,
        {"02_b/high.py": "import typing\nif typing.TYPE_CHECKING:\n    import common\n"},
        "02_b/high.py:3",
    ),
    "import_module": (
        laws.law_of_floors,
        {"01_a/low.py": "import importlib\nm = importlib.import_module('high')\n"},
        "higher chapter",
    ),
    "import_module by its bare name": (
        laws.law_of_floors,
        {"01_a/low.py": "from importlib import import_module\nimport_module('common.engine')\n"},
        "`common`",
    ),
    "__import__": (laws.law_of_floors, {"01_a/low.py": "m = __import__('high')\n"}, "higher"),
    "computed name": (
        laws.law_of_floors,
        {"01_a/low.py": "import importlib\nm = importlib.import_module('hi' + 'gh')\n"},
        "computed",
    ),
    "relative": (laws.law_of_floors, {"02_b/high.py": "from . import low\n"}, "relatively"),
    "folder as package": (
        laws.law_of_floors,
        {"02_b/high.py": "import importlib\nimportlib.import_module('01_batching.request')\n"},
        "`01_batching`",
    ),
    "test helper": (
        laws.law_of_floors,
        {"02_b/high.py": "import test_high\n"},
        "a test, a demo or a helper of tests",
    ),
    "root that imports its own beyond": (
        rooms.law_of_rooms,
        {"02_b/high.py": "import far\n", "02_b/beyond/far.py": ""},
        "02_b/high.py:1 imports `far`",
    ),
    "root that imports a lower beyond": (
        rooms.law_of_rooms,
        {"02_b/high.py": "from far import x\n", "01_a/beyond/far.py": "x = 1\n"},
        "02_b/high.py:1",
    ),
    "word of a later chapter": (
        rooms.law_of_words,
        {"01_a/low.py": "def plan(request):\n    return request.num_blocks\n"},
        "01_a/low.py:2 says `num_blocks`",
    ),
    "function of a later chapter": (
        rooms.law_of_words,
        {"01_a/low.py": "def verify_drafts(tokens):\n    pass\n"},
        "01_a/low.py:1 says `verify_drafts`",
    ),
    "class of a later chapter": (
        rooms.law_of_words,
        {"02_b/high.py": "class ChunkThing:\n    pass\n"},
        "02_b/high.py:1 says `ChunkThing`",
    ),
    "word of a later chapter in a class": (
        rooms.law_of_words,
        {"02_b/high.py": "class PrefixThing:\n    pass\n"},
        "02_b/high.py:1 says `PrefixThing`",
    ),
    "too much code": (
        budgets_of_the_small_tree,
        {"01_a/more.py": "x = 1\n"},
        "01_a: 6 of code, its budget is 5: take something out, or",
    ),
    "too many lines of tests": (
        budgets_of_the_small_tree,
        {"02_b/testing/fake.py": "", "02_b/test_more.py": "x = 1\n"},
        "02_b: 3 of tests, its budget is 2",
    ),
    "too much of a page": (budgets_of_the_small_tree, {"01_a/x.js": "a\nb\n"}, "01_a: 2 of pages"),
    "too long a table": (budgets_of_the_small_tree, {"02_b/x.txt": "a\nb\n"}, "02_b: 2 of tables"),
    "too many words": (
        budgets_of_the_small_tree,
        {"01_a/README.md": "# One more\n"},
        "01_a: 3 of words, its budget is 2",
    ),
    "a folder without a budget": (
        budgets_of_the_small_tree,
        {"common/new/part.py": "x = 1\n"},
        "common/new: 1 of code, its budget is 0",
    ),
    "too many lines of Python": (
        budgets_of_the_small_tree,
        {"01_a/low.py": '"""' + "told\n" * 20 + '"""\nimport os\n'},
        "all Python: 32 lines, the budget is 20",
    ),
    "upwards": (
        rooms.rule_of_layers,
        {"common/models/model.py": "from common import engine\n", "common/engine.py": ""},
        "common/models/model.py:1 imports `common.engine` of a higher layer",
    ),
    "upwards, for types": (
        rooms.rule_of_layers,
        {
            "common/runner/plans.py": "if TYPE_CHECKING:\n    import common.parallel.remote\n",
            "common/parallel/remote.py": "",
        },
        "common/runner/plans.py:2 imports `common.parallel.remote` of a higher layer",
    ),
    "the workshop, in a function": (
        rooms.rule_of_layers,
        {
            "common/llm.py": "def f():\n    import workshop.draw\n",
            "workshop/draw.py": "",
        },
        "common/llm.py:2 imports `workshop.draw` of a higher layer",
    ),
    "a test of the engine": (
        rooms.rule_of_layers,
        {"common/llm.py": "import common.tests.oracle\n", "common/tests/oracle.py": ""},
        "common/llm.py:1 imports `common.tests.oracle` of a higher layer",
    ),
    "circle in a chapter": (
        rooms.law_of_circles,
        {"02_b/far.py": "import farther\n", "02_b/farther.py": "def f():\n    import far\n"},
        "a circle of files: 02_b/far",
    ),
    "circle": (
        rooms.law_of_circles,
        {
            "common/runner/a.py": "import common.runner.b\n",
            "common/runner/b.py": "from common.runner import c\n",
            "common/runner/c.py": "def f():\n    from common.runner.a import g\n",
        },
        "a circle of files: ",
    ),
    "no layer": (
        rooms.rule_of_layers,
        {"common/attic.py": ""},
        "attic.py is in no layer",
    ),
    "a helper of tests in the engine": (
        rooms.rule_of_layers,
        {"common/llm.py": "import fake\n", "01_a/testing/fake.py": ""},
        "common/llm.py:1 imports `fake`, which is beside",
    ),
    "room without a text": (laws.law_of_text, {"02_b/beyond/far.py": ""}, "02_b/beyond has no"),
    "helper of tests in a chapter": (
        laws.law_of_floors,
        {"01_a/testing/fake.py": "", "02_b/high.py": "import fake\n"},
        "02_b/high.py:1 imports `fake`",
    ),
    "helper of a higher chapter in a test": (
        laws.rule_of_helpers,
        {"01_a/test_low.py": "import fake\n", "02_b/testing/fake.py": ""},
        "01_a/test_low.py:1 imports `fake` of 02_b",
    ),
    "higher chapter in a helper": (
        laws.rule_of_helpers,
        {"01_a/testing/fake.py": "import high\n"},
        "01_a/testing/fake.py:1 imports `high` of 02_b",
    ),
    "workshop in a helper": (
        laws.rule_of_helpers,
        {"01_a/testing/fake.py": "from workshop.book import sync\n"},
        "01_a/testing/fake.py:1 imports `workshop`",
    ),
    "redefined in common": (
        laws.law_of_one_definition,
        {"common/engine.py": "class Low:\n    pass\n"},
        "class Low is defined 2 times",
    ),
    "redefined by a test double": (
        laws.law_of_one_definition,
        {"02_b/test_high.py": "def test():\n    class High:\n        pass\n"},
        "02_b/test_high.py:2",
    ),
    "redefined behind an underscore": (
        laws.law_of_one_definition,
        {"common/engine.py": "class _Low:\n    pass\n"},
        "common/engine.py:1",
    ),
    "redefined in the next chapter": (
        laws.law_of_one_definition,
        {"02_b/high.py": "class Low:\n    pass\n"},
        "02_b/high.py:1",
    ),
    "scheduler in common": (
        laws.law_of_composition,
        {"common/engine.py": "class FastScheduler:\n    pass\n"},
        "FastScheduler",
    ),
    "rejection rule in common": (
        laws.law_of_composition,
        {"common/engine.py": "class RejectionSampler:\n    pass\n"},
        "RejectionSampler",
    ),
    "same module name twice": (laws.law_of_names, {"02_b/low.py": ""}, "`low` is used 2 times"),
    "same name in common": (laws.law_of_names, {"common/low.py": ""}, "common/low.py"),
    "name of the standard library": (laws.law_of_names, {"01_a/queue.py": ""}, "`queue`"),
    "forbidden name": (laws.law_of_names, {"common/utils.py": ""}, "`utils`"),
    "name of a dependency": (laws.law_of_names, {"01_a/triton.py": ""}, "`triton`"),
    "second name of a module": (
        laws.law_of_names,
        {"common/test_it.py": "from workshop import sync\n", "workshop/book/sync.py": ""},
        "common/test_it.py:1 imports `workshop` without its folder",
    ),
    "class in a demo": (laws.law_of_demos, {"01_a/low_demo.py": "class X:\n    pass\n"}, "class X"),
    "workshop in a demo": (
        laws.law_of_demos,
        {"01_a/low_demo.py": "from workshop.book.palette import INK\n"},
        "low_demo.py:1 imports `workshop.book.palette`",
    ),
    "another colour in a demo": (
        laws.law_of_demos,
        {"01_a/low_demo.py": "INK = '#123456'\n"},
        "low_demo.py:1 has another INK",
    ),
    "quotation differs": (
        laws.law_of_quotation,
        {"README.md": "a\n\n```python file=low.py\nimport os\nimport torch.nn\n```\n"},
        "README.md:3 differs from 01_a/low.py",
    ),
    "quotation leaves lines out": (
        laws.law_of_quotation,
        {"01_a/README.md": "```python file=01_a/low.py\nimport os\nclass Low:\n```\n"},
        "differs",
    ),
    "quotation of an unknown file": (
        laws.law_of_quotation,
        {"README.md": "```python file=lost.py\nx\n```\n"},
        "0 files",
    ),
    "empty quotation": (
        laws.law_of_quotation,
        {"README.md": "```python file=low.py\n```\n"},
        "low",
    ),
    "machine path": (laws.law_of_no_machine, {"a.txt": f"b\nat {'/ro'}ot/x\n"}, "a.txt:2"),
    "somebody's folder": (laws.law_of_no_machine, {"a.txt": f"'{'/ho'}me/jo/x'"}, "a.txt:1"),
    "Windows folder": (laws.law_of_no_machine, {"a.txt": "C:" + "\\Users\\jo"}, "a.txt:1"),
    "list without a chapter": (
        lists_of_the_small_tree,
        {"pyproject.toml": PYPROJECT.replace('pythonpath = [".", "01_a",', 'pythonpath = [".",')},
        "pytest pythonpath",
    ),
    "unlisted room": (lists_of_the_small_tree, {"02_b/beyond/far.py": ""}, "02_b/beyond"),
    "unlisted chapter": (lists_of_the_small_tree, {"03_c/README.md": ""}, "03_c"),
    "no text": (laws.law_of_text, {"03_c/new.py": ""}, "03_c has no README.md"),
    "no twin": (laws.law_of_pairs, {"01_a/low_demo.py": "# %%\n1 + 1\n"}, "is missing"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_breach_is_found(case: str, build: Callable) -> None:
    law, changes, expected = BREACHES[case]
    broken = law(build(changes))
    assert any(expected in sentence for sentence in broken), broken


ALLOWED: dict[str, tuple[Law, str, str]] = {
    "a test may import anything": (laws.law_of_floors, "01_a/test_low.py", "import common, high"),
    "so may a demo": (laws.law_of_floors, "01_a/low_demo.py", "import common, high"),
    "a test of a demo is no demo": (laws.law_of_pairs, "01_a/test_low_demo.py", "import common"),
    "docstrings and comments cost nothing": (
        budgets_of_the_small_tree,
        "01_a/told.py",
        '"""Plain."""\n\n# English.\n',
    ),
    "a word of an earlier chapter": (rooms.law_of_words, "02_b/high.py", "num_blocks = 1\n"),
    "a hook, a field and a parameter with nouns of later chapters": (
        rooms.law_of_words,
        "01_a/low.py",
        "class Plugin:\n    num_draft_tokens = 0\n\n    def verified(self, chunk): ...\n",
    ),
    "a field that crosses processes": (
        rooms.law_of_words,
        "01_a/low.py",
        "class Plan:\n    block_ids: list[int]  # chapter 2\n",
    ),
    "quotation of a method, moved left": (
        laws.law_of_quotation,
        "README.md",
        "```python file=low.py\nx = 1\n\ny = 2\n```\n",
    ),
    "a block without a file": (laws.law_of_quotation, "README.md", "```python\nnothing\n```\n"),
    "an address on the web": (laws.law_of_no_machine, "a.txt", f"https://a.com{'/wo'}rk/b"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed_is_not_reported(case: str, build: Callable) -> None:
    law, file, text = ALLOWED[case]
    assert law(build({file: text})) == []


def loaded_by(code: str) -> set[str]:
    """Heavy packages that a fresh process has loaded after running `code`."""
    heavy = {"torch", "transformers", "triton"}
    path = os.pathsep.join([str(ROOT), *(str(ROOT / room) for room in House(ROOT).rooms())])
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*({heavy} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_light_import_of_llm() -> None:
    """`from common.llm import LLM` costs nothing until an LLM is made."""
    assert loaded_by("import common.llm") == set()


def test_a_scheduler_is_imported_without_a_tensor_library() -> None:
    """Policies and memory are plain Python: reading and testing them takes no seconds to load."""
    assert loaded_by("import paged_fcfs_scheduler, scheduler, chunk_policy") == set()
    assert loaded_by("import draft_plugin, prefill_first_scheduler") == set()


def test_the_engine_does_not_speak_of_the_workshop(this_house: House) -> None:
    """The engine reads no file of it and names none."""
    names = {
        this_house.name(path)
        for path in this_house.python_files(aside=False)
        if "workshop" in path.read_text(encoding="utf-8")
    }
    assert not [name for name in names if name.startswith("common/")]


@pytest.mark.needs("make")
def test_make_says_what_it_can_make() -> None:
    """Each target with its line: a quote in one of them is not one of the shell's."""
    run = subprocess.run(["make", "help", "JOBS=2"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^TARGETS := (.*)", makefile, re.MULTILINE)
    for target in targets.split():
        (description,) = re.findall(rf"^WHAT_{target} := (.*)", makefile, re.MULTILINE)
        assert f"{target:10} {description.replace('$(JOBS)', '2')}\n" in run.stdout


@pytest.mark.needs("make")
def test_make_says_what_a_number_is_for_before_it_does_anything() -> None:
    run = subprocess.run(
        ["make", "--no-print-directory", "museum", "32"], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (2, "") and "BUG=32" in run.stderr


@pytest.mark.needs("make")
def test_each_target_installs_what_it_needs_and_no_more(tmp_path: Path) -> None:
    """By a dry run in a bare clone: who serves waits for no notebooks, tests or Mooncake."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)

    def extras(*target: str) -> list[str]:
        run = subprocess.run(["make", "-n", *target], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert '"torch==' in run.stdout and '"triton==' in run.stdout
        return re.findall(r"-e '\.\[([\w,]+)\]'", run.stdout)

    layers = [["grammar,chapters"], ["server"], ["test", "mooncake", "browser"], ["notebooks,dev"]]
    expected = [[extra for layer in layers[: i + 1] for extra in layer] for i in range(4)]
    of = ["demo watch bench ladder", "serve", "check test matrix museum task"]
    of.append("lint format notebooks figures sync")
    found = {target: extras(target) for targets in of for target in targets.split()}
    expected_extras = {
        t: e for targets, e in zip(of, expected, strict=True) for t in targets.split()
    }
    assert found == expected_extras
    assert (
        extras("demo", "ARGS=--mine") == extras("watch", "ARGS=--mine") == expected_extras["test"]
    )
    assert extras("book") == [*expected_extras["test"], "book"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^TARGETS := (.*)", makefile, re.MULTILINE)
    assert set(targets.split()) - set(found) == {"book", "clean", "gpu", "lock"}
    run = subprocess.run(["make", "-n", "gpu"], cwd=tmp_path, capture_output=True, text=True)
    assert "pip" not in run.stdout and "python3 -m workshop.bench.gpu" in run.stdout


def test_what_a_reader_runs_first_needs_nothing_of_the_tests() -> None:
    """`make demo`, `make watch`, `make bench` and `make ladder` install no more than the engine."""
    hidden = [
        "pytest",
        "hypothesis",
        "matplotlib",
        "jupytext",
        "scipy",
        "peft",
        "fastapi",
        "openai",
    ]
    modules = "common.demo, workshop.watch.watch_command, workshop.measure.bench.bench"
    code = f"import sys; sys.modules |= dict.fromkeys({hidden}); import {modules}"
    code += ", workshop.measure.ladder, workshop.measure.bench.ladder_bench"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def undeclared(house: House, report: Path, options: list[str]) -> dict[str, set[str]]:
    """Return the modules that deptry finds for each code, with nothing allowed."""
    command = [*house.pyproject()["tool"]["hatch"]["build"]["dev-mode-dirs"], "-o", str(report)]
    with pytest.raises(SystemExit):
        deptry.main([*command, "--per-rule-ignores", "DEP001=-", *options])
    found: dict[str, set[str]] = {}
    for violation in json.loads(report.read_text(encoding="utf-8")):
        found.setdefault(violation["error"]["code"], set()).add(violation["module"])
    return found


def test_what_is_imported_is_declared(
    this_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And used, but for the lists in pyproject.toml, and those name nothing in vain."""
    monkeypatch.chdir(ROOT)
    found = undeclared(this_house, tmp_path / "report.json", [])
    allowed = this_house.pyproject()["tool"]["deptry"]["per_rule_ignores"]
    assert found.pop("DEP001", set()) | found.pop("DEP003", set()) == {*allowed["DEP001"]}
    assert found == {"DEP002": {*allowed["DEP002"]}}


def test_the_server_needs_nothing_of_the_tests(
    this_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make serve` installs all packages that the chapters and `common` import."""
    monkeypatch.chdir(ROOT)
    aside = ".*test_|.*conftest|workshop|common/tests|.*/testing/|.*_demo|hatch_build"
    of_others = ["--optional-dependencies-dev-groups", "chapters,test,notebooks,browser,dev,book"]
    found = undeclared(
        this_house, tmp_path / "report.json", [*of_others, "--extend-exclude", aside]
    )
    assert found.get("DEP004", set()) == set()


def test_the_lock_has_a_version_of_each_declared_package(this_house: House) -> None:
    """`make lock` was run after the last one was added. The file names no host and no folder."""
    names = set()
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        pin = re.fullmatch(r"([a-z0-9-]+)==[\w.]+(?: ; [^;#/@]+)?", line)
        assert pin, line
        names.add(pin[1])
    assert laws.distributions(this_house) - names == {"torch", "triton", "vllm-from-scratch"}
    assert not [name for name in names if name.startswith(("torch", "triton", "nvidia-", "cuda-"))]


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_pytest_says_at_its_end_what_was_left_out(options: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-k", "test_whatever_arrives"]
    command += [*options, "03_prefix_cache/test_caching_fcfs_scheduler.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (summary,) = re.findall(r"^left out: (.*)", run.stdout, re.MULTILINE)
    assert re.fullmatch(r"\d+ cases of large grids; to run them: -m slow", summary)


NEEDY = """
import pytest

@pytest.mark.needs("browser")
def test_marked(): ...

@pytest.fixture
def peft():
    import peft

def test_by_its_fixture(peft): ...

def test_broken(): import httpx
"""


@pytest.mark.parametrize("is_required", [False, True], ids=["a reader", "the CI"])
def test_pytest_says_what_was_not_found(tmp_path: Path, is_required: bool) -> None:
    """Only what the table of conftest.py names is optional, and a failure has its name at once."""
    (tmp_path / "test_a.py").write_text(NEEDY, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import xgrammar\n", encoding="utf-8")
    code = "import sys; sys.modules |= dict.fromkeys(('peft', 'xgrammar', 'httpx'))\n"
    code += "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-p", "conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "--continue-on-collection-errors", str(tmp_path)]
    environment = os.environ | {"PATH": "", "VLLM_FS_REQUIRE_ALL": "1" * is_required}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert "\nfailed: test_a.py::test_broken\n" in run.stdout, run.stdout + run.stderr
    missing = re.findall(r"^not tried: (.*)", run.stdout, re.MULTILINE)
    assert missing == [] if is_required else "browser (apt" in missing[0] and "; peft" in missing[0]
    assert f" 1 failed, 3 {'errors' if is_required else 'skipped'} in " in run.stdout


def test_wheel_holds_flat_modules_and_nothing_else(tmp_path: Path) -> None:
    """An installed wheel offers every module of the engine under its flat name, `common` less what
    works in a checkout only, and no test, helper of tests or text."""
    house = House(ROOT)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    flat = {p.name for p in house.chapter_modules()}
    flat |= {p.name for kind in ("cpp", "h") for p in ROOT.glob(f"0*/beyond/*.{kind}")}
    packaged = {
        house.name(p)
        for p in house.files
        if house.name(p).startswith("common/")
        and not house.name(p).startswith("common/serve/fleet/")
        and not house.is_aside(p)
        and p.suffix not in (".md", ".svg")
    }
    assert flat and packaged
    assert inside == flat | packaged
