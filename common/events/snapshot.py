"""The engine's complete state between two steps, as one event, with which a film begins that does
not start with the engine. Taking it has no side effects; its time grows with the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from base_scheduler import BaseScheduler
from common.events.event_kinds import Snapshot
from common.events.event_log import EventLog, TextDeltas, label_of
from common.events.watched_scheduler import RequestWatch
from grouped_prefix_cache import GroupedPrefixCache
from prefix_cache import NormalKeys, PrefixCache, extra_keys_of, normalise_extra_keys
from request import Request
from scheduler_interface import SchedulerOutput


def take_snapshot(
    log: EventLog,
    texts: TextDeltas,
    scheduler: BaseScheduler,
    watch: RequestWatch,
    under_way: Sequence[SchedulerOutput],
    numbers: Sequence[int],
) -> Snapshot:
    """Return the snapshot. `under_way` are the plans whose results are not processed yet, the
    oldest first; `numbers` are their step numbers."""
    memory, plans = watch.memory, [_plan_row(*row, scheduler) for row in zip(numbers, under_way)]
    cache = memory.cache
    loads = () if memory.loads is None else memory.loads.loads()
    loaded = {} if memory.connector is None else memory.connector.num_loaded_blocks()
    return Snapshot(
        log.now(),
        [_request_row(request, texts, watch, plans) for request in scheduler.requests.values()],
        watch.queue_order(),
        list(scheduler.running),
        [block.block_id for block in memory.pool.free_order()],
        [] if cache is None else _cached_rows(cache),
        [] if cache is None else _node_heads(cache),
        [
            {
                "request": load.request.request_id,
                "prefix": [block.block_id for block in load.prefix],
                "blocks": [block.block_id for block in load.blocks],
                "has_arrived": load.has_arrived,
            }
            for load in loads
        ],
        {tier: num for tier, num in loaded.items() if num},
        plans,
    )


def is_as_new(snapshot: Snapshot, num_blocks: int) -> bool:
    """Whether the engine is in its initial state, so that a film needs no snapshot."""
    has_nothing = not (snapshot.requests or snapshot.cached or snapshot.under_way)
    return has_nothing and snapshot.free == list(range(1, num_blocks))


def _request_row(
    request: Request, texts: TextDeltas, watch: RequestWatch, plans: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    name, outputs = request.request_id, list(request.output_token_ids)
    return {
        "request": name,
        "prompt": list(request.prompt_token_ids),
        "prompt_pieces": texts.begin(request),
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "tenant": label_of(normalise_extra_keys(extra_keys_of(request))),
        "order_key": watch.order_key(request),
        **watch.brought(request),
        "arrived_at": watch.log.since_start(request.arrival_time),
        "outputs": outputs,
        "pieces": texts.add(request, outputs),
        **_tables(watch.memory.memory.get_tables(name)),
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "highest": _highest(request, plans),
    }


def _highest(request: Request, plans: Sequence[dict[str, Any]]) -> int:
    """Return the position up to which a request was ever computed. A request with outputs has
    computed everything before the last one."""
    name, known = request.request_id, request.num_tokens - 1 if request.output_token_ids else 0
    planned = [num for p in plans for r, num in zip(p["requests"], p["num_tokens"]) if r == name]
    return max(known, request.num_computed_tokens - sum(planned))


def _plan_row(step: int, plan: SchedulerOutput, scheduler: BaseScheduler) -> dict[str, Any]:
    rows = [
        (request.request_id, start, num)
        for request, start, num in zip(
            plan.scheduled_requests, plan.start_positions, plan.num_scheduled_tokens.values()
        )
        if scheduler.requests.get(request.request_id) is request
    ]
    names, starts, nums = (list(column) for column in zip(*rows)) if rows else ([], [], [])
    drafts = {n: d for n, d in plan.scheduled_draft_token_ids.items() if n in names}
    columns = {"requests": names, "starts": starts, "num_tokens": nums}
    return {"step": step, **columns, "drafts": drafts}


def _tables(tables: Sequence[Sequence[int]]) -> dict[str, Any]:
    first, *others = map(list, tables)
    return {"table": first, **({"tables": others} if others else {})}


def _cached_rows(cache: PrefixCache | GroupedPrefixCache) -> list[dict[str, Any]]:
    if isinstance(cache, GroupedPrefixCache):
        return [
            {
                "block": known.block.block_id,
                "parent": None,
                "tokens": list(known.chain[known.index][1]),
                "tenant": "",
                "hash": known.key[1].hex()[:8],
                "group": known.group,
                "place": known.index,
            }
            for known in cache.cached_prefixes()
        ]
    prefixes, size = list(cache.cached_prefixes()), cache.block_size
    ids: dict[tuple[NormalKeys, tuple[int, ...]], int] = {}
    for prefix in prefixes:
        ids[prefix.extra_keys, prefix.token_ids] = prefix.block.block_id
    return [
        {
            "block": prefix.block.block_id,
            "parent": ids.get((prefix.extra_keys, prefix.token_ids[:-size])),
            "tokens": list(prefix.token_ids[-size:]),
            "tenant": label_of(prefix.extra_keys),
            "hash": cache.hash_of(prefix.block),
        }
        for prefix in prefixes
    ]


def _node_heads(cache: PrefixCache | GroupedPrefixCache) -> list[int]:
    if isinstance(cache, GroupedPrefixCache):
        return []
    blocks = (cache.pool.blocks[block_id] for block_id in cache.cached_block_ids())
    return [block.block_id for block in blocks if cache.begins_node(block)]
