"""The manager of block tables: from a request's positions to slots in the KV memory.

A request sees one row of positions 0, 1, 2, ... Its block table says which block holds each stretch
of `block_size` of them, as a page table does in an operating system:

    block_size 4, table [7, 2, 5]      position 6  ->  block table[6 // 4] = 2, offset 6 % 4 = 2
                                                   ->  slot 2 * 4 + 2 = 10

    | written             | new tokens  | lookahead |        positions
    0                     ^ computed    ^           ^ end    the table must reach `end`
    | block 7 | block 2 | block 5 |        ...

Before a step the scheduler asks for slots for the positions the step writes. That takes a new block
only when a block boundary is crossed. A sampled token is known before its keys and values are
written, so after a step that fills the last block no new block is needed yet: only the two counters
decide, never `len % block_size`.

`fork` lets a second request share blocks by reference (several samples of one prompt). Full blocks
are never written again, so they stay shared. A shared block that one of its holders is about to
write is copied first: *copy on write*, decided when slots are asked for.

Invariants: a refusal changes nothing; a block is in two tables only after a fork; nobody ever gets
slots in a block that somebody else holds; `ref_cnt` is the number of holders.

vLLM shares samples' prompts through its prefix cache and so needs no copy; its first versions
copied on write as here. SGLang keeps a table of slots, one entry a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from block_pool import Block, BlockPool
from request import Request
from scheduler_interface import ComputedBlocks


@dataclass(slots=True)
class _BlockTable:
    """`block_ids[i]` is `blocks[i].block_id`. Forked requests have one `family`."""

    family: str
    blocks: list[Block] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def append(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.blocks.append(block)
            self.block_ids.append(block.block_id)

    def replace(self, index: int, block: Block) -> None:
        self.blocks[index] = block
        self.block_ids[index] = block.block_id


@dataclass(slots=True)
class _PendingCopy:
    request_id: str
    block_index: int
    src_block_id: int


_NOTHING = ComputedBlocks()


class KVCacheManager:
    """Block tables of all requests over one `BlockPool`.

    Requests are told apart by `request_id`; of a request only that and `num_computed_tokens` are
    read, and nothing of it is changed.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: it must be >= 1")
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[str, _BlockTable] = {}
        self._copies: dict[int, _PendingCopy] = {}  # by destination block id

    # -- what a scheduler asks

    def num_blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_when_empty(self, num_tokens: int) -> bool:
        """Could the whole pool hold this many positions of one request?"""
        return self.num_blocks_needed(num_tokens) <= self.pool.num_usable_blocks

    @property
    def capacity(self) -> int:
        """Positions that the whole pool holds."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def usage(self) -> float:
        """The share of usable blocks that somebody holds."""
        return 1 - self.pool.num_free_blocks / self.pool.num_usable_blocks

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.pool.num_usable_blocks - self.pool.num_free_blocks

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """What a cache knows of the request already: here nothing (chapter 3)."""
        return ComputedBlocks()

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        return ()

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """The request's block table; empty if it has none. Read-only and alive: copy it to keep
        it."""
        table = self._tables.get(request_id)
        return () if table is None else table.block_ids

    def slot_mapping(self, request_id: str, start: int, stop: int) -> list[int]:
        """The slots of positions `[start, stop)`. Raises `ValueError` outside the table."""
        block_ids = self.get_block_ids(request_id)
        if not 0 <= start <= stop <= len(block_ids) * self.block_size:
            raise ValueError(
                f"positions [{start}, {stop}) of request {request_id!r}: its table reaches "
                f"[0, {len(block_ids) * self.block_size})"
            )
        size = self.block_size
        return [block_ids[pos // size] * size + pos % size for pos in range(start, stop)]

    # -- what a scheduler does

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        """Give the request slots of its own for `num_new_tokens` behind the computed positions, and
        for `num_lookahead_tokens` behind those. O(blocks that these positions touch).

        `computed`, for a request without a table, is put in front, by reference; its positions
        count as computed here, though `request.num_computed_tokens` does not include them yet.
        False: refused, and nothing has changed; also if fewer than `num_blocks_kept_free` blocks
        would be left for others. Raises `ValueError` for negative counts, or for `computed` blocks
        when there is a table.
        """
        if num_new_tokens < 0 or num_lookahead_tokens < 0:
            raise ValueError(
                f"num_new_tokens is {num_new_tokens} and num_lookahead_tokens is "
                f"{num_lookahead_tokens}: both must be >= 0"
            )
        computed = computed or _NOTHING
        table = self._tables.get(request.request_id)
        if table is None:
            table = _BlockTable(family=request.request_id)
        elif computed.blocks:
            raise ValueError(f"request {request.request_id!r} has a block table already")

        start = request.num_computed_tokens + computed.num_tokens
        end = start + num_new_tokens + num_lookahead_tokens
        if self._is_in_own_block(table, start, end):
            return True  # most decode steps
        # Hold what was found before anything is taken, so that making room cannot evict it.
        self._touch(computed.blocks)
        held = table.blocks + computed.blocks if computed.blocks else table.blocks
        shared = self._shared(held, start, end)
        num_missing = max(self.num_blocks_needed(end) - len(held), 0)
        fresh = self._take_blocks(len(shared) + num_missing, num_blocks_kept_free)
        if fresh is None:
            self._release(computed.blocks)
            return False
        table.append(computed.blocks)
        for index, block in zip(shared, fresh, strict=False):
            self._copy_on_write(request.request_id, table, index, block)
        table.append(fresh[len(shared) :])
        if table.blocks:
            self._tables[request.request_id] = table
        return True

    def can_replace(
        self,
        victim: Request,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        """Would `allocate_slots` agree if `victim` had been freed first? No table changes. O(blocks
        of both)."""
        computed = computed or _NOTHING
        gone = set(self._tables[victim.request_id].blocks)
        table = self._tables.get(request.request_id) or _BlockTable(request.request_id)
        start = request.num_computed_tokens + computed.num_tokens
        end = start + num_new_tokens + num_lookahead_tokens
        if self._is_in_own_block(table, start, end, gone):
            return True
        held = table.blocks + computed.blocks
        num_missing = max(self.num_blocks_needed(end) - len(held), 0)
        num_wanted = len(self._shared(held, start, end, gone)) + num_missing
        return self._has_room(num_wanted, num_blocks_kept_free, gone, computed.blocks)

    def free(self, request: Request) -> None:
        """Give up the request's blocks, the deepest first. Nothing happens if it has none."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        self._release(table.blocks)
        if self._copies:
            for block in table.blocks:
                self._disown_copy(request.request_id, block)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share the blocks of its first `child.num_computed_tokens` positions.

        Those must be written by the time the step's block copies are made: not merely planned for
        the same step. Blocks the parent has reserved beyond them are not shared. Raises
        `ValueError` if the parent has not computed that many, or the child has a table.
        """
        table = self._tables.get(parent.request_id)
        num_shared = self.num_blocks_needed(child.num_computed_tokens)
        if child.request_id in self._tables:
            raise ValueError(f"request {child.request_id!r} has a block table already")
        if num_shared == 0:
            return
        if table is None or child.num_computed_tokens > parent.num_computed_tokens:
            raise ValueError(
                f"{child.request_id!r} cannot share {child.num_computed_tokens} positions: "
                f"{parent.request_id!r} has computed {parent.num_computed_tokens if table else 0}"
            )
        shared = table.blocks[:num_shared]
        self._touch(shared)
        forked = _BlockTable(table.family)
        forked.append(shared)
        self._tables[child.request_id] = forked

    def take_block_copies(self) -> list[tuple[str, int, int, int]]:
        """Copies to make before the next forward pass: `(request_id, block_index, src_block_id,
        dst_block_id)`. All at once: every source is read before any destination is written.
        """
        copies = [
            (copy.request_id, copy.block_index, copy.src_block_id, dst_block_id)
            for dst_block_id, copy in self._copies.items()
        ]
        self._copies.clear()
        return copies

    # What only a manager with a cache has to do (chapter 3); a scheduler asks every manager alike.

    def cache_blocks(self, request: Request) -> None:
        """The forward pass that wrote the computed positions is over: they may be shared."""

    def wait_for_loads(self) -> None:
        """Nothing can be computed before some KV has arrived: wait for it, for a moment."""

    def reset_prefix_cache(self) -> bool:
        return True

    # -- inside

    # `gone` are blocks of a table that counts as freed already.

    def _is_in_own_block(
        self, table: _BlockTable, start: int, end: int, gone: Collection[Block] = ()
    ) -> bool:
        """Are the positions `[start, end)` in one block, which the table has and nobody shares?"""
        index = start // self.block_size
        is_one_block = end <= (index + 1) * self.block_size and index < len(table.blocks)
        return is_one_block and table.blocks[index].ref_cnt - (table.blocks[index] in gone) == 1

    def _shared(
        self, held: Sequence[Block], start: int, end: int, gone: Collection[Block] = ()
    ) -> list[int]:
        """Which of the blocks that the positions `[start, end)` are in somebody else holds too."""
        stop = self.num_blocks_needed(end) if end > start else 0
        written = range(start // self.block_size, min(stop, len(held)))
        return [i for i in written if held[i].ref_cnt - (held[i] in gone) > 1]

    def _has_room(
        self,
        num_blocks: int,
        num_kept_free: int,
        gone: Collection[Block] = (),
        found: Collection[Block] = (),
    ) -> bool:
        """Can `num_blocks` be taken and `num_kept_free` be left, while `found` are held?"""
        num_freed = sum(block.ref_cnt == 1 for block in gone)
        return num_blocks + num_kept_free <= self.pool.num_free_blocks + num_freed

    def _touch(self, blocks: Sequence[Block]) -> None:
        """One holder more for blocks of one table, head first."""
        self.pool.touch(blocks)

    def _release(self, blocks: Sequence[Block]) -> None:
        """One holder less for blocks of one table, head first. The deepest is freed first."""
        self.pool.free(blocks[::-1])

    def _take_blocks(self, num_blocks: int, num_kept_free: int = 0) -> list[Block] | None:
        """`num_blocks` blocks, or None and nothing has changed. Chapter 3 makes room here."""
        if not self._has_room(num_blocks, num_kept_free):
            return None
        return self.pool.allocate(num_blocks) if num_blocks else []

    def _copy_on_write(self, request_id: str, table: _BlockTable, index: int, dst: Block) -> None:
        src = table.blocks[index]
        pending = self._copies.get(src.block_id)  # src itself is still to be filled by a copy
        src_block_id = src.block_id if pending is None else pending.src_block_id
        if src_block_id != dst.block_id:  # equal: the first source was freed, and is taken again
            self._copies[dst.block_id] = _PendingCopy(request_id, index, src_block_id)
        table.replace(index, dst)
        self._release([src])
        if pending is not None:
            self._disown_copy(request_id, src)

    def _disown_copy(self, request_id: str, dst: Block) -> None:
        """The request holds `dst` no more. A copy into it that nobody waits for is forgotten; one
        that a fork waits for becomes the fork's."""
        copy = self._copies.get(dst.block_id)
        if copy is None:
            return
        if dst.ref_cnt == 0:
            del self._copies[dst.block_id]
        elif copy.request_id == request_id:
            index = copy.block_index
            copy.request_id = next(
                other_id
                for other_id, other in self._tables.items()
                if other.block_ids[index : index + 1] == [dst.block_id]
            )

    def _count_holders(self) -> Counter[int]:
        """Holders of each block id. A cache adds its own (chapter 3)."""
        return Counter(block_id for table in self._tables.values() for block_id in table.block_ids)

    def _check_sharing(self) -> None:
        """A block is in several tables only after a fork, and at the same place in each."""
        places: dict[int, tuple[str, int]] = {}
        for request_id, table in self._tables.items():
            for place in ((table.family, index) for index in range(len(table.blocks))):
                block_id = table.block_ids[place[1]]
                assert places.setdefault(block_id, place) == place, (
                    f"block {block_id} stands in the table of {request_id!r} as {place} "
                    f"and elsewhere as {places[block_id]}"
                )

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        """Raise `AssertionError` if tables, pool and pending copies contradict each other, or the
        table of one of `requests` does not reach its computed positions. O(pool)."""
        self.pool.check_invariants()
        holders = self._count_holders()
        for block in self.pool.blocks:
            assert block.ref_cnt == holders[block.block_id], (
                f"{block} has {holders[block.block_id]} holders"
            )
        for request_id, table in self._tables.items():
            assert table.block_ids == [block.block_id for block in table.blocks], request_id
            assert table.blocks, f"request {request_id!r} has an empty table"
        self._check_sharing()
        for dst_block_id, copy in self._copies.items():
            block_ids = self.get_block_ids(copy.request_id)
            assert block_ids[copy.block_index] == dst_block_id != copy.src_block_id, copy
        for request in requests:
            num_slots = len(self.get_block_ids(request.request_id)) * self.block_size
            assert num_slots >= request.num_computed_tokens, (
                f"{request!r} has only {num_slots} slots"
            )
