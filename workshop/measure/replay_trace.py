"""A published trace through a real cache: the hit rate that a capacity buys.

    python -m workshop.replay_trace --trace FILE [--capacity 1000 ...]

A trace has no tokens, but an id for each block of 512 of them. So a cache with blocks of one
"token" is given the ids as tokens: one id, one block. Requests come in the order of the trace, one
after the other; the outputs are not in the trace and are not cached.

A hit counts as many tokens as the request has in the found blocks: the last block of a prompt is
rarely full. A cache without bounds is the limit: it misses only blocks that are new to it.

Invariants: at any capacity at most as many hits as without bounds; both caches evict exactly the
same blocks, and therefore have the same hits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from block_pool import BlockPool
from kv_slots import PREFIX_CACHES
from prefix_cache import PrefixCache
from workshop.measure.prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest, read_trace

CACHES = ("hash", "radix")
CAPACITIES = (1000, 3000, 10000, 30000)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one replay. Blocks are those of the trace."""

    capacity: int  # blocks
    num_requests: int
    num_tokens: int
    num_tokens_hit: int
    num_blocks: int
    num_blocks_hit: int
    num_cached_at_end: int  # blocks

    @property
    def hit_rate(self) -> float:
        """The share of the tokens that was found."""
        return self.num_tokens_hit / self.num_tokens


def make_cache(name: str, capacity: int) -> PrefixCache:
    """An empty cache for `capacity` blocks of one token. Raises `ValueError` for other names."""
    if name not in CACHES:
        raise ValueError(f"cache must be one of {CACHES}, got {name!r}")
    if capacity < 1:
        raise ValueError(f"capacity must be >= 1 block, got {capacity}")
    return PREFIX_CACHES[name](BlockPool(capacity + 1), 1)  # one more for the null block


def replay(trace: Sequence[TraceRequest], cache: PrefixCache) -> ReplayResult:
    """Look up and then cache every request's prompt. `cache` has blocks of one token."""
    num_blocks_hit = 0
    for request in trace:
        num_found = cache.match_prefix(request.hash_ids).num_cached_tokens
        num_blocks_hit += num_found
        cache.stats.record(request.input_length, request.num_tokens_in(num_found))
        cache.cache_computed_blocks(request.hash_ids)
    return ReplayResult(
        capacity=cache.pool.num_usable_blocks,
        num_requests=cache.stats.num_requests,
        num_tokens=cache.stats.num_tokens_looked_up,
        num_tokens_hit=cache.stats.num_tokens_hit,
        num_blocks=sum(len(request.hash_ids) for request in trace),
        num_blocks_hit=num_blocks_hit,
        num_cached_at_end=cache.num_cached_blocks,
    )


def num_distinct_blocks(trace: Sequence[TraceRequest]) -> int:
    """Return the capacity at which nothing is ever evicted."""
    return len({hash_id for request in trace for hash_id in request.hash_ids})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSONL, as Mooncake's FAST'25")
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=CAPACITIES, help="blocks of 512 tokens"
    )
    parser.add_argument("--cache", choices=CACHES, default="hash")
    options = parser.parse_args(arguments)
    try:
        trace = read_trace(options.trace)
        if min(options.capacity) < 1:
            raise ValueError(f"capacity must be >= 1 block, got {min(options.capacity)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    limit = num_distinct_blocks(trace)
    print(f"{len(trace):,} requests, {limit:,} different blocks of {TRACE_BLOCK_SIZE} tokens")
    for capacity in [*sorted(c for c in set(options.capacity) if c < limit), limit]:
        result = replay(trace, make_cache(options.cache, capacity))
        note = "  nothing evicted" if capacity == limit else ""
        print(f"{options.cache} cache of {capacity:>9,} blocks: {result.hit_rate:6.1%}{note}")


if __name__ == "__main__":
    main()
