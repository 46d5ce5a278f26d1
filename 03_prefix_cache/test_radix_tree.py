"""The tree alone: nodes, cuts and copies. Letters are pages of tokens. What every cache must do is
in `test_prefix_cache.py`, splits and locks are in `lookups.txt`."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest

from block_pool import Block
from cache_words import as_word, ids, spell
from radix_cache import RadixCache
from radix_tree import RadixTree, TreeNode
from radix_words import TreeRig


class Grove:
    """A tree whose paths are words. The block of the n-th page ever added has the id n."""

    def __init__(self, *words: str, page_size: int = 2) -> None:
        self.tree = RadixTree(page_size)
        self.page_size = page_size
        self.num_blocks = 0
        for word in words:
            self.grow(word)

    def grow(self, word: str, lock_ref: int = 0) -> TreeNode:
        tokens = spell(word, self.page_size)
        node, page = self.tree.descend(self.tree.root(()), tokens, len(word))
        node = self.tree.split_node(node, page)
        if page == len(word):
            return node
        first = self.num_blocks + 1
        self.num_blocks += len(word) - page
        blocks = [Block(block_id, 1) for block_id in range(first, self.num_blocks + 1)]
        return self.tree.append(node, tokens, blocks, lock_ref)

    def end_of(self, word: str) -> TreeNode:
        node, page = self.tree.descend(self.tree.root(()), spell(word, self.page_size), len(word))
        assert page == len(word)
        return node

    def words(self) -> list[list[str]]:
        """Every path from a root to a leaf, node by node."""
        leaves = [node for node in self.tree.nodes() if not node.children]
        return sorted(
            [as_word(link.key, self.page_size) for link in self.tree.path_to(leaf)]
            for leaf in leaves
        )


def test_there_are_as_many_nodes_as_places_where_prefixes_part_or_end():
    grove = Grove("ABCD", "ABXY", "Q")
    assert grove.words() == [["AB", "CD"], ["AB", "XY"], ["Q"]]
    assert ids(grove.tree.blocks_up_to(grove.end_of("ABXY"))) == [1, 2, 5, 6]
    assert len(list(grove.tree.nodes())) == 5  # and the root
    grove.tree.check_invariants()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cut_leaves_the_old_object_as_the_lower_part(page_size):
    grove = Grove("ABCDE", page_size=page_size)
    node = grove.grow("ABCDEF")  # in place
    child = grove.grow("ABCDEFG", lock_ref=1)
    node.lock_ref, node.last_access = 3, 7
    upper = grove.tree.split_node(node, 2)
    assert (as_word(upper.key, page_size), as_word(node.key, page_size)) == ("AB", "CDEF")
    assert (upper.start, upper.end, node.start, node.end) == (0, 2, 2, 6)
    assert (upper.lock_ref, upper.last_access) == (node.lock_ref, node.last_access) == (3, 7)
    assert upper.parent.is_root and node.parent is upper and child.parent is node
    assert [grove.tree.node_of[i] for i in (1, 2, 3, 6)] == [upper, upper, node, node]
    assert grove.words() == [["AB", "CDEF", "G"]]
    grove.tree.check_invariants()


def test_a_cut_at_the_end_of_a_node_is_none():
    grove = Grove("ABC")
    node = grove.end_of("ABC")
    assert grove.tree.split_node(node, 3) is node and grove.words() == [["ABC"]]
    root = node.parent
    assert grove.tree.split_node(root, 0) is root


def test_pages_are_found_and_cut_out_at_both_ends():
    """Every stretch of a path over three nodes: the nodes then hold these pages and no other."""
    for begin in range(8):
        for end in range(begin + 1, 9):
            grove = Grove("ABCDEFGH", "ABCX", "ABCDEY")
            path = [1, 2, 3, 4, 5, 6, 7, 8]
            nodes = grove.tree.cut_out(path[begin:end])
            assert [i for node in reversed(nodes) for i in ids(node.blocks)] == path[begin:end]
            assert all(below.parent is above for below, above in pairwise(nodes))
            assert ids(grove.tree.blocks_up_to(grove.end_of("ABCDEFGH"))) == path
            assert len(nodes) == sum(
                lower < end and upper > begin for lower, upper in ((0, 3), (3, 5), (5, 8))
            )
            grove.tree.check_invariants()
    assert grove.tree.cut_out([]) == []


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


def test_a_use_leaves_the_heap_alone_and_an_eviction_looks_at_few_leaves():
    cache = RadixCache(page_size=1, num_pages=300)
    for leaf in range(300):
        cache.cache_computed_blocks([leaf])
        cache.match_prefix([0])
    assert len(cache._heap) == 300
    queue, calls = cache._queue, []
    cache._queue = lambda node: calls.append(1) or queue(node)
    cache.evict(10)
    assert len(calls) <= 12
