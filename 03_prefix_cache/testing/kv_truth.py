"""Expected answers of a manager with a cache, from its tables and its cache's prefixes alone."""

from __future__ import annotations

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import ComputedBlocks
from kv_slots import MakeCache, Runner
from prefix_cache import KeyedRequest, extra_keys_of, normalise_extra_keys
from request import Request


class Truth:
    """A manager, the waiting and running requests, and the right answer to every call."""

    def __init__(
        self, make_cache: MakeCache, num_usable: int, block_size: int, checks: bool = True
    ) -> None:
        self.pool = BlockPool(num_usable + 1)
        self.block_size = block_size
        self.runner = Runner(block_size)
        self.cache = make_cache(self.pool, block_size)
        self.manager = self.make_manager()
        self.waiting: dict[str, KeyedRequest] = {}
        self.running: dict[str, KeyedRequest] = {}
        self.written: dict[str, int] = {}  # positions whose KV is in memory
        self.plan: dict[str, tuple[int, int]] = {}
        self.stats = [0, 0, 0]
        self.planned_request_left = False  # since the last step
        self.checks = checks

    # -- for worlds in which KV comes from outside

    def make_manager(self) -> CachedKVCacheManager:
        return CachedKVCacheManager(self.pool, self.block_size, self.cache)

    def held_outside(self, for_good: bool = False) -> set[int]:
        """Blocks that are held by something other than a table. `for_good`: only those that do not
        give way to a table."""
        return set()

    # -- expected answers of the manager

    def tables(self) -> dict[str, list[int]]:
        return {r: list(self.manager.get_block_ids(r)) for r in self.running}

    def prefixes(self) -> dict[tuple, int]:
        return {
            (prefix.extra_keys, prefix.token_ids): prefix.block.block_id
            for prefix in self.cache.cached_prefixes()
        }

    def longest(self, request: Request, stop: int) -> list[int]:
        """The cached blocks of the request's first `stop` tokens."""
        keys, prefixes, found = normalise_extra_keys(extra_keys_of(request)), self.prefixes(), []
        for end in range(self.block_size, stop + 1, self.block_size):
            block_id = prefixes.get((keys, tuple(request.all_token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def computing(self, request: Request, num_cached: int) -> bool:
        """Whether this step computes the block after the cached ones, for a request that has
        these."""
        end = (num_cached + 1) * self.block_size
        keys = normalise_extra_keys(extra_keys_of(request))
        return end < request.num_tokens and any(
            normalise_extra_keys(extra_keys_of(other)) == keys
            and other.all_token_ids[:end] == request.all_token_ids[:end]
            and self.plan[r][0] < end <= self.plan[r][1]
            and self.plan[r][0] // self.block_size == num_cached
            for r, other in self.running.items()
            if r in self.plan
        )

    def held(self, for_good: bool = False, without: str | None = None) -> set[int]:
        tables = {r: table for r, table in self.tables().items() if r != without}
        held = {block_id for table in tables.values() for block_id in table}
        return held | self.held_outside(for_good)

    def num_missing(
        self, request: Request, num_tokens: int, computed: ComputedBlocks | None
    ) -> int:
        """Blocks that the request's table is missing for these tokens."""
        num_found = 0 if computed is None else len(computed.blocks)
        end = request.num_computed_tokens + num_found * self.block_size + num_tokens
        num_present = len(self.manager.get_block_ids(request.request_id)) + num_found
        return max(-(-end // self.block_size) - num_present, 0)

    def fits(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks | None,
        num_watermark_blocks: int = 0,
        without: str | None = None,
    ) -> bool:
        found = set() if computed is None else {block.block_id for block in computed.blocks}
        num_missing = self.num_missing(request, num_tokens, computed)
        left = self.pool.num_usable_blocks - num_missing
        if left < len(self.held(False, without) | found):
            return left - num_watermark_blocks >= len(self.held(True, without) | found)
        return left - num_watermark_blocks >= len(self.held(False, without) | found)

    def gives_way(self) -> bool:
        return self.held_outside() != self.held_outside(for_good=True)

    def snapshot(self, arrivals: bool = False) -> tuple:
        """The whole state except the order of use. With `arrivals`, finished loads are left out."""
        always = (
            {r: list(table.block_ids) for r, table in self.manager._tables.items()},
            dict(self.manager._in_flight),
            list(self.manager._moves),
        )
        if arrivals:
            return always
        return (
            *always,
            [block.ref_cnt for block in self.pool.blocks],
            [block.block_id for block in self.pool.free_order()],
            self.prefixes(),
            (self.cache.num_evictable_blocks, self.manager.num_blocks_in_use),
        )
