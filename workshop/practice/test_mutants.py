"""Mutants by their sources, and a small project in which they are planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workshop.book.quoted import code_lines
from workshop.practice.mutants import all_mutants, planted_mutants
from workshop.practice.source_patch import ROOT

MODULE = '''
"""Text with 1 < 2."""
LIMIT = 3


class Counter:
    """Counts to 4."""

    def add(self, a, b):
        """Add 5."""
        if a < b and not self.full:
            self.total = max(a, b) + pow(
                a, b
            )
        assert a != 9, f"{a + 6}"
        raise ValueError(7 + 8)
'''


def test_each_kind_of_change_is_made_and_texts_errors_and_constants_of_the_module_are_not() -> None:
    found = {(m.kind, m.old, m.new) for m in all_mutants(MODULE)}
    call = "pow(\n                a, b\n            )"
    assert found == {
        ("and/or", "a < b and not self.full", "((a < b) or (not self.full))"),
        ("comparison", "a < b", "(a <= b)"),
        ("not", "not self.full", "(bool(self.full))"),
        ("dropped statement", f"self.total = max(a, b) + {call}", "pass"),
        ("turned sign", f"max(a, b) + {call}", f"(max(a, b) - {call})"),
        ("swapped arguments", call, call.replace("a, b", "b, a")),
    }


def test_lines_keep_their_numbers_and_equal_changes_are_counted() -> None:
    source = "def f(a, b):\n    if (\n        a < b\n    ) and a < b:\n"
    source += "        a = g(\n            a, b\n        )\n    return a\n"
    for mutant in all_mutants(source):
        changed = mutant.apply(source)
        compile(changed, "f", "exec")
        assert changed.count("\n") == source.count("\n") and changed != source
        assert changed.splitlines()[-1] == "    return a"
    numbers = [(m.number, list(m.lines(source))) for m in all_mutants(source) if m.old == "a < b"]
    assert numbers == [(1, [3]), (2, [4])]


def test_operands_and_arguments_keep_their_parentheses() -> None:
    source = "def f(a, b):\n    if (x := a(b, (a or b))) is not None and (a or b) < -b:\n"
    source += "        c(a, [b for b in a])\n"
    found = {m.old: m.new for m in all_mutants(source) if m.kind != "and/or"}
    assert found == {
        "(x := a(b, (a or b))) is not None": "((x := a(b, (a or b))) is None)",
        "(a or b) < -b": "((a or b) <= (-b))",
        "c(a, [b for b in a])": "c([b for b in a], a)",
    }
    for mutant in all_mutants(source):
        compile(mutant.apply(source), "f", "exec")


@pytest.mark.parametrize("name", ["04_scheduler/scheduler.py", "common/engine.py"])
def test_three_of_a_hundred_lines_are_planted_in_as_many_functions_as_possible(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    planted = planted_mutants(source)
    assert planted == planted_mutants(source)
    assert len(planted) * 100 >= 3 * len(code_lines(source)) > (len(planted) - 1) * 100
    functions = {m.function for m in all_mutants(source)}
    assert len({m.function for m in planted}) == min(len(planted), len(functions))
    assert len({m.kind for m in planted}) >= 3


def test_lines_without_code_do_not_count() -> None:
    assert len(code_lines('"""A\nB"""\n\n# c\nx = (1,\n     2)\n')) == 2


PROJECT = {
    "thing.py": """
import functools, time

@functools.cache
def is_small(a):
    return a < 3

def unused(a):
    return a < 4

def count(n):
    i = 0
    while i < n:
        time.sleep(0.01)  # one that never ends waits, too
        i += 1
    return i
""",
    "test_thing.py": """
import subprocess, sys
from thing import count, is_small

def test_at_the_limit():
    assert not is_small(3)

def test_far_from_the_limit():
    assert is_small(0)

def test_in_another_process():
    assert not int(subprocess.check_output(
        [sys.executable, "-c", "import thing; print(int(thing.is_small(3)))"]
    )) and is_small(0)

def test_that_fails_anyway():
    assert is_small(9)

def test_count():
    assert count(1) == 1
""",
    "pytest.ini": "[pytest]\ntimeout = 60\n",
}


def test_a_small_project(tmp_path: Path) -> None:
    """Also a mutant that never ends, cases of another process, and code that no case reaches."""
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "workshop.practice.planting"]
    command += ["--plant", "thing.py", "--plant-record", "record.json", "--plant-factor", "30"]
    environment = {
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (tmp_path / "record.json").is_file(), done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    names = [name.partition("::test_")[2] for name, _ in record["cases"]]
    assert all(row["num_run"] == row["num_reached"] for row in record["mutants"])
    kills = {
        row["mutant"]: ({names[case] for case in row["kills"]}, row["num_reached"])
        for row in record["mutants"]
    }
    assert kills["is_small: a < 3 -> (a <= 3) #1"] == ({"at_the_limit", "in_another_process"}, 3)
    assert kills["unused: a < 4 -> (a <= 4) #1"] == (set(), 0)
    assert kills["count: i += 1 -> pass #1"] == ({"count"}, 1)
    command += ["--plant-kills", "1", "--plant-only", "a < 3"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "record.json").read_text())["mutants"]
    assert len(row["kills"]) == 1 and row["num_run"] < row["num_reached"]
