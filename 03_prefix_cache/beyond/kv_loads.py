"""Loads of external KV for requests that still wait.

KV that a connector can fetch (from tiers, a global pool) is put into the cache before its request
is admitted. A load allocates blocks for it and pins the prefix that it extends:

    | cached: pinned | allocated from the pool: the connector writes here |
    0                ^ cached here                                        ^ found there

Blocks that arrived are cached, and pinned for the request until it is admitted, unless memory runs
short: then waiting requests give way to running ones, and recompute the blocks that they lose.

Invariants: a block that is being loaded is in no table and not in the cache; a load displaces no
other load, and a request whose load gets no blocks does not wait; a request is looked up again only
if the cache has lost something since. vLLM's scheduler, too, allocates the blocks before the load.

See 03_prefix_cache/beyond/README.md#loads"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from block_pool import Block
from kv_connector import KVConnector
from kv_memory import ComputedBlocks
from prefix_cache import PrefixCache, extra_keys_of
from request import Request

logger = logging.getLogger(__name__)

LOAD_WAIT_S = 0.005


@dataclass(slots=True)
class Load:
    request: Request
    prefix: list[Block]  # cached blocks that the load pins
    blocks: list[Block]  # destination of the loaded KV; cached and pinned too when it has arrived
    has_arrived: bool = False


class KVLoads:
    """The loads of one `LoadingKVCacheManager`. `allocate_blocks` allocates blocks that can be
    written immediately, or returns None."""

    def __init__(
        self,
        connector: KVConnector,
        cache: PrefixCache,
        allocate_blocks: Callable[[int], list[Block] | None],
    ) -> None:
        self.connector = connector
        self.cache = cache
        self._allocate_blocks = allocate_blocks
        self._loads: dict[str, Load] = {}
        # Tokens that the cache had when a load was last decided on, by request that was looked up;
        # None: not decided yet.
        self._num_local: dict[str, int | None] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def is_in_flight(self, request_id: str) -> bool:
        load = self._loads.get(request_id)
        return load is not None and not self._has_arrived(load)

    def start(self, request: Request, computed: ComputedBlocks) -> None:
        """Start to load what the connector has after `computed`, unless this was decided before, or
        there are no blocks for it: its admission needs as many, so it will be looked up again."""
        name = request.request_id
        num_local = self._num_local.setdefault(name, None)
        if num_local is not None and computed.num_tokens >= num_local:
            return
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, computed.num_tokens)
        blocks: list[Block] | None = []
        if num_tokens > 0:
            self.cache.touch(computed.blocks)
            blocks = self._allocate_blocks(num_tokens // self.cache.block_size)
            if blocks is None:
                self.cache.release(computed.blocks)
                return
        self._num_local[name] = computed.num_tokens
        if blocks:
            self._loads[name] = Load(request, computed.blocks, blocks)
            block_ids = [block.block_id for block in blocks]
            self.connector.update_state_after_alloc(request, block_ids, num_tokens)

    def _has_arrived(self, load: Load) -> bool:
        """Cache the blocks that arrived, pinned by the load. Returns False while it is in
        flight."""
        if load.has_arrived:
            return True
        num_tokens = self.connector.get_finished_load(load.request.request_id)
        if num_tokens is None:
            return False
        self._cache_arrived(load, num_tokens // self.cache.block_size)
        return True

    def _cache_arrived(self, load: Load, num_arrived: int) -> None:
        cached = self.cache.insert(
            load.request.all_token_ids,
            load.blocks[:num_arrived],
            extra_keys_of(load.request),
            start=len(load.prefix),
        )
        self.cache.pool.free(load.blocks[num_arrived:][::-1])
        load.blocks = cached
        load.has_arrived = True

    def drop(self, request_id: str) -> None:
        """Drop a request's load. Blocks that arrived stay cached; the rest is cancelled."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.has_arrived:
            self.cache.release(load.prefix + load.blocks)
        else:
            self.connector.cancel_load(request_id)
            self.cache.pool.free(load.blocks[::-1])
            self.cache.release(load.prefix)

    def drop_all(self) -> None:
        """Drop all loads, before all blocks leave the cache."""
        for request_id in list(self._loads):
            self.drop(request_id)

    def remove_request(self, request_id: str) -> None:
        """Drop the load of a request that frees its memory. The connector discards the result of
        its lookup for this request."""
        self.drop(request_id)
        if request_id in self._num_local:
            del self._num_local[request_id]
            self.connector.cancel_load(request_id)

    def give_way(self) -> None:
        """Unpin blocks that were loaded for waiting requests, because memory is short."""
        for request_id, load in list(self._loads.items()):
            if self._has_arrived(load):
                self.drop(request_id)

    def clear(self) -> None:
        """Reset after a call that was interrupted: no load is in flight, no lookup is
        remembered."""
        try:
            for request_id in self._num_local:
                self.connector.cancel_load(request_id)
        except Exception:  # it would be raised again by every later call
            logger.exception("the connector failed when it was to begin anew")
        self._loads.clear()
        self._num_local.clear()

    def wait(self) -> None:
        """Wait until a load arrives, for a short time."""
        if any(not load.has_arrived for load in self._loads.values()):
            self.connector.wait_for_load(LOAD_WAIT_S)

    def held_blocks(self) -> Iterator[Block]:
        for load in self._loads.values():
            yield from load.prefix + load.blocks

    def loads(self) -> Iterable[Load]:
        return self._loads.values()
