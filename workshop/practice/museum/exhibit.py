"""What the museum shows: a bug that a real engine shipped, put back into our code.

An exhibit is a story (a row of `stories.txt`, read in `hall.py`), a demonstration, and the patch of
its title in `workshop/practice/patches.txt` with the tests that notice. The demonstration is a
small function that uses the module as a user of it would, and says in a few lines of text what came
of it. It imports what it needs when it is called, so that it gets the module with the bug where
that is wanted:

                             the module    demonstrate()    the named tests
    as it is                 ours          `right`          pass
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

ENDLESS_S = 2.0  # where the symptom is that it does not end


@dataclass(frozen=True, slots=True)
class Guest:
    """A request, and the step before which it comes. `sampling` is greedy but for what it says."""

    name: str
    prompt: str
    max_tokens: int = 8
    step: int = 0
    priority: int = 0
    adapter: str | None = None  # a name for the shipped one
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """`guests`, in order of arrival, come to an engine with the settings of `config`."""

    look: str  # what to look at
    parts: str  # where the film with the bug parts from the other: "step 3, planned, b"
    guests: tuple[Guest, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    has_chapter_2s_scheduler: bool = False  # instead of the one that `config` names, "fcfs"


@dataclass(frozen=True, slots=True)
class Exhibit:
    trap: int  # its number in the project's list of traps, which the tests cite: "Trap 10"
    origin: str  # who shipped it: "vLLM #42571"; or "ours"
    title: str
    seen: str  # what a user would have seen
    lesson: str
    demonstrate: Callable[[], str]
    wrong: str  # what it says with the bug in; `NEVER_ENDS` if that is the bug
    right: str
    watch: Workload | str  # a sentence: why there is nothing to watch
    room: str = ""  # of another chapter than the one that the bug is put into

    @property
    def patch(self) -> Bug:
        return bug_of_exhibit(self.title)

    @property
    def tests(self) -> tuple[str, ...]:
        """path::name of those that notice."""
        return self.patch.tests

    def limit_s(self, swap: ModuleSwap | None) -> float:
        return ENDLESS_S if swap is not None and self.wrong == NEVER_ENDS else LIMIT_S

    def show(self, swap: ModuleSwap | None = None) -> str:
        """What the demonstration says, in a process of its own, with the bug if `swap` has it."""
        return said_by(self.demonstrate, swap, self.limit_s(swap))

    @property
    def chapter(self) -> str:
        """The folder that the bug is put into, unless it says otherwise."""
        return self.room or self.patch.chapter
