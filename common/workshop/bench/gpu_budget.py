"""Sections of a report, each with its share of the time, none of which can take down the others.

    a section                has time until its share, and what was left of the ones before, is over
    runs out of time         says in a note what it left out: `cut`
    raises                   keeps what it has, and the error: `failed`
    asks for what is not     says so: `unavailable`
    breaks the device        ends the process, since CUDA does nothing more in it; a new one goes on

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

from common.workshop.bench.gpu_device import Device

BAD = ("failed", "running")  # a section that still runs when the report is read never ended


class UnavailableError(RuntimeError):
    """What is to be measured does not exist here. The message says precisely why."""


class DeviceLostError(RuntimeError):
    """The device answers nothing more in this process."""


@dataclass(slots=True)
class Section:
    """What a section's function fills in. `results` is in the record from the start."""

    name: str
    deadline: float  # of time.monotonic()
    device: Device
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    status: str = "running"
    seconds: float = 0.0

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def has_time(self, what: str, needed_s: float = 0.0) -> bool:
        """Whether `what` can still be done. If not, that is noted."""
        if self.seconds_left() > needed_s:
            return True
        self.cut(f"left out, the time was up: {what}")
        return False

    def cut(self, note: str) -> None:
        if self.status == "running":
            self.status = "cut"
        self.notes.append(note)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fail(self, text: str) -> None:
        self.errors.append(" ".join(text.split())[:400])
        self.status = "failed"

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error in it is noted, and the section goes on. Raises `DeviceLostError` if the device
        does not."""
        try:
            yield
        except (UnavailableError, DeviceLostError):
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(f"{what}: {describe_error(error)}")
            if not self.device.is_usable():
                raise DeviceLostError(what) from error

    def as_record(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "notes": self.notes,
            "errors": self.errors,
            "results": self.results,
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """A section's share of the time, and what it does."""

    share: float
    measure: Callable[[Section], None]


def deadlines(sections: Mapping[str, Planned], start: float, total_s: float) -> dict[str, float]:
    """When each has to be over: its share later than the one before it."""
    whole, passed, ends = sum(one.share for one in sections.values()), 0.0, {}
    for name, one in sections.items():
        passed += one.share / whole
        ends[name] = start + passed * total_s
    return ends


def run_sections(
    sections: Mapping[str, Planned],
    record: dict[str, Any],
    device: Device,
    write: Callable[[dict[str, Any]], None],
    start: float,  # of time.monotonic()
    total_s: float,
) -> None:
    """All that the record does not have yet, in order. Raises `DeviceLostError`, with the record
    written, when no more can be done in this process."""
    ends = deadlines(sections, start, total_s)
    for name, planned in sections.items():
        if name in record["sections"]:
            continue
        section = Section(name, ends[name], device)
        began = time.monotonic()

        def keep(section: Section = section, began: float = began) -> None:
            section.seconds = time.monotonic() - began
            record["sections"][section.name] = section.as_record()
            write(record)

        keep()
        try:
            if section.has_time("all of it"):
                with section.attempt("the section"):
                    planned.measure(section)
        except UnavailableError as error:
            section.status = "unavailable"
            section.note(" ".join(str(error).split()))
        except BaseException:
            if section.status == "running":
                section.fail("interrupted")
            keep()
            raise
        if section.status == "running":
            section.status = "done"
        keep()
        device.release()


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def has_failed(record: Mapping[str, Any], sections: Mapping[str, Planned]) -> bool:
    done = record["sections"]
    return any(name not in done or done[name]["status"] in BAD for name in sections)
