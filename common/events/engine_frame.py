"""Read an engine's whole state as a frame (`frames.py`). Has no side effects; costs as much as the
pool and the cache are large.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from base_scheduler import BaseScheduler
from common.events.frames import Frame
from grouped_prefix_cache import GroupedBlock, GroupedPrefixCache
from kv_memory import UncachedKVCacheManager
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import CachedContent, PrefixCache
from request import Request


def read_frame(
    scheduler: BaseScheduler,
    memory: UncachedKVCacheManager,
    requests: Iterable[Request],
    waiting: Sequence[str],
    cached: CachedRows,
) -> Frame:
    """Return what the engine's parts know, without texts, plans and times. `requests` are the
    unfinished ones and those that have just ended; `waiting` are those in the queue."""
    by_id = {request.request_id: request for request in requests}
    pool = memory.pool
    cached.read(memory.cache)
    return {
        "waiting": list(waiting),
        "running": list(scheduler.running),
        "computed": {name: request.num_computed_tokens for name, request in by_id.items()},
        "outputs": {name: list(request.output_token_ids) for name, request in by_id.items()},
        "tables": {name: tables for name in by_id if (tables := tables_of(memory, name))},
        "free": [block.block_id for block in pool.free_order()],
        "refs": {str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt},
        "cached": cached.rows,
        "evictable": cached.evictable,
        "loads": loads_of(memory),
    }


def tables_of(memory: UncachedKVCacheManager, request_id: str) -> dict[str, list[int]]:
    """Return the block tables by group, {} without any block."""
    tables = memory.get_tables(request_id)
    return {str(group): list(ids) for group, ids in enumerate(tables)} if any(tables) else {}


def loads_of(memory: UncachedKVCacheManager) -> dict[str, Any]:
    if not isinstance(memory, LoadingKVCacheManager):
        return {}
    return {
        load.request.request_id: {
            "prefix": [block.block_id for block in load.prefix],
            "blocks": [block.block_id for block in load.blocks],
            "has_arrived": load.has_arrived,
        }
        for load in memory.loads.values()
    }


class CachedRows:
    """The rows of all cached blocks. A row is made once for each content, and is then the same
    object in each frame; so are both results while the cache does not change."""

    def __init__(self) -> None:
        self._num_changes = -1
        self._known: dict[str, tuple[CachedContent | GroupedBlock, dict[str, Any]]] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # by block
        self.evictable: list[int] = []  # blocks that no request uses, the next victim first

    def read(self, cache: PrefixCache | GroupedPrefixCache | None) -> None:
        """Read the cache again, if it has changed. With groups no block is `evictable`, because the
        free order is the order of eviction."""
        if cache is None or cache.num_changes == self._num_changes:
            return
        self._num_changes = cache.num_changes
        is_grouped = isinstance(cache, GroupedPrefixCache)
        contents = cache.cached_prefixes() if is_grouped else cache.cached_contents()
        before = self._known
        self._known = {}
        self.evictable = []
        for content in contents:
            block = str(content.block.block_id)
            known = before.get(block)
            if known is None or not (known[0] is content or known[0] == content):
                row = _cached_row(content)
                if known is not None and _differs_by_node(known[0], content):
                    row = known[1] | {"begins_node": row.get("begins_node", False)}
                known = content, row
            self._known[block] = known
            if isinstance(content, CachedContent) and content.block.ref_cnt == 1:
                self.evictable.append(content.block.block_id)
        self.rows = {block: row for block, (_, row) in self._known.items()}


def _differs_by_node(one: object, other: object) -> bool:
    """Whether only `begins_node` can differ: a node of the tree was split."""
    if not isinstance(one, CachedContent) or not isinstance(other, CachedContent):
        return False
    return one[:4] == other[:4]


def _cached_row(content: CachedContent | GroupedBlock) -> dict[str, Any]:
    """With groups, the parent may no longer be cached; `place` is the index in the group's tables.
    `begins_node`: with a radix tree, whether the block is the first of its node."""
    if isinstance(content, GroupedBlock):
        return {
            "tokens": list(content.chain[content.index][1]),
            "hash": content.key[1].hex()[:8],
            "group": content.group,
            "place": content.index,
        }
    return filled(
        tokens=list(content.token_ids),
        parent=content.parent_id,
        tenant=label_of(content.extra_keys),
        hash=content.block_hash.hex()[:8],
        begins_node=content.begins_node,
    )


def filled(**row: Any) -> dict[str, Any]:
    """Return a row without its empty values; a reader takes a missing one as empty."""
    return {name: value for name, value in row.items() if value}


def label_of(extra_keys: object) -> str:
    """Return a short label of a tenant's cache keys that does not reveal them."""
    if not extra_keys:
        return ""
    return hashlib.blake2b(repr(extra_keys).encode(), digest_size=4).hexdigest()
