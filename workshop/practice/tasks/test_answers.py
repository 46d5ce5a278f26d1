"""Right answers in other styles pass, wrong ones that readers may give do not: `answers.txt`.

    2.1 right a loop with divmod         a task, the expected verdict, and the kind of answer
    | blocks = ...                       the body that replaces `raise`; or, as in the patch
    - for block in blocks:               table, our answer with a change
    + for block in sorted(blocks):

The mistakes that the grader knows by name (`patches.txt`) are wrong answers too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from workshop.book.text_rows import TextRow, read_rows
from workshop.practice.apart import apart
from workshop.practice.named_tests import run_tests
from workshop.practice.patch_table import Bug
from workshop.practice.renames import renamed
from workshop.practice.tasks.course import EVENINGS, TASKS, Task, blank_of, task_numbered
from workshop.practice.trial import swapped

TABLE = Path(__file__).with_name("answers.txt")
MAX_CPU_S = 10  # for a reader who waits


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    task: Task
    is_right: bool
    row: TextRow

    @property
    def id(self) -> str:
        return self.row.head

    def text(self) -> str:
        """The source of the whole module."""
        if not self.row.said["|"]:
            old, new, task = self.row.text("-"), self.row.text("+"), self.task
            return Bug(task.module, task.place, old, new, parameters=task.parameters).apply()
        blank = blank_of(self.task)
        last = blank.stub.splitlines()[-1]
        margin = last[: len(last) - len(last.lstrip())]
        said = renamed(self.row.text("|"), self.task.names_now()).split("\n")
        body = "".join(f"{margin}{line}".rstrip() + "\n" for line in said)
        return blank.before + body + blank.after


def the(number: str) -> Task:
    task = task_numbered(number)
    assert task is not None
    return task


def given(row: TextRow) -> GivenAnswer:
    number, verdict, _ = row.head.split(" ", 2)
    return GivenAnswer(the(number), ("wrong", "right").index(verdict) == 1, row)


GIVEN = tuple(map(given, read_rows(TABLE.read_text(encoding="utf-8"), "- + |")))


@pytest.mark.parametrize("answer", GIVEN, ids=lambda answer: answer.id)
def test_an_answer_is_graded_by_its_behaviour(answer: GivenAnswer) -> None:
    task = answer.task
    with swapped(task.path, answer.text()) as swap:
        run = apart(run_tests, (task.test_ids, swap.file, True, 60), 120, swap)
    assert run.cpu_s < MAX_CPU_S
    if answer.is_right:
        assert run.first is None, run.report
    else:
        assert run.first is not None, "every test passes"


def test_an_evening_has_a_right_answer_in_another_style_and_a_task_a_mistake() -> None:
    assert {answer.task.evening for answer in GIVEN if answer.is_right} == {*EVENINGS}
    assert all(task.mistakes for task in TASKS)
