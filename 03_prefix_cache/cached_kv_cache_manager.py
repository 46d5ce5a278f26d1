"""Chapter 2's manager of block tables, combined with any prefix cache.

A request's table then has three parts:

    | cached when it was admitted | published since | its own: partial, or still to be written |
    0                                               ^ num_published, in blocks         table's end

A full block is published (made findable by other requests) after the forward pass that wrote it,
never before, so a step that fails leaves no wrong block in the cache. While a request computes the
block that it will publish next, other requests with the same content are not ready; one step later
they hit the block.

If a request's logits are NaN, its KV is not trusted, and it is unknown from which block on: the
cache is emptied, and requests that have a table keep running but publish nothing more.

Invariants: those of the manager and of the cache; the published blocks of a table are owned by the
cache, in the order of the request's prefix. vLLM publishes a block when it is scheduled; SGLang's
`lpm` order moves a request whose uncached prefix an earlier one shares to the end of the queue.

See 03_prefix_cache/README.md#the-manager-with-a-cache"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from block_pool import Block, BlockPool
from kv_cache_manager import BlockTable
from kv_memory import ComputedBlocks, NotReady, UncachedKVCacheManager
from prefix_cache import MatchCursor, PrefixCache, extra_keys_of, normalise_extra_keys
from request import Request
from scheduler_interface import BlockTableUpdate

_BlockKey = tuple[object, ...]  # (id of the cached block before it, extra keys, its tokens)
_NOTHING_COMPUTED = ComputedBlocks()


@dataclass(slots=True)
class _CacheState:
    """The manager's state for one request, from its first lookup until its blocks are freed. A
    request that has blocks but no state publishes none: its KV is not trusted."""

    cursor: MatchCursor = field(default_factory=MatchCursor)
    num_published: int = 0  # blocks at the front of its table that the cache owns
    in_flight: _BlockKey = ()  # the block that it was the first to compute


class CachedKVCacheManager(UncachedKVCacheManager):
    """A `UncachedKVCacheManager` whose requests share the prefixes that any of them has computed.
    `cache` works on the same `pool` and block size."""

    def __init__(self, pool: BlockPool, block_size: int, cache: PrefixCache) -> None:
        super().__init__(pool, block_size)
        self.cache: PrefixCache = cache
        self._states: dict[str, _CacheState] = {}
        self._in_flight: dict[_BlockKey, str] = {}  # block being computed -> request
        self._moves: list[BlockTableUpdate] = []  # not yet sent to the runner

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that requests hold. Blocks that are only cached count as free."""
        return super().num_blocks_in_use - self.cache.num_evictable_blocks

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        """Find the longest cached prefix, short of the last token, which must be computed because
        its logits are needed. Returns `NotReady` if a running request is computing the next
        block."""
        computed = self._get_computed_blocks(request)
        if not wait_for_others or request.sampling_params.skip_reading_prefix_cache:
            return computed
        key = self._key(request, computed.blocks, len(computed.blocks))
        has_next = computed.num_tokens + self.block_size < request.num_tokens
        self.blocking_req_id = self._in_flight.get(key) if has_next else None
        return NotReady.IN_FLIGHT if self.blocking_req_id else computed

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Ids of the longest cached prefix. The blocks are marked as used now, but are not
        held."""
        return [block.block_id for block in self._get_computed_blocks(request).blocks]

    def _get_computed_blocks(self, request: Request) -> ComputedBlocks:
        self.current_req_id = request.request_id
        if request.sampling_params.skip_reading_prefix_cache:
            return _NOTHING_COMPUTED
        state = self._states.setdefault(request.request_id, _CacheState())
        num_usable = (request.num_tokens - 1) // self.block_size * self.block_size
        token_ids = request.all_token_ids[:num_usable]
        match = self.cache.match_prefix(token_ids, extra_keys_of(request), state.cursor)
        blocks = [self.pool.blocks[block.block_id] for block in match.blocks]
        return ComputedBlocks(blocks, match.num_cached_tokens)

    def _key(self, request: Request, blocks: Sequence[Block], index: int) -> _BlockKey:
        """The content of block `index` as a key. If the blocks before it are cached, equal prefixes
        have equal block ids."""
        start = index * self.block_size
        tokens = tuple(request.all_token_ids[start : start + self.block_size])
        parent_id = blocks[index - 1].block_id if index else None
        return (parent_id, normalise_extra_keys(extra_keys_of(request)), tokens)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        """Allocate slots, with the `computed` blocks shared at the front of the table.
        `request.num_computed_tokens` does not include them yet."""
        self.current_req_id = request.request_id
        is_admission = request.request_id not in self._tables
        computed = computed or _NOTHING_COMPUTED
        if computed.blocks:
            # Touched before anything is allocated, so that the allocation cannot evict them.
            self.cache.touch(computed.blocks)
            table = self._tables[request.request_id] = BlockTable()
            table.append(computed.blocks)
        end = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        if not self._grow_table_to(request.request_id, end + num_reserved_tokens):
            if computed.blocks:
                super().free(request)
            return False
        if is_admission:
            self._begin(request, computed)
        self._note_in_flight(request, end)
        return True

    def _begin(self, request: Request, computed: ComputedBlocks) -> None:
        """Set up the state of a request that got its first slots, after `computed`."""
        state = self._states.setdefault(request.request_id, _CacheState())
        state.num_published = len(computed.blocks)
        reads = not request.sampling_params.skip_reading_prefix_cache
        if request.num_preemptions == 0 and reads:
            self.cache.stats.record(request.num_tokens, computed.num_tokens)

    def _note_in_flight(self, request: Request, num_planned: int) -> None:
        """Record the block that the request publishes next as being computed, if the step fills
        it."""
        state = self._states.get(request.request_id)
        if state is None or state.in_flight:
            return
        end = (state.num_published + 1) * self.block_size
        if end <= min(num_planned, request.num_tokens):
            blocks = self._tables[request.request_id].blocks
            key = self._key(request, blocks, state.num_published)
            if self._in_flight.setdefault(key, request.request_id) == request.request_id:
                state.in_flight = key

    def _num_allocatable(self, num_wanted: int, found: list[Block], freeing: list[Block]) -> int:
        freed = set(freeing)
        num_free = self._num_free_or_evictable()
        num_free += sum(block.ref_cnt == 1 + self.cache.owns(block) for block in freed)
        # Found blocks that no request uses are evictable now, but no longer when they are held.
        return num_free - sum(block.ref_cnt - (block in freed) == 1 for block in found)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks. If another request published the same content first,
        the table switches to that block. O(new full blocks), so most steps do nothing."""
        table = self._tables.get(request.request_id)
        state = self._states.get(request.request_id)
        if table is None or state is None:
            return
        first = state.num_published
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= first:
            return
        self.current_req_id = request.request_id
        given = table.blocks[first:num_full]
        cached = self.cache.insert(
            request.all_token_ids, given, extra_keys_of(request), start=first, cursor=state.cursor
        )
        for index, kept in enumerate(cached, first):
            if kept is not table.blocks[index]:
                table.replace(index, kept)
                self._moves.append(BlockTableUpdate(request.request_id, index, kept.block_id))
        state.num_published = num_full
        self._in_flight.pop(state.in_flight, None)
        state.in_flight = ()

    def free(self, request: Request) -> None:
        """Free the request's blocks. Published blocks stay cached until they are evicted, unless
        the request's KV is not trusted."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._in_flight.pop(state.in_flight, None)
        if request.has_bad_kv:
            self._withdraw(request)
        self._moves = [move for move in self._moves if move.req_id != request.request_id]
        super().free(request)

    def _withdraw(self, request: Request) -> None:
        """Empty the cache, because the KV of this request is not trusted. No running request
        publishes any more."""
        self.cache.withdraw_all()
        self._in_flight.clear()
        self._states.clear()

    def clear(self) -> None:
        """Clear the tables and the cache."""
        for container in (self._states, self._in_flight, self._moves):
            container.clear()
        self.cache.clear()
        super().clear()

    def pop_table_updates(self) -> list[BlockTableUpdate]:
        moves = self._moves
        self._moves = []
        return moves

    def _num_free_or_evictable(self) -> int:
        return self.pool.num_free_blocks + self.cache.num_evictable_blocks

    def _allocate_blocks(self, num_blocks: int) -> list[Block] | None:
        num_missing = num_blocks - self.pool.num_free_blocks
        if num_missing > self.cache.num_evictable_blocks:
            return None  # before anything is evicted, so that a refusal changes nothing
        if num_missing > 0:
            self.cache.evict(num_missing)
        return super()._allocate_blocks(num_blocks)

    def _release(self, blocks: Sequence[Block]) -> None:
        """Free a table's blocks: cached ones come first, then the table's own."""
        num_cached = sum(self.cache.owns(block) for block in blocks)
        super()._release(blocks[num_cached:])
        self.cache.release(blocks[:num_cached])

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        holders.update(self.cache.cached_block_ids())
        return holders

    def _check_sharing(self) -> None:
        """Cached blocks may be in several tables."""

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        super().check_invariants(requests)
        self.cache.check_invariants()
