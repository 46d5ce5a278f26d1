"""A scheduler that plans ahead, on chapter 1's scheduler and a script. Every scheduler
of the book, in every interleaving: `04_scheduler/beyond/test_overlapped_scheduling.py`."""

from __future__ import annotations

import pytest

from fcfs_scheduler import FCFSScheduler
from overlap_plugin import OverlapPlugin
from request import Request, SamplingParams
from scheduler_interface import PENDING, SchedulerOutput, StepOutput

STOP = 9


def make(name: str, max_tokens: int = 5) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[STOP])
    return Request(name, [1, 2, 3], params)


@pytest.fixture
def scheduler():
    return FCFSScheduler(plugins=[OverlapPlugin()])


def sampled(plan: SchedulerOutput, token: int) -> StepOutput:
    return StepOutput({request_id: [token] for request_id in plan.num_scheduled_tokens})


def test_a_pending_token_is_counted_planned_on_and_sent_when_it_is_known(scheduler) -> None:
    scheduler.add_request(request := make("a"))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert request.num_output_placeholders == 2 and request.output_token_ids == []
    cached = plans[1].scheduled_cached_reqs
    assert (cached.new_token_ids, cached.num_output_tokens) == ([[PENDING]], [1])
    assert cached.pending_req_ids == cached.req_ids
    assert plans[1].start_positions == [3]
    for token in (11, 12, 13):
        scheduler.check_invariants()
        (result,) = scheduler.update_from_output(plans[-2], sampled(plans[-2], token))
        assert result.new_token_ids == [token] and request.num_output_placeholders == 1
        plans.append(scheduler.schedule())
        cached = plans[-1].scheduled_cached_reqs
        assert cached.new_token_ids == [[token, PENDING]], "once more, now by its name"
        assert cached.num_output_tokens == [request.num_output_tokens + 1]
    assert request.output_token_ids == [11, 12, 13] and plans[4].start_positions == [6]


def test_the_check_notices_a_pending_token_without_a_plan(scheduler) -> None:
    scheduler.add_request(request := make("a"))
    scheduler.schedule()
    (plugin,) = scheduler.plugins
    plugin.check()
    request.num_output_placeholders += 1
    with pytest.raises(AssertionError):
        plugin.check()


def test_the_last_token_allowed_is_foreseen(scheduler) -> None:
    scheduler.add_request(request := make("a", max_tokens=2))
    scheduler.add_request(make("b", max_tokens=5))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert list(second.num_scheduled_tokens) == ["a", "b"]
    assert list(third.num_scheduled_tokens) == ["b"]
    for plan in (first, second):
        scheduler.update_from_output(plan, sampled(plan, 7))
    assert request.finish_reason == "length" and request.output_token_ids == [7, 7]
    assert scheduler.plugins[0].num_discarded_tokens == 0


def test_a_token_planned_after_a_stop_token_is_dropped(scheduler) -> None:
    scheduler.add_request(request := make("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, sampled(first, STOP))
    assert request.finish_reason == "stop" and not scheduler.has_unfinished_requests()
    third = scheduler.schedule()
    assert third.is_empty and third.finished_req_ids == {"a"}
    assert list(scheduler.update_from_output(second, sampled(second, 5))) == []
    assert request.output_token_ids == [STOP] and scheduler.plugins[0].num_discarded_tokens == 1
    assert scheduler.schedule().finished_req_ids == set(), "once"


def test_an_id_can_be_reused_while_its_last_step_is_in_flight(scheduler) -> None:
    scheduler.add_request(old := make("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.add_request(new := make("a"))
    scheduler.update_from_output(first, sampled(first, 5))
    third = scheduler.schedule()
    assert [data.req_id for data in third.scheduled_new_reqs] == ["a"]
    assert third.finished_req_ids == {"a"} and new.num_output_placeholders == 1
    scheduler.update_from_output(second, sampled(second, 6))
    assert new.output_token_ids == [] == old.output_token_ids
    scheduler.check_invariants()
    scheduler.update_from_output(third, sampled(third, 8))
    assert new.output_token_ids == [8]
