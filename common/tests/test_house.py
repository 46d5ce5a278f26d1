"""The rules about the repository hold, by a tool where there is one, and each rule of ours can be
broken. What starts make, pytest or a build is in `test_commands.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from deptry.cli import cli as deptry
from tach import extension as tach
from tach.parsing import parse_project_config

import conftest
from common.tests import house as rules
from common.tests.house import House

ROOT = Path(__file__).resolve().parents[2]
HOUSE = House(ROOT)
Rule = Callable[[House], list[str]]
RULES: list[Rule] = [
    rules.rule_of_floors,
    rules.rule_of_circles,
    rules.rule_of_names,
    rules.rule_of_one_definition,
    rules.rule_of_quotation,
    rules.rule_of_no_machine,
    rules.rule_of_lists,
    rules.rule_of_notebooks,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_this_repository(rule: Rule) -> None:
    broken = rule(HOUSE)
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_the_layers_hold() -> None:
    """`[tool.tach]`: common imports its own layer and lower ones; `tach check` says the same."""
    found = tach.check(ROOT, parse_project_config(ROOT), dependencies=True, interfaces=False)
    assert not found, tach.format_diagnostics(found)


PYPROJECT = """
[project]
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
triton = ["triton; sys_platform == 'linux'"]
[tool.hatch.build]
dev-mode-dirs = [".", "01_a", "02_b", "02_b/beyond"]
[tool.pytest.ini_options]
pythonpath = [".", "01_a", "02_b", "02_b/beyond"]
[tool.tach]
source_roots = [".", "01_a", "02_b", "02_b/beyond"]
ignore_type_checking_imports = false
layers = ["engine"]
modules = [{ path = "common.engine", layer = "engine" }]
"""
SOUND = {
    "pyproject.toml": PYPROJECT,
    "01_a/README.md": "# One\n",
    "02_b/README.md": "# Two\n\n```python file=high.py\nx = 1\n\ny = 2\n```\n",
    "02_b/beyond/README.md": "# More\n",
    "01_a/low.py": "import os\nimport torch\n\nclass Low:\n    pass\n",
    "02_b/high.py": 'from low import Low\n\nclass High(Low):\n    "A"\n\n    x = 1\n\n    y = 2\n',
    "02_b/beyond/far.py": "from high import High\n",
    "02_b/test_high.py": "from common.engine import Whole\nfrom high import High\n",
    "common/engine.py": "from high import High\n\nclass Whole:\n    pass\n",
    "a.txt": f"https://a.com{'/wo'}rk/b",
}


@pytest.fixture
def build(tmp_path: Path) -> Callable[[dict[str, str]], House]:
    """A small sound repository, changed by the files given."""

    def _build(changes: dict[str, str]) -> House:
        for name, text in {**SOUND, **changes}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return House(tmp_path)

    return _build


LISTS = PYPROJECT.replace('source_roots = [".", "01_a",', 'source_roots = [".",')
BREACHES: dict[str, tuple[Rule, dict[str, str], str]] = {
    "higher chapter": (
        rules.rule_of_floors,
        {"01_a/low.py": "def f():\n    from high import High\n    return High\n"},
        "01_a/low.py imports 02_b/high.py",
    ),
    "circle": (
        rules.rule_of_circles,
        {"02_b/beyond/far.py": "import f\n", "02_b/beyond/f.py": "def g():\n    import far\n"},
        "a circle of files: ",
    ),
    "name twice": (rules.rule_of_names, {"common/low.py": ""}, "01_a/low.py, common/low.py"),
    "redefined by a test double": (
        rules.rule_of_one_definition,
        {"02_b/test_high.py": "def test():\n    class _High:\n        pass\n"},
        "class High is defined 2 times: 02_b/high.py, 02_b/test_high.py",
    ),
    "quotation": (
        rules.rule_of_quotation,
        {"02_b/README.md": "```python file=high.py\nx = 1\ny = 2\n```\n"},
        "02_b/README.md differs",
    ),
    "machine": (rules.rule_of_no_machine, {"a.txt": f"b\nat {'/ro'}ot/x\n"}, "a.txt has"),
    "lists": (rules.rule_of_lists, {"pyproject.toml": LISTS}, "source_roots must be"),
    "notebook": (rules.rule_of_notebooks, {"01_a/low_demo.py": "# %%\n1 + 1\n"}, "is missing"),
}


@pytest.mark.parametrize("case", BREACHES)
def test_breach_is_found(case: str, build: Callable) -> None:
    rule, changes, expected = BREACHES[case]
    assert rule(build({})) == []
    broken = rule(build(changes))
    assert any(expected in sentence for sentence in broken), broken


# -- what is imported


def run_python(code: str) -> str:
    folders = os.pathsep.join(str(ROOT / room) for room in [".", *HOUSE.rooms()])
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": folders}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "common.llm",
        "paged_fcfs_scheduler, scheduler, chunk_policy, draft_plugin, prefill_first_scheduler",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_used(modules: str) -> None:
    """`from common.llm import LLM` costs nothing, policies and memory are plain Python."""
    heavy = "{'torch', 'transformers', 'triton'}"
    assert run_python(f"import sys, {modules}; print(*{heavy} & set(sys.modules))") == "\n"


def test_what_a_reader_runs_first_needs_nothing_of_the_tests() -> None:
    """`make demo`, `make watch`, `make bench` and `make ladder` install no more than the engine."""
    hidden = ["pytest", "hypothesis", "matplotlib", "jupytext", "scipy", "peft", "fastapi"]
    modules = "common.demo, workshop.watch.watch_command, workshop.measure.bench.bench"
    modules += ", workshop.measure.ladder, workshop.measure.bench.ladder_bench"
    run_python(f"import sys; sys.modules |= dict.fromkeys({hidden}); import {modules}")


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
    makefile, both = (ROOT / "Makefile").read_text(), (conftest.TEST, conftest.TEST_BOOK)
    assert all(f'-m "{words}"' in makefile for words in both)
    for marks in ({}, {"book"}, {"slow"}, {"book", "slow"}):
        asked = [
            Expression.compile(words).evaluate(lambda name, **_: name in marks) for words in both
        ]
        assert asked.count(True) == ("slow" not in marks)
    tests = [path for path in HOUSE.python_files() if path.match("test_*.py")]
    of_the_book = {path for path in tests if conftest.is_of_the_book(path)}
    assert of_the_book == {path for path in tests if conftest.is_left_out(path, conftest.TEST)}
    assert not any(conftest.is_left_out(path, conftest.TEST_BOOK) for path in of_the_book)
