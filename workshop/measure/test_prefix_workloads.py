"""The workloads share exactly what they say, and a replay finds what it should."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from workshop.measure.plot_prefix_cache import CACHES, make_cache, num_distinct_blocks, replay
from workshop.measure.prefix_workloads import TRACE_BLOCK_SIZE, PrefixWorkload, TraceRequest


def num_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))


def test_prompts_share_their_beginning_and_not_a_token_more() -> None:
    """Few-shot prompts are a tree of two levels."""
    workload = PrefixWorkload(64, 0)
    families = [
        (workload.shared_system_prompts(3, 4, 20, 7, 5), [0, 20, 20, 20] * 3),
        (workload.few_shot(3, 2, 10, 20, 5, 1), [0, 30, 10, 30, 10, 30]),
    ]
    for sessions, expected in families:
        prompts = [request.prompt({}) for session in sessions for request in session]
        shared = [
            max((num_shared(prompt, other) for other in prompts[:i]), default=0)
            for i, prompt in enumerate(prompts)
        ]
        assert shared == expected


def random_trace(seed: int, num_requests: int = 60) -> list[TraceRequest]:
    """Walks in a random tree: an id is numbered when its path is first seen."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    trace = []
    for i in range(num_requests):
        path: tuple[int, ...] = ()
        hash_ids = []
        for _ in range(rng.randint(1, 5)):
            path = (*path, rng.randint(0, 2))
            hash_ids.append(ids.setdefault(path, len(ids)))
        length = (len(hash_ids) - 1) * TRACE_BLOCK_SIZE + rng.randint(1, TRACE_BLOCK_SIZE)
        trace.append(TraceRequest(i, length, 1, tuple(hash_ids)))
    return trace


def naive_replay(trace: Sequence[TraceRequest], capacity: int) -> tuple[int, int]:
    """Hits in tokens and blocks of a cache that is a dictionary: whole prefix -> time of last use.
    Of equal times the longest goes first. A prompt longer than the cache is cached from its front.
    """
    last_use: dict[tuple[int, ...], int] = {}
    num_tokens = num_blocks = 0
    for now, request in enumerate(trace):
        prefixes = [request.hash_ids[:n] for n in range(1, len(request.hash_ids) + 1)]
        found = 0
        while found < len(prefixes) and prefixes[found] in last_use:
            found += 1
        num_blocks += found
        num_tokens += request.num_tokens_in(found)
        kept = prefixes[:capacity]
        last_use.update(dict.fromkeys(kept, now))
        while len(last_use) > capacity:
            del last_use[min(last_use, key=lambda p: (last_use[p], -len(p)))]
    return num_tokens, num_blocks


@pytest.mark.sample
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 3, 10, 1000])
def test_a_replay_hits_what_whole_prefixes_hit(cache: str, seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    result = replay(trace, make_cache(cache, capacity, 1))
    found = result["num_tokens_hit"], result["num_blocks_hit"]
    assert found == naive_replay(trace, capacity)
    assert result["num_tokens"] == sum(request.input_length for request in trace)
    assert result["num_cached_at_end"] <= result["capacity"] == capacity
    if capacity == 1000:  # nothing is evicted
        assert result["num_cached_at_end"] == num_distinct_blocks(trace)
