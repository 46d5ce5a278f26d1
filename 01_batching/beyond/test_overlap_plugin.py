"""A scheduler that plans ahead, on chapter 1's scheduler and a script. Every scheduler
of the book, in every interleaving: `04_scheduler/beyond/test_overlapped_scheduling.py`."""

from __future__ import annotations

from fcfs_scheduler import FCFSScheduler
from overlap_plugin import OverlapPlugin
from request import Request, SamplingParams
from scheduler_interface import PENDING, StepOutput

STOP = 9


def test_a_pending_token_is_counted_planned_on_and_sent_when_it_is_known() -> None:
    """And what was planned behind a stop token is dropped."""
    scheduler = FCFSScheduler(plugins=[plugin := OverlapPlugin()])
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[STOP])
    scheduler.add_request(request := Request("a", [1, 2, 3], params))
    plans = [scheduler.schedule(), scheduler.schedule()]
    cached = plans[1].scheduled_cached_reqs
    assert (cached.new_token_ids, cached.num_output_tokens) == ([[PENDING]], [1])
    assert cached.pending_req_ids == ["a"] and plans[1].start_positions == [3]
    for token in (11, 12):
        scheduler.check_invariants()
        scheduler.update_from_output(plans[-2], StepOutput({"a": [token]}))
        assert request.output_token_ids[-1] == token and request.num_output_placeholders == 1
        plans.append(scheduler.schedule())
        cached = plans[-1].scheduled_cached_reqs
        assert cached.new_token_ids == [[token, PENDING]], "once more, now by its name"
        assert cached.num_output_tokens == [request.num_output_tokens + 1]
    scheduler.update_from_output(plans[2], StepOutput({"a": [STOP]}))
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert list(scheduler.update_from_output(plans[3], StepOutput({"a": [5]}))) == []
    assert request.output_token_ids == [11, 12, STOP] and plugin.num_discarded_tokens == 1
