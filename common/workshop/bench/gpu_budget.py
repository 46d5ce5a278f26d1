"""Sections of a report, each with its share of the time, none of which can take down the others.

    a section          has time until its share, and what was left of the ones before, is over
    runs out of time   says in a note what it left out: `cut`
    raises             keeps what it has, and the error: `failed`
    is interrupted     is `running` for whoever reads the record: it never ended

The record is written before and after each section, so whatever happens, what was measured stays.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Section:
    """What a section's function fills in. `results` is in the record from the start."""

    deadline: float  # of time.monotonic()
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    status: str = "running"
    seconds: float = 0.0

    def has_time(self, what: str, needed_s: float = 0.0) -> bool:
        """Whether `what` can still be done. If not, that is noted."""
        if self.deadline - time.monotonic() > needed_s:
            return True
        self.cut(f"left out, the time was up: {what}")
        return False

    def cut(self, note: str) -> None:
        self.status = "cut"
        self.notes.append(note)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error in it is noted, and the section goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.cut(f"left out, it does not fit in memory: {what}")
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(f"{what}: {type(error).__name__}: {error}")

    def fail(self, text: str) -> None:
        self.errors.append(" ".join(text.split())[:400])

    def as_record(self) -> dict[str, Any]:
        status = "failed" if self.errors else self.status
        names = ("seconds", "notes", "errors", "results")
        return {"status": status} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Planned:
    """A section's share of the time, and what it does."""

    share: float
    measure: Callable[[Section], None]


def run_sections(
    plan: Mapping[str, Planned], record: dict[str, Any], write: Callable[[], None], total_s: float
) -> None:
    """All of the plan, in order, in place of what the record has of them."""
    whole, passed, start = sum(one.share for one in plan.values()), 0.0, time.monotonic()
    for name, planned in plan.items():
        passed += planned.share / whole
        section, began = Section(start + passed * total_s), time.monotonic()

        def keep(name: str = name, section: Section = section, began: float = began) -> None:
            section.seconds = round(time.monotonic() - began, 2)
            record["sections"][name] = section.as_record()
            write()

        keep()
        try:
            if section.has_time("all of it"):
                with section.attempt("the section"):
                    planned.measure(section)
            section.status = "done" if section.status == "running" else section.status
        finally:  # an interrupted one still runs, for whoever reads the record
            keep()
