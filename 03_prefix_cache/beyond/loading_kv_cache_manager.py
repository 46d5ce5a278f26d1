"""The manager with a cache that can also load KV from elsewhere.

KV that a connector can fetch (from tiers, a global pool) is put into the cache before its request
is admitted. A load allocates blocks for it and pins the prefix that it extends:

    | cached: pinned | allocated from the pool: the connector writes here |
    0                ^ cached here                                        ^ found there

    get_computed_blocks   first starts a load of the connector's KV, and returns `NotReady` until
                          the load has ended
    allocate_slots        loaded blocks are in the table now, so the load unpins them
    can_allocate          if memory is short, blocks loaded for waiting requests are unpinned
    free                  the connector is notified while the blocks still hold the published KV;
                          after an error, it learns which blocks are not trusted

Blocks that arrived are cached, and pinned for the request until it is admitted, unless memory runs
short: then waiting requests give way to running ones, and recompute the blocks that they lose. If a
step computes nothing while requests wait, the engine calls `wait_for_loads` instead of stepping
again immediately.

If steps run while others are planned, a step can still write to blocks that were just freed. A step
of the next request with these blocks comes later, but a load may not, so it waits:
`wait_for_steps`.

Invariants: those of `CachedKVCacheManager`; no request has both a load and a table; a block that is
being loaded is in no table and not in the cache; a load displaces no other load, and a request
whose load gets no blocks does not wait; a request is looked up again only if the cache has lost
something since. vLLM's scheduler, too, allocates the blocks before the load.

See 03_prefix_cache/beyond/README.md#loads"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from block_pool import Block, BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_connector import KVConnector
from kv_memory import ComputedBlocks, NotReady
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


class LoadingKVCacheManager(CachedKVCacheManager):
    """A `UncachedKVCacheManager` that loads prefixes from `connector`, which is bound already, if
    its cache does not have them."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        cache: PrefixCache,
        connector: KVConnector,
        wait_for_steps: Callable[[], object] = int,
    ) -> None:
        super().__init__(pool, block_size, cache)
        self.connector = connector
        self.wait_for_steps = wait_for_steps
        self.loads: dict[str, Load] = {}  # by request
        # Tokens that the cache had when a load was last decided on, by request.
        self._num_local: dict[str, int] = {}

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        name = request.request_id
        self.current_req_id = name
        if not request.sampling_params.skip_reading_prefix_cache:
            if name not in self.loads:
                self._start_load(request, self._get_computed_blocks(request))
            if name in self.loads and not self._has_arrived(self.loads[name]):
                return NotReady.LOADING
        return super().get_computed_blocks(request, wait_for_others)

    def _start_load(self, request: Request, computed: ComputedBlocks) -> None:
        """Start to load what the connector has after `computed`, unless this was decided before, or
        there are no blocks for it: its admission needs as many, so it will be looked up again."""
        name = request.request_id
        if computed.num_tokens >= self._num_local.get(name, computed.num_tokens + 1):
            return
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, computed.num_tokens)
        if num_tokens > 0:
            self.cache.touch(computed.blocks)
            blocks = self._take_blocks_to_load(num_tokens // self.block_size)
            if blocks is None:
                self.cache.release(computed.blocks)
                return
            self.loads[name] = Load(request, computed.blocks, blocks)
            block_ids = [block.block_id for block in blocks]
            self.connector.update_state_after_alloc(request, block_ids, num_tokens)
        self._num_local[name] = computed.num_tokens

    def _take_blocks_to_load(self, num_blocks: int) -> list[Block] | None:
        blocks = super()._allocate_blocks(num_blocks)
        if blocks is not None:
            self.wait_for_steps()
        return blocks

    def _has_arrived(self, load: Load) -> bool:
        """Cache the blocks that arrived, pinned by the load. Returns False while it is in
        flight."""
        if load.has_arrived:
            return True
        num_tokens = self.connector.get_finished_load(load.request.request_id)
        if num_tokens is None:
            return False
        num_arrived = num_tokens // self.block_size
        arrived = load.blocks[:num_arrived]
        self.pool.free(load.blocks[num_arrived:][::-1])
        load.blocks = self.cache.insert(
            load.request.all_token_ids,
            arrived,
            extra_keys_of(load.request),
            start=len(load.prefix),
        )
        load.has_arrived = True
        return True

    def _drop_load(self, request_id: str) -> None:
        """Drop a request's load. Blocks that arrived stay cached; the rest is cancelled."""
        load = self.loads.pop(request_id, None)
        if load is None:
            return
        if load.has_arrived:
            self.cache.release(load.prefix + load.blocks)
        else:
            self.connector.cancel_load(request_id)
            self.pool.free(load.blocks[::-1])
            self.cache.release(load.prefix)

    def _begin(self, request: Request, computed: ComputedBlocks) -> None:
        super()._begin(request, computed)
        self._drop_load(request.request_id)

    def _give_way(self) -> None:
        """Unpin blocks that were loaded for waiting requests, because memory is short."""
        for request_id, load in list(self.loads.items()):
            if self._has_arrived(load):
                self._drop_load(request_id)

    def _num_allocatable(self, num_wanted: int, found: list[Block], freeing: list[Block]) -> int:
        if super()._num_allocatable(num_wanted, found, freeing) < num_wanted:
            self._give_way()
        return super()._num_allocatable(num_wanted, found, freeing)

    def _allocate_blocks(self, num_blocks: int) -> list[Block] | None:
        if num_blocks > self._num_free_or_evictable():
            self._give_way()
        return super()._allocate_blocks(num_blocks)

    def free(self, request: Request) -> None:
        name = request.request_id
        self._drop_load(name)
        self._num_local.pop(name, None)
        self.connector.cancel_load(name)  # what the connector has found for it
        state = self._states.get(name)
        if state is not None and state.num_published and not request.has_bad_kv:
            block_ids = self.get_block_ids(name)[: state.num_published]
            self._tell(request, lambda: self.connector.request_finished(request, block_ids))
        super().free(request)

    def _withdraw(self, request: Request) -> None:
        for request_id in list(self.loads):
            self._drop_load(request_id)
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        num_blocks = num_tokens // self.block_size
        self._tell(request, lambda: self.connector.refuse(request, num_blocks))
        super()._withdraw(request)

    def _tell(self, request: Request, tell: Callable[[], object]) -> None:
        try:
            tell()
        except Exception:  # a failing connector costs only its benefit
            logger.exception("the connector failed when %r ended", request.request_id)

    def clear(self) -> None:
        try:
            for request_id in {*self.loads, *self._num_local}:
                self.connector.cancel_load(request_id)
        except Exception:  # every later call would raise it again
            logger.exception("the connector failed when it was to begin anew")
        self.loads.clear()
        self._num_local.clear()
        super().clear()

    def wait_for_loads(self) -> None:
        """Wait until a load arrives, for a short time. Returns immediately if none is in flight."""
        if any(not load.has_arrived for load in self.loads.values()):
            self.connector.wait_for_load(LOAD_WAIT_S)

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        for load in self.loads.values():
            holders.update(block.block_id for block in load.prefix + load.blocks)
        return holders
