"""Recorded runs of an exhibit: a real engine serves a few requests, with and without the bug.

    with broken_copy(exhibit.patch) as swap:
        wrong = make_film(exhibit.watch, path, swap)
    parting(make_film(exhibit.watch, other_path), wrong)    where the two diverge

Like a demonstration, a run has a separate process, so that no module is imported before the bug is
planted. The model computes in float64, and the likeliest token comes next unless a seed is set, so
two films of one engine differ only in times."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

from common.events.event_kinds import Event, Failed, Planned, Run, Updated, read_events, to_line
from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum.hall import Workload
from workshop.practice.trial import LIMIT_S
from workshop.watch.replay.film import State

MAX_STEPS = 60
STEP_CPU_S = 2  # a step that takes more of the processor does not end
SETTINGS = {
    "device": "cpu",
    "dtype": "float64",
    "compile": False,
    "overlap_scheduling": False,
    "block_size": 4,
    "num_blocks": 40,
    "watermark": 0.0,
}
# Fields that differ between two runs of one engine, and meaningless names: a block's hash.
_ASIDE: dict[str, Any] = {"time": 0.0, "started_at": 0.0, "schedule_ms": 0.0, "update_ms": 0.0}
_ASIDE |= {"times": {}, "order_key": "", "hashes": []}


@dataclass(frozen=True, slots=True)
class RunOnFilm:
    """The events of a run without their times, the run line first, and the error that ended it."""

    events: list[Event]
    error: str = ""

    @property
    def num_steps(self) -> int:
        return sum(isinstance(event, Updated | Failed) for event in self.events)


def make_film(workload: Workload, path: Path, swap: ModuleSwap | None = None) -> RunOnFilm:
    """Run the workload and write its events to `path`, with the bug if `swap` has one."""
    error = apart(_perform, (workload, path, swap), LIMIT_S)
    events = [_without_times(event) for event in read_events(path)]
    return RunOnFilm(events, "it does not end" if error is None else error)


def _without_times(event: Event) -> Event:
    return replace(event, **{name: _ASIDE[name] for name in _ASIDE if hasattr(event, name)})


# -- two films of one workload


@dataclass(frozen=True, slots=True)
class Parting:
    """The first event at which two films differ, in each of them. None: that film has ended."""

    step: int
    right: Event | None
    wrong: Event | None

    @property
    def kind(self) -> str:
        """The kind of the event in the film with the bug."""
        event = self.wrong or self.right
        return "" if event is None else event.kind

    @property
    def request(self) -> str:
        """The request of the event, or the first one that the two events differ in. "": none."""
        right, wrong = self.right, self.wrong
        if isinstance(right, Planned) and isinstance(wrong, Planned):
            return _first_other(_shares(right), _shares(wrong))
        if type(right) is type(wrong):
            for name in (f.name for f in fields(wrong or Event)):
                one, other = getattr(right, name), getattr(wrong, name)
                if isinstance(one, dict) and one != other:
                    return _first_other(one, other)
        names = (getattr(event, "request", None) for event in (wrong, right))
        return next(filter(None, names), "")

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"step {self.step}", self.kind, self.request)))


def _shares(plan: Planned) -> dict[str, tuple]:
    drafts = [plan.drafts.get(name) for name in plan.requests]
    return dict(zip(plan.requests, zip(plan.starts, plan.num_tokens, drafts)))


def _first_other(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> str:
    return next((n for n in {**wrong, **right} if right.get(n) != wrong.get(n)), "")


def parting(right: RunOnFilm, wrong: RunOnFilm) -> Parting | None:
    """Return where two films diverge. None if their events are the same."""
    step = 0
    for one, other in zip_longest(right.events, wrong.events):
        if one != other:
            return Parting(step, one, other)
        step += isinstance(one, Updated | Failed)
    return None


def line_of(event: Event | None, most: int = 200) -> str:
    """Return an event as a line of its file, cut to `most` characters."""
    line = "the end of the film" if event is None else to_line(event)
    return line if len(line) <= most else f"{line[: most - 1]}…"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A step whose events contradict the events before."""

    step: int
    sentence: str


def contradiction(made: RunOnFilm) -> Contradiction | None:
    """Return a film's first contradiction; None if there is none."""
    run, *events = made.events
    assert isinstance(run, Run)
    state, step = State(run), 0
    for event in events:
        try:
            state.apply(event)
        except (ValueError, LookupError) as error:
            return Contradiction(step, str(error))
        step += isinstance(event, Updated | Failed)
    return None


# -- in a process of its own


class EndlessError(Exception):
    """A step did not end and was stopped from outside."""


def _perform(workload: Workload, path: Path, swap: ModuleSwap | None) -> str:
    if swap is not None:
        swap.install()
        swap.check()  # before anything else
    try:
        for step in _serve(workload, path):
            if step == MAX_STEPS:
                break
    except Exception as error:  # whatever the bug has led to
        return f"{type(error).__name__}: {error}"
    return ""


def _serve(workload: Workload, path: Path) -> Iterator[int]:
    """Serve the workload, one step per iteration."""
    from common.engine_config import SHIPPED_ADAPTER
    from common.llm import LLM, SamplingParams

    adapters = {guest.adapter: SHIPPED_ADAPTER for guest in workload.guests if guest.adapter}
    config: dict[str, Any] = SETTINGS | ({"adapters": adapters} if adapters else {})
    config |= workload.config
    engine = LLM(**config, events=path).engine
    if workload.has_chapter_2s_scheduler:
        from paged_fcfs_scheduler import PagedFCFSScheduler

        scheduler: Any = engine.scheduler
        scheduler.__class__ = PagedFCFSScheduler
    step, to_come = 0, list(workload.guests)
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0].step <= step:
            guest = to_come.pop(0)
            sampling = {"temperature": 0, "max_tokens": guest.max_tokens, **guest.sampling}
            options = {"priority": guest.priority, "adapter": guest.adapter}
            try:
                engine.add_request(guest.name, guest.prompt, SamplingParams(**sampling), **options)
            except ValueError:
                continue  # refused at once
        if engine._grammars is not None:  # however long it takes: two films are compared
            engine._grammars.queue.wait(LIMIT_S)
        if engine.has_unfinished_requests():
            _with_a_limit(engine.step)
        step += 1
        yield step


def _with_a_limit(work: Any) -> None:
    """Run `work` with a limit on CPU time, not wall time. Raises `EndlessError` beyond the
    limit."""
    if not hasattr(signal, "setitimer"):
        work()
        return
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, STEP_CPU_S)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise EndlessError("the run does not end; stopped from outside")
