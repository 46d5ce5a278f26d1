"""The course: functions of ours with the body taken out, for a reader to write. From `tasks.txt`.

    1.1 The title                    the first task of the first evening; see `exercise.py`
    minutes 10 easy                  and the difficulty
    place block_pool BlockPool.free(blocks)    the module, and the function in it; see `read_place`
    write                            a paragraph of the instructions, or a line of a drawing
    hint                             from vague to precise
    test MODULE NAME NAME            the simplest first
    names                            bound by the statements to write; none: the whole body

Common wrong answers, each with the lesson in it, are in `patches.txt`; `zh_mistake` is the lesson
in Chinese. If a reader's answer fails the tests as a typical mistake does, the lesson is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workshop.practice.exercise import Exercise, read_exercises, renamed_row
from workshop.practice.patch_table import (
    Bug,
    mistakes_of_task,
    names_changed_in,
    path_of_test,
    read_place,
)
from workshop.practice.source_patch import ROOT, file_of
from workshop.practice.tasks.blank import Blank, make_blank, with_holes

TABLE = Path(__file__).with_name("tasks.txt")
_WORDS = "example minutes place write hint test names"


@dataclass(frozen=True, slots=True)
class Task(Exercise):
    minutes: int
    difficulty: str  # "easy", "medium" or "hard"
    module: str  # of ours
    place: str  # the function in it: `BlockPool.free`
    parameters: tuple[str, ...]  # of the function, when the task was written
    tests: tuple[str, ...]  # module::name; the simplest first
    mistakes: tuple[Bug, ...]
    # Not the whole body: the statements, one after the other, that bind these names.
    names: tuple[str, ...]

    @property
    def number(self) -> str:
        return self.english.head.partition(" ")[0]

    @property
    def evening(self) -> int:
        return int(self.number.partition(".")[0])

    @property
    def path(self) -> Path:
        return file_of(self.module)

    @property
    def file(self) -> str:
        """The file's path, relative to the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def test_ids(self) -> tuple[str, ...]:
        return tuple(map(path_of_test, self.tests))

    def names_now(self) -> dict[str, str]:
        return names_changed_in(self.module, self.place, self.parameters)

    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")


def read_tasks(table: Path) -> Iterator[Task]:
    for row, chinese in read_exercises(table, _WORDS):
        minutes, difficulty = row.text("minutes").split()
        module, place, parameters = read_place(row.text("place"))
        # Names of tests, or of rows of a step log: `test_plans[a title]`.
        tests = (re.findall(r"[^\s\[]+(?:\[[^]]*\])?", line) for line in row.said["test"])
        mistakes = mistakes_of_task(row.head.partition(" ")[0])
        row.said["mistake"] = [mistake.message for mistake in mistakes]
        yield Task(
            row,
            chinese,
            minutes=int(minutes),
            difficulty=difficulty,
            module=module,
            place=place,
            parameters=parameters,
            tests=tuple(f"{file}::{name}" for file, *names in tests for name in names),
            mistakes=mistakes,
            names=tuple(row.text("names").split()),
        )


TASKS = tuple(read_tasks(TABLE))
EVENINGS = {
    1: "Batching",
    2: "Paged KV",
    3: "Prefix cache",
    4: "Scheduler",
    5: "Speculative decoding",
    6: "Chunked prefill",
}


def task_numbered(number: str) -> Task | None:
    return next((task for task in TASKS if task.number == number), None)


def blank_of(task: Task) -> Blank:
    names = task.names_now()
    write = renamed_row(task.english, names).text("write")
    bound = [names.get(name, name) for name in task.names]
    return make_blank(task.source(), task.place, bound, task.title, write, task.number)


def tasks_of_evening(number: int) -> list[Task]:
    return [task for task in TASKS if task.evening == number]


def minutes_of(evening: int) -> int:
    """The total minutes of an evening's tasks."""
    return sum(task.minutes for task in tasks_of_evening(evening))


def tasks_of(module: str) -> list[Task]:
    """The tasks of a module, all in one evening."""
    return [task for task in TASKS if task.module == module]


def blank_text(module: str) -> str:
    """Return the module's text with all holes of its evening."""
    tasks = tasks_of(module)
    return with_holes(tasks[0].source(), map(blank_of, tasks))
