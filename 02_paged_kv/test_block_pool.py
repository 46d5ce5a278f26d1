"""The pool against a naive model, in every state of a small pool."""

from __future__ import annotations

from itertools import product

import pytest

from block_pool import Block, BlockPool
from bounded_loops import as_long_as


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def snapshot(pool: BlockPool) -> tuple:
    assert pool.num_free_blocks == len(list(pool.free_order()))
    return ids(pool.free_order()), [block.ref_cnt for block in pool.blocks]


def refused(pool: BlockPool, match: str | None, call, *args) -> None:
    """The call raises `ValueError` and has changed nothing."""
    before = snapshot(pool)
    with pytest.raises(ValueError, match=match):
        call(*args)
    assert snapshot(pool) == before
    pool.check_invariants()


class NaivePool:
    """The same promises in lists: slow, and obvious."""

    def __init__(self, num_blocks: int) -> None:
        self.free_ids = list(range(1, num_blocks))
        self.ref_cnt = [0] * num_blocks

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self.free_ids):
            return None
        taken = [self.free_ids.pop(0) for _ in range(n)]
        for block_id in taken:
            self.ref_cnt[block_id] = 1
        return taken

    def free(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.ref_cnt[block_id] -= 1
        self.free_ids += [i for i in block_ids if self.ref_cnt[i] == 0]

    def touch(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.ref_cnt[block_id] += 1

    def reclaim(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.free_ids.remove(block_id)
            self.ref_cnt[block_id] = 1

    def clear(self) -> None:
        self.free_ids += [i for i, count in enumerate(self.ref_cnt) if count]
        self.ref_cnt = [0] * len(self.ref_cnt)


def apply(pool: BlockPool, model: NaivePool, name: str, argument) -> None:
    """Do one operation to both. An operation that the model cannot do must be refused."""
    if name == "clear":
        pool.clear()
        model.clear()
    elif name == "allocate" and argument < 1:
        refused(pool, f"num_blocks must be >= 1, got {argument}", pool.allocate, argument)
    elif name == "allocate":
        blocks = pool.allocate(argument)
        assert (None if blocks is None else ids(blocks)) == model.allocate(argument)
    else:
        blocks = [pool.blocks[block_id] for block_id in argument]
        are_right = [i and (model.ref_cnt[i] == 0) == (name == "reclaim") for i in argument]
        if all(are_right) and len(set(argument)) == len(argument):
            getattr(pool, name)(blocks)
            getattr(model, name)(argument)
        else:
            refused(pool, name, getattr(pool, name), blocks)
    assert snapshot(pool) == (model.free_ids, model.ref_cnt)
    pool.check_invariants()


def restored(state: tuple) -> tuple[BlockPool, NaivePool]:
    """A pool and a model in a given state: free ids in order, reference counts."""
    free_ids, ref_cnt = state
    pool, model = BlockPool(len(ref_cnt)), NaivePool(len(ref_cnt))
    for block, count in zip(pool.blocks, ref_cnt, strict=True):
        block.ref_cnt = count
    pool._free.clear()
    pool._free.update((block_id, pool.blocks[block_id]) for block_id in free_ids)
    model.free_ids = list(free_ids)
    model.ref_cnt = list(ref_cnt)
    return pool, model


@pytest.mark.net
def test_every_reachable_state_of_a_small_pool():
    """All operations on up to two blocks, in all states of a pool of 5 with at most 2 references a
    block: 4 usable blocks, each free (in any order) or held once or twice. Trap 10: a block is not
    freed twice. Trap 11: freed first, reused first."""
    arguments = [[]] + [[a] for a in range(5)] + [*product(range(5), repeat=2)]
    operations = [("allocate", n) for n in range(-1, 6)] + [("clear", None)]
    operations += [(name, ids) for name in ("free", "touch", "reclaim") for ids in arguments]
    start = ((1, 2, 3, 4), (0,) * 5)
    assert snapshot(BlockPool(5)) == (list(start[0]), list(start[1]))
    seen = {start}
    frontier = [start]
    for _ in as_long_as(lambda: frontier, max_rounds=200_000):
        state = frontier.pop()
        for name, argument in operations:
            pool, model = restored(state)
            apply(pool, model, name, argument)
            after = (tuple(model.free_ids), tuple(model.ref_cnt))
            if max(model.ref_cnt) <= 2 and after not in seen:
                seen.add(after)
                frontier.append(after)
    # The orders of k free blocks out of 4, and 2 reference counts for each of the others.
    assert len(seen) == 24 + 24 * 2 + 12 * 4 + 4 * 8 + 16


OTHER = BlockPool(9)  # Trap 50: two engines in one process do not mix their blocks
REFUSALS = {  # in a pool of 5, whose blocks 1 and 2 are held: the call, its blocks, what is said
    "free-twice-in-one-call": ("free", [1, 1], r"free blocks \[1, 1\]: .*unique"),
    "free-a-free-block": ("free", [1, 3], "cannot free block 3: the block is free already"),
    "touch-a-free-block": ("touch", [4], "cannot touch block 4: the block is free already"),
    "reclaim-a-held-block": ("reclaim", [3, 2], "cannot reclaim block 2: the block is held"),
    "free-the-null-block": ("free", [0], "not a usable block"),
    "free-a-foreign-block": ("free", [OTHER.blocks[1]], "not a usable block of this pool"),
}


@pytest.mark.parametrize(("name", "blocks", "match"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_is_named(name, blocks, match):
    pool = BlockPool(5)
    pool.allocate(2)
    blocks = [pool.blocks[each] if isinstance(each, int) else each for each in blocks]
    refused(pool, match, getattr(pool, name), blocks)
    refused(pool, r"num_blocks must be >= 2 .*, got 1", BlockPool, 1)
