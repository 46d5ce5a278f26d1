"""KV memory of layers in groups: a block table for each group of a request, over one pool.

    window 5, blocks of 2       positions     0 1   2 3   4 5   6 7   8 9
    group 0    every position                  5     9     3     8     7
    group 1    what a window sees              0     0     4    11     2      0: given up

Token 9 is computed next: it sees 5 to 9, and no token to come sees 0 to 4. A block is given up when
all that is in it lies in front of what the next token sees, at the request's own next step: counted
from what is computed, never from what is planned. Its entry becomes the null block, and the runner
is told.

So a request holds at most `ceil((window - 1 + step) / block_size) + 1` blocks in a group with a
window, whatever its length, if a step computes up to `step` of its tokens. Room that is reserved
for a whole request is no more than that, either: what it gives up at the left it gets again at the
right, before anybody else can.

Invariants: a request has room in all groups, or in none; what stands at position p of a group's
table is held, or no token to come sees it. A refusal leaves every table as it was, but for blocks
that nobody sees any more.

No prefix is kept here. vLLM's coordinator of several managers does this and keeps prefixes, too."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from block_pool import NULL_BLOCK_ID, Block, BlockPool
from kv_memory import ComputedBlocks, KVMemory
from request import Request, check_integers
from scheduler_interface import BlockMove


class OneGroup(KVMemory):
    """The tables of group number `group`. Its layers see everything."""

    def __init__(self, pool: BlockPool, block_size: int, group: int) -> None:
        super().__init__(pool, block_size)
        self.group = group

    def num_blocks_wanted(self, request_id: str, end: int, reserved_end: int) -> int:
        """How long the table is to be: it reaches `end`, and what is reserved."""
        return self.num_blocks_needed(max(end, reserved_end))

    def lengthen(self, request: Request, num_blocks: int) -> bool:
        return self._reach(request.request_id, num_blocks * self.block_size)

    def forget_all(self) -> None:
        self._tables.clear()


class WindowGroup(OneGroup):
    """The tables of a group whose layers see a window. A request holds at most `most` blocks."""

    def __init__(
        self, pool: BlockPool, block_size: int, group: int, window: int, most: int
    ) -> None:
        super().__init__(pool, block_size, group)
        self.window, self.most = window, most
        self.moves: list[BlockMove] = []
        self._num_given_up: dict[str, int] = {}  # entries at the left of a table

    def num_blocks_wanted(self, request_id: str, end: int, reserved_end: int) -> int:
        num_reachable = self._num_given_up.get(request_id, 0) + self.most
        reserved = min(self.num_blocks_needed(reserved_end), num_reachable)
        return max(self.num_blocks_needed(end), reserved)

    def give_up(self, request: Request) -> None:
        """What no token to come sees. O(blocks that are given up)."""
        name, size = request.request_id, self.block_size
        num_unseen = max(0, request.num_computed_tokens - self.window + 1) // size
        first = self._num_given_up.get(name, 0)
        if num_unseen <= first or name not in self._tables:
            return
        table, null = self._tables[name], self.pool.blocks[NULL_BLOCK_ID]
        self._release(table.blocks[first:num_unseen])
        for index in range(first, num_unseen):
            table.replace(index, null)
            self.moves.append(BlockMove(name, index, NULL_BLOCK_ID, self.group))
        self._num_given_up[name] = num_unseen

    def free(self, request: Request) -> None:
        super().free(request)
        self._num_given_up.pop(request.request_id, None)
        self.moves = [move for move in self.moves if move.req_id != request.request_id]

    def forget_all(self) -> None:
        super().forget_all()
        self._num_given_up.clear()
        self.moves.clear()

    def _release(self, blocks: Sequence[Block]) -> None:
        super()._release([block for block in blocks if block.block_id != NULL_BLOCK_ID])

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        del holders[NULL_BLOCK_ID]
        return holders


class GroupedKVMemory(KVMemory):
    """A `KVMemory` with a table for each of `windows`; None is a group that sees everything. A step
    computes at most `max_step_tokens` of a request."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None],
        max_step_tokens: int,
    ) -> None:
        super().__init__(pool, block_size)
        check_integers(1, max_step_tokens=max_step_tokens)
        self.windows, self.max_step_tokens = windows, max_step_tokens
        self.groups: list[OneGroup] = []
        for number, window in enumerate(windows):
            group = OneGroup(pool, block_size, number)
            if window is not None:
                most = most_of_window(window, block_size, max_step_tokens)
                group = WindowGroup(pool, block_size, number, window, most)
            group.grown = self.grown
            self.groups.append(group)
        self._windows = [group for group in self.groups if isinstance(group, WindowGroup)]
        self._reserved_ends: dict[str, int] = {}

    def most_blocks(self, num_tokens: int) -> int:
        """That a request of so many positions holds at once, in all groups."""
        return most_blocks(num_tokens, self.block_size, self.windows, self.max_step_tokens)

    @property
    def capacity(self) -> int:
        """The longest request that the whole memory holds, if it is alone. With windows alone that
        may be any."""
        return bisect_right(range(1, 1 << 40), self.pool.num_usable_blocks, key=self.most_blocks)

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """Of the first group."""
        return self.groups[0].get_block_ids(request_id)

    def get_tables(self, request_id: str) -> tuple[Sequence[int], ...]:
        return tuple(group.get_block_ids(request_id) for group in self.groups)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        for group in self._windows:
            group.give_up(request)
        name, end = request.request_id, request.num_computed_tokens + num_new_tokens
        reserved_end = max(self._reserved_ends.get(name, 0), end + num_reserved_tokens)
        wanted = [group.num_blocks_wanted(name, end, reserved_end) for group in self.groups]
        lengths = map(len, self.get_tables(name))
        if sum(max(0, w - n) for w, n in zip(wanted, lengths)) > self.pool.num_free_blocks:
            return False
        if num_reserved_tokens:
            self._reserved_ends[name] = reserved_end
        return all([g.lengthen(request, n) for g, n in zip(self.groups, wanted, strict=True)])

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_kept_free: int = 0,
        gone: Request | None = None,
    ) -> bool:
        num_new = self.most_blocks(num_tokens)
        held: set[int] = set()
        if gone is not None:
            held.update(*self.get_tables(gone.request_id))
        num_free = self.pool.num_free_blocks + len(held - {NULL_BLOCK_ID})
        return num_new + num_kept_free <= num_free

    def free(self, request: Request) -> None:
        self._reserved_ends.pop(request.request_id, None)
        for group in self.groups:
            group.free(request)

    def begin_anew(self) -> None:
        self._reserved_ends.clear()
        for group in self.groups:
            group.forget_all()
        super().begin_anew()

    def take_block_moves(self) -> list[BlockMove]:
        moves = [move for group in self._windows for move in group.moves]
        for group in self._windows:
            group.moves = []
        return moves

    def _count_holders(self) -> Counter[int]:
        return sum((group._count_holders() for group in self.groups), Counter())

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        """And that nothing which is seen was given up."""
        requests = list(requests)
        super().check_invariants(requests)
        names = [group._tables.keys() for group in self.groups]
        assert all(found == names[0] for found in names), "a table is missing in some group"
        for group in self._windows:
            for request in requests:
                ids = group.get_block_ids(request.request_id)
                assert len(ids) * self.block_size >= request.num_computed_tokens, repr(request)
                num_null = sum(block_id == NULL_BLOCK_ID for block_id in ids)
                num_unseen = max(0, request.num_computed_tokens - group.window + 1)
                assert num_null <= num_unseen // self.block_size, f"{request} lost what it sees"
                assert all(ids[num_null:]), f"{request} has a hole in group {group.group}"


def most_blocks(
    num_tokens: int, block_size: int, windows: Sequence[int | None], max_step_tokens: int
) -> int:
    """That a request of `num_tokens` positions holds at once in groups with `windows`, if a step
    computes at most `max_step_tokens`."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if w is None else min(whole, most_of_window(w, block_size, max_step_tokens))
        for w in windows
    )


def most_of_window(window: int, block_size: int, max_step_tokens: int) -> int:
    """Blocks of `window - 1` positions and a step behind them, wherever they begin."""
    return -(-(window - 1 + max_step_tokens) // block_size) + 1
