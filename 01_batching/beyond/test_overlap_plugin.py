"""A scheduler that plans ahead, on chapter 1's scheduler and a script. Every scheduler
of the book, in every interleaving: `04_scheduler/beyond/test_overlapped_scheduling.py`."""

from __future__ import annotations

from fcfs_scheduler import FCFSScheduler
from overlap_plugin import OverlapPlugin
from request import Request, SamplingParams
from scheduler_interface import PENDING, SchedulerOutput, StepOutput

STOP = 9


def make(name: str) -> Request:
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[STOP])
    return Request(name, [1, 2, 3], params)


def sampled(plan: SchedulerOutput, token: int) -> StepOutput:
    return StepOutput({request_id: [token] for request_id in plan.num_scheduled_tokens})


def test_a_pending_token_is_counted_planned_on_and_sent_when_it_is_known() -> None:
    """And what was planned behind a stop token is dropped."""
    scheduler = FCFSScheduler(plugins=[plugin := OverlapPlugin()])
    scheduler.add_request(request := make("a"))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert request.num_output_placeholders == 2 and request.output_token_ids == []
    cached = plans[1].scheduled_cached_reqs
    assert (cached.new_token_ids, cached.num_output_tokens) == ([[PENDING]], [1])
    assert cached.pending_req_ids == cached.req_ids
    assert plans[1].start_positions == [3]
    for token in (11, 12):
        scheduler.check_invariants()
        (result,) = scheduler.update_from_output(plans[-2], sampled(plans[-2], token))
        assert result.new_token_ids == [token] and request.num_output_placeholders == 1
        plans.append(scheduler.schedule())
        cached = plans[-1].scheduled_cached_reqs
        assert cached.new_token_ids == [[token, PENDING]], "once more, now by its name"
        assert cached.num_output_tokens == [request.num_output_tokens + 1]
    scheduler.update_from_output(plans[2], sampled(plans[2], STOP))
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert list(scheduler.update_from_output(plans[3], sampled(plans[3], 5))) == []
    assert request.output_token_ids == [11, 12, STOP] and plugin.num_discarded_tokens == 1
