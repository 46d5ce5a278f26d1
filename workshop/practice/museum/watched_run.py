"""Recorded runs of an exhibit: a real engine serves a few requests, with and without the bug.

    with broken_copy(exhibit.patch) as swap:
        wrong = make_film(exhibit.watch, path, swap)
    parting(make_film(exhibit.watch, other_path), wrong)    where the two diverge

Like a demonstration, a run has a separate process, so that no module is imported before the bug is
planted. The model computes in float64, and the likeliest token comes next unless a seed is set, so
two films of one engine differ only in times."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

from workshop.practice.apart import apart
from workshop.practice.module_swap import ModuleSwap
from workshop.practice.museum.exhibits import Workload
from workshop.practice.trial import LIMIT_S
from workshop.watch.replay.film import Film

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
# Values that differ between two runs of one engine, and a block's hash, which is only a name.
_ASIDE = {"time", "times", "schedule_ms", "update_ms", "arrived_at", "order_key", "hash"}
# Two runs part at the first of these keys whose changes differ in a frame.
_KEYS = ("in_flight", "result", "outputs", "waiting", "running", "requests", "loads", "tables")
_KEYS += ("computed", "cached", "evictable", "refs", "free")
_SAID = {"in_flight": "plan", "requests": "state", "tables": "block table"}
_SAID |= {kind: f"{kind} blocks" for kind in ("cached", "evictable", "free")}


@dataclass(frozen=True, slots=True)
class RunOnFilm:
    """A recorded run, and the error that ended it."""

    film: Film
    error: str = ""

    @property
    def num_steps(self) -> int:
        return self.film.num_steps


def make_film(workload: Workload, path: Path, swap: ModuleSwap | None = None) -> RunOnFilm:
    """Run the workload and write its frames to `path`, with the bug if `swap` has one."""
    error = apart(_perform, (workload, path, swap), LIMIT_S)
    return RunOnFilm(Film.read(path), "it does not end" if error is None else error)


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_times(item) for key, item in value.items() if key not in _ASIDE}


# -- two films of one workload


@dataclass(frozen=True, slots=True)
class Parting:
    """The first frame at which two films differ: what changed in it under `key`, in each of them;
    None: nothing, or that film has ended."""

    step: int
    at: str  # the moment of the frame in the film with the bug
    key: str
    right: Any
    wrong: Any

    @property
    def request(self) -> str:
        """The first request that the two differ in. "": none, or blocks differ."""
        right, wrong = self.right, self.wrong
        if self.key in ("waiting", "running"):
            right, wrong = (dict.fromkeys(chain(*one or []), 1) for one in (right, wrong))
        elif self.key == "in_flight":
            right, wrong = map(_rows_of_plan, (right, wrong))
        elif self.key == "result":
            found = zip(*(_facts_of_result(one) for one in (right, wrong)))
            return next(filter(None, (_first_other(*pair) for pair in found)), "")
        elif self.key in ("cached", "evictable", "refs", "free"):
            return ""
        return _first_other(right or {}, wrong or {})

    @property
    def place(self) -> str:
        """The step, the key and the request, in words."""
        of = f" of {self.request}" if self.request else ""
        return f"in step {self.step}, in the {_SAID.get(self.key, self.key)}{of}"

    @property
    def changes(self) -> tuple[Any, Any]:
        """The changes with the bug and without it: of `request`, where that is enough."""
        wrong, right = self.wrong, self.right
        if self.key == "in_flight" and self.request:
            wrong, right = map(_rows_of_plan, (wrong, right))
        elif self.key not in ("requests", "outputs", "tables", "computed"):
            return wrong, right
        return (wrong or {}).get(self.request), (right or {}).get(self.request)

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"step {self.step}", self.at, self.key, self.request)))


def _rows_of_plan(change: Any) -> dict[str, Any]:
    """By request, what a plan says about it."""
    plans = [plan[0] for plan in (change or {}).values() if plan]
    rows: dict[str, Any] = {}
    for plan in plans:
        columns = (plan.get(name, ()) for name in ("requests", "starts", "num_tokens"))
        for name, start, num in zip(*columns):
            drafts = plan.get("drafts", {}).get(name, [])
            rows[name] = {"start": start, "num_tokens": num, "drafts": drafts}
        for fact in ("skipped", "recomputed", "found"):
            rows |= {name: {fact: value} for name, value in plan.get(fact, {}).items()}
    return rows


def _facts_of_result(change: Any) -> list[dict[str, Any]]:
    result = change[0] if change else {}
    return [result.get(name, {}) for name in ("verified", "discarded")]


def _first_other(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> str:
    return next((n for n in {**wrong, **right} if right.get(n) != wrong.get(n)), "")


def parting(right: RunOnFilm, wrong: RunOnFilm) -> Parting | None:
    """Return where two films diverge. None if their frames are the same."""
    step = 0
    for one, other in zip_longest(right.film.lines, wrong.film.lines):
        pair = [_without_times(line or {}) for line in (one, other)]
        if pair[0] != pair[1]:
            at = (other or one)["at"]
            changes = [line["changes"] if line.get("at") == at else {} for line in pair]
            keys = (*_KEYS, *changes[0], *changes[1])
            key = next((k for k in keys if changes[0].get(k) != changes[1].get(k)), "")
            return Parting(step, at, key, *(change.get(key) for change in changes))
        step += one["at"] in ("result", "failed")
    return None


def line_of(change: Any, most: int = 200) -> str:
    """Return what changed as JSON, cut to `most` characters."""
    line = "nothing" if change is None else json.dumps(change, ensure_ascii=False)
    return line if len(line) <= most else f"{line[: most - 1]}…"


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

    adapters = {
        request.adapter: SHIPPED_ADAPTER for request in workload.requests if request.adapter
    }
    config: dict[str, Any] = SETTINGS | ({"adapters": adapters} if adapters else {})
    config |= workload.config
    engine = LLM(**config, events=path).engine
    if workload.has_chapter_2s_scheduler:
        from paged_fcfs_scheduler import PagedFCFSScheduler

        scheduler: Any = engine.scheduler
        scheduler.__class__ = PagedFCFSScheduler
    step, to_come = 0, list(workload.requests)
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0].step <= step:
            request = to_come.pop(0)
            sampling = {"temperature": 0, "max_tokens": request.max_tokens, **request.sampling}
            options = {"priority": request.priority, "adapter": request.adapter}
            try:
                engine.add_request(
                    request.name, request.prompt, SamplingParams(**sampling), **options
                )
            except ValueError:
                continue  # refused at once
        if engine.grammars is not None:  # however long it takes: two films are compared
            engine.grammars.wait(LIMIT_S)
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
