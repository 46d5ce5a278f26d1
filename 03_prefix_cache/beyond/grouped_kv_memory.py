"""KV memory of layers in groups: a block table for each group of a request, over one pool.

    window 5, blocks of 2       positions     0 1   2 3   4 5   6 7   8 9
    group 0    every position                  5     9     3     8     7
    group 1    what a window sees              0     0     4    11     2      0: freed

Token 9 is computed next: it sees 5 to 9, and no later token sees 0 to 4. A block is freed when all
its positions are before the ones that the next token sees. That happens at the request's own next
step, and depends on computed tokens, never on the next plan. (With a step in flight, its tokens
count as computed: it reads its blocks before the next step, which may get them, writes.) The entry
becomes the null block, and the runner is notified.

So a request holds at most `ceil((window - 1 + step) / block_size) + 1` blocks in a group with a
window, whatever its length, if a step computes up to `step` of its tokens. A reservation for a
whole request, at admission, is not larger than that: the request gets the blocks that it frees at
the left again at the right, before any other request can. (Slots allocated later, for draft tokens,
are not a reservation.)

Invariants: a request has memory in all groups, or in none; the entry at position p of a group's
table is held, or no later token sees it. A refused allocation leaves every table unchanged, except
for blocks that no token sees any longer.

A hit must hold in all groups:

    window 5, blocks of 2       positions     0 1   2 3   4 5   6 7   8 ..
    found in group 0                           5     9     3     8
    found in group 1                           0     0     4    11            0: not read
    computed next                                                     8 and on

Written blocks are published after their forward pass, in each group separately. Blocks that a
window leaves are freed after that, so they stay findable until they are reallocated. The rule for
blocks that are not trusted is that of `cached_kv_cache_manager.py`. A request that has a
reservation, or was preempted and may get one, shares no blocks: a block that it frees must become
free at that moment. No request waits for what another computes. vLLM's coordinator of several
managers does this.

See 02_paged_kv/beyond/WINDOWS.md#layers-of-two-kinds and 03_prefix_cache/beyond/GROUPS.md"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from block_pool import NULL_BLOCK_ID, Block, BlockPool
from grouped_prefix_cache import GroupedPrefixCache
from kv_cache_manager import BlockTable
from kv_memory import ComputedBlocks, UncachedKVCacheManager
from request import Request
from request_chain import Link, RequestChains
from scheduler_interface import BlockTableUpdate


class OneGroup(UncachedKVCacheManager):
    """The tables of group number `group`. Its layers see `window` positions; None: every one."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        group: int,
        window: int | None,
        max_step_tokens: int,
    ) -> None:
        super().__init__(pool, block_size)
        self.group = group
        self.window = window
        self.max_step_tokens = max_step_tokens
        self.moves: list[BlockTableUpdate] = []
        self.num_given_up: Counter[str] = Counter()  # freed entries at the left of a table

    def max_reserved(self, num_given_up: int, end: int) -> int:
        """Length of the table for a request that has reserved up to `end`."""
        num_needed = self.num_blocks_needed(end)
        if self.window is None:
            return num_needed
        max_held_blocks = max_window_blocks(self.window, self.block_size, self.max_step_tokens)
        return min(num_needed, num_given_up + max_held_blocks)

    def num_unseen_blocks(self, num_computed_tokens: int) -> int:
        """Blocks at the left that no later token sees."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def give_up(self, request: Request, num_freeable: int) -> None:
        """O(freed blocks)."""
        name = request.request_id
        first = self.num_given_up[name]
        end = min(self.num_unseen_blocks(request.num_computed_tokens), num_freeable)
        if end > first and name in self._tables:
            self._release(self._tables[name].blocks[first:end])
            for index in range(first, end):
                self.replace(name, index, self.pool.blocks[NULL_BLOCK_ID])
            self.num_given_up[name] = end

    def begin_with(self, request_id: str, found: Sequence[Block], num_blocks: int) -> None:
        """Begin the request's table with `num_blocks` entries, the last of which are `found`."""
        self.num_given_up[request_id] = num_blocks - len(found)
        table = self._tables[request_id] = BlockTable()
        table.append([self.pool.blocks[NULL_BLOCK_ID]] * (num_blocks - len(found)))
        table.append(found)

    def lengthen(self, request: Request, num_blocks: int) -> bool:
        return self._grow_table_to(request.request_id, num_blocks * self.block_size)

    def replace(self, request_id: str, index: int, block: Block) -> None:
        """Replace an entry, and record the change for the runner."""
        self._tables[request_id].replace(index, block)
        self.moves.append(BlockTableUpdate(request_id, index, block.block_id, self.group))

    def remove_table(self, request_id: str) -> Sequence[Block | None]:
        """Remove a request's table. Returns its blocks, with None for freed entries."""
        self.moves = [move for move in self.moves if move.req_id != request_id]
        self.req_ids_with_new_blocks.discard(request_id)
        num_given_up = self.num_given_up.pop(request_id, 0)
        table = self._tables.pop(request_id, None)
        return [] if table is None else [None] * num_given_up + table.blocks[num_given_up:]

    def tail(self, request_id: str, first: int) -> list[Block]:
        return self._tables[request_id].blocks[first:]

    def held(self, request_id: str) -> list[Block]:
        return self.tail(request_id, self.num_given_up[request_id])

    def clear_tables(self) -> None:
        for container in (self._tables, self.moves, self.num_given_up):
            container.clear()

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        del holders[NULL_BLOCK_ID]
        return holders


class GroupedKVMemory(UncachedKVCacheManager):
    """A `UncachedKVCacheManager` with a table for each of `windows`; None is a group that sees
    every position. A step computes at most `max_step_tokens` of a request. With `has_cache`,
    requests share the prefixes that any of them has computed."""

    cache: GroupedPrefixCache | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None],
        max_step_tokens: int,
        has_cache: bool = False,
    ) -> None:
        super().__init__(pool, block_size)
        self.windows = windows
        self.max_step_tokens = max_step_tokens
        self.cache = GroupedPrefixCache(pool, block_size, windows) if has_cache else None
        self.groups: list[OneGroup] = []
        for number, window in enumerate(windows):
            group = OneGroup(pool, block_size, number, window, max_step_tokens)
            group.req_ids_with_new_blocks = self.req_ids_with_new_blocks
            self.groups.append(group)
        self._reserved_ends: dict[str, int] = {}
        self._chains = RequestChains(block_size, ())
        # Published blocks at the front of each group, by request. A request that has tables and is
        # not here publishes nothing: its blocks are not trusted, or may not be shared.
        self._num_published: dict[str, int] = {}

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` positions holds at a time, in all groups."""
        return max_blocks(num_tokens, self.block_size, self.windows, self.max_step_tokens)

    @property
    def capacity(self) -> int:
        """The longest request that the whole memory can hold alone. If all groups have windows,
        there is no limit."""
        lengths = range(1, 1 << 40)
        num_usable = self.pool.num_usable_blocks
        return bisect_right(lengths, num_usable, key=self.num_blocks_needed)

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """The table of the first group."""
        return self.groups[0].get_block_ids(request_id)

    def get_tables(self, request_id: str) -> tuple[Sequence[int], ...]:
        return tuple(group.get_block_ids(request_id) for group in self.groups)

    # -- a hit

    def get_computed_blocks(self, request: Request, wait_for_others: bool = True) -> ComputedBlocks:
        """Like the method without groups, but no request waits for what another computes. The
        blocks themselves are looked up again when they are pinned."""
        self.current_req_id = request.request_id
        if request.num_preemptions:
            return ComputedBlocks()
        return ComputedBlocks(num_tokens=len(self._cached_links(request)) * self.block_size)

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Numbers that represent the blocks' contents, because a block may be missing in one
        group."""
        return [int.from_bytes(name[:8]) for name, _ in self._cached_links(request)]

    def _cached_links(self, request: Request) -> Sequence[Link]:
        """The links of the longest prefix that holds in every group."""
        if self.cache is None or request.sampling_params.skip_reading_prefix_cache:
            return ()
        chain = self._chains.chain(request, (request.num_tokens - 1) // self.block_size)
        return chain[: self.cache.longest_hit(chain)]

    def _find(self, request: Request, computed: ComputedBlocks) -> list[list[Block]]:
        """The blocks of `computed`, by group."""
        num_blocks = computed.num_tokens // self.block_size
        if self.cache is None or num_blocks == 0:
            return [[] for _ in self.groups]
        return self.cache.find(self._chains.chain(request, num_blocks), num_blocks)

    # -- slots

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        name = request.request_id
        self.current_req_id = name
        computed = computed or ComputedBlocks()
        is_admission = not self.get_block_ids(name)
        if is_admission:
            self._begin_with(request, computed)
        for group in self.groups:
            group.give_up(request, self._may_be_given_up(request))
        end = request.num_computed_tokens + computed.num_tokens + num_new_tokens
        reserved_end = max(self._reserved_ends.get(name, 0), end + num_reserved_tokens)
        num_new = 0
        lengths = []
        for group in self.groups:
            num_reserved = group.max_reserved(group.num_given_up[name], reserved_end)
            lengths.append(max(group.num_blocks_needed(end), num_reserved))
            num_new += max(0, lengths[-1] - len(group.get_block_ids(name)))
        if num_new > self.pool.num_free_blocks:
            if is_admission:
                self.free(request)
            return False
        for group, length in zip(self.groups, lengths, strict=True):
            first = len(group.get_block_ids(name))
            group.lengthen(request, length)
            if self.cache is not None:
                self.cache.remove_blocks(group.tail(name, first))
        if is_admission:
            if num_reserved_tokens:
                self._reserved_ends[name] = reserved_end
            self._admitted(request, computed)
        return True

    def _begin_with(self, request: Request, computed: ComputedBlocks) -> None:
        """Begin the request's tables with the blocks of `computed`, pinned."""
        num_found = computed.num_tokens // self.block_size
        if self.cache is not None and num_found:
            found = self._find(request, computed)
            self.cache.hold([block for blocks in found for block in blocks])
            for group, blocks in zip(self.groups, found, strict=True):
                group.begin_with(request.request_id, blocks, num_found)

    def _admitted(self, request: Request, computed: ComputedBlocks) -> None:
        if self.cache is None or request.num_preemptions:
            return
        if request.request_id not in self._reserved_ends:
            self._num_published[request.request_id] = computed.num_tokens // self.block_size
        if not request.sampling_params.skip_reading_prefix_cache:
            self.cache.stats.record(request.num_tokens, computed.num_tokens)

    def _may_be_given_up(self, request: Request) -> int:
        """Entries that can be freed, once they are published, if no later token sees them. With
        steps in flight, that is later than they are computed, so tokens of one more step are
        held."""
        num_computed = request.num_computed_tokens // self.block_size
        return self._num_published.get(request.request_id, num_computed)

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_watermark_blocks: int = 0,
        freeing: Request | None = None,
    ) -> bool:
        found = self._find(request, computed)
        num_new = num_watermark_blocks
        num_found = computed.num_tokens // self.block_size
        for group, blocks in zip(self.groups, found, strict=True):
            end = computed.num_tokens + num_tokens
            num_new += group.max_reserved(num_found - len(blocks), end) - num_found
        released: list[Block] = []
        if freeing is not None:
            released = [b for group in self.groups for b in group.held(freeing.request_id)]
        num_free = self.pool.num_free_blocks + sum(block.ref_cnt == 1 for block in released)
        # Found blocks that no request uses are free now, but no longer when they are pinned.
        taken = (b.ref_cnt == (b in released) for blocks in found for b in blocks)
        return num_new + sum(taken) <= num_free

    def num_written_slots(self, starts: Collection[int], num_tokens: int) -> int:
        """Slots in all groups that a later token can see."""
        num_slots = len(self.groups) * num_tokens
        for window in self.windows:
            num_slots += sum(starts if window is None else (min(n, window - 1) for n in starts))
        return num_slots

    # -- after a step

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks, in all groups. O(new full blocks)."""
        name = request.request_id
        first = self._num_published.get(name)
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if self.cache is None or first is None or num_full <= first:
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
        """Free the deepest blocks of all groups first, because a prefix is useful only if all
        groups have it. Published blocks stay findable until they are reallocated, unless the
        request's KV is not trusted: then the cache is emptied, and no running request publishes any
        more."""
        name = request.request_id
        self.current_req_id = name
        self._reserved_ends.pop(name, None)
        self._num_published.pop(name, None)
        if self.cache is not None and request.has_bad_kv:
            self.cache.clear()
            self._num_published.clear()
        tables = [group.remove_table(name) for group in self.groups]
        depths = [*zip_longest(*tables)][::-1]
        self.pool.free([block for blocks in depths for block in blocks if block is not None])

    def clear(self) -> None:
        """Clear the tables and the cache."""
        self._reserved_ends.clear()
        self._num_published.clear()
        for group in self.groups:
            group.clear_tables()
        if self.cache is not None:
            self.cache.clear()
        super().clear()

    def pop_table_updates(self) -> list[BlockTableUpdate]:
        moves = [move for group in self.groups for move in group.moves]
        for group in self.groups:
            group.moves = []
        return moves

    def _count_holders(self) -> Counter[int]:
        return sum((group._count_holders() for group in self.groups), Counter())

    def _check_sharing(self) -> None:
        """Cached blocks may be in several tables."""

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        super().check_invariants(requests)
        if self.cache is not None:
            self.cache.check_invariants()


def max_blocks(
    num_tokens: int, block_size: int, windows: Sequence[int | None], max_step_tokens: int
) -> int:
    """Blocks that a request of `num_tokens` positions holds at a time in groups with `windows`, if
    a step computes at most `max_step_tokens`."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if w is None else min(whole, max_window_blocks(w, block_size, max_step_tokens))
        for w in windows
    )


def max_window_blocks(window: int, block_size: int, max_step_tokens: int) -> int:
    """Blocks that hold `window - 1` positions and a step after them, wherever they begin."""
    return -(-(window - 1 + max_step_tokens) // block_size) + 1
