"""The simulator's books, whoever schedules: simulated time is the sum of what steps cost, and every
token that was computed is somebody's.

By hand, and the measures themselves: `test_scheduling_simulator.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from caching_fcfs_scheduler import CachingFCFSScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler, make_kv_memory
from scheduler_interface import SchedulerInterface, SchedulerOutput
from sglang_policies import POLICIES, policy_over
from workshop.measure.scheduling_simulator import CostModel, SimulatedRequest, simulate

COST = CostModel(base_ms=10.0, per_token_ms=1.0, per_request_ms=0.5, per_context_ms=0.25)
NUM_BLOCKS = 16  # 15 of 4 positions: two or three requests


def limits() -> dict:
    memory = make_kv_memory(NUM_BLOCKS, block_size=4)
    return {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_memory": memory}


def two_phases(policy: str) -> SchedulerInterface:
    options = limits()
    return Scheduler(policy=policy_over(options["kv_memory"], policy), **options)


def prefill_first(**options: bool) -> SchedulerInterface:
    """Bold at admission, so that somebody is retracted."""
    return PrefillFirstScheduler(
        init_new_token_ratio=0.0, min_new_token_ratio=0.0, **options, **limits()
    )


PREEMPTIVE: dict[str, Callable[[], SchedulerInterface]] = {
    **{f"two phases, {p}": lambda p=p: two_phases(p) for p in POLICIES},
    "prefill first": prefill_first,
    "prefill first, mixed": lambda: prefill_first(mixing=True),
}
SCHEDULERS = PREEMPTIVE | {
    "two phases, reserved": lambda: Scheduler(reserve_all=True, **limits()),
    "chapter 1": lambda: CachingFCFSScheduler(**limits()),
}


def random_load(seed: int, mean_gap_s: float = 0.0) -> list[SimulatedRequest]:
    """Thirty requests, some of which share a beginning. Without a gap all come at once."""
    rng = random.Random(seed)
    beginnings = [[], *([rng.randrange(2, 99) for _ in range(12)] for _ in range(2))]
    requests, arrival_s = [], 0.0
    for _ in range(30):
        arrival_s += rng.expovariate(1 / mean_gap_s) if mean_gap_s else 0.0
        prompt = rng.choice(beginnings) + [rng.randrange(2, 99) for _ in range(rng.randint(1, 20))]
        requests.append(
            SimulatedRequest(arrival_s, prompt, rng.randint(1, 24), 24, rng.randrange(3))
        )
    return requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SCHEDULERS)
def test_everybody_says_what_the_workload_says_one_token_after_the_other(
    name: str, seed: int
) -> None:
    requests = random_load(seed, mean_gap_s=0.05)
    run = simulate(SCHEDULERS[name](), requests, COST)
    for request, times in zip(requests, run.token_times_s, strict=True):
        assert len(times) == request.num_outputs, f"seed {seed}"
        assert request.arrival_s < times[0], f"seed {seed}"
        assert all(a < b for a, b in pairwise(times)), f"seed {seed}"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_without_idling_time_is_the_sum_of_what_the_steps_cost(name: str) -> None:
    run = simulate(SCHEDULERS[name](), random_load(7), COST)
    end_s = 0.0
    for step in run.steps:
        if step.num_tokens:  # a step that only preempts takes no time
            num_positions = step.kv_tokens_written
            end_s += COST.step_ms(step.num_tokens, step.num_running, num_positions) / 1e3
        assert step.end_s == pytest.approx(end_s)
    token_times = {time for times in run.token_times_s for time in times}
    assert token_times <= {step.end_s for step in run.steps}
    assert max(token_times) == run.steps[-1].end_s


@pytest.mark.parametrize("name", SCHEDULERS)
def test_with_idling_the_rest_of_the_time_is_before_an_arrival(name: str) -> None:
    requests = random_load(7, mean_gap_s=1.0)  # a request takes about half a second
    run = simulate(SCHEDULERS[name](), requests, COST)
    arrivals = {request.arrival_s for request in requests}
    clock_s, num_pauses = 0.0, 0
    for step in run.steps:
        cost_s = COST.step_ms(step.num_tokens, step.num_running, step.kv_tokens_written) / 1e3
        start_s = step.end_s - cost_s
        if start_s > clock_s + 1e-9:
            num_pauses += 1
            assert min(abs(start_s - arrival_s) for arrival_s in arrivals) < 1e-9
        clock_s = step.end_s
    assert num_pauses > 3


@pytest.mark.parametrize("name", PREEMPTIVE)
def test_every_computed_token_is_accounted_for(name: str) -> None:
    requests = random_load(7)
    scheduler = PREEMPTIVE[name]()
    run = simulate(scheduler, requests, COST)
    stats = scheduler.get_stats()
    assert stats.total_preempted == sum(step.num_preempted for step in run.steps) > 0
    wanted = sum(len(r.prompt_token_ids) + r.num_outputs - 1 for r in requests)
    num_computed = sum(step.num_tokens for step in run.steps)
    assert num_computed == wanted - stats.total_cached_tokens + stats.total_recomputed_tokens


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_written_fits_what_is_held(name: str) -> None:
    """Prompts that share nothing: with shared blocks, more positions are read than there are."""
    requests = [
        SimulatedRequest(0.0, list(range(100 * i, 100 * i + 5 + i)), 6, 24) for i in range(1, 13)
    ]
    for step in simulate(SCHEDULERS[name](), requests, COST).steps:
        assert step.kv_tokens_written <= 4 * step.kv_blocks_in_use <= 4 * (NUM_BLOCKS - 1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_twice(name: str) -> None:
    first, second = (simulate(SCHEDULERS[name](), random_load(3, 0.05), COST) for _ in range(2))
    assert first.token_times_s == second.token_times_s and first.steps == second.steps


def test_prefill_first_lets_who_decodes_stand_still() -> None:
    """By hand, 10 ms a step and 1 ms a token: the newcomer's 2 tokens from 14 to 26 ms, and the
    second token of who was there only at 37."""
    cost = CostModel(10.0, 1.0, 0.0, 0.0)
    requests = [SimulatedRequest(0.0, [2, 3, 4, 5], 3, 8), SimulatedRequest(0.005, [6, 7], 1, 8)]
    run = simulate(PrefillFirstScheduler(), requests, cost)
    assert run.token_times_s[0] == pytest.approx([0.014, 0.037, 0.048])
    assert run.token_times_s[1] == pytest.approx([0.026])


def test_a_prompt_that_is_cut_says_its_first_token_after_the_last_piece() -> None:
    """16, 16 and 8 tokens, and then one: 26, 26, 18 and 11 ms."""
    cost = CostModel(10.0, 1.0, 0.0, 0.0)
    scheduler = PrefillFirstScheduler(chunked_prefill_size=16)
    run = simulate(scheduler, [SimulatedRequest(0.0, list(range(2, 42)), 2, 8)], cost)
    assert [step.num_tokens for step in run.steps] == [16, 16, 8, 1]
    assert run.token_times_s[0] == pytest.approx([0.070, 0.081])


class Hesitant(Scheduler):
    """Plans nothing the second time, as a step does that only preempts. Remembers who came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[Request] = []
        self.num_plans = 0

    def add_request(self, request: Request) -> None:
        self.came.append(request)
        super().add_request(request)

    def schedule(self) -> SchedulerOutput:
        self.num_plans += 1
        return self.finish_step(self.begin_step()) if self.num_plans == 2 else super().schedule()


def test_a_step_without_tokens_takes_no_time() -> None:
    run = simulate(Hesitant(), [SimulatedRequest(0.0, [2, 3, 4, 5], 2, 8)], COST)
    first_s = COST.step_ms(4, 1, 4) / 1e3
    second_s = first_s + COST.step_ms(1, 1, 5) / 1e3
    assert [step.end_s for step in run.steps] == pytest.approx([first_s, first_s, second_s])


def test_the_scheduler_is_told_everything_but_the_end() -> None:
    hesitant = Hesitant()
    requests = [SimulatedRequest(0.25, [2, 3], 3, 8, priority=2)]
    requests.append(SimulatedRequest(0.5, [4], 1, 9, priority=1))
    simulate(hesitant, requests, COST)
    told = [(r.arrival_time, r.prompt_token_ids, r.max_tokens, r.priority) for r in hesitant.came]
    assert told == [(0.25, [2, 3], 8, 2), (0.5, [4], 9, 1)]
