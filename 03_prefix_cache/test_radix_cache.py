"""The radix tree alone: sequences of tokens, the lazy heap, and the check.

What every cache must do is in `test_prefix_cache.py`, splits and locks are in `lookups.txt`."""

from __future__ import annotations

from array import array

import pytest

from block_pool import Block, BlockPool
from radix_cache import RadixCache
from radix_words import TreeRig


def test_it_makes_its_own_pool_or_takes_one():
    assert RadixCache().pool.num_usable_blocks == 1024 and RadixCache().page_size == 16
    pool = BlockPool(5)
    cache = RadixCache(2, pool=pool)
    assert cache.pool is pool and cache.block_size == cache.page_size == 2


def test_any_sequence_of_tokens_is_copied_and_compared_alike():
    """Trap 9: a slice of a tuple is a tuple, and one of a buffer looks into the buffer, which the
    next request writes over."""
    rig = TreeRig()
    row = array("q", rig.spell("ABC"))
    rig.cache.insert(memoryview(row), rig.pool.allocate(3))
    row[:] = array("q", rig.spell("XYZ"))
    for kind in (list, tuple, lambda tokens: memoryview(array("q", tokens))):
        assert len(rig.cache.match_prefix(kind(rig.spell("ABX"))).blocks) == 2
        assert len(rig.cache.match_prefix(kind(rig.spell("XYZ"))).blocks) == 0
    rig.check()


def test_uses_leave_the_heap_alone():
    """A warm cache is looked up far more often than it evicts."""
    rig = TreeRig()
    for letter in "ABCDEFGH":
        rig.warm(letter)
    for _ in range(200):
        rig.hits("C"), rig.warm("D"), rig.hits("AX"), rig.warm("BC")
    assert len(rig.cache._heap) == 8


@pytest.mark.parametrize("num_leaves", [20, 300])
def test_eviction_looks_at_leaves_and_not_at_the_whole_tree(num_leaves):
    """A heap, no scan: one page more costs a few entries, with 300 leaves or with 20."""
    cache = RadixCache(page_size=1, num_pages=num_leaves)
    for leaf in range(num_leaves):
        cache.cache_computed_blocks([leaf])
    queue, calls = cache._queue, []
    cache._queue = lambda node: calls.append(1) or queue(node)
    cache.evict(10)
    assert len(calls) == 10


# No test notices if `_pop_oldest_leaf` does not look at a node's children. A node that got some was
# used since its entry was pushed, so the entry is out of date and fails the comparison before it.


def _use_later(cache: RadixCache, path: list[int]) -> None:
    cache.tree.node_of[path[-1]].last_access = 10**9


def _lock_without_the_pool(cache: RadixCache, path: list[int]) -> None:
    next(node for node in cache.tree.nodes() if node.lock_ref).lock_ref += 1


def _take_a_block_of_another_pool(cache: RadixCache, path: list[int]) -> None:
    node = cache.tree.node_of[path[0]]
    node.blocks[0] = Block(path[0], node.lock_ref + 1)


DAMAGE = {
    "a user too many": lambda cache, path: setattr(cache, "_num_used", cache._num_used + 1),
    "a lock without the pool": _lock_without_the_pool,
    "a child used more than its parent": lambda cache, path: [
        cache._lock(cache.tree.node_of[path[3]]) for _ in range(2)
    ],
    "a child used later than its parent": _use_later,
    "a leaf forgotten": lambda cache, path: cache._heap.pop(),
    "a leaf twice": lambda cache, path: cache._heap.append(cache._heap[0]),
    "a leaf too late": lambda cache, path: cache._heap.insert(0, (10**9, *cache._heap.pop(0)[1:])),
    "a leaf not marked": lambda cache, path: setattr(cache._heap[0][2], "is_queued", False),
    "another pool's block": _take_a_block_of_another_pool,
    "in the tree": lambda cache, path: cache.tree.node_of.update({99: cache.tree.node_of[path[0]]}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(name):
    rig = TreeRig()
    path = rig.warm("ABCD") + rig.warm("XYZ")
    rig.hold("AB")
    rig.hits("XY")
    rig.check()
    DAMAGE[name](rig.cache, path)
    with pytest.raises(AssertionError):
        rig.cache.check_invariants()
