"""The radix tree alone: sequences of tokens, the lazy heap, and the check.

What every cache must do is in `test_prefix_cache.py`, splits and locks are in `lookups.txt`."""

from __future__ import annotations

from array import array

import pytest

from block_pool import BlockPool
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
