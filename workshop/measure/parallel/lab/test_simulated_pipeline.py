"""What a pipeline is busy with, counted: nothing here is measured."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median

import pytest

from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Scheduler
from workshop.measure.parallel.lab.simulated_pipeline import (
    Arrival,
    Costs,
    all_at_once,
    simulate,
    trickling,
)

NO_HOST = Costs(step_ms=8.0, token_ms=0.0, host_ms=0.0)
CROWD = all_at_once(8, 8, 101)  # one step of prompts, then 100 tokens each


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_pipeline_is_full_if_decodes_are_split_and_empty_if_not(num_stages, kind) -> None:
    """Step by step: without a split one of P stages computes; with it all do, but for the prompts'
    step and the draining at the end."""
    alone = simulate(CROWD, num_stages, num_micro_batches=1, costs=NO_HOST, kind=kind)
    assert alone.num_steps == 101
    assert alone.busy == pytest.approx([1 / num_stages] * num_stages)
    split = simulate(CROWD, num_stages, costs=NO_HOST, kind=kind)
    assert split.num_steps == 1 + 100 * num_stages
    num_idle = 2 * (num_stages - 1)  # steps of a stage, of each
    full = split.num_steps / (split.num_steps + num_idle)
    assert split.busy == pytest.approx([full] * num_stages)


def test_a_token_is_no_sooner_there_and_more_requests_bring_more_tokens() -> None:
    one = simulate(CROWD, 1, costs=NO_HOST)
    four = simulate(CROWD, 4, costs=NO_HOST)
    many = simulate(all_at_once(32, 8, 101), 4, costs=NO_HOST)
    for found in (one, four, many):
        assert median(found.itl_ms) == pytest.approx(8.0) == min(found.itl_ms)
    assert four.outputs_per_s == pytest.approx(one.outputs_per_s, rel=0.02)
    assert many.outputs_per_s == pytest.approx(4 * one.outputs_per_s, rel=0.05)


def test_where_tokens_are_the_cost_smaller_plans_are_shorter() -> None:
    costs = Costs(step_ms=0.0, token_ms=1.0, host_ms=0.0)
    one, four = (simulate(CROWD, num, costs=costs) for num in (1, 4))
    assert mean(one.itl_ms) == pytest.approx(8.0) and mean(four.itl_ms) < 2.1


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Sixteen chunks through four stages: 16 + 3 steps of a stage, not 16 times 4."""
    prompt = [Arrival(0.0, 16 * 512, 1)]
    followed = simulate(prompt, 4, costs=NO_HOST)
    one_by_one = simulate(prompt, 4, num_in_flight=1, costs=NO_HOST)
    assert followed.duration_ms == pytest.approx((16 + 3) * 2.0)
    assert one_by_one.duration_ms == pytest.approx(16 * 4 * 2.0)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_trickling_arrivals_keep_the_stages_busy(num_stages) -> None:
    """Trap 51. And one more plan under way makes stages busier and everybody slower."""
    arrivals = trickling(100, gap_ms=25.0)
    alone = simulate(arrivals, num_stages, num_micro_batches=1)
    split = simulate(arrivals, num_stages)
    ahead = simulate(arrivals, num_stages, num_in_flight=num_stages + 1)
    assert mean(split.busy) > 0.85 and mean(split.busy) > mean(alone.busy)
    assert mean(ahead.busy) > mean(split.busy)
    assert mean(ahead.itl_ms) > 1.1 * mean(split.itl_ms)
    assert ahead.outputs_per_s < split.outputs_per_s <= 1.01 * alone.outputs_per_s


def test_a_stage_computes_one_step_at_a_time_in_order() -> None:
    found = simulate(trickling(30, gap_ms=5.0), 3)
    for stage in range(3):
        own = [i for i in found.intervals if i.stage == stage]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(own))
        assert [i.step for i in own] == sorted(i.step for i in own)
