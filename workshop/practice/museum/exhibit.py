"""An exhibit of the museum: a bug that a real engine shipped, put back into our code.

An exhibit is a story (a row of `stories.txt`, read in `hall.py`), a demonstration, and the patch of
its title in `workshop/practice/patches.txt` with the tests that catch it. The demonstration is a
small function that uses the module as its user would and returns the result in a few lines of text.
It imports everything when it is called, so that it can get the module with the bug:

                             the module    demonstrate()    the named tests
    unchanged                ours          `right`          pass
    with the bug             a copy        `wrong`          fail, each of them

All four are checked for every exhibit (`test_museum_visits.py`). Most can be watched as well: an
engine serves a few requests with the bug and without, and the two films are compared
(`watched_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workshop.practice.module_swap import ModuleSwap
from workshop.practice.patch_table import Bug, bug_of_exhibit
from workshop.practice.trial import LIMIT_S, NEVER_ENDS, said_by

ENDLESS_S = 2.0  # if the symptom is that it does not end


@dataclass(frozen=True, slots=True)
class Guest:
    """A request, and the step before which it arrives. `sampling` defaults to greedy."""

    name: str
    prompt: str
    max_tokens: int = 8
    step: int = 0
    priority: int = 0
    adapter: str | None = None  # a name for the shipped one
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in order of arrival, for an engine with the settings of `config`."""

    look: str  # what to look at
    parts: str  # the first event at which the two films differ: "step 3, planned, b"
    guests: tuple[Guest, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    has_chapter_2s_scheduler: bool = False  # instead of the "fcfs" of `config`


@dataclass(frozen=True, slots=True)
class Exhibit:
    trap: int  # its number in the project's list of traps, as cited by tests: "Trap 10"
    origin: str  # the engine that shipped it: "vLLM #42571"; or "ours"
    title: str
    symptom: str  # what a user would have seen
    cause: str
    lesson: str
    demonstrate: Callable[[], str]
    wrong: str  # its result with the bug; `NEVER_ENDS` if that is the bug
    right: str
    watch: Workload | str  # a sentence: why there is nothing to watch
    room: str = ""  # the chapter, if it is not that of the patched module

    @property
    def patch(self) -> Bug:
        return bug_of_exhibit(self.title)

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that catch the bug, as path::name."""
        return self.patch.tests

    def limit_s(self, swap: ModuleSwap | None) -> float:
        return ENDLESS_S if swap is not None and self.wrong == NEVER_ENDS else LIMIT_S

    def show(self, swap: ModuleSwap | None = None) -> str:
        """Run the demonstration in a separate process, with the bug if `swap` has it."""
        return said_by(self.demonstrate, swap, self.limit_s(swap))

    @property
    def chapter(self) -> str:
        """The folder of the patched module, unless `room` names another."""
        return self.room or self.patch.chapter
