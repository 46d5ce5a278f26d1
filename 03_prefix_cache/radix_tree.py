"""A radix tree over pages of tokens: the index of `radix_cache.py`, which adds locks and eviction.

Pages that all prefixes have in common form one edge, however many pages that is:

    A B C D is there; A B X comes:       A B --- C D         each letter a page: `page_size` tokens
                                           \\---- X              (a block, in other chapters)

A node is the edge that leads to it: tokens, and the block of each page. Children are found by their
first page. A leaf grows in place, so decoding makes no chain of one-page nodes.

Invariants: `key` holds `page_size` tokens per block; no node except a root is empty; no two
children begin with the same page; each block is in one node, and `node_of` has that node; a root
without children is removed. Source: RadixAttention, arXiv 2312.07104.

See 03_prefix_cache/README.md#the-tree"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from block_pool import Block
from prefix_cache import CachedContent, NormalKeys


@dataclass(slots=True, eq=False)
class TreeNode:
    """Pages `[start, end)` of a prefix, counted from the root. A root has no pages and no
    parent."""

    parent: TreeNode | None = field(default=None, repr=False)
    key: list[int] = field(default_factory=list)  # the tree's own copy of the tokens
    blocks: list[Block] = field(default_factory=list)
    end: int = 0
    lock_ref: int = 0  # users; the same for all pages of a node
    last_access: int = 0  # the same for all pages; stale while the node is in use
    children: dict[tuple[int, ...], TreeNode] = field(default_factory=dict, repr=False)
    is_queued: bool = False  # the cache's heap has an entry for it
    extra_keys: NormalKeys = ()  # only of a root
    contents: list[CachedContent] | None = None  # of its pages; made when they are asked for

    @property
    def start(self) -> int:
        return self.end - len(self.blocks)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def above(self) -> TreeNode:
        assert self.parent is not None
        return self.parent


class RadixTree:
    """A forest: one tree for each set of extra keys. Pages are counted from 0 at the root."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.node_of: dict[int, TreeNode] = {}  # by block id
        self.roots: dict[NormalKeys, TreeNode] = {}

    def root(self, extra_keys: NormalKeys) -> TreeNode:
        """The root for these extra keys. A new root joins the forest with its first child."""
        return self.roots.get(extra_keys) or TreeNode(extra_keys=extra_keys)

    def descend(self, node: TreeNode, token_ids: Sequence[int], end: int) -> tuple[TreeNode, int]:
        """Follow `token_ids` from the end of `node` to page `end` at most. Returns the last node
        that shares a page with them, and the number of pages that match, from the root. O(tokens
        compared)."""
        page = node.end
        while page < end and node.children:
            child = node.children.get(tuple(self._pages(token_ids, page, page + 1)))
            if child is None:
                break
            given = self._pages(token_ids, page, min(child.end, end))
            page += self._num_common_pages(child.key, given)
            node = child
            if page < child.end:
                break
        return node, page

    def _pages(self, token_ids: Sequence[int], begin: int, end: int) -> list[int]:
        """The tokens of pages `[begin, end)`, copied because the caller's list can change."""
        return list(token_ids[begin * self.page_size : end * self.page_size])

    def _num_common_pages(self, key: list[int], given: list[int]) -> int:
        """How many pages are equal from the front; the first is known to be equal. `given` is no
        longer than `key`. Compares slices of lists, never single tokens; at most twice the whole
        list."""
        size = self.page_size
        low = 1
        high = len(given) // size
        if key[: len(given)] == given:
            return high
        while low < high:  # the first `low` pages are equal, the first `high + 1` are not
            middle = (low + high + 1) // 2
            if key[low * size : middle * size] == given[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_up_to(self, node: TreeNode, begin: int = 0) -> list[Block]:
        """The blocks of pages `[begin, node.end)` on the path to `node`."""
        runs: list[list[Block]] = []
        while node.end > begin:
            runs.append(node.blocks[max(begin - node.start, 0) :])
            node = node.above
        return list(chain.from_iterable(reversed(runs)))

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes, roots included; each before its children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def split_node(self, node: TreeNode, page: int) -> TreeNode:
        """Split `node` at `page`, which is inside it or its end. Returns the node that ends at
        `page`. O(pages before the split)."""
        if page == node.end:
            return node
        num_pages = page - node.start
        key = node.key[: num_pages * self.page_size]
        blocks = node.blocks[:num_pages]
        upper = TreeNode(node.parent, key, blocks, page, node.lock_ref, node.last_access)
        del node.key[: len(key)], node.blocks[:num_pages]
        node.contents = None
        self._attach(upper)
        node.parent = upper
        self._attach(node)
        for block in blocks:
            self.node_of[block.block_id] = upper
        return upper

    def _attach(self, node: TreeNode) -> None:
        node.above.children[tuple(node.key[: self.page_size])] = node

    def _detach(self, node: TreeNode) -> None:
        del node.above.children[tuple(node.key[: self.page_size])]
        if node.above.is_root and not node.above.children:
            del self.roots[node.above.extra_keys]

    def cut_out(self, block_ids: Sequence[int]) -> list[TreeNode]:
        """Split nodes so that some nodes hold exactly these pages, which follow each other on one
        path. Returns these nodes, deepest first."""
        if not block_ids:
            return []
        node = self.node_of[block_ids[-1]]
        end = node.end
        while node.blocks[end - node.start - 1].block_id != block_ids[-1]:
            end -= 1
        begin = end - len(block_ids)
        nodes = [self.split_node(node, end)]
        while nodes[-1].start > begin:
            nodes.append(nodes[-1].above)
        if nodes[-1].start < begin:
            self.split_node(nodes[-1], begin)  # the part after the split keeps its identity
        return nodes

    def append(
        self, node: TreeNode, token_ids: Sequence[int], blocks: Sequence[Block], lock_ref: int
    ) -> TreeNode:
        """Append `blocks` to the end of `node`. Returns the node that holds them: `node` itself,
        extended, if it has no children and the same users. O(new tokens)."""
        key = self._pages(token_ids, node.end, node.end + len(blocks))
        if node.is_root or node.children or node.lock_ref != lock_ref:
            if node.is_root:
                self.roots[node.extra_keys] = node
            node = TreeNode(node, key, list(blocks), node.end + len(blocks), lock_ref)
            self._attach(node)
        else:
            node.key += key
            node.blocks += blocks
            node.end += len(blocks)
            node.contents = None
        for block in blocks:
            self.node_of[block.block_id] = node
        return node

    def trim(self, leaf: TreeNode, num_pages: int) -> list[Block]:
        """Remove the last `num_pages` pages of a leaf and return their blocks, deepest first. A
        leaf without pages leaves its parent. The blocks stay in `node_of` until the caller frees
        them."""
        taken = leaf.blocks[-num_pages:][::-1]
        if len(taken) == len(leaf.blocks):
            self._detach(leaf)
        leaf.end -= len(taken)
        leaf.contents = None
        del leaf.blocks[-num_pages:], leaf.key[-num_pages * self.page_size :]
        return taken
