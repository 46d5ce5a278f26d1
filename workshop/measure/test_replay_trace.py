"""A replay finds what a cache that stores whole prefixes would find."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from workshop.measure.prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest
from workshop.measure.replay_trace import CACHES, main, make_cache, num_distinct_blocks, replay

# Five prompts of 512-token blocks, the last block of each partly filled.
#              blocks   tokens   found without bounds
BY_HAND = [
    ((1, 2, 3), 1100),  #  0
    ((1, 2, 4), 1300),  #  1, 2: 1024 tokens
    ((5,), 512),  #        0
    ((1, 2, 3), 1100),  #  1, 2, 3: all 1100, not 1536
    ((5, 6), 600),  #      5: 512
]


def make_trace(prompts: Sequence[tuple[tuple[int, ...], int]]) -> list[TraceRequest]:
    return [TraceRequest(i, length, 1, ids) for i, (ids, length) in enumerate(prompts)]


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

    Of equal times the longest goes first, which is its path's leaf. A prompt longer than the cache
    is cached from its front.
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


@pytest.mark.parametrize("cache", CACHES)
def test_a_trace_by_hand_hits_tokens_not_whole_blocks(cache: str) -> None:
    result = replay(make_trace(BY_HAND), make_cache(cache, 100))
    assert (result.num_requests, result.num_tokens) == (5, 1100 + 1300 + 512 + 1100 + 600)
    assert result.num_tokens_hit == 1024 + 1100 + 512
    assert (result.num_blocks, result.num_blocks_hit) == (12, 2 + 3 + 1)
    assert result.hit_rate == 2636 / 4612
    assert result.num_cached_at_end == num_distinct_blocks(make_trace(BY_HAND)) == 6


@pytest.mark.sample
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 3, 10, 40, 1000])
def test_a_replay_hits_what_whole_prefixes_hit(cache: str, seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    store = make_cache(cache, capacity)
    result = replay(trace, store)
    assert (result.num_tokens_hit, result.num_blocks_hit) == naive_replay(trace, capacity), seed
    assert result.num_cached_at_end <= result.capacity == capacity
    store.check_invariants()
    assert store.num_evictable_blocks == store.num_cached_blocks


@pytest.mark.parametrize("cache", CACHES)
def test_at_the_number_of_different_blocks_nothing_is_evicted(cache: str) -> None:
    trace = random_trace(9)
    limit = num_distinct_blocks(trace)
    bounded = replay(trace, make_cache(cache, limit))
    assert bounded.num_cached_at_end == limit
    assert bounded.num_tokens_hit == replay(trace, make_cache(cache, 10 * limit)).num_tokens_hit
    assert bounded.num_tokens_hit > replay(trace, make_cache(cache, limit // 8)).num_tokens_hit


@pytest.mark.parametrize(
    ("cache", "capacity", "message"), [("lru", 5, "cache must"), ("hash", 0, "capacity must")]
)
def test_unknown_caches_and_empty_ones_are_refused(cache: str, capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache(cache, capacity)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(ids)}
        for ids, n in BY_HAND
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize("cache", CACHES)
def test_the_command_prints_each_capacity_and_the_limit(cache, trace_file: Path, capsys) -> None:
    main(["--trace", str(trace_file), "--capacity", "3", "1", "99", "--cache", cache])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 requests, 6 different blocks of 512 tokens"
    assert [line.split()[3] for line in lines[1:]] == ["1", "3", "6"]
    assert lines[3].endswith("57.2%  nothing evicted")


def test_the_command_says_what_is_wrong(trace_file: Path, capsys) -> None:
    for arguments, message in (
        (["--trace", str(trace_file.with_name("nowhere"))], "No such file"),
        (["--trace", str(trace_file), "--capacity", "0"], "capacity must"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
