"""All tasks, evening by evening, from one table, `tasks.txt`.

    tasks_batching ends              a module of this folder, and its function that probes
    number, title, minutes, difficulty, module, place, test_module      see `Task`
    write                            a line of the instructions, or an empty line
    hint                             from vague to precise
    test                             the simplest first
    names                            bound by the statements to write; none: the whole body
    engine {"chunked_prefill": 8}    arguments of `LLM` that make it use the module; null: none

The Chinese texts are in `tasks.zh.txt`, shown if the terminal's language is Chinese (`LANGUAGE=zh`
sets that anywhere). A row has number, title, write and hint, a `mistake` for each of the task's
typical ones in `patches.txt`, and `en`, the digest of the English words that were translated.

`text_rows.py` reads such tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from workshop.book.text_rows import TextRow, is_chinese, read_rows
from workshop.practice.tasks.blank import Blank, filled, make_blank, with_holes
from workshop.practice.tasks.task import Task

TABLE = Path(__file__).with_name("tasks.txt")
_WORDS = "number title minutes difficulty module place write hint test_module test names engine"


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of a task in one language."""

    title: str
    write: str
    hints: tuple[str, ...]
    mistakes: tuple[str, ...]  # as `Task.mistakes`

    @property
    def digest(self) -> str:
        said = self.title, " ".join(self.write.split()), self.hints, self.mistakes
        return sha256(repr(said).encode()).hexdigest()[:12]


def read_tasks(text: str) -> Iterator[Task]:
    for row in read_rows(text, _WORDS):
        module, _, function = row.head.partition(" ")
        yield Task(
            number=row.text("number"),
            title=row.text("title"),
            minutes=int(row.text("minutes")),
            difficulty=int(row.text("difficulty")),
            module=row.text("module"),
            place=row.text("place"),
            write=row.text("write"),
            hints=tuple(row.said["hint"]),
            tests=tuple(row.said["test"]),
            probe=getattr(import_module(f"{__package__}.{module}"), function),
            test_module=row.text("test_module"),
            names=tuple(row.text("names").split()),
            engine=json.loads(row.text("engine") or "{}"),
        )


TASKS = tuple(read_tasks(TABLE.read_text(encoding="utf-8")))
EVENINGS = {
    1: "Batching",
    2: "Paged KV",
    3: "Prefix cache",
    4: "Scheduler",
    5: "Speculative decoding",
    6: "Chunked prefill",
}


def _words(row: TextRow) -> Words:
    hints, mistakes = tuple(row.said["hint"]), tuple(row.said["mistake"])
    return Words(row.text("title"), row.text("write"), hints, mistakes)


_ROWS = read_rows(TABLE.with_suffix(".zh.txt").read_text("utf-8"), "en title write hint mistake")
CHINESE = {row.head: (row.text("en"), _words(row)) for row in _ROWS}  # digests and words


def english_of(task: Task) -> Words:
    mistakes = tuple(mistake.message for mistake in task.mistakes)
    return Words(task.title, filled(task.write, 92), task.hints, mistakes)


def words_of(task: Task) -> Words:
    return CHINESE[task.number][1] if is_chinese() else english_of(task)


def task_numbered(number: str) -> Task | None:
    return next((task for task in TASKS if task.number == number), None)


def blank_of(task: Task) -> Blank:
    return make_blank(task.source(), task.place, task.names, task.title, task.write, task.number)


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
