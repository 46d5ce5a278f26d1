"""Requests that wait for a grammar, requests that overtake them, and grammars without a waiting
request."""

from __future__ import annotations

import pytest

from grammar_queue import GrammarsCompiled
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import MAX_SKIPPED, Scheduler
from scheduler_steps import SchedulerLoop, make_memory, make_scheduler, preempting, scheduled_tokens
from worker_thread import ThreadJob


class Compiler:
    """Jobs by source, which a test brings to their end."""

    def __init__(self) -> None:
        self.jobs: dict[str, ThreadJob[str]] = {}

    def __call__(self, source: str) -> ThreadJob[str]:
        return self.jobs.setdefault(source, ThreadJob[str]())


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def queue(compiler) -> GrammarsCompiled:
    return GrammarsCompiled(compiler)


def make_loop(queue: GrammarsCompiled, kind: type = Scheduler, **options) -> SchedulerLoop:
    options |= {"kv_memory": make_memory(None, 100, 4), "plugins": [queue]}
    return SchedulerLoop(make_scheduler(kind, **options))


def add(
    loop: SchedulerLoop, queue: GrammarsCompiled, name: str, source: str | None, n: int = 3
) -> Request:
    request = loop.add(name, n, 4)
    if source is not None:
        request.features["grammar"] = source
    queue.arrived(request)
    return request


def test_a_request_that_waits_for_its_grammar_blocks_no_other(queue, compiler) -> None:
    loop = make_loop(queue)
    waits = add(loop, queue, "a", "digits")
    same = add(loop, queue, "b", "digits")
    add(loop, queue, "c", None)
    assert list(scheduled_tokens(loop.step())) == ["c"]
    assert waits.status == RequestStatus.WAITING_FOR_GRAMMAR == same.status
    queue.begin_step()
    compiler.jobs["digits"].set_result("DIGITS")
    assert not queue.can_start(waits), "in one step, one answer"
    queue.begin_step()
    assert waits.status == RequestStatus.WAITING, "whatever else may hold it back now"
    plan = loop.step()
    assert {new.req_id: new.features for new in plan.scheduled_new_reqs} == {
        "a": {"grammar": "DIGITS"},
        "b": {"grammar": "DIGITS"},
    }
    assert waits.features == {"grammar": "digits"}
    loop.run()
    assert not queue._jobs and not queue._waits


def test_a_compiled_grammar_is_sent_again_after_a_preemption(queue, compiler) -> None:
    loop = make_loop(queue)
    add(loop, queue, "a", "digits")
    compiler.jobs["digits"].set_result("DIGITS")
    assert scheduled_tokens(loop.step()) == {"a": 3}
    with preempting(loop.scheduler):
        loop.step()
    assert "a" in scheduled_tokens(loop.step())
    sent = [new.features for new in loop.step().scheduled_new_reqs]
    assert all(features == {"grammar": "DIGITS"} for features in sent)
    loop.run()


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler])
def test_slow_grammars_stop_admission_neither_by_age_nor_by_number(kind, queue, compiler) -> None:
    loop = make_loop(queue, kind, max_overtakes=2)
    for i in range(2 * MAX_SKIPPED + 1):
        add(loop, queue, f"slow {i}", "digits", 9)
    for name in "bcde":
        add(loop, queue, name, None)
        assert name in scheduled_tokens(loop.step())
    compiler.jobs["digits"].set_result("DIGITS")
    loop.step()
    assert loop.requests["slow 0"].status == RequestStatus.RUNNING


def test_a_request_that_can_never_start_is_reported_with_its_reason(queue, compiler) -> None:
    loop = make_loop(queue)
    add(loop, queue, "a", "wrong")
    add(loop, queue, "b", "right")
    assert queue.failed() == {} and queue.wait(0)
    compiler.jobs["wrong"].set_exception(ValueError("a sentence"))
    compiler.jobs["right"].set_result("RIGHT")
    assert queue.failed() == {"a": "grammar: a sentence"}
    assert list(scheduled_tokens(loop.step())) == ["b"]
    loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ERROR)
    assert queue.failed() == {} and not queue.wait(0)
    loop.run()


def test_a_request_interrupted_on_arrival_still_waits(queue, compiler) -> None:
    loop = make_loop(queue)
    loop.add("a", 3, 4).features["grammar"] = "digits"
    assert scheduled_tokens(loop.step()) == {}
    compiler.jobs["digits"].set_result("DIGITS")
    assert scheduled_tokens(loop.step()) == {"a": 3}
    loop.run()


def test_a_grammar_without_a_waiting_request_is_dropped(queue, compiler) -> None:
    loop = make_loop(queue)
    for name in "ab":
        add(loop, queue, name, "digits")
    loop.scheduler.abort_request("a")
    assert not compiler.jobs["digits"].cancelled(), "b waits for it"
    loop.scheduler.abort_request("b")
    assert compiler.jobs["digits"].cancelled()
