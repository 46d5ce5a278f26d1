"""The size of chunks on a machine with known costs."""

from __future__ import annotations

import pytest

from adaptive_chunks import AdaptiveChunks
from bounded_loops import as_long_as
from request import Request


def true_ms(starts: list[int], lens: list[int]) -> float:
    """2 ms a step, 0.05 a token, 0.001 or 0.0002 a pair of query and key, of decodes or chunks."""
    ms = 2.0
    for start, num_tokens in zip(starts, lens, strict=True):
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        ms += 0.05 * num_tokens + (0.001 if num_tokens == 1 else 0.0002) * num_pairs
    return ms


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
        times.append(true_ms(starts, lens))
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
