"""A recorded run: the engine's state after any step, and what happened in between.

    film = Film.read("run.jsonl")
    film.state_after(12)                    a frame: plain JSON, see `common/events/frames.py`
    for step in film.steps(): ...           its frames, its plan, and what happened in it
    film.requests()["a"]                    every request of the run, as it ended

This module needs only Python's standard library. A line that is not of this format raises
`ValueError` with its number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.events.frames import (
    MOMENTS,
    VERSION,
    Frame,
    apply,
    empty_frame,
)
from workshop.watch.replay.frame_facts import Happened, cells, happened, reasons_to_wait

_EVERY = 32  # frames between two states that are kept


@dataclass(frozen=True)
class FilmStep:
    """The frames up to the one in which a step ended: `(moment, frame before, frame after)`.
    `number` counts ended steps, and is the step's own as long as no step has failed."""

    number: int
    frames: list[tuple[str, Frame, Frame]]

    @cached_property
    def happened(self) -> list[Happened]:
        """The changes that led to each frame; none where watching begins in the middle of a run."""
        return [happened(before, after) for at, before, after in self.frames if at != "start"]

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plans made in this step: with two steps in flight, the first one has two."""
        return [what["plan"] for what in self.happened if what["plan"] is not None]

    @property
    def result(self) -> dict[str, Any]:
        """The result with which the step ended; `error` if it failed."""
        return self.frames[-1][2]["result"]

    @property
    def state(self) -> Frame:
        return self.frames[-1][2]

    @property
    def reasons(self) -> dict[str, str]:
        """Why each request waited when the last plan was made."""
        plans = [after for at, _, after in self.frames if at == "plan"]
        return reasons_to_wait(plans[-1]) if plans else {}

    def cells(self) -> list[tuple[str, str, int, int]]:
        """The tokens that the step's plans compute, by kind (`frame_facts.cells`)."""
        frames = [after for at, _, after in self.frames if at == "plan"]
        return [cell for plan, frame in zip(self.plans, frames) for cell in cells(plan, frame)]


class Film:
    """`run` has the fields of the first line; `lines` are the others."""

    def __init__(self, lines: Iterable[str], name: str = "run.jsonl") -> None:
        run, *self.lines = _read(lines, name)
        self.run, self._name = SimpleNamespace(**{"windows": [], **run}), name
        self._kept: list[Frame] = [empty_frame(self.run.num_blocks)]
        self._last: tuple[int, Frame] = (0, self._kept[0])
        ended = ("result", "failed")
        self._ends = [n for n, line in enumerate(self.lines, 1) if line["at"] in ended]

    @classmethod
    def read(cls, path: str | Path) -> Film:
        path = Path(path)
        # A crash can cut a character; text after the last line break is not read.
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return cls(file, path.name)

    @property
    def num_steps(self) -> int:
        """The number of steps that ended, also by an error."""
        return len(self._ends)

    def steps(self) -> Iterator[FilmStep]:
        return map(self.step, range(self.num_steps))

    def step(self, number: int) -> FilmStep:
        """A step, counted from 0. Raises `ValueError` for a step that does not exist."""
        self._check(number, 0)
        positions = range(self._ends[number - 1] if number else 0, self._ends[number])
        frames = [(self.lines[p]["at"], self.state_behind(p), self.state_behind(p + 1))
                  for p in positions]  # fmt: skip
        return FilmStep(number, frames)

    def state_after(self, step: int) -> Frame:
        """The state after a step, counted from 0; -1: before the first."""
        self._check(step, -1)
        return self.state_behind(self._ends[step] if step >= 0 else 0)

    def last_state(self) -> Frame:
        return self.state_behind(len(self.lines))

    def state_behind(self, position: int) -> Frame:
        """The state after so many lines. Raises `ValueError` if a line cannot be applied."""
        at, frame = self._last
        kept = min(position // _EVERY, len(self._kept) - 1)
        if not kept * _EVERY <= at <= position:
            at, frame = kept * _EVERY, self._kept[kept]
        while at < position:
            try:
                frame = apply(frame, self.lines[at]["changes"])
            except (AttributeError, TypeError, ValueError) as error:
                where = f"{self._name}, line {at + 2}"
                raise ValueError(f"{where}: cannot apply the changes: {error}") from None
            at += 1
            if at == len(self._kept) * _EVERY:
                self._kept.append(frame)
        self._last = at, frame
        return frame

    def requests(self) -> dict[str, dict[str, Any]]:
        """Every request of the run in order of arrival: its last row, with `outputs` and `text`."""
        found: dict[str, dict[str, Any]] = {}
        for position, line in enumerate(self.lines):
            rows = line["changes"].get("requests", {})
            for name in (name for name, change in rows.items() if change is None):
                found[name] = whole_row(self.state_behind(position), name)
        last = self.last_state()
        found |= {name: whole_row(last, name) for name in last["requests"]}
        return dict(sorted(found.items(), key=lambda item: item[1]["number"]))

    def _check(self, step: int, first: int) -> None:
        if not first <= step < self.num_steps:
            raise ValueError(f"step must be from 0 to {self.num_steps - 1}, got {step}")


def whole_row(frame: Frame, name: str) -> dict[str, Any]:
    """A request's row with its `outputs` and its output `text` so far."""
    row = frame["requests"][name]
    end = row.get("finish", {})
    text = "".join(frame["pieces"][name]) + end.get("rest", "")
    return {**row, "outputs": frame["outputs"][name], "text": text[: end.get("text_length")]}


def _read(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    number = 0
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        if not line.endswith("\n"):  # a crash cut this line
            number -= 1
            break
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: must be JSON: {error}") from None
        is_run = isinstance(values, dict) and values.get("kind") == "run"
        if is_run != (number == 1):
            raise ValueError(f"{where}: only the first line must be the run line")
        if is_run and values.get("version") != VERSION:
            raise ValueError(
                f"{where}: must be of version {VERSION}, got {values.get('version')!r}; record the "
                "run again, or read it with the commit that wrote it"
            )
        is_frame = isinstance(values, dict) and values.get("at") in MOMENTS
        if not (is_run or (is_frame and isinstance(values.get("changes"), dict))):
            raise ValueError(f"{where}: must be a frame, got {line[:40]!r}")
        yield values
    if not number:
        raise ValueError(f"{name} must begin with the run line")
