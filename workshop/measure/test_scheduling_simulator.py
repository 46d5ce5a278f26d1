"""The clock and the measures, against arithmetic by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Scheduler
from workshop.measure.scheduling_simulator import (
    CostModel,
    SimulatedRequest,
    Simulation,
    fit_cost_model,
    jain_index,
    simulate,
)

COST = CostModel(base_ms=10, per_token_ms=1, per_request_ms=2, per_context_ms=0.1)


def request(arrival_s: float, num_prompt: int, num_outputs: int) -> SimulatedRequest:
    return SimulatedRequest(arrival_s, list(range(num_prompt)), num_outputs, 64)


def test_a_step_costs_what_the_formula_says():
    assert COST.step_ms(num_tokens=5, num_requests=2, num_context=30) == 10 + 5 + 4 + 3


def test_two_requests_by_hand():
    """a computes 4 tokens from 0 s. b comes in the middle of that step and is in the next."""
    run = simulate(Scheduler(), [request(0.0, 4, 3), request(0.005, 2, 1)], COST)
    first = (10 + 4 + 2 + 0.4) / 1e3
    second = first + (10 + 1 + 2 + 4 + 0.1 * (5 + 2)) / 1e3  # a decodes, b computes 2 tokens
    third = second + (10 + 1 + 2 + 0.6) / 1e3
    assert run.token_times_s[0] == pytest.approx([first, second, third])
    assert run.token_times_s[1] == pytest.approx([second])
    assert run.ttft_s == pytest.approx([first, second - 0.005])
    assert run.itl_s == pytest.approx([second - first, third - second])
    assert run.throughput == pytest.approx(4 / third)
    assert [step.num_tokens for step in run.steps] == [4, 3, 1]
    assert [step.num_outputs for step in run.steps] == [1, 2, 1]
    assert [step.num_waiting for step in run.steps] == [0, 0, 0]
    assert [step.kv_tokens_written for step in run.steps] == [4, 7, 6]


def test_an_idle_engine_waits_for_the_next_arrival():
    run = simulate(Scheduler(), [request(0.0, 1, 1), request(5.0, 1, 1)], COST)
    assert run.token_times_s[1][0] == pytest.approx(5 + (10 + 1 + 2 + 0.1) / 1e3)


def test_goodput_counts_who_was_served_in_time():
    requests = [request(0.0, 1, 3)] * 3
    run = Simulation(requests, [[0.1, 0.2, 0.3], [0.1, 0.2, 0.9], [0.9, 1.0, 1.1]])
    assert run.goodput(max_ttft_s=0.5, max_itl_s=0.2) == pytest.approx(1 / 3)
    assert run.goodput(max_ttft_s=0.5, max_itl_s=0.5) == pytest.approx(2 / 3)
    assert run.goodput(max_ttft_s=1.0, max_itl_s=0.5) == 1


def test_jains_index():
    assert jain_index([3, 3, 3, 3]) == 1
    assert jain_index([5, 0, 0, 0]) == 1 / 4
    assert jain_index([1, 2, 3]) == pytest.approx(36 / (3 * 14))
    run = Simulation([request(0.0, 1, 2), request(1.0, 1, 2)], [[0.5, 1.0], [1.5, 5.0]])
    assert run.fairness == pytest.approx(jain_index([2.0, 0.5]))


def test_the_fit_finds_the_model_that_made_the_steps():
    rng = random.Random(0)
    steps = []
    for _ in range(200):
        size = (rng.randint(1, 500), rng.randint(1, 64), rng.randint(1, 9000))
        steps.append((*size, COST.step_ms(*size)))
    model, error = fit_cost_model(steps)
    assert error < 1e-9
    assert (model.base_ms, model.per_token_ms) == pytest.approx((10, 1))
    assert (model.per_request_ms, model.per_context_ms) == pytest.approx((2, 0.1))


def test_a_scheduler_that_stands_still_is_an_error():
    scheduler = Scheduler()
    scheduler._admit = lambda plan: None
    with pytest.raises(RuntimeError, match="no progress"):
        simulate(scheduler, [request(0.0, 4, 3)], COST)


# -- workloads


def test_an_empty_first_plan_is_no_standstill():
    scheduler = Scheduler()
    admit, plans = scheduler._admit, []
    scheduler._admit = lambda plan: plans.append(plan) or (admit(plan) if len(plans) > 3 else None)
    run = simulate(scheduler, [request(0.0, 4, 3)], COST)
    assert [step.num_tokens for step in run.steps] == [0, 0, 0, 4, 1, 1]


# -- measures, and the fit


def test_throughput_begins_with_the_first_arrival() -> None:
    requests = [request(arrival_s, 1, 2) for arrival_s in (2.0, 3.0)]
    assert Simulation(requests, [[3.0, 4.0], [3.5, 8.0]]).throughput == pytest.approx(4 / 6)


def test_goodput_averages_over_the_gaps_of_which_there_is_one_less_than_tokens() -> None:
    run = Simulation([request(0.0, 1, 3)], [[0.5, 1.0, 1.5]])
    assert run.goodput(0.5, 0.5) == 1 and run.goodput(0.5, 0.4) == 0
    alone = Simulation([request(0.0, 1, 1)], [[0.5]])
    assert alone.goodput(0.5, 0.0) == 1, "one token has no gap"


def test_the_fit_weighs_relative_errors() -> None:
    """For steps of 1 and 2 ms, the base a with the least (a - 1)^2 + (a / 2 - 1)^2 is 1.2, and not
    their mean."""
    model, error = fit_cost_model([(0, 0, 0, 1.0), (0, 0, 0, 2.0)])
    assert model.base_ms == pytest.approx(1.2)
    assert error == pytest.approx((0.2 + 0.4) / 2)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9))
def test_no_number_of_a_fit_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    steps = [
        (rng.randint(1, 99), rng.randint(1, 9), rng.randint(1, 999), rng.uniform(0.1, 50.0))
        for _ in range(rng.randint(4, 12))
    ]
    model, error = fit_cost_model(steps)
    numbers = (model.base_ms, model.per_token_ms, model.per_request_ms, model.per_context_ms)
    assert min(numbers) >= 0 and max(numbers) > 0 and error >= 0


@given(st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_jains_index_is_between_one_nth_and_one_and_has_no_unit(
    values: list[float], scale: float
) -> None:
    index = jain_index(values)
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([scale * value for value in values]) == pytest.approx(index)
