"""Requests that wait for a grammar, requests that overtake them, and grammars without a waiting
request."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from grammar_queue import GrammarsCompiled
from preemptive_scheduler import MAX_SKIPPED
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_steps import SchedulerLoop, make_memory, make_scheduler, preempting, scheduled_tokens


class Loop(SchedulerLoop):
    """`jobs` has those of the compiler by source; a test brings them to their end."""

    def __init__(self, kind: type = Scheduler, **options) -> None:
        self.jobs: dict[str, Future[str]] = {}
        self.queue = GrammarsCompiled(lambda text: self.jobs.setdefault(text, Future[str]()))
        memory = make_memory(None, 100, 4)
        super().__init__(make_scheduler(kind, kv_memory=memory, plugins=[self.queue], **options))

    def arrive(self, name: str, source: str | None = None, num_prompt: int = 3) -> Request:
        request = self.add(name, num_prompt, 4)
        if source is not None:
            request.features["grammar"] = source
        self.queue.arrived(request)
        return request


def test_a_request_that_waits_for_its_grammar_blocks_no_other() -> None:
    loop = Loop()
    waits, same = loop.arrive("a", "digits"), loop.arrive("b", "digits")
    loop.arrive("c")
    assert list(scheduled_tokens(loop.step())) == ["c"]
    assert waits.status == RequestStatus.WAITING_FOR_GRAMMAR == same.status
    loop.queue.begin_step()
    loop.jobs["digits"].set_result("DIGITS")
    assert not loop.queue.can_start(waits), "in one step, one answer"
    loop.queue.begin_step()
    assert waits.status == RequestStatus.WAITING, "whatever else may hold it back now"
    new = loop.step().scheduled_new_reqs
    assert {each.req_id: each.features for each in new} == {
        "a": {"grammar": "DIGITS"},
        "b": {"grammar": "DIGITS"},
    }
    assert waits.features == {"grammar": "digits"}
    with preempting(loop.scheduler):
        loop.step()
    for each in loop.step().scheduled_new_reqs:
        assert each.features == {"grammar": "DIGITS"}, "it is sent again after a preemption"
    loop.run()
    assert not loop.queue._jobs and not loop.queue._waits


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler])
def test_slow_grammars_stop_admission_neither_by_age_nor_by_number(kind) -> None:
    loop = Loop(kind, max_overtakes=2)
    for i in range(2 * MAX_SKIPPED + 1):
        loop.arrive(f"slow {i}", "digits", 9)
    for name in "bcde":
        loop.arrive(name)
        assert name in scheduled_tokens(loop.step())
    loop.jobs["digits"].set_result("DIGITS")
    loop.step()
    assert loop.requests["slow 0"].status == RequestStatus.RUNNING


def test_a_request_that_can_never_start_is_reported_with_its_reason() -> None:
    loop = Loop()
    loop.arrive("a", "wrong")
    loop.arrive("b", "right")
    assert loop.queue.failed() == {} and loop.queue.wait(0)
    loop.jobs["wrong"].set_exception(ValueError("a sentence"))
    loop.jobs["right"].set_result("RIGHT")
    assert loop.queue.failed() == {"a": "grammar: a sentence"}
    assert list(scheduled_tokens(loop.step())) == ["b"]
    loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ERROR)
    assert loop.queue.failed() == {} and not loop.queue.wait(0)
    loop.run()


def test_a_request_interrupted_on_arrival_still_waits() -> None:
    loop = Loop()
    loop.add("a", 3, 4).features["grammar"] = "digits"
    assert scheduled_tokens(loop.step()) == {}
    loop.jobs["digits"].set_result("DIGITS")
    assert scheduled_tokens(loop.step()) == {"a": 3}


def test_a_grammar_without_a_waiting_request_is_dropped() -> None:
    loop = Loop()
    loop.arrive("a", "digits")
    loop.arrive("b", "digits")
    loop.scheduler.abort_request("a")
    assert not loop.jobs["digits"].cancelled(), "b waits for it"
    loop.scheduler.abort_request("b")
    assert loop.jobs["digits"].cancelled()
