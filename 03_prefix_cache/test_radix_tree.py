"""The tree alone: paths, cuts, growth, trimming, bookmarks. Letters are pages of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from block_pool import Block
from cache_words import as_word, ids, spell
from radix_tree import RadixTree, TreeNode


class Grove:
    """A tree whose paths are words. The block of the n-th page ever added has the id n."""

    def __init__(self, *words: str, page_size: int = 2) -> None:
        self.tree = RadixTree(page_size)
        self.page_size = page_size
        self.num_blocks = 0
        for word in words:
            self.grow(word)

    def grow(self, word: str, lock_ref: int = 0) -> TreeNode:
        """Add what is missing of `word`, cutting where it parts."""
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


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_path_is_followed_to_the_first_page_that_differs(page_size):
    """One changed token at every place, against counting by hand."""
    grove = Grove("ABCDE", "ABXYZ", page_size=page_size)
    for word in ("ABCDE", "ABXYZ"):
        for place in range(5 * page_size):
            tokens = spell(word, page_size)
            tokens[place] += 50
            node, page = grove.tree.descend(grove.tree.root(()), tokens, 5)
            assert page == place // page_size
            assert node.start < page <= node.end or page == 0
    for end, num_pages in ((6, 5), (3, 3), (2, 2)):
        found = grove.tree.descend(grove.tree.root(()), spell("ABCDEF", page_size), end)
        assert found[1] == num_pages
    assert found[0] is grove.end_of("AB")


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


def test_the_tree_copies_its_arguments():
    """Trap 9: tokens and blocks are in lists that the caller changes afterwards."""
    tree = RadixTree(2)
    tokens, blocks = spell("AB", 2), [Block(1, 1), Block(2, 1)]
    node = tree.append(tree.root(()), tokens, blocks, 0)
    tokens[:], blocks[:] = spell("XY", 2), []
    tree.check_invariants()
    assert node.key == spell("AB", 2) and ids(node.blocks) == [1, 2]
    assert tree.blocks_up_to(node) is not node.blocks


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


@pytest.mark.parametrize(
    "block_ids",
    [[2, 1], [1, 3], [1, 2, 3, 5], [4, 1, 2]],  # 5 is on the other branch; 4 is not before 1
)
def test_pages_that_are_no_stretch_of_a_path_are_refused(block_ids):
    grove = Grove("ABCD", "ABXY")
    with pytest.raises(ValueError, match="in order of a path"):
        grove.tree.cut_out(block_ids)
    assert grove.words() == [["AB", "CD"], ["AB", "XY"]]
