"""KV memory of layers in groups, with a prefix cache: a hit must hold in all groups.

    window 5, blocks of 2       positions     0 1   2 3   4 5   6 7   8 ..
    found in group 0                           5     9     3     8
    found in group 1                           0     0     4    11            0: not read
    computed next                                                     8 and on

Written blocks are published after their forward pass, in each group separately. Blocks that a
window leaves are freed after that, so they stay findable until they are reallocated. The rule for
blocks that are not trusted is that of `cached_kv_cache_manager.py`. A request that has a
reservation, or was preempted and may get one, shares no blocks: a block that it frees must become
free at that moment. No request waits for what another computes.

Invariants: those of `GroupedKVMemory`; the published blocks of a table are known to the cache under
their own prefix, or have been withdrawn; a block is in several tables only if it is or was known,
at one index of one group. vLLM's coordinator of several managers does this.

See 03_prefix_cache/beyond/GROUPS.md"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from block_pool import Block, BlockPool
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from kv_memory import ComputedBlocks
from request import Request
from request_chain import RequestChains


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
        # Published blocks at the front of each group, by request. A request that has tables and is
        # not here publishes nothing: its blocks are not trusted, or may not be shared.
        self._num_published: dict[str, int] = {}

    def get_computed_blocks(self, request: Request, wait_for_others: bool = True) -> ComputedBlocks:
        """Like the method without groups, but no request waits for what another computes. The
        blocks themselves are looked up again when they are pinned."""
        self.current_req_id = request.request_id
        if request.sampling_params.skip_reading_prefix_cache or request.num_preemptions:
            return ComputedBlocks()
        chain = self._chains.chain(request, (request.num_tokens - 1) // self.block_size)
        return ComputedBlocks(num_tokens=self.cache.longest_hit(chain) * self.block_size)

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Numbers that represent the blocks' contents, because a block may be missing in one
        group."""
        if request.sampling_params.skip_reading_prefix_cache:
            return ()
        chain = self._chains.chain(request, (request.num_tokens - 1) // self.block_size)
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
        is_admission = not self.get_block_ids(name)
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
        if is_admission and request.num_preemptions == 0:
            if name not in self._reserved_ends:
                self._num_published[name] = num_found
            if not request.sampling_params.skip_reading_prefix_cache:
                self.cache.stats.record(request.num_tokens, computed.num_tokens)
        return True

    def _may_be_given_up(self, request: Request) -> int:
        """Entries that can be freed, once they are published. With steps in flight, that is later
        than they are computed, so tokens of one more step are held."""
        num_published = self._num_published.get(request.request_id)
        if num_published is None:
            return super()._may_be_given_up(request)
        return num_published

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks, in all groups. O(new full blocks)."""
        name = request.request_id
        first = self._num_published.get(name)
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if first is None or num_full <= first:
            return
        self.current_req_id = name
        chain = self._chains.known(request, num_full)
        for group in self.groups:
            for index, block in zip(range(first, num_full), group.tail(name, first)):
                kept = self.cache.publish(group.group, chain, index, block)
                if kept is not block:
                    group.replace(name, index, kept)
        self._num_published[name] = num_full

    def free(self, request: Request) -> None:
        """Free the request's blocks. Published blocks stay findable until they are reallocated,
        unless the request's KV is not trusted: then the cache is emptied, and no running request
        publishes any more."""
        self._num_published.pop(request.request_id, None)
        if request.has_bad_kv:
            self.cache.clear()
            self._num_published.clear()
        super().free(request)

    def clear(self) -> None:
        """Clear the tables and the cache."""
        self._num_published.clear()
        self.cache.clear()
        super().clear()

    def _check_sharing(self) -> None:
        """Cached blocks may be in several tables."""

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        super().check_invariants(requests)
        self.cache.check_invariants()
