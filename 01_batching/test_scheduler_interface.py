"""The plan of one step and its answer: sums, emptiness, and that no two of them share a list."""

from __future__ import annotations

import dataclasses

from request import SamplingParams
from scheduler_interface import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
    StepTimer,
)


def test_a_plan_without_tokens_is_empty_even_if_it_carries_news():
    assert SchedulerOutput().is_empty
    assert SchedulerOutput(finished_req_ids={"a"}).is_empty
    assert not SchedulerOutput(num_scheduled_tokens={"a": 1}).is_empty


def test_the_total_is_the_sum_over_requests_under_both_names():
    output = SchedulerOutput(num_scheduled_tokens={"a": 5, "b": 1, "c": 3})
    assert output.total_num_scheduled_tokens == output.total_tokens == 9
    assert SchedulerOutput().total_num_scheduled_tokens == 0


def test_no_two_plans_share_a_container():
    """Trap 50: a mutable default is state of the whole process."""
    for make in (
        SchedulerOutput,
        StepOutput,
        CachedRequestData.make_empty,
        lambda: NewRequestData("a", [1], SamplingParams()),
    ):
        one, other = make(), make()
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if isinstance(value, (list, dict, set)) and field.name != "prompt_token_ids":
                assert value is not getattr(other, field.name), field.name
                assert not value, field.name


def test_cached_data_counts_its_requests():
    assert CachedRequestData.make_empty().num_reqs == 0
    data = CachedRequestData(["a", "b"], [[1], [2]], [3, 4], [1, 1], [(), ()])
    assert data.num_reqs == 2


def test_a_lap_is_the_time_since_the_last_one(monkeypatch):
    now = iter([10.0, 10.5, 10.75])
    monkeypatch.setattr("scheduler_interface.time.monotonic", lambda: next(now))
    clock = StepTimer()
    clock.lap("a_ms")
    clock.lap("b_ms")
    assert (clock.start_time, clock.ms) == (10.0, {"a_ms": 500.0, "b_ms": 250.0})
