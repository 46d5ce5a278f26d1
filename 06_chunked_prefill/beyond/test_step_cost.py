"""Counts against counting one by one, FLOPs against a model's real matrices, and the size of chunks
on a machine with known costs."""

from __future__ import annotations

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


# -- the policy

TRUE_COSTS = (2.0, 0.05, 0.001, 0.0002)


def true_ms(work: StepWork) -> float:
    c0, c1, c2, c3 = TRUE_COSTS
    return c0 + c1 * work.num_tokens + c2 * work.num_decode_pairs + c3 * work.num_chunk_pairs


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
def test_steps_come_up_to_the_target_and_hardly_over_it(target_ms, num_decodes):
    policy = AdaptiveChunks(target_ms, min_chunk=4)
    prefill_alone(policy, 2000, num_decodes)
    times = sorted(prefill_alone(policy, 2000, num_decodes)[5:])
    assert times[-1] <= 1.3 * target_ms
    assert 0.9 * target_ms < times[len(times) // 2] < 1.1 * target_ms


def test_a_pause_of_the_machine_costs_a_few_smaller_chunks():
    policy = AdaptiveChunks(20.0)
    prefill_alone(policy, 2000)
    before = policy.max_tokens
    policy.observe_step([0], [1], 2000.0)
    policy.observe_step([0], [0], 5.0)  # a step of nothing shows nothing
    assert policy.max_tokens == before // 2
    prefill_alone(policy, 500)
    assert policy.max_tokens > before // 2


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
    prefill_alone(policy, 2000, 8)
    sizes = []
    for num_tokens in (1, 3):
        policy.begin_step(make_decodes(8), lambda request, n=num_tokens: n)
        sizes.append(policy.num_tokens_to_schedule(prompt_of(2000), 2000, 4096, 4096))
    assert sizes == [policy.max_tokens - 8, policy.max_tokens - 24]
