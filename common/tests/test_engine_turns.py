"""An engine is one thread's at a time, and its maker's process's. Whoever else comes is told so,
and nothing changes by it; a request may be ended, and the engine closed, from anywhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.engine import LLMEngine
from common.requests.engine_lock import EngineLock
from common.runner.overlap import OverlappedEngineCore
from common.tests.engine_oracle import checked_engine, finish, greedy_params, serve
from scheduler_interface import SchedulerOutput

LOOPS = {"plain": {}, "overlapped": {"overlap_scheduling": True}}
USES: dict[str, Callable[[LLMEngine], object]] = {
    "step": lambda engine: engine.step(),
    "add_request": lambda engine: engine.add_request("late", [1, 2], greedy_params(3)),
    "generate": lambda engine: engine.generate_batch([[1, 2]], greedy_params(3)),
    "stream": lambda engine: next(engine.stream([1, 2], greedy_params(3))),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "reset_stats": lambda engine: engine.reset_stats(),
}


@pytest.fixture(params=LOOPS)
def engine(request, random_loaded) -> LLMEngine:
    return checked_engine(random_loaded, num_blocks=60, **LOOPS[request.param])


class Busy:
    """Another thread generates, and is held up in the middle of it."""

    def __init__(self, engine: LLMEngine, prompts: list, max_tokens: int = 12) -> None:
        self.engine, self.is_inside, self.may_go = engine, threading.Event(), threading.Event()
        engine.on_step = self.hold_up
        self.thread = ThreadPoolExecutor(1)
        self.outputs = self.thread.submit(engine.generate_batch, prompts, greedy_params(max_tokens))
        assert self.is_inside.wait(30)

    def hold_up(self, record) -> None:
        if record.step == 3:
            self.is_inside.set()
            assert self.may_go.wait(30)

    def end(self) -> list:
        self.may_go.set()
        outputs = self.outputs.result(30)
        self.thread.shutdown()
        self.engine.on_step = None
        return [o.outputs[0] for o in outputs.values()]


def test_a_second_thread_is_told_so_and_disturbs_nobody(engine, random_oracle) -> None:
    busy = Busy(engine, random_oracle.prompts[:2])
    for use in USES.values():
        with pytest.raises(RuntimeError, match="in use by another thread"):
            use(engine)
    first, second = busy.end()
    assert first.token_ids == random_oracle.expected(0, 12)
    assert second.token_ids == random_oracle.expected(1, 12)
    assert not engine.has_unfinished_requests()
    serve(engine, random_oracle, [2, 3], 5)  # it is anybody's now


def test_a_request_is_ended_from_another_thread(engine, random_oracle) -> None:
    busy = Busy(engine, random_oracle.prompts[:2])
    output = engine.abort_request("request-0")
    assert output is not None and not output.finished, "a step is under way"
    assert engine.abort_request("nobody") is None
    first, second = busy.end()
    assert first.finish_reason == "abort" and len(first.token_ids) < 12
    assert first.token_ids == random_oracle.expected(0, 12)[: len(first.token_ids)]
    assert second.token_ids == random_oracle.expected(1, 12)
    assert engine.stats().num_aborted == 1 and engine.stats().kv_blocks_in_use == 0


def test_an_engine_is_closed_from_another_thread(engine, random_oracle) -> None:
    busy = Busy(engine, random_oracle.prompts[:2])
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(engine.close)
        while not engine._is_closed:
            assert not closing.done()
        assert [c.finish_reason for c in busy.end()] == ["abort", "abort"]
        closing.result(30)
    for name in ("step", "add_request", "generate", "stream"):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            USES[name](engine)
    assert engine.stats().kv_blocks_in_use == 0
    engine.close()


def test_closing_does_not_wait_for_ever_for_a_step(engine, random_oracle, monkeypatch) -> None:
    monkeypatch.setattr("common.engine.CLOSE_TIMEOUT_S", 0.05)
    busy = Busy(engine, random_oracle.prompts[:2])
    engine.close()
    assert [c.finish_reason for c in busy.end()] == ["abort", "abort"]
    if isinstance(engine.core, OverlappedEngineCore):  # nor does its thread stay
        with pytest.raises(RuntimeError, match="worker thread is closed"):
            engine.core.runner.begin(SchedulerOutput())


def test_a_closed_engine_still_says_what_became_of_its_requests(engine) -> None:
    engine.add_request("a", [1, 2], greedy_params(3))
    engine.step()
    engine.close()
    assert finish(engine)["a"].outputs[0].finish_reason == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_two_threads_at_once_get_their_own_tokens_or_a_sentence(engine, random_oracle) -> None:
    """Each insists. However they meet, no token is another's and the engine stays as it was."""

    def insist(index: int) -> int:
        num_refused = num_served = 0
        for _ in range(100_000):
            try:
                serve(engine, random_oracle, [index], 6)
            except RuntimeError as error:
                assert "in use by another thread" in str(error)
                num_refused += 1
            else:
                num_served += 1
            if num_served == 4:
                break
        assert num_served == 4
        return num_refused

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(insist, [0, 1])) > 0
    engine.check_invariants()
    assert not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0


def in_a_fork(use: Callable[[], object]) -> str:
    """What it raises there, in words."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it was the time limit's of this test
        signal.alarm(20)  # an overlapped engine that is not stopped waits for a thread for ever
        try:
            use()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("name", [*USES, "abort_request", "close"])
def test_a_forked_process_is_told_so(engine, random_oracle, name) -> None:
    """Its books are a copy; workers, threads and files are its parent's."""
    serve(engine, random_oracle, [0], 4)
    uses = USES | {
        "abort_request": lambda engine: engine.abort_request("open"),
        "close": lambda engine: engine.close(),
    }
    engine.add_request("open", random_oracle.prompts[2], greedy_params(6))
    said = in_a_fork(lambda: uses[name](engine))
    assert said.startswith(f"RuntimeError: cannot use the engine of process {os.getpid()} ")
    assert finish(engine)["open"].outputs[0].token_ids == random_oracle.expected(2, 6)


def test_what_another_thread_asks_for_waits_for_the_end_of_a_call_that_adds_several(
    engine, random_oracle
) -> None:
    """The first is aborted from elsewhere while others are still added, and the last is refused."""
    prompt, params = random_oracle.prompts[0], greedy_params(3)

    def requests(last):
        yield "first", prompt, params
        elsewhere = threading.Thread(target=engine.abort_request, args=("first",))
        elsewhere.start()
        elsewhere.join(30)
        yield "second", prompt, params
        yield "third", prompt, last

    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams, got 5"):
        engine.add_requests(requests(5))
    assert not engine.has_unfinished_requests()
    engine.add_requests(requests(params))
    outputs = {name: output.outputs[0] for name, output in finish(engine).items()}
    assert outputs["first"].finish_reason == "abort"
    assert {outputs[name].finish_reason for name in ("second", "third")} == {"length"}


def test_what_is_asked_for_and_fails_is_not_done_again() -> None:
    lock, done = EngineLock(), []

    def fail() -> None:
        done.append("fails")
        raise ValueError

    with pytest.raises(ValueError):
        lock.run_or_defer(fail)
    lock.run_or_defer(lambda: done.append("next"))
    assert done == ["fails", "next"] and not lock.deferred


def test_who_is_undisturbed_stays_so_behind_a_call_that_was_so_too() -> None:
    lock, done = EngineLock(), []
    with lock, lock.deferring():
        with lock.deferring():
            pass
        lock.run_or_defer(lambda: done.append("asked"))
        assert not done
    assert done == ["asked"]
