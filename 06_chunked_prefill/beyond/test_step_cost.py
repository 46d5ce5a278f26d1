"""Counts against counting one by one, FLOPs against a model's real matrices, and the fit against
costs that are known."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from adaptive_chunks import AdaptiveChunks
from bounded_loops import as_long_as
from request import Request
from step_cost import (
    ModelShape,
    StepCost,
    StepWork,
    count_bytes_and_flops,
    count_work,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=5)


@pytest.mark.net
@given(SPANS)
def test_pairs_are_counted_as_one_by_one(spans):
    work = count_work([s for s, _ in spans], [n for _, n in spans])
    pairs = {True: 0, False: 0}
    for start, num_tokens in spans:
        for position in range(start, start + num_tokens):
            pairs[num_tokens == 1] += len(range(position + 1))
    assert work.num_tokens == sum(n for _, n in spans)
    assert (work.num_decode_pairs, work.num_chunk_pairs) == (pairs[True], pairs[False])
    assert work.num_keys_read == sum(s + n for s, n in spans)


def test_flops_are_those_that_torch_counts():
    """A layer of projections and attention over a chunk with history, dense."""
    num_heads = 4
    num_kv_heads = 2
    head_dim = 8
    start = 5
    n = 3
    weights = [torch.randn(32, 24), *(torch.randn(24, width) for width in (32, 16, 16))]
    with FlopCounterMode(display=False) as counter:
        for weight in weights:
            torch.randn(n, len(weight)) @ weight
        for position in range(start, start + n):  # what a kernel has to do
            for _ in range(num_heads):
                q = torch.randn(1, head_dim)
                k = torch.randn(head_dim, position + 1)
                (q @ k) @ torch.randn(position + 1, head_dim)
    num_weights = sum(weight.numel() for weight in weights)
    shape = ModelShape(num_weights, 1, num_heads, num_kv_heads, head_dim, bytes_per_value=4)
    counted = count_bytes_and_flops(count_work([start], [n]), shape)
    assert counted.flops == counter.get_total_flops()
    kv = 2 * num_kv_heads * head_dim * 4
    assert counted.bytes_moved == 4 * num_weights + kv * (start + n) + kv * n
    assert counted.flops_per_byte == counted.flops / counted.bytes_moved


# -- the fit

TRUE_COSTS = (2.0, 0.05, 0.001, 0.0002)


def true_ms(work: StepWork) -> float:
    c0, c1, c2, c3 = TRUE_COSTS
    return c0 + c1 * work.num_tokens + c2 * work.num_decode_pairs + c3 * work.num_chunk_pairs


def random_work(rng: random.Random) -> StepWork:
    starts = [rng.randrange(900) for _ in range(rng.randint(0, 20))]
    lens = [1] * len(starts)
    if rng.random() < 0.5 or not starts:
        starts.append(rng.randrange(1500))
        lens.append(rng.randint(2, 300))
    return count_work(starts, lens)


def learn(noise: float = 0.0, pauses: float = 0.0, num_steps: int = 200, seed: int = 0) -> StepCost:
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(num_steps):
        work = random_work(rng)
        step_ms = true_ms(work) * (1 + noise * rng.uniform(-1, 1))
        cost.observe(work, step_ms * (20 if rng.random() < pauses else 1))
    return cost


def error(cost: StepCost) -> float:
    rng = random.Random(99)
    works = [random_work(rng) for _ in range(50)]
    return max(abs(cost.predict_ms(work) / true_ms(work) - 1) for work in works)


@pytest.mark.net
@pytest.mark.parametrize(
    ("noise", "pauses", "limit"), [(0, 0, 0.01), (0.2, 0, 0.15), (0.05, 0.03, 0.25)], ids=str
)
def test_known_costs_are_found(noise, pauses, limit):
    """Although steps take a fifth more or less, or the machine pauses for the time of 20 steps."""
    assert error(learn(noise, pauses)) < limit


def test_steps_of_one_kind_or_without_sense_never_make_a_cost_negative():
    cost = StepCost()
    large = count_work([0], [500])
    assert cost.predict_ms(large) == 0 and cost.largest_chunk(5.0, StepWork(), 0) > 10**6
    for _ in range(50):
        cost.observe(count_work([100] * 4, [1] * 4), 7.0)
        cost.observe(StepWork(), 5.0)
        cost.observe(large, 0.0)
    assert cost.num_observations == 50 and cost.predict_ms(large) >= 0
    cost.observe(large, 80.0)  # its pairs were never seen, and it counts
    assert cost.predict_ms(large) > 7


LEARNT = learn()


@pytest.mark.net
@given(
    target_ms=st.floats(0.5, 300),
    start=st.integers(0, 3000),
    num_decodes=st.integers(0, 30),
)
def test_the_largest_chunk_is_the_largest(target_ms, start, num_decodes):
    cost = LEARNT
    beside = count_work([300] * num_decodes, [1] * num_decodes)
    n = cost.largest_chunk(target_ms, beside, start)
    for size, is_over in ((n, False), (n + 1, True)) if n else ((1, True),):
        pairs = size * start + size * (size + 1) // 2  # of chunks, also if it is one token
        work = beside + StepWork(size, 0, pairs, start + size)
        assert (cost.predict_ms(work) > target_ms * (1 + 1e-9)) == is_over


# -- the policy


def num_known_after(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def prompt_of(num_tokens: int) -> Request:
    return Request.from_tokens("prompt", [1] * num_tokens, max_new_tokens=9)


def make_decodes(num_decodes: int) -> list[Request]:
    """They compute position 299."""
    decodes = [prompt_of(300) for _ in range(num_decodes)]
    for request in decodes:
        request.num_computed_tokens = 299
    return decodes


def prefill_alone(policy: AdaptiveChunks, num_prompt: int, num_decodes: int = 0) -> list[float]:
    """Milliseconds of each step of a prompt on a machine with the costs above."""
    decodes, request = make_decodes(num_decodes), prompt_of(num_prompt)
    start = 0
    times = []
    for _ in as_long_as(lambda: start < num_prompt):
        policy.begin_step(decodes, num_known_after)
        n = policy.num_tokens_to_schedule(request, num_prompt - start, 4096 - num_decodes, 4096)
        starts, lens = [299] * num_decodes + [start], [1] * num_decodes + [n]
        times.append(true_ms(count_work(starts, lens)))
        policy.observe_step(starts, lens, times[-1])
        start += n
    return times


@pytest.mark.net
@pytest.mark.parametrize("num_decodes", [0, 8])
@pytest.mark.parametrize("target_ms", [8.0, 20.0, 60.0])
def test_steps_come_up_to_the_target_and_not_over_it(target_ms, num_decodes):
    policy = AdaptiveChunks(target_ms, min_chunk=4)
    prefill_alone(policy, 2000, num_decodes)
    times = prefill_alone(policy, 2000, num_decodes)
    assert max(times) <= 1.02 * target_ms
    assert sorted(times)[len(times) // 2] > 0.9 * target_ms


@pytest.mark.parametrize(
    ("limits", "expected"), [((), [16, 32, 64, 128, 256, 512]), ((7, 1), [7] * 6)], ids=str
)
def test_the_first_chunks_grow_by_doubling(limits, expected):
    policy = AdaptiveChunks(1000.0, *limits)
    request = prompt_of(5000)
    sizes = []
    start = 0
    for _ in range(6):
        policy.begin_step([], num_known_after)
        sizes.append(policy.num_tokens_to_schedule(request, 5000 - start, 4096, 4096))
        policy.observe_step([start], [sizes[-1]], 1.0)
        start += sizes[-1]
    assert sizes == expected


def test_prefill_never_stops_and_only_one_prompt_gets_more_than_fits():
    policy = AdaptiveChunks(0.001, min_chunk=5)
    times = prefill_alone(policy, 100, num_decodes=1)
    assert len(times) == 20
    decode = prompt_of(1)
    first = prompt_of(50)
    second = prompt_of(50)
    policy.begin_step([decode], num_known_after)
    assert policy.num_tokens_to_schedule(first, 50, 100, 100) == 5
    assert policy.num_tokens_to_schedule(second, 50, 100, 100) == 0
    policy.begin_step([decode], num_known_after)
    assert policy.num_tokens_to_schedule(second, 50, 3, 100) == 3
    policy.begin_step([], num_known_after)  # a target that no step meets, and nothing decodes
    assert policy.num_tokens_to_schedule(first, 50, 100, 100) == 50
    assert policy.num_tokens_to_schedule(second, 50, 50, 100) == 50


def test_a_decode_counts_with_its_drafts_and_leaves_less_for_a_chunk():
    """The scheduler says how many tokens a decode brings; the counters alone would say one."""
    policy = AdaptiveChunks(20.0)
    prefill_alone(policy, 2000)
    prefill_alone(policy, 2000, 8)
    decodes = make_decodes(8)
    sizes = []
    for num_tokens in (1, 9):
        policy.begin_step(decodes, lambda request, n=num_tokens: n)
        sizes.append(policy.num_tokens_to_schedule(prompt_of(2000), 2000, 4096, 4096))
        starts = [299] * 8 + [0]
        lens = [num_tokens] * 8 + [sizes[-1]]
        assert true_ms(count_work(starts, lens)) == pytest.approx(20, rel=0.05)
    assert sizes[1] < sizes[0] - 8 * 8 // 2
