"""A program of ours runs with what a reader has written, and says how much that is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workshop.practice.source_patch import ROOT
from workshop.practice.tasks.course import TASKS, blank_of, blank_text
from workshop.practice.tasks.test_answers import the
from workshop.practice.tasks.workbench import Workbench

SHOWN = """
import sys
from pathlib import Path
from workshop.practice.tasks import mine
from workshop.practice.tasks.test_answers import the
from workshop.practice.tasks.workbench import Workbench
mine.main(sys.argv[2:], Workbench(Path(sys.argv[1])))
"""


def test_a_program_runs_with_the_readers_functions_and_says_how_many(tmp_path: Path) -> None:
    """One of them is in a package, and is swapped by the name that others import."""
    bench = Workbench(tmp_path / "my")
    tasks = [the(number) for number in ("1.1", "2.1", "2.2", "4.6", "6.1")]
    bench.open(tasks)
    for task in tasks[:4]:
        printed = f'        print("here is {task.number}")\n'
        blank = blank_of(task)
        text = blank_text(task.module).replace(blank.stub, printed + blank.solution)
        text = task.source() if task.number == "4.6" else text
        bench.file(task).write_text(text, encoding="utf-8")
        bench.passed(task)
    arguments = ["--mine", "common.demo", "--num-prompts", "1", "--max-tokens", "2"]
    command = [sys.executable, "-c", SHOWN, str(bench.folder), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == lines[-1] == f"4 of {len(TASKS)} functions of this engine are yours."
    assert "here is 1.1" in lines and "here is 2.2" in lines
    assert any(line.startswith("output throughput") for line in lines)
