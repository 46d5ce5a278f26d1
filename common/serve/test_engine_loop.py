"""The engine's thread, with an engine that does what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine_config import EngineStats
from common.features.grammars.lark_text import TOO_MANY_WAYS
from common.sampling.runner_plugin import NO_TOKEN
from common.serve.deltas import EngineUpdate, RequestDelta
from common.serve.engine_loop import (
    MAX_ADD_S,
    MAX_FAILURES,
    UNCOMPILED,
    EngineError,
    EngineLoop,
)
from common.serve.test_deltas import Growing
from request import SamplingParams


class Engine:
    """`steps`: what each does with the one request; it runs until there are no more."""

    def __init__(self, *steps: Callable[[Growing], None]) -> None:
        self.steps, self.request, self.num_steps = [*steps], Growing(), 0
        self.config, self.is_asked = SimpleNamespace(max_num_seqs=1), False
        self.handed_over = Queue[EngineUpdate]()
        self.stats, self.close = EngineStats, lambda: None
        self.loop = EngineLoop(lambda: self, self.handed_over.put)  # pyright: ignore[reportArgumentType]

    def add_request(self, *_: Any) -> Any:
        self.is_asked = True
        return self.request.group

    def has_unfinished_requests(self) -> bool:
        return self.is_asked and bool(self.steps)

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.steps.pop(0)(self.request)
        return [self.request.group, SimpleNamespace(request_id="of nobody here")]

    def collect(self) -> list[RequestDelta]:
        """Collect all deltas of the request."""
        self.loop.add("x", [7, 8, 9], SamplingParams(), {})
        found: list[RequestDelta] = []
        while not (found and found[-1].finished):
            found += self.handed_over.get(timeout=20).deltas
        self.loop.close()
        assert [delta.request_id for delta in found] == ["x"] * len(found)
        return found


AMBIGUOUS = f"grammar ({TOO_MANY_WAYS})"


def ends(reason: str, detail: str | None = None) -> Callable[[Growing], None]:
    def step(request: Growing) -> None:
        for i in range(2):
            request.grow(i, 5, reason)
        request.group.finished, request.group.metrics.finish_detail = True, detail

    return step


def fails(error: Exception) -> Callable[[Growing], None]:
    def step(request: Growing) -> None:
        raise error

    return step


@pytest.mark.parametrize(
    ("step", "kind", "says"),
    [
        (ends("stop"), None, ""),
        (ends("error", f"{UNCOMPILED}: (x"), ValueError, f"{UNCOMPILED}: (x"),
        (ends("error", f"{AMBIGUOUS}: {NO_TOKEN}"), ValueError, f"{AMBIGUOUS}: {NO_TOKEN}"),
        (ends("error", "logits hold nan"), EngineError, "logits hold nan"),
        (ends("abort"), EngineError, "the request was ended"),
    ],
    ids=["whole", "what was sent", "rules that were sent", "what was computed", "by somebody"],
)
def test_how_it_ended_is_said(step: Any, kind: type | None, says: str) -> None:
    *_, last = Engine(step).collect()
    assert type(last.error) is (kind or type(None)) and says in str(last.error)
    assert set(last.completions) == {0, 1}


@pytest.mark.parametrize("is_final", [True, False])
def test_an_engine_that_does_not_recover_is_given_up(is_final: bool) -> None:
    error = RuntimeError("a rank is gone")
    if is_final:
        error.is_final = True  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(*[fails(error)] * 5)
    *_, last = engine.collect()
    assert engine.num_steps == (1 if is_final else MAX_FAILURES)
    assert isinstance(last.error, EngineError) and last.error.__cause__ is error
    assert str(last.error) == "the engine has stopped: RuntimeError"
    assert engine.loop.death_reason == str(last.error), "and not that it was closed"


def test_a_step_that_fails_is_why_its_requests_end() -> None:
    """Trap 86: the text of an exception may quote one request, and each of the step gets it."""
    error = MemoryError("no memory left")
    *_, last = Engine(fails(error), fails(error), ends("abort")).collect()
    assert str(last.error) == "a step with this request has failed: MemoryError"
    assert last.error.__cause__ is error


def test_concurrent_requests_start_together_and_the_loop_waits_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the engine was idle, and by how long a step takes there."""

    def first_step(step_s: float, pause_s: float, max_seqs: int) -> int:
        """How many have come by then, of `most` with a pause between two."""
        engine, begun = Engine(lambda _: begun.set(), ends("stop")), threading.Event()
        engine.loop.made.result()
        engine.loop._step_s = step_s
        num_asked = 0
        while num_asked < max_seqs and not begun.is_set():
            engine.loop.add(str(num_asked), [7], SamplingParams(), {})
            num_asked += 1
            time.sleep(pause_s)
        assert begun.wait(20)
        engine.loop.close()
        return num_asked

    assert first_step(1000.0, 0.5, 2) == 1, "a compilation, say: that is no measure"
    monkeypatch.setattr("common.serve.engine_loop.MAX_GATHER_GAP_S", 0.5)
    assert first_step(20.0, 0.01, 3) == 3
    assert 1 < first_step(2.0, 0.001, 5000) < 5000
    assert first_step(0.01, 0.5, 2) == 1
    engine, gathered = Engine(lambda _: None, ends("stop")), list[int]()
    engine.loop._gather = lambda: gathered.append(engine.num_steps)
    engine.collect()
    assert gathered == [0], "not where steps follow each other"


def test_a_crowd_is_taken_in_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 87: a body of 2,048 prompts held up those that run until all were taken."""
    is_full = threading.Event()
    engine = Engine(*[lambda request: is_full.wait(20)] * 200, ends("stop"))
    order: list[str] = []
    add, step = engine.add_request, engine.step

    def add_slowly(*arguments: Any) -> Any:
        order.append("add")
        time.sleep(MAX_ADD_S / 4)
        return add(*arguments)

    def notified_sizes() -> list[Any]:
        order.append("step")
        return step()

    monkeypatch.setattr(engine, "add_request", add_slowly)
    monkeypatch.setattr(engine, "step", notified_sizes)
    for i in range(40):
        engine.loop.add(f"{i}", [7], SamplingParams(), {})
    is_full.set()
    while order.count("add") < 40:
        engine.handed_over.get(timeout=20)
    engine.loop.close()
    longest = max(map(len, "".join("a" if o == "add" else " " for o in order).split()))
    assert longest <= 12, order


def test_a_crowd_of_requests_to_a_dead_engine_gets_its_error() -> None:
    """All of it, without another message that would wake the thread up."""
    engine = Engine(*[fails(RuntimeError("a rank is gone"))] * MAX_FAILURES)
    engine.loop.add("first", [7], SamplingParams(), {})
    add, names = engine.loop._add, set[str]()

    def add_slowly(*arguments: Any) -> None:
        time.sleep(MAX_ADD_S)
        add(*arguments)

    engine.loop._add = add_slowly
    while "first" not in names:
        names |= {d.request_id for d in engine.handed_over.get(timeout=20).deltas if d.finished}
    for i in range(3):
        engine.loop.add(f"{i}", [7], SamplingParams(), {})
    while len(names) < 4:
        names |= {d.request_id for d in engine.handed_over.get(timeout=20).deltas if d.finished}
    engine.loop.close()


def test_one_request_is_not_held_until_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CPython 3.11 `SimpleQueue.get(timeout=...)` waits forever if its thread loses the
    processor for longer than the timeout before the wait. Here it always does."""

    class Late(SimpleQueue):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            return super().get()

    monkeypatch.setattr("common.serve.engine_loop.SimpleQueue", Late)
    engine = Engine(ends("stop"))
    engine.loop.made.result()
    engine.loop._step_s = 20.0  # so it gathers for up to five seconds
    assert engine.collect()[-1].finished


def test_an_aborted_request_costs_one_update_and_not_one_a_step() -> None:
    """Its statistics are sent once; steps that change nothing for any client send nothing."""
    is_aborted = threading.Event()
    steps = [lambda request: None, lambda request: is_aborted.wait(20)]
    engine = Engine(*steps, *[lambda request: None] * 5)
    engine.abort_request = lambda request_id: None  # pyright: ignore[reportAttributeAccessIssue]
    engine.loop.add("x", [7], SamplingParams(), {})
    updates = [engine.handed_over.get(timeout=20)]  # it is accepted, and its second step waits
    engine.loop.abort("x")
    is_aborted.set()
    while engine.steps:
        time.sleep(0.001)
    engine.loop.close()
    while not updates[-1].is_last:
        updates.append(engine.handed_over.get(timeout=20))
    empty = [u for u in updates if not (u.deltas or u.answers or u.is_last)]
    assert len(empty) == 1
