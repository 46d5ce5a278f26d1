"""Chapter 2's manager of block tables, with any prefix cache behind it.

The same interface, so every scheduler works with it. A request's table then has three stretches:

    | cached when it was admitted | published since | its own: partial, or still to be written |
    0                             ^ hit             ^ _published                       table's end

Full blocks are published when the forward pass that wrote them is over (`cache_blocks`), never
before: a step that fails, or a request preempted between plan and forward pass, leaves nothing
wrong behind. If somebody else has published the same content meanwhile, the table takes the cache's
block and gives its own back, so a prefix is in memory once.

Two requests that arrive together with one prefix would both compute it, because neither is
published yet. So the block that a request publishes next is known by its content while it is being
computed, and a request that could use it is not ready: a step later it hits.

What a connector can fetch is loaded before the request is admitted (`kv_loads.py`):
`get_computed_blocks` starts that and says "not ready" until it has ended.

Invariants: those of the manager and of the cache; what a table has published is owned by the cache
and is its path, block by block.

vLLM publishes a block when it is planned, so that requests of one step share it, and must take care
that the plan is carried out. SGLang puts off requests that share an uncached prefix, as here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from block_pool import Block, BlockPool
from kv_cache_manager import KVCacheManager
from kv_connector import KVConnector
from kv_loads import KVLoads
from prefix_cache import PrefixCache, PrefixPath, normalise_extra_keys
from request import Request
from scheduler_interface import ComputedBlocks

_BlockKey = tuple[object, ...]  # (id of the cached block before it, extra keys, its tokens)


@dataclass(slots=True)
class _CacheState:
    """What the cache knows of one request, from its first look-up until it gives up its blocks."""

    path: PrefixPath = field(default_factory=PrefixPath)
    num_published: int = 0  # blocks at the front of its table that the cache owns
    in_flight: _BlockKey | None = None


class CachedKVCacheManager(KVCacheManager):
    """A `KVCacheManager` whose requests share what any of them has computed.

    `cache` works on the same `pool`, in the same blocks; `connector`, if given, is bound already.
    Raises `ValueError` if pool or block size differ.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        cache: PrefixCache,
        connector: KVConnector | None = None,
    ) -> None:
        super().__init__(pool, block_size)
        if cache.pool is not pool or cache.block_size != block_size:
            raise ValueError(
                f"block_size is {block_size}: the cache has {cache.block_size}, and must be on the "
                "manager's own pool"
            )
        self.cache = cache
        self._states: dict[str, _CacheState] = {}
        self._in_flight: dict[_BlockKey, str] = {}  # block being computed -> request
        self._loads = KVLoads(connector, cache, self._take_blocks_for_load)
        # Entries that now name the cache's block: the runner has yet to be told.
        self._moved: list[tuple[str, int, int, int]] = []

    @property
    def connector(self) -> KVConnector | None:
        return self._loads.connector

    @connector.setter
    def connector(self, connector: KVConnector | None) -> None:
        self._loads.connector = connector

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that a request holds, or that are being loaded. What is only cached is as good as
        free."""
        return super().num_blocks_in_use - self.cache.num_evictable_blocks

    @property
    def usage(self) -> float:
        return self.num_blocks_in_use / self.pool.num_usable_blocks

    # -- before a request is admitted

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix, short of the last token: its logits are wanted, so it has to
        be computed."""
        if request.request_id in self._tables:
            raise ValueError(f"request {request.request_id!r} has a block table already")
        has_load = request.request_id in self._loads
        if has_load and self._loads.is_under_way(request.request_id):
            return ComputedBlocks(is_ready=False, is_loading=True)
        computed = self._look_up(request)
        if not has_load and self._loads.wants_load(request, computed):
            if not self._loads.start(request, computed):
                return ComputedBlocks(is_ready=False, is_loading=True)
            computed = self._look_up(request)
        if self._is_being_computed(request, computed.blocks):
            return ComputedBlocks(is_ready=False)
        return computed

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Where its longest cached prefix is. They count as used now, and nothing keeps them."""
        return [block.block_id for block in self._look_up(request).blocks]

    def _look_up(self, request: Request) -> ComputedBlocks:
        state = self._states.setdefault(request.request_id, _CacheState())
        num_usable = (request.num_tokens - 1) // self.block_size * self.block_size
        token_ids = request.all_token_ids[:num_usable]
        match = self.cache.match_prefix(token_ids, request.extra_keys, state.path)
        blocks = [self.pool.blocks[block.block_id] for block in match.blocks]
        return ComputedBlocks(blocks, match.num_cached_tokens)

    def _is_being_computed(self, request: Request, cached: Sequence[Block]) -> bool:
        """Does a running request compute the very block that the look-up missed?"""
        end = (len(cached) + 1) * self.block_size
        key = self._key(request, cached, len(cached))
        return end < request.num_tokens and key in self._in_flight

    def _key(self, request: Request, blocks: Sequence[Block], index: int) -> _BlockKey:
        """Block `index` by its content: an equal prefix is in equal blocks, if they are cached."""
        start = index * self.block_size
        tokens = tuple(request.all_token_ids[start : start + self.block_size])
        parent_id = blocks[index - 1].block_id if index else None
        return (parent_id, normalise_extra_keys(request.extra_keys), tokens)

    # -- the table

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        is_admission = request.request_id not in self._tables
        if not super().allocate_slots(
            request, num_new_tokens, num_lookahead_tokens, computed, num_blocks_kept_free
        ):
            return False
        num_computed = request.num_computed_tokens
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _CacheState()
        self._loads.drop(request.request_id)  # what it brought is in the table, or a fork came
        if is_admission and computed is not None:
            state.num_published = len(computed.blocks)
            num_computed += computed.num_tokens
            if request.num_preemptions == 0:
                self.cache.stats.record(request.num_tokens, computed.num_tokens)
        self._note_in_flight(request, state, num_computed + num_new_tokens)
        return True

    def _note_in_flight(self, request: Request, state: _CacheState, num_planned: int) -> None:
        end = (state.num_published + 1) * self.block_size
        if state.in_flight is None and end <= min(num_planned, request.num_tokens):
            table = self._tables[request.request_id]
            key = self._key(request, table.blocks, state.num_published)
            if self._in_flight.setdefault(key, request.request_id) == request.request_id:
                state.in_flight = key

    def _forget_in_flight(self, state: _CacheState) -> None:
        if state.in_flight is not None:
            del self._in_flight[state.in_flight]
            state.in_flight = None

    def cache_blocks(self, request: Request) -> None:
        """Publish the request's full blocks: everything up to `num_computed_tokens` is written.

        Costs O(new full blocks), so nothing in most steps."""
        state = self._states.get(request.request_id)
        table = self._tables.get(request.request_id)
        if state is None or table is None:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        first = state.num_published
        if num_full <= first:
            return
        given = table.blocks[first:num_full]
        result = self.cache.insert(
            request.all_token_ids, given, request.extra_keys, start=first, path=state.path
        )
        for index, (own, kept) in enumerate(zip(given, result.blocks, strict=True), first):
            if kept is not own:
                table.replace(index, kept)
                self._moved.append((request.request_id, index, kept.block_id, kept.block_id))
        state.num_published = num_full
        self._forget_in_flight(state)

    def fork(self, parent: Request, child: Request) -> None:
        """Full blocks are published before they are shared, or one of the two could go on with a
        duplicate, and with cached blocks behind it. Raises `ValueError` if they are not."""
        state = self._states.get(parent.request_id, _CacheState())
        num_full = child.num_computed_tokens // self.block_size
        if state.num_published < num_full <= parent.num_computed_tokens // self.block_size:
            raise ValueError(
                f"{child.request_id!r} cannot share {num_full} full blocks: "
                f"{parent.request_id!r} has published {state.num_published}"
            )
        super().fork(parent, child)
        if child.request_id in self._tables:
            self._states[child.request_id] = _CacheState(num_published=num_full)

    def free(self, request: Request) -> None:
        """Give up the request's blocks; what is published stays cached until it is evicted."""
        self._loads.forget(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._forget_in_flight(state)
            if self.connector is not None and state.num_published:
                block_ids = self.get_block_ids(request.request_id)[: state.num_published]
                self.connector.request_finished(request, block_ids)
        if self._moved:
            self._moved = [move for move in self._moved if move[0] != request.request_id]
        super().free(request)

    def take_block_copies(self) -> list[tuple[str, int, int, int]]:
        """Chapter 2's copies, and the table entries that changed without one: `src == dst`."""
        moved, self._moved = self._moved, []
        return moved + super().take_block_copies()

    def reset_prefix_cache(self) -> bool:
        return self.cache.reset()

    def wait_for_loads(self) -> None:
        self._loads.wait()

    # -- chapter 2's hooks

    def _has_room(
        self,
        num_blocks: int,
        num_kept_free: int,
        gone: Collection[Block] = (),
        found: Collection[Block] = (),
    ) -> bool:
        """What only the cache holds is as good as free; where that is not enough, loads give
        way."""
        num_free = self._num_free(gone, found)
        if num_blocks > num_free:
            self._loads.give_way()
            num_free = self._num_free(gone, found)
        return num_blocks + num_kept_free <= num_free

    def _num_free(self, gone: Collection[Block], found: Collection[Block]) -> int:
        num_free = self.pool.num_free_blocks + self.cache.num_evictable_blocks
        if not gone:
            return num_free  # this one is asked often
        num_freed = sum(block.ref_cnt == 1 + self.cache.owns(block) for block in gone)
        num_held = sum(block.ref_cnt - (block in gone) == 1 for block in found)
        return num_free + num_freed - num_held

    def _take_blocks(self, num_blocks: int, num_kept_free: int = 0) -> list[Block] | None:
        if not self._has_room(num_blocks, num_kept_free):
            return None  # before anything is evicted: a refusal changes nothing
        self.cache.evict(num_blocks - self.pool.num_free_blocks)
        return self.pool.allocate(num_blocks) if num_blocks else []

    def _take_blocks_for_load(self, num_blocks: int) -> list[Block] | None:
        """Not blocks that are still to be copied from: a load may write to them at once."""
        blocks = self._take_blocks(num_blocks)
        sources = {copy.src_block_id for copy in self._copies.values()}
        if blocks and not sources.isdisjoint(block.block_id for block in blocks):
            self.pool.free(blocks)
            return None
        return blocks

    def _touch(self, blocks: Sequence[Block]) -> None:
        cached, own = self._split(blocks)
        self.cache.touch(cached)
        self.pool.touch(own)

    def _release(self, blocks: Sequence[Block]) -> None:
        cached, own = self._split(blocks)
        self.pool.free(own[::-1])
        self.cache.release(cached)

    def _split(self, blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """A table's blocks: those in the cache come first, those of its own behind them."""
        num_cached = 0
        while num_cached < len(blocks) and self.cache.owns(blocks[num_cached]):
            num_cached += 1
        return list(blocks[:num_cached]), list(blocks[num_cached:])

    # -- checks

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        holders.update(self.cache.cached_block_ids())
        holders.update(block.block_id for block in self._loads.held_blocks())
        return holders

    def _check_sharing(self) -> None:
        """A cached block may be in any table, at its own depth; others only after a fork."""
        places: dict[int, tuple[object, int]] = {}
        for request_id, table in self._tables.items():
            num_published = self._states[request_id].num_published
            for index, block in enumerate(table.blocks):
                is_cached = self.cache.owns(block)
                assert is_cached or index >= num_published, f"{request_id!r} lost {block}"
                place = ("cached" if is_cached else table.family, index)
                assert places.setdefault(block.block_id, place) == place, (request_id, place)

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        """And the cache's. O(pool x depth)."""
        requests = list(requests)
        assert set(self._tables) <= set(self._states), "a table without a state"
        super().check_invariants(requests)
        self.cache.check_invariants()
        assert self._loads.request_ids().isdisjoint(self._tables), "loading, and running"
        for key, request_id in self._in_flight.items():
            assert self._states[request_id].in_flight == key, request_id
        paths = {prefix.block.block_id: prefix for prefix in self.cache.cached_prefixes()}
        for request in requests:
            block_ids = self.get_block_ids(request.request_id)
            for index in range(self._states[request.request_id].num_published):
                held = paths[block_ids[index]]
                tokens = request.all_token_ids[: (index + 1) * self.block_size]
                assert list(held.token_ids) == tokens, (request, index)
                assert held.extra_keys == normalise_extra_keys(request.extra_keys), request
