"""Read an engine's whole state as a frame (`frames.py`). Has no side effects; its cost grows with
the pool and the cache, so the recorder calls it only where a film begins.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from base_scheduler import BaseScheduler
from common.events.frames import Frame
from grouped_prefix_cache import GroupedPrefixCache
from kv_loads import KVLoads
from kv_memory import UncachedKVCacheManager
from prefix_cache import NormalKeys, PrefixCache
from scheduler_interface import SchedulerOutput


def read_frame(
    scheduler: BaseScheduler,
    memory: UncachedKVCacheManager,
    cache: PrefixCache | GroupedPrefixCache | None,
    loads: KVLoads | None,
    waiting: Sequence[str],
    plans: dict[int, SchedulerOutput],
) -> Frame:
    """Return what the engine's parts know, without texts, reasons and times. Has no side effects;
    `waiting` is the order of service, which a cache-aware policy cannot be asked for; `plans` are
    those without results, by step number."""
    requests = scheduler.requests
    pool = memory.pool
    return {
        "waiting": list(waiting),
        "running": list(scheduler.running),
        "requests": {name: row_of(request) for name, request in requests.items()},
        "computed": {name: request.num_computed_tokens for name, request in requests.items()},
        "outputs": {name: list(request.output_token_ids) for name, request in requests.items()},
        "tables": {name: tables for name in requests if (tables := tables_of(memory, name))},
        "free": [block.block_id for block in pool.free_order()],
        "refs": {str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt},
        "cached": {} if cache is None else dict(cached_rows(cache)),
        "evictable": [] if cache is None else _evictable(cache),
        "loads": {} if loads is None else loads_of(loads),
        "in_flight": {str(step): plan_row(plan, scheduler) for step, plan in plans.items()},
    }


def row_of(request: Any) -> dict[str, Any]:
    """The part of a request's row that its own object knows."""
    return {
        "num_cached": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
    }


def tables_of(memory: UncachedKVCacheManager, request_id: str) -> dict[str, list[int]]:
    """Return the block tables by group, {} without any block."""
    tables = memory.get_tables(request_id)
    return {str(group): list(ids) for group, ids in enumerate(tables)} if any(tables) else {}


def plan_row(plan: SchedulerOutput, scheduler: BaseScheduler) -> dict[str, Any]:
    """Return a plan, without requests that have ended since."""
    rows = [
        (request.request_id, start, num)
        for request, start, num in zip(
            plan.scheduled_requests, plan.start_positions, plan.num_scheduled_tokens.values()
        )
        if scheduler.requests.get(request.request_id) is request
    ]
    names, starts, nums = (list(column) for column in zip(*rows)) if rows else ([], [], [])
    drafts = {n: list(d) for n, d in plan.scheduled_draft_token_ids.items() if n in names}
    return filled(requests=names, starts=starts, num_tokens=nums, drafts=drafts)


def loads_of(loads: KVLoads) -> dict[str, Any]:
    return {
        load.request.request_id: {
            "prefix": [block.block_id for block in load.prefix],
            "blocks": [block.block_id for block in load.blocks],
            "has_arrived": load.has_arrived,
        }
        for load in loads.loads()
    }


def cached_rows(cache: PrefixCache | GroupedPrefixCache) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every cached block with its row. O(blocks x depth)."""
    if isinstance(cache, GroupedPrefixCache):
        for known in cache.cached_prefixes():
            yield str(known.block.block_id), grouped_row(known)
        return
    prefixes = list(cache.cached_prefixes())
    size = cache.block_size
    ids: dict[tuple[NormalKeys, tuple[int, ...]], int] = {}
    for prefix in prefixes:
        ids[prefix.extra_keys, prefix.token_ids] = prefix.block.block_id
    for prefix in prefixes:
        parent = ids.get((prefix.extra_keys, prefix.token_ids[:-size]))
        yield (
            str(prefix.block.block_id),
            cached_row(cache, prefix.block, parent, prefix.token_ids[-size:], prefix.extra_keys),
        )


def cached_row(
    cache: PrefixCache, block: Any, parent: int | None, tokens: Sequence[int], keys: NormalKeys
) -> dict[str, Any]:
    """`begins_node`: with a radix tree, whether the block is the first of its node."""
    return filled(
        tokens=list(tokens),
        parent=parent,
        tenant=label_of(keys),
        hash=cache.hash_of(block),
        begins_node=cache.begins_node(block),
    )


def filled(**row: Any) -> dict[str, Any]:
    """Return a row without its empty values; a reader takes a missing one as empty."""
    return {name: value for name, value in row.items() if value}


def grouped_row(known: Any) -> dict[str, Any]:
    """With groups, the parent may no longer be cached; `place` is the index in the group's
    tables."""
    return {
        "tokens": list(known.chain[known.index][1]),
        "hash": known.key[1].hex()[:8],
        "group": known.group,
        "place": known.index,
    }


def _evictable(cache: PrefixCache | GroupedPrefixCache) -> list[int]:
    if isinstance(cache, GroupedPrefixCache):
        return []  # the free order is the order of eviction
    return [p.block.block_id for p in cache.cached_prefixes() if p.num_users == 0]


def label_of(extra_keys: object) -> str:
    """Return a short label of a tenant's cache keys that does not reveal them."""
    if not extra_keys:
        return ""
    return hashlib.blake2b(repr(extra_keys).encode(), digest_size=4).hexdigest()
