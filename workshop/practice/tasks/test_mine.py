"""A program of ours runs with what a reader has written, and says how much that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workshop.practice.module_swap import ModuleSwap
from workshop.practice.source_patch import ROOT
from workshop.practice.tasks import mine
from workshop.practice.tasks.course import TASKS, Task, blank_of, blank_text, task_numbered
from workshop.practice.tasks.grade import Verdict
from workshop.practice.tasks.workbench import Workbench

SHOWN = """
import sys
from pathlib import Path
from workshop.practice.tasks import mine
from workshop.practice.tasks.workbench import Workbench
mine.main(sys.argv[2:], Workbench(Path(sys.argv[1])))
"""


def the(number: str) -> Task:
    task = task_numbered(number)
    assert task is not None
    return task


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    """Three tasks written, of which one has passed, one will, and one is wrong."""
    bench = Workbench(tmp_path / "my")
    bench.open([the("1.1"), the("2.1"), the("2.2"), the("6.1")])
    solved = {"1.1": "", "2.2": "", "2.1": ""}
    for number in solved:
        task, blank = the(number), blank_of(the(number))
        printed = f'        print("here is {number}")\n'
        text = blank_text(task.module).replace(blank.stub, printed + blank.solution)
        bench.file(task).write_text(text, encoding="utf-8")
    bench.passed(the("1.1"))
    return bench


def test_passing_answers_are_taken_and_only_new_ones_are_graded(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded = []

    def grade(task: Task, file: Path) -> Verdict:
        graded.append(task.number)
        return Verdict(task.number == "2.2", "")

    monkeypatch.setattr(mine, "grade", grade)
    assert [task.number for task in mine.passing(bench)] == ["1.1", "2.2"]
    assert graded == ["2.1", "2.2"]
    assert Workbench(bench.folder).has_passed(the("2.2")) and not bench.has_passed(the("2.1"))


def test_a_program_runs_with_the_readers_functions_and_says_how_many(bench: Workbench) -> None:
    for number in ("2.1", "2.2"):
        bench.passed(the(number))
    arguments = ["--mine", "common.demo", "--num-prompts", "1", "--max-tokens", "2"]
    command = [sys.executable, "-c", SHOWN, str(bench.folder), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    sentence = f"3 of {len(TASKS)} functions of this engine are yours."
    lines = run.stdout.splitlines()
    assert lines[0] == lines[-1] == sentence
    assert "here is 1.1" in lines and "here is 2.2" in lines
    assert any(line.startswith("output throughput") for line in lines)


def test_it_is_said_how_many_of_how_many(tmp_path: Path) -> None:
    with mine.installed(Workbench(tmp_path / "my")) as of:
        assert of == (0, len(TASKS))


def test_a_watched_run_starts_without_our_task_bodies() -> None:
    modules = "workshop.watch.watch_command, workshop.practice.tasks.mine"  # in their order
    code = f"import sys, {modules}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "workshop.practice.tasks.mine" in run.stdout, run.stderr
    assert {task.module for task in TASKS}.isdisjoint(run.stdout.split())


def test_a_function_of_a_package_is_swapped_by_the_name_that_others_import(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleSwap, "install", lambda swap: None)
    bench.open([the("4.6")])
    (swap,) = mine.install([the("4.6")], bench, tmp_path)
    assert swap.module == "common.sampling.sampling_constraints"
