"""A task of the course: a function of ours with its body taken out, for a reader to write.

                           the module    the named tests    probe()
    ours                   the source    pass               `right`: the source's output
    the blank              a copy        fail
    a typical mistake      a copy        fail               another text, one for each mistake

A probe is a small function that uses the module as a caller would and returns the result in a few
lines of text. If a reader's answer fails the tests and the probe's output is that of a typical
mistake, the mistake's message is shown; mistakes and messages are in
`workshop/practice/patches.txt`. A probe imports modules when it is called, so that it gets the
reader's module. All of the above is checked for every task (`test_task_grades.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.practice.patch_table import Bug, mistakes_of_task, path_of_test
from workshop.practice.source_patch import ROOT, file_of, module_files

DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}


@dataclass(frozen=True, slots=True)
class Task:
    number: str  # "3.2": the second of the third evening
    title: str
    minutes: int
    difficulty: int  # a key of DIFFICULTIES
    module: str  # of ours
    place: str  # the function in it: `BlockPool.free`
    write: str  # what to write, and what has to hold
    hints: tuple[str, ...]  # from vague to precise
    tests: tuple[str, ...]  # names within `test_module`, or module::name; the simplest first
    probe: Callable[[], str]
    test_module: str
    # Not the whole body: the statements, one after the other, that bind these names.
    names: tuple[str, ...] = ()
    # Arguments of `LLM` that make it use the module. None: no arguments do.
    engine: dict[str, Any] | None = field(default_factory=dict)

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
    def mistakes(self) -> tuple[Bug, ...]:
        """Common wrong answers, each with the lesson in it."""
        return mistakes_of_task(self.number)

    @property
    def test_ids(self) -> tuple[str, ...]:
        names = (
            n if n.partition("::")[0] in module_files() else f"{self.test_module}::{n}"
            for n in self.tests
        )
        return tuple(map(path_of_test, names))

    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")
