"""A task of the course: a function of ours with its body taken out, for a reader to write.

                           the module    the named tests    probe()
    ours                   the source    pass               `right`: what the source says
    the blank              a copy        fail
    a typical mistake      a copy        fail               another text, one for each mistake

A probe is a small function that uses the module as a user of it would and says in a few lines of
text what came of it. Where a reader's answer fails the tests and says what a typical mistake says,
the mistake's message is shown. It imports what it needs when it is called, so that it gets the
reader's module. All of the above is checked for every task (`test_task_grades.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.tools.source_patch import ROOT, Patch

DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong answer that many give, as a change of ours, and what there is to learn from it."""

    old: str  # stands in our file exactly once
    new: str
    message: str


@dataclass(frozen=True, slots=True)
class Task:
    number: str  # "3.2": the second of the third evening
    title: str
    minutes: int
    difficulty: int  # a key of DIFFICULTIES
    file: str  # of ours, a path from the root
    place: str  # the function in it: `BlockPool.free`
    write: str  # what to write, and what has to hold
    hints: tuple[str, ...]  # from vague to precise
    tests: tuple[str, ...]  # names within `test_file`, or path::name; the simplest first
    probe: Callable[[], str]
    mistakes: tuple[Mistake, ...]
    test_file: str
    # Not the whole body: the statements, one after the other, that bind these names.
    names: tuple[str, ...] = ()
    # What `LLM` is given so that it uses the module. None: nothing makes it do so.
    engine: dict[str, Any] | None = field(default_factory=dict)

    @property
    def evening(self) -> int:
        return int(self.number.partition(".")[0])

    @property
    def module(self) -> str:
        return Patch(self.file, "", "").module

    @property
    def test_ids(self) -> tuple[str, ...]:
        return tuple(n if ".py::" in n else f"{self.test_file}::{n}" for n in self.tests)

    def source(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8")

    def with_mistake(self, mistake: Mistake) -> str:
        return Patch(self.file, mistake.old, mistake.new).apply()
