"""A film as Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

    process "host"      schedule and update of every step, on one track
    process "device"    prepare, forward, sample and propose: what the runner timed
    process "requests"  an async slice for each request's life, and inside it its waits and runs;
                        an arrow from a preemption to the return, if there is one
    counters            blocks by state, running, waiting, tokens of a step

The runner times its parts and not when they begin: they are laid end to end behind the plan or, if
that is later, behind the step before. Source: the Trace Event Format document of the Chromium
project; times are microseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
    Failed,
    Finished,
    Planned,
    Preempted,
    Updated,
)
from workshop.watch.replay.film import Film, State

HOST, DEVICE, REQUESTS = 1, 2, 3  # process ids
PARTS = ("prepare", "forward", "sample", "propose")
_PROCESSES = {HOST: "host", DEVICE: "device", REQUESTS: "requests"}

TraceEvent = dict[str, Any]


def trace_of(film: Film) -> dict[str, Any]:
    """The whole trace: `traceEvents` in order of time."""
    events = sorted(_Tracer(film).events(), key=lambda event: event.get("ts", 0.0))
    metadata = {"model": film.run.model, "config": film.run.config, "versions": film.run.versions}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def write_trace(film: Film, path: str | Path) -> None:
    text = json.dumps(trace_of(film), ensure_ascii=False, allow_nan=False)
    Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)


def _times(film: Film) -> list[float]:
    """Of every event. Where it has none, that of the next that has one: what a planning did, began
    with it; what came of a step was over with it."""
    times, last = [], 0.0
    for event in reversed(film.events):
        last = getattr(event, "time", last)
        times.append(last)
    return times[::-1]


class _Tracer:
    """One walk through the film."""

    def __init__(self, film: Film) -> None:
        self.film = film
        self.state = State(film.run)
        self.now = 0.0  # seconds
        self.device_is_free_at = 0.0
        self.planned: dict[int, Planned] = {}
        self.lives: dict[str, int] = {}  # of those that have not ended: the id of their slices
        self.phases: dict[str, str] = {}  # of these, the inner slice that is open
        self.arrows: list[tuple[str, str, float]] = []  # of a planning that is not over: its ends
        self.begun: dict[str, TraceEvent] = {}  # of the preempted: where the arrow begins
        self.num_ids = 0

    def events(self) -> Iterator[TraceEvent]:
        for pid, name in _PROCESSES.items():
            yield _event("M", "process_name", pid, 0.0, args={"name": name})
            yield _event("M", "thread_name", pid, 0.0, args={"name": name})
        for event, time in zip(self.film.events, _times(self.film), strict=True):
            self.state.apply(event)
            self.now = max(self.now, time)
            handler = getattr(self, f"_on_{event.kind}", None)
            if handler is not None:
                yield from handler(event)
        for request in list(self.lives):  # the film ends before they do
            yield from self._end(request, {"finish_reason": None})

    # -- steps

    def _on_planned(self, event: Planned) -> Iterator[TraceEvent]:
        end = event.time + event.schedule_ms / 1e3
        self.now, self.planned[event.step] = max(self.now, end), event
        kinds: dict[str, int] = {}
        for cell in self.state.cells(event):
            kinds[cell.kind] = kinds.get(cell.kind, 0) + cell.num_tokens
        args = {"step": event.step, "tokens": kinds, "stop": event.stop}
        yield _slice("schedule", HOST, event.time, end, args)
        yield from self._draw_arrows()
        if kinds:
            yield _counter("tokens of the step", event.time, kinds)
        yield from self._counters()

    def _on_computed(self, event: Computed) -> Iterator[TraceEvent]:
        planned = self.planned.pop(event.step)
        begin = max(planned.time + planned.schedule_ms / 1e3, self.device_is_free_at)
        for part in PARTS:
            ms = event.times.get(f"{part}_ms", 0.0)
            if ms > 0:
                end = begin + ms / 1e3
                yield _slice(part, DEVICE, begin, end, {"step": event.step})
                begin = end
        self.device_is_free_at = begin

    def _on_updated(self, event: Updated) -> Iterator[TraceEvent]:
        begin = event.time - event.update_ms / 1e3
        yield _slice("update", HOST, begin, event.time, {"step": event.step})
        yield from self._counters()

    def _draw_arrows(self) -> Iterator[TraceEvent]:
        """An arrow's end binds to the slice around it, which is the planning: without one, or if
        the request never returns, there is no arrow."""
        for ph, request, time in self.arrows:
            if ph == "s":
                self.num_ids += 1
                begin = _event(ph, "preemption", HOST, time, id=self.num_ids, cat="preemption")
                self.begun[request] = begin
            elif (begin := self.begun.pop(request, None)) is not None:
                yield begin
                yield {**begin, "ph": ph, "ts": _us(time), "bp": "e"}
        self.arrows = []

    def _on_failed(self, event: Failed) -> Iterator[TraceEvent]:
        self.arrows = []
        yield _event("i", "failed", HOST, event.time, s="g", args={"error": event.error})

    def _counters(self) -> Iterator[TraceEvent]:
        state = self.state
        num_idle = sum(state.ref_cnt[block] == 1 for block in state.cached)
        num_used = state.run.num_blocks - 1 - len(state.free) - num_idle
        blocks = {"in use": num_used, "cached": num_idle, "free": len(state.free)}
        yield _counter("blocks", self.now, blocks)
        yield _counter("running", self.now, {"running": len(state.running)})
        yield _counter("waiting", self.now, {"waiting": len(state.waiting)})

    # -- requests

    def _on_arrived(self, event: Arrived) -> Iterator[TraceEvent]:
        self.num_ids += 1
        self.lives[event.request] = self.num_ids
        args = {"prompt_tokens": len(event.prompt), "max_tokens": event.max_tokens}
        yield self._async("b", event.request, event.request, args)
        yield from self._enter(event.request, "waits")

    def _on_admitted(self, event: Admitted) -> Iterator[TraceEvent]:
        yield from self._enter(event.request, "runs")
        self.arrows.append(("f", event.request, self.now))

    def _on_preempted(self, event: Preempted) -> Iterator[TraceEvent]:
        yield from self._enter(event.request, "is preempted")
        self.arrows.append(("s", event.request, self.now))
        args = {"request": event.request, "lost_tokens": event.num_lost_tokens}
        yield _event("i", "preempted", HOST, self.now, s="t", args=args)

    def _on_finished(self, event: Finished) -> Iterator[TraceEvent]:
        yield from self._end(event.request, {"finish_reason": event.reason})

    def _enter(self, request: str, phase: str) -> Iterator[TraceEvent]:
        if (before := self.phases.get(request)) is not None:
            yield self._async("e", before, request)
        self.phases[request] = phase
        yield self._async("b", phase, request)

    def _end(self, request: str, args: dict[str, Any]) -> Iterator[TraceEvent]:
        yield self._async("e", self.phases.pop(request), request)
        self.begun.pop(request, None)  # it never returned
        yield self._async("e", request, request, args)
        del self.lives[request]

    def _async(
        self, ph: str, name: str, request: str, args: dict[str, Any] | None = None
    ) -> TraceEvent:
        id_, args = self.lives[request], args or {}
        return _event(ph, name, REQUESTS, self.now, id=id_, cat="request", args=args)


def _event(ph: str, name: str, pid: int, seconds: float, **more: Any) -> TraceEvent:
    return {"ph": ph, "name": name, "pid": pid, "tid": pid, "ts": _us(seconds), **more}


def _slice(name: str, pid: int, begin: float, end: float, args: dict[str, Any]) -> TraceEvent:
    ts = _us(begin)
    return {**_event("X", name, pid, begin, cat="step", args=args), "dur": max(0.0, _us(end) - ts)}


def _counter(name: str, seconds: float, values: dict[str, int]) -> TraceEvent:
    return _event("C", name, HOST, seconds, args=values)
