"""A program of ours runs with what a reader has written, and says how much that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import TASKS, blank_of, blank_text, task_numbered
from workshop.practice.tasks.workbench import Workbench

SHOWN = """
import sys
from pathlib import Path
from workshop.practice.tasks import mine
from workshop.practice.tasks.workbench import Workbench
mine.main(sys.argv[2:], Workbench(Path(sys.argv[1])))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    """Four tasks written, of which one has passed."""
    bench = Workbench(tmp_path / "my")
    tasks = {number: task_numbered(number) for number in ("1.1", "2.1", "2.2", "4.6", "6.1")}
    bench.open(task for task in tasks.values() if task is not None)
    for number in ("1.1", "2.1", "2.2"):
        task = tasks[number]
        assert task is not None
        blank = blank_of(task)
        printed = f'        print("here is {number}")\n'
        text = blank_text(task.module).replace(blank.stub, printed + blank.solution)
        bench.file(task).write_text(text, encoding="utf-8")
    bench.passed(TASKS[0])
    return bench


def test_a_program_runs_with_the_readers_functions_and_says_how_many(bench: Workbench) -> None:
    """One of them is in a package, and is swapped by the name that others import."""
    for number in ("2.1", "2.2", "4.6"):
        task = task_numbered(number)
        assert task is not None
        if number == "4.6":
            bench.file(task).write_text(task.source(), encoding="utf-8")
        bench.passed(task)
    arguments = ["--mine", "common.demo", "--num-prompts", "1", "--max-tokens", "2"]
    command = [sys.executable, "-c", SHOWN, str(bench.folder), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == lines[-1] == f"4 of {len(TASKS)} functions of this engine are yours."
    assert "here is 1.1" in lines and "here is 2.2" in lines
    assert any(line.startswith("output throughput") for line in lines)
