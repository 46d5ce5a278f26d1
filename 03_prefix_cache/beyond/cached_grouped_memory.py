"""KV memory of layers in groups, with a prefix cache: a hit must hold in all groups.

    window 5, blocks of 2       positions     0 1   2 3   4 5   6 7   8 ..
    found in group 0                           5     9     3     8
    found in group 1                           0     0     4    11            0: not read
    computed next                                                     8 and on

Written blocks are published after their forward pass, in each group separately. Blocks that a
window leaves are freed after that, so they stay findable until they are reallocated. The rules for
waiting for a block that another request computes, and for blocks that are not trusted, are those of
`cached_kv_cache_manager.py`. A request that has a reservation, or was preempted and may get one,
does not share blocks of a window: a block that it frees must become free at that moment.

Invariants: those of `GroupedKVMemory`; the published blocks of a table are known to the cache under
their own prefix, or have been withdrawn; a block is in several tables only if it is or was known,
at one index of one group. vLLM's coordinator of several managers does this.

See 03_prefix_cache/beyond/GROUPS.md"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from block_pool import NULL_BLOCK_ID, Block, BlockPool
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from kv_memory import ComputedBlocks, NotReady
from request import Request
from request_chain import Link, RequestChains


@dataclass(slots=True)
class _InTables:
    """State of a request that has tables."""

    request: Request
    num_blocks: int  # published blocks at the front, in each group
    in_flight: bytes = b""  # hash of the block that it was the first to compute
    publishes: bool = True  # False: its blocks are not trusted, or may not be shared


class CachedGroupedMemory(GroupedKVMemory):
    """A `GroupedKVMemory` whose requests share the prefixes that any of them has computed."""

    cache: GroupedPrefixCache  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None],
        max_step_tokens: int,
    ) -> None:
        super().__init__(pool, block_size, windows, max_step_tokens)
        self.cache = GroupedPrefixCache(pool, block_size, windows)
        self._chains = RequestChains(block_size, ())
        self._published: dict[str, _InTables] = {}
        self._in_flight: dict[bytes, str] = {}  # block being computed -> request

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        """Like the method without groups. The blocks themselves are looked up again when they are
        pinned."""
        self.current_req_id = request.request_id
        if request.sampling_params.skip_reading_prefix_cache:
            return ComputedBlocks()
        chain = self._chains.chain(request, (request.num_tokens - 1) // self.block_size)
        num_blocks = self.cache.longest_hit(chain)
        if self._minds_sharing(request) and self._is_window_held(request, chain, num_blocks):
            num_blocks = 0
        self.blocking_req_id = None
        if wait_for_others and num_blocks < len(chain):
            self.blocking_req_id = self._in_flight.get(chain[num_blocks][0])
        found = ComputedBlocks(num_tokens=num_blocks * self.block_size)
        return NotReady.IN_FLIGHT if self.blocking_req_id else found

    def _minds_sharing(self, request: Request) -> bool:
        """Whether sharing blocks of a window is not allowed, because a request has a reservation or
        this one may get one. Blocks that such a request frees at the left must be available to it
        at the right, but a block that another request holds does not become free."""
        return bool(request.num_preemptions or self._reserved_ends)

    def _is_window_held(self, request: Request, chain: list[Link], num_blocks: int) -> bool:
        """Whether found blocks of a window are held by requests with which they may not be
        shared."""
        found = self.cache.find(chain, num_blocks)
        held = {block for g in self._windows for block in found[g.group] if block.ref_cnt}
        if not held or request.num_preemptions:
            return bool(held)
        owners = ((group, name) for group in self._windows for name in self._reserved_ends)
        return any(block in held for group, name in owners for block in group.held(name))

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Numbers that represent the blocks' contents, because a block may be missing in one
        group."""
        chain = self._chains.chain(request, (request.num_tokens - 1) // self.block_size)
        if request.sampling_params.skip_reading_prefix_cache:
            return ()
        return [int.from_bytes(name[:8]) for name, _ in chain[: self.cache.longest_hit(chain)]]

    def _find(self, request: Request, computed: ComputedBlocks) -> list[list[Block]]:
        num_blocks = computed.num_tokens // self.block_size
        return self.cache.find(self._chains.chain(request, num_blocks), num_blocks)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        name = request.request_id
        computed = computed or ComputedBlocks()
        self.current_req_id = name
        is_admission = name not in self._published
        num_found = computed.num_tokens // self.block_size
        if num_found:
            found = self._find(request, computed)
            self.cache.hold([block for blocks in found for block in blocks])
            for group, blocks in zip(self.groups, found, strict=True):
                group.begin_with(name, blocks, num_found)
        lengths = list(map(len, self.get_tables(name)))
        if not super().allocate_slots(request, num_new_tokens, num_reserved_tokens, computed):
            if num_found:
                super().free(request)
            return False
        for group, length in zip(self.groups, lengths, strict=True):
            self.cache.remove_blocks(group.tail(name, length))
        if is_admission:
            self._published[name] = _InTables(request, num_found)
            reads = not request.sampling_params.skip_reading_prefix_cache
            if request.num_preemptions == 0 and reads:
                self.cache.stats.record(request.num_tokens, computed.num_tokens)
        end = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        self._note_in_flight(request, min(end, request.num_tokens))
        return True

    def _note_in_flight(self, request: Request, end: int) -> None:
        """Record the block that the request publishes next as being computed, if the step fills
        it."""
        state = self._published[request.request_id]
        num_blocks = state.num_blocks + 1
        is_next_known = state.in_flight or not state.publishes
        if not is_next_known and num_blocks * self.block_size <= end:
            block_hash = self._chains.known(request, num_blocks)[num_blocks - 1][0]
            if self._in_flight.setdefault(block_hash, request.request_id) == request.request_id:
                state.in_flight = block_hash

    def _may_be_given_up(self, request: Request) -> int:
        """Entries that can be freed, once they are published. With steps in flight, that is later
        than they are computed, so tokens of one more step are held."""
        state = self._published.get(request.request_id)
        if state is None or not state.publishes:
            return super()._may_be_given_up(request)
        return state.num_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks, in all groups. O(new full blocks)."""
        state = self._published.get(request.request_id)
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if state is None or num_full <= state.num_blocks or not state.publishes:
            return
        self.current_req_id = request.request_id
        chain = self._chains.known(request, num_full)
        given = chain[state.num_blocks : num_full]
        if self._minds_sharing(request) and any(
            self.cache.is_used(group.group, link) for group in self._windows for link in given
        ):
            state.publishes = False
            self._release_waiters(state)
            return
        for group in self.groups:
            blocks = group.tail(request.request_id, state.num_blocks)
            for index, block in zip(range(state.num_blocks, num_full), blocks):
                kept = self.cache.publish(group.group, chain, index, block)
                if kept is not block:
                    group.replace(request.request_id, index, kept)
        state.num_blocks = num_full
        self._release_waiters(state)

    def _release_waiters(self, state: _InTables) -> None:
        """Stop other requests from waiting for its block: it is published, or never will be."""
        self._in_flight.pop(state.in_flight, None)
        state.in_flight = b""

    def free(self, request: Request) -> None:
        """Free the request's blocks. Published blocks stay findable until they are reallocated,
        unless the request's KV is not trusted."""
        state = self._published.pop(request.request_id, None)
        if state is not None:
            self._release_waiters(state)
            if request.has_bad_kv:
                self._withdraw()
        super().free(request)

    def _withdraw(self) -> None:
        """Empty the cache, because some content is not trusted. Requests that have tables keep
        them, and publish nothing more."""
        self.cache.clear()
        self._in_flight.clear()
        for state in self._published.values():
            state.publishes = False
            state.num_blocks = 0
            state.in_flight = b""

    def clear(self) -> None:
        """Clear the tables and the cache."""
        self._published.clear()
        self._in_flight.clear()
        self.cache.clear()
        super().clear()

    def _check_sharing(self) -> None:
        places: dict[int, tuple[object, int, int]] = {}
        for name, state in self._published.items():
            for number, ids in enumerate(self.get_tables(name)):
                for index, block_id in enumerate(ids):
                    is_known = self.cache.is_cached(self.pool.blocks[block_id])
                    is_shared = is_known or not state.publishes
                    place = ("shared" if is_shared else name, number, index)
                    is_alone = places.setdefault(block_id, place) == place
                    assert is_alone or block_id == NULL_BLOCK_ID, (name, place)

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        requests = list(requests)
        assert self._published.keys() == self.groups[0].requests(), "tables without a state"
        super().check_invariants(requests)
        self.cache.check_invariants()
        for block_hash, name in self._in_flight.items():
            assert self._published[name].in_flight == block_hash, name
        for request in requests:
            state = self._published[request.request_id]
            chain = self._chains.chain(request, state.num_blocks)
            tokens = [token for _, of_block in chain for token in of_block]
            assert tokens == request.all_token_ids[: len(tokens)], request
            for group in self.groups:
                blocks = group.held(request.request_id)
                first = group.num_given_up[request.request_id]
                for index, block in zip(range(first, state.num_blocks), blocks):
                    key = group.group, chain[index][0]
                    assert self.cache.key_of(block) == key, (request, key)
