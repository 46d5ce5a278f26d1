"""The manager with a cache that can also load KV from elsewhere.

    get_computed_blocks   first starts a load of the connector's KV (`kv_loads.py`), and returns
                          `NotReady` until the load has ended
    allocate_slots        loaded blocks are in the table now, so the load unpins them
    can_allocate          if memory is short, blocks loaded for waiting requests are unpinned
    free                  the connector is notified while the blocks still hold the published KV;
                          after an error, it learns which blocks are not trusted

A scheduler sees one more reason to wait and nothing else. If a step computes nothing while requests
wait, the engine calls `wait_for_loads` instead of stepping again immediately.

If steps run while others are planned, a step can still write to blocks that were just freed. A step
of the next request with these blocks comes later, but a load may not, so it waits:
`wait_for_steps`.

Invariants: those of `CachedKVCacheManager` and of `kv_loads.py`; no request has both a load and a
table.

See 03_prefix_cache/beyond/README.md#loads"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from block_pool import Block, BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_connector import KVConnector
from kv_loads import KVLoads
from kv_memory import ComputedBlocks, NotReady
from prefix_cache import PrefixCache
from request import Request

logger = logging.getLogger(__name__)


class LoadingKVCacheManager(CachedKVCacheManager):
    """A `UncachedKVCacheManager` that loads prefixes from `connector`, which is bound already, if
    its cache does not have them."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        cache: PrefixCache,
        connector: KVConnector,
        wait_for_steps: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(pool, block_size, cache)
        self.connector = connector
        self.loads = KVLoads(connector, cache, self._take_blocks_to_load)
        self.wait_for_steps = wait_for_steps or (lambda: None)

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        self.current_req_id = request.request_id
        reads = not request.sampling_params.skip_reading_prefix_cache
        if reads and request.request_id not in self._tables:
            if request.request_id not in self.loads:
                self.loads.start(request, self._get_computed_blocks(request))
            if self.loads.is_in_flight(request.request_id):
                return NotReady.LOADING
        return super().get_computed_blocks(request, wait_for_others)

    def _begin(self, request: Request, computed: ComputedBlocks) -> None:
        super()._begin(request, computed)
        self.loads.drop(request.request_id)

    def _num_allocatable(self, num_wanted: int, found: list[Block], freeing: list[Block]) -> int:
        if super()._num_allocatable(num_wanted, found, freeing) < num_wanted:
            self.loads.give_way()
        return super()._num_allocatable(num_wanted, found, freeing)

    def _allocate_blocks(self, num_blocks: int) -> list[Block] | None:
        if num_blocks > self._num_free_or_evictable():
            self.loads.give_way()
        return super()._allocate_blocks(num_blocks)

    def _take_blocks_to_load(self, num_blocks: int) -> list[Block] | None:
        blocks = super()._allocate_blocks(num_blocks)
        if blocks is not None:
            self.wait_for_steps()
        return blocks

    def free(self, request: Request) -> None:
        self.loads.remove_request(request.request_id)
        state = self._states.get(request.request_id)
        if state is not None and state.num_published and not request.has_bad_kv:
            block_ids = self.get_block_ids(request.request_id)[: state.num_published]
            try:
                self.connector.request_finished(request, block_ids)
            except Exception:  # a failing connector costs only its benefit
                logger.exception("the connector failed when %r ended", request.request_id)
        super().free(request)

    def _withdraw(self, request: Request) -> None:
        self.loads.drop_all()
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        try:
            self.connector.refuse(request, num_tokens // self.block_size)
        except Exception:
            logger.exception("the connector failed when %r ended", request.request_id)
        super()._withdraw(request)

    def clear(self) -> None:
        self.loads.clear()
        super().clear()

    def wait_for_loads(self) -> None:
        """Wait until a load arrives, for a short time. Returns immediately if none is in flight."""
        self.loads.wait()

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        holders.update(block.block_id for block in self.loads.held_blocks())
        return holders
