"""The radix tree alone: splits, locks, growth in place, the lazy heap.

The behaviour of every cache is tested in `test_prefix_cache.py`, with users that take and leave any
stretch of a path."""

from __future__ import annotations

import random
from array import array

import pytest

from block_pool import Block, BlockPool
from bounded_loops import as_long_as
from prefix_cache import MatchCursor
from radix_cache import RadixCache
from radix_words import TreeRig


@pytest.fixture
def rig():
    rig = TreeRig()
    yield rig
    rig.check()


def test_it_makes_its_own_pool_or_takes_one():
    assert RadixCache().pool.num_usable_blocks == 1024 and RadixCache().page_size == 16
    assert RadixCache(num_pages=3).pool.num_usable_blocks == 3
    pool = BlockPool(5)
    assert RadixCache(2, pool=pool).pool is pool
    assert RadixCache(page_size=2).block_size == 2


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"page_size": 0}, "page_size must be .*>= 1, got 0"),
        ({"num_pages": 0}, "num_pages must be .*, got 0"),
        ({"num_pages": 4, "pool": BlockPool(5)}, "give num_pages or pool"),
    ],
)
def test_a_size_below_one_or_two_pools_are_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        RadixCache(**kwargs)


# splits


def test_a_match_cuts_the_node_that_it_ends_in(rig):
    rig.warm("ABCD")
    assert len(rig.hits("ABCD")) == len(rig.hits("ABCDE")) == 4
    assert rig.nodes() == {"ABCD": 0}  # it ends at the node's end: nothing to cut
    assert len(rig.hits("ABX")) == 2
    assert rig.nodes() == {"AB": 0, "AB.CD": 0}
    assert rig.hits("X") == [] and len(rig.nodes()) == 2


def test_only_the_matched_half_of_a_cut_node_is_refreshed(rig):
    """Trap 6: the half that was just matched is not evicted before older things; the rest, which
    was not used, is."""
    rig.warm("ABCD"), rig.warm("UV")
    rig.hits("AB")
    for left in ({"AB", "AB.C", "UV"}, {"AB", "UV"}, {"AB", "U"}, {"AB"}, {"A"}, set()):
        assert rig.cache.evict(1) == 1
        assert set(rig.nodes()) == left


def test_every_page_size_matches_whole_pages_only():
    """Trap 8: against the longest common prefix, counted token by token and truncated down."""
    rng = random.Random(5)
    for page_size in range(1, 17):
        cache = RadixCache(page_size=page_size, num_pages=400)
        prompts: list[list[int]] = []
        for _ in range(25):
            known = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
            prompt = known[: rng.randrange(60)] + rng.choices(range(3), k=rng.randrange(50))
            expected = 0
            for other in prompts:
                both = zip(prompt, other[: len(other) // page_size * page_size])
                same = next((i for i, (a, b) in enumerate(both) if a != b), None)
                same = min(len(prompt), len(other)) if same is None else same
                expected = max(expected, same // page_size)
            match = cache.match_prefix(prompt)
            assert match.num_cached_tokens == len(match.blocks) * page_size
            assert len(match.blocks) == expected, (page_size, prompt)
            cache.cache_computed_blocks(prompt)
            prompts.append(prompt)
            cache.check_invariants()


def test_any_sequence_of_tokens_is_copied_and_compared_alike(rig):
    """Trap 9: a slice of a tuple is a tuple, and one of a buffer looks into the buffer, which the
    next request writes over."""
    row = array("q", rig.spell("ABC"))
    rig.cache.insert(memoryview(row), rig.pool.allocate(3))
    row[:] = array("q", rig.spell("XYZ"))
    for kind in (list, tuple, lambda tokens: memoryview(array("q", tokens))):
        assert len(rig.cache.match_prefix(kind(rig.spell("ABX"))).blocks) == 2
        assert len(rig.cache.match_prefix(kind(rig.spell("XYZ"))).blocks) == 0


# locks


def test_a_lock_covers_the_node_that_it_ends_in(rig):
    """Trap 7: a lock that begins at the parent leaves the pages just matched to be evicted."""
    rig.warm("ABCD"), rig.hits("AB")
    rig.cache.touch(rig.found("ABCD"))
    assert rig.nodes() == {"AB": 1, "AB.CD": 1}
    assert rig.cache.evict(9) == 0


def test_a_locked_node_that_is_cut_is_locked_in_both_parts(rig):
    """Trap 7: while a request uses A B C D, another match splits it. Both parts keep the lock, and
    one release of the old table unlocks both."""
    blocks = rig.hold("ABCD")
    rig.hits("AB")
    assert rig.nodes() == {"AB": 1, "AB.CD": 1}
    assert rig.cache.evict(9) == 0
    rig.cache.release(blocks)
    assert rig.nodes() == {"AB": 0, "AB.CD": 0} and rig.cache.evict(9) == 4


def test_a_partial_match_pins_its_pages_and_no_more(rig):
    """Trap 7: without the split, two pages in use would pin the other two forever."""
    rig.warm("ABCD")
    rig.cache.touch(rig.found("ABX"))
    assert rig.nodes() == {"AB": 1, "AB.CD": 0}
    assert rig.cache.evict(9) == 2 and rig.nodes() == {"AB": 1}


def test_a_stretch_that_ends_within_a_node_is_locked_alone(rig):
    """Trap 7: a match of four pages, of which the request takes two, then one of those in the
    middle of a node once more."""
    rig.warm("ABCDE")
    found = rig.found("ABCDE")
    rig.cache.touch(found[:3])
    assert rig.nodes() == {"ABC": 1, "ABC.DE": 0}
    rig.cache.touch(found[:2])
    rig.cache.release(found[1:2])
    assert rig.nodes() == {"A": 2, "A.B": 1, "A.B.C": 1, "A.B.C.DE": 0}
    assert rig.cache.evict(9) == 2
    rig.cache.release(found[1:3])
    assert rig.nodes() == {"A": 2, "A.B": 0, "A.B.C": 0} and rig.cache.evict(9) == 2


# insert


def test_a_leaf_that_all_its_users_share_on_grows_in_place(rig):
    """Two forks hold every page: the leaf has two users, and the pages after it have two as well.
    The path that the second of them remembers still ends at the same page."""
    parent, child = MatchCursor(), MatchCursor()
    blocks = rig.hold("AB", cursor=parent)
    rig.cache.touch(blocks)
    rig.cache.match_prefix(rig.spell("AB"), None, child)
    c, x = rig.pool.allocate(2)
    rig.pool.touch([c])
    rig.cache.insert(rig.spell("ABC"), [c], start=2, cursor=parent)
    assert rig.nodes() == {"ABC": 2}
    rig.cache.insert(rig.spell("ABX"), [x], start=2, cursor=child)  # it went another way
    assert rig.nodes() == {"AB": 2, "AB.C": 2, "AB.X": 1}


def test_duplicates_lock_exactly_the_pages_they_duplicate(rig):
    """Trap 2, in the middle of a node: two pages after the first are duplicates, one is new."""
    rig.hold("A")
    rig.warm("ABCDE")
    new = rig.pool.allocate(3)
    result = rig.cache.insert(rig.spell("ABCX"), new, start=1)
    assert result.duplicates == new[:2] and result.owned == new[2:]
    assert rig.nodes() == {"A": 1, "A.BC": 1, "A.BC.DE": 0, "A.BC.X": 1}


def test_an_old_path_finds_its_way_after_cuts_and_evictions(rig):
    cursor = MatchCursor()
    held = rig.hold("ABCD", cursor=cursor)
    rig.hits("AB"), rig.hits("A")
    (e,) = rig.pool.allocate(1)
    rig.cache.insert(rig.spell("ABCDE"), [e], start=4, cursor=cursor)
    assert rig.nodes() == {"A": 1, "A.B": 1, "A.B.CDE": 1}
    rig.cache.release([*held, e])
    rig.cache.evict(3)
    rig.hold("ABXYZ")  # as long as what was evicted, and in the very node that the path knows
    new = rig.pool.allocate(1)
    with pytest.raises(ValueError, match="block 2 is not cached"):
        rig.cache.insert(rig.spell("ABCDEF"), new, start=5, cursor=cursor)
    assert rig.cache.insert(rig.spell("ABC"), new, start=2, cursor=cursor).owned == new
    assert len(rig.hits("ABC")) == 3 and len(rig.hits("ABXYZ")) == 5


# eviction


def test_a_leaf_is_trimmed_to_exactly_what_is_asked(rig):
    """Trap 14: 8 of 19, not all 19 because they are one node."""
    rig.warm("ABCDEFGHIJKLMNOPQRS")
    assert rig.cache.evict(8) == 8 and rig.nodes() == {"ABCDEFGHIJK": 0}
    assert rig.cache.evict(100) == 11 and rig.cache.evict(1) == 0


def test_eviction_continues_in_the_parent_after_a_leaf(rig):
    rig.warm("ABCD"), rig.warm("ABXY"), rig.warm("Q")
    assert rig.cache.evict(3) == 3
    assert rig.nodes() == {"AB": 0, "AB.X": 0, "Q": 0}
    assert rig.cache.evict(2) == 2 and rig.nodes() == {"A": 0, "Q": 0}


def test_uses_leave_the_heap_alone(rig):
    """A warm cache is looked up far more often than it evicts."""
    for letter in "ABCDEFGH":
        rig.warm(letter)
    for _ in range(200):
        rig.hits("C"), rig.warm("D"), rig.hits("AX"), rig.warm("BC")
    assert len(rig.cache._heap) == 8


def test_entries_that_are_out_of_date_are_put_right_when_they_come_up(rig):
    for letter in "ABCD":
        rig.warm(letter)
    rig.hits("A"), rig.hits("C"), rig.hits("A")
    held = rig.hold("B")
    order = []
    for _ in as_long_as(lambda: rig.cache.num_evictable_blocks):
        before = set(rig.nodes())
        rig.cache.evict(1)
        order += before - set(rig.nodes())
        rig.check()
    assert order == ["D", "C", "A"]
    assert rig.cache._heap == []  # B's entry came up while it was in use, and was dropped
    rig.cache.release(held)
    assert rig.cache.evict(1) == 1 and rig.nodes() == {}


@pytest.mark.parametrize("num_leaves", [20, 1000])
def test_eviction_looks_at_leaves_and_not_at_the_whole_tree(num_leaves):
    """A heap, no scan: one page more costs a few entries, with 1,000 leaves or with 20."""
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


def test_an_invalidation_keeps_the_order_of_eviction(rig):
    blocks = {letter: rig.warm(letter)[0] for letter in "ABCD"}
    rig.cache.evict(1)  # A: the heap is now B, D, C
    rig.cache.invalidate(rig.pool.blocks[blocks["B"]])
    assert rig.cache.evict(1) == 1 and rig.nodes() == {"D": 0}
