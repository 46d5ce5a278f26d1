"""The simulator against arithmetic by hand; and with every scheduler, simulated time is the sum of
the steps' costs, and every computed token is accounted for."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from base_scheduler import BaseScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Scheduler, make_kv_memory
from sglang_policies import POLICIES, policy_by_name
from workshop.measure.scheduling_simulator import (
    CostModel,
    SimulatedRequest,
    Simulation,
    fit_cost_model,
    simulate,
)

COST = CostModel(base_ms=10, per_token_ms=1, per_request_ms=2, per_context_ms=0.1)
NUM_BLOCKS = 16  # 15 of 4 positions: two or three requests


def request(arrival_s: float, num_prompt: int, num_outputs: int) -> SimulatedRequest:
    return SimulatedRequest(arrival_s, list(range(num_prompt)), num_outputs, 64)


def test_two_requests_by_hand() -> None:
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
    found = [(step.num_tokens, step.kv_tokens_written) for step in run.steps]
    assert found == [(4, 4), (3, 7), (1, 6)]


def test_the_measures_by_hand() -> None:
    requests = [request(0.0, 1, 3)] * 3
    run = Simulation(requests, [[0.1, 0.2, 0.3], [0.1, 0.2, 0.9], [0.9, 1.0, 1.1]])
    assert run.goodput(max_ttft_s=0.5, max_itl_s=0.2) == pytest.approx(1 / 3)
    assert run.goodput(max_ttft_s=0.5, max_itl_s=0.5) == pytest.approx(2 / 3)
    assert run.goodput(max_ttft_s=1.0, max_itl_s=0.5) == 1
    assert Simulation([request(0.0, 1, 1)], [[0.5]]).goodput(0.5, 0.0) == 1, "one token has no gap"
    run = Simulation([request(2.0, 1, 2), request(3.0, 1, 2)], [[2.5, 3.0], [3.5, 7.0]])
    assert run.throughput == pytest.approx(4 / 5), "from the first arrival"


def test_the_fit_finds_the_model_that_made_the_steps_and_weighs_relative_errors() -> None:
    """For steps of 1 and 2 ms, the base a with the least (a - 1)^2 + (a / 2 - 1)^2 is 1.2."""
    rng, steps = random.Random(0), []
    for _ in range(200):
        size = (rng.randint(1, 500), rng.randint(1, 64), rng.randint(1, 9000))
        steps.append((*size, COST.step_ms(*size)))
    model, error = fit_cost_model(steps)
    assert error < 1e-9
    assert (model.base_ms, model.per_token_ms) == pytest.approx((10, 1))
    assert (model.per_request_ms, model.per_context_ms) == pytest.approx((2, 0.1))
    model, error = fit_cost_model([(0, 0, 0, 1.0), (0, 0, 0, 2.0)])
    assert (model.base_ms, error) == pytest.approx((1.2, (0.2 + 0.4) / 2))


def limits() -> dict:
    memory = make_kv_memory(NUM_BLOCKS, block_size=4)
    return {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_memory": memory}


def two_phases(policy: str) -> BaseScheduler:
    options = limits()
    return Scheduler(policy=policy_by_name(policy, options["kv_memory"]), **options)


def prefill_first(**options: bool) -> BaseScheduler:
    """Admit more than fits, so that requests are retracted."""
    ratios = dict.fromkeys(("init_new_token_ratio", "min_new_token_ratio"), 0.0)
    return PrefillFirstScheduler(**ratios, **options, **limits())


PREEMPTIVE: dict[str, Callable[[], BaseScheduler]] = {
    **{f"two phases, {p}": lambda p=p: two_phases(p) for p in POLICIES},
    "prefill first": prefill_first,
    "prefill first, mixed": lambda: prefill_first(mixing=True),
}


def random_load(seed: int) -> list[SimulatedRequest]:
    """Thirty requests that come at once, some of which share a beginning."""
    rng, requests = random.Random(seed), []
    beginnings = [[], *([rng.randrange(2, 99) for _ in range(12)] for _ in range(2))]
    for _ in range(30):
        prompt = rng.choice(beginnings) + [rng.randrange(2, 99) for _ in range(rng.randint(1, 20))]
        requests.append(SimulatedRequest(0.0, prompt, rng.randint(1, 24), 24, rng.randrange(3)))
    return requests


@pytest.mark.parametrize("name", PREEMPTIVE)
def test_every_computed_token_is_accounted_for(name: str) -> None:
    requests, scheduler = random_load(7), PREEMPTIVE[name]()
    run = simulate(scheduler, requests, COST)
    assert sum(step.num_preempted for step in run.steps) > 0
    num_needed = sum(len(r.prompt_token_ids) + r.num_outputs - 1 for r in requests)
    num_computed = sum(step.num_tokens for step in run.steps)
    num_lost = scheduler.num_recomputed_tokens
    num_cached = num_needed + num_lost - num_computed
    assert 0 <= num_cached < num_needed
