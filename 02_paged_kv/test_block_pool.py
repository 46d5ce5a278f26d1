"""The pool against a naive model, in every state of a small pool."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from block_pool import Block, BlockPool
from bounded_loops import as_long_as


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def snapshot(pool: BlockPool) -> tuple:
    return ids(pool.free_order()), [block.ref_cnt for block in pool.blocks]


def refused(pool: BlockPool, match: str | None, call, *args) -> None:
    """The call raises `ValueError` and has changed nothing."""
    before = snapshot(pool)
    with pytest.raises(ValueError, match=match):
        call(*args)
    assert snapshot(pool) == before
    pool.check_invariants()


def test_all_blocks_but_the_null_block_are_handed_out_once():
    pool = BlockPool(5)
    assert pool.num_usable_blocks == pool.num_free_blocks == 4
    assert ids(pool.allocate(3) + pool.allocate(1)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_a_refused_allocation_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    before = snapshot(pool)
    assert pool.allocate(2) is None
    assert snapshot(pool) == before
    for num_blocks in (0, -1):
        refused(pool, f"num_blocks must be >= 1, got {num_blocks}", pool.allocate, num_blocks)


def test_a_pool_without_a_usable_block_is_an_error():
    with pytest.raises(ValueError, match=r"num_blocks must be >= 2 .*, got 1"):
        BlockPool(1)


def test_blocks_are_reused_in_the_order_in_which_they_were_freed():
    """Trap 11: the deepest block, named first, goes first; the head of the prefix lives longest."""
    pool = BlockPool(6)
    table = pool.allocate(4)  # 1 2 3 4; 5 was never used
    pool.free(table[::-1])
    assert ids(pool.free_order()) == [5, 4, 3, 2, 1]
    assert ids(pool.allocate(3)) == [5, 4, 3]


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.touch(blocks[:1])
    pool.free(blocks)
    assert pool.num_free_blocks == 1 and blocks[0].ref_cnt == 1
    pool.free(blocks[:1])
    assert ids(pool.free_order()) == [2, 1]


def test_double_free_is_an_error_and_changes_nothing():
    pool = BlockPool(5)
    held, freed = pool.allocate(2)
    pool.free([freed])
    for blocks in ([freed], [held, freed]):  # nor is `held` freed
        refused(pool, None, pool.free, blocks)


def test_a_free_block_can_not_be_freed_or_touched_and_the_error_names_it():
    pool = BlockPool(5)
    (block,) = pool.allocate(1)
    pool.free([block])
    refused(pool, "cannot free block 1: .*free", pool.free, [block])
    refused(pool, "cannot touch block 1: .*free", pool.touch, [block])


def test_a_block_named_twice_in_one_call_is_an_error():
    """Trap 10: it would count twice, and later be handed to two requests."""
    pool = BlockPool(5)
    (block,) = pool.allocate(1)
    for num_holders in (1, 2, 3):
        assert block.ref_cnt == num_holders
        refused(pool, "must be unique", pool.free, [block, block])
        refused(pool, "must be unique", pool.touch, [block, block])
        pool.touch([block])


def test_the_null_block_and_foreign_blocks_are_refused():
    """Trap 50: two engines in one process do not mix their blocks."""
    pool, other = BlockPool(4), BlockPool(9)
    pool.allocate(2), other.allocate(8)
    for call in (pool.free, pool.touch, pool.reclaim):
        refused(pool, "null block", call, [pool.blocks[0]])
        refused(pool, "not a block of this pool", call, [other.blocks[1]])
        refused(pool, "not a block of this pool", call, [other.blocks[8]])


def test_a_free_block_is_reclaimed_from_the_middle_of_the_free_order():
    pool = BlockPool(6)
    blocks = pool.blocks
    pool.reclaim([blocks[3], blocks[1]])
    assert ids(pool.free_order()) == [2, 4, 5]
    assert blocks[3].ref_cnt == blocks[1].ref_cnt == 1
    refused(pool, "cannot reclaim block 3: .*held", pool.reclaim, [blocks[2], blocks[3]])
    refused(pool, "must be unique", pool.reclaim, [blocks[2], blocks[2]])


def test_removal_from_either_end_and_the_middle_does_not_scan():
    """Cost an operation does not grow with the pool. A scan of 200,000 blocks for each of 20,000
    operations would be 4 * 10 ** 9 steps: minutes."""
    pool = BlockPool(200_000)
    for block in pool.blocks[1:20_001]:  # leaves a hole at the front, the plain dict's weak spot
        pool.reclaim([block])
        pool.free([block])
    for _ in range(20_000):
        pool.allocate(1)
    pool.check_invariants()


@pytest.mark.parametrize(
    ("block_id", "ref_cnt"),
    [(1, 0), (4, 1), (0, 1), (1, -1), (4, None)],
    ids=["leak", "free_and_held", "null", "negative", "duplicate"],
)
def test_check_invariants_notices_damage(block_id, ref_cnt):
    pool = BlockPool(5)
    pool.allocate(2)
    pool.check_invariants()
    if ref_cnt is None:
        pool._free[block_id] = pool.blocks[3]
    else:
        pool.blocks[block_id].ref_cnt = ref_cnt
    with pytest.raises(AssertionError):
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
            if self.ref_cnt[block_id] == 0:
                self.free_ids.append(block_id)

    def touch(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.ref_cnt[block_id] += 1

    def reclaim(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.free_ids.remove(block_id)
            self.ref_cnt[block_id] = 1


def apply(pool: BlockPool, model: NaivePool, name: str, argument) -> None:
    """Do one operation to both. An operation that the model cannot do must be refused."""
    if name == "allocate":
        blocks = pool.allocate(argument)
        assert (None if blocks is None else ids(blocks)) == model.allocate(argument)
    else:
        blocks = [pool.blocks[block_id] for block_id in argument]
        wants_free = name == "reclaim"
        allowed = len(set(argument)) == len(argument) and all(
            block_id != 0 and (model.ref_cnt[block_id] == 0) == wants_free for block_id in argument
        )
        if allowed:
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
    pool._free.clear()
    for block, count in zip(pool.blocks, ref_cnt, strict=True):
        block.ref_cnt = count
    for block_id in free_ids:
        pool._free[block_id] = pool.blocks[block_id]
    model.free_ids, model.ref_cnt = list(free_ids), list(ref_cnt)
    return pool, model


def test_every_reachable_state_of_a_small_pool():
    """All operations on up to two blocks, and on three in any order, in all states of a pool of 5
    with at most 2 references a block: 4 usable blocks, each free (in any order) or held once or
    twice."""
    arguments = [[]] + [[a] for a in range(5)] + [*product(range(5), repeat=2)]
    arguments += permutations(range(1, 5), 3)
    operations = [("allocate", n) for n in range(1, 6)]
    operations += [(name, ids) for name in ("free", "touch", "reclaim") for ids in arguments]
    start = ((1, 2, 3, 4), (0,) * 5)
    seen, frontier = {start}, [start]
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
