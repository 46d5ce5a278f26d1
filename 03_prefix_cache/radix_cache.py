"""A prefix cache as a radix tree: requests lock paths, and the least recently used leaf is evicted.

    tokens            | A A A A B B B B | C C C C |       lock_ref counts a node's users:
    request 1 uses    |<--------------->|                 the node A B has 2, the node C has 1
    request 2 uses    |<------------------------->|       ref_cnt of their blocks: lock_ref + 1

If a match, a lock or a release ends inside a node, the node is split there. So all pages of one
node have the same users and the same last use. Eviction removes pages from the end of the least
recently used leaf. Leaves are kept in a heap. A use does not change the heap; a stale entry is
corrected when it reaches the top.

Invariants: those of `prefix_cache.py`; all blocks of a node have `ref_cnt == lock_ref + 1`; no node
has fewer users than a child of it; every unlocked leaf is in the heap, at its last use or earlier,
and no node twice. SGLang's tree holds slots of tokens, or pages; a lock there walks up to the root,
here over the blocks it is given. Source: RadixAttention, arXiv 2312.07104.

See 03_prefix_cache/README.md#the-cache-over-the-tree"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, groupby
from operator import attrgetter

from block_pool import Block, BlockPool
from prefix_cache import CachedContent, CacheListener, HasBlockId, PrefixCache, PrefixKey
from radix_tree import RadixTree, TreeNode

PAGE_SIZE = 16
NUM_PAGES = 1024


class RadixCache(PrefixCache):
    """A `PrefixCache` that keeps the tokens themselves. A page is a block of the pool. Takes the
    engine's `pool`, or makes a pool of `num_pages` pages."""

    def __init__(
        self,
        page_size: int = PAGE_SIZE,
        pool: BlockPool | None = None,
        num_pages: int = NUM_PAGES,
        listener: CacheListener | None = None,
    ) -> None:
        super().__init__(pool or BlockPool(num_pages + 1), page_size, listener)
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self._by_block_id = self.tree.node_of
        self._num_used = 0  # cached blocks with at least one user
        self._clock = 0  # one tick per call that uses a prefix
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._serial = count()  # breaks ties between equal times, because nodes have no order

    def _match(self, prefix: PrefixKey, begin: int, end: int) -> list[Block]:
        """O(depth of the tree + tokens compared). Splits the node in which the match ends, so that
        its front gets a last use separate from its end."""
        root = self.tree.root(prefix.keys)
        node, num_pages = self.tree.descend(root, prefix.token_ids, end)
        node = self.tree.split_node(node, num_pages)
        return self.tree.blocks_up_to(node, begin)

    def _insert(
        self, prefix: PrefixKey, first: int, parent: Block | None, blocks: list[Block]
    ) -> None:
        if parent is None:
            node = self.tree.root(prefix.keys)
        else:
            node = self.tree.node_of[parent.block_id]
        for ref_cnt, run in groupby(blocks, key=attrgetter("ref_cnt")):
            node = self.tree.append(node, prefix.token_ids, list(run), lock_ref=ref_cnt)
        self._num_used += len(blocks)

    def _mark_used(self, blocks: list[Block]) -> None:
        """Locked nodes, and all nodes above them, get their time when they are released."""
        self._clock += 1
        node = self.tree.node_of[blocks[-1].block_id]
        while not node.is_root and node.lock_ref == 0:
            node.last_access = self._clock
            node = node.above

    def touch(self, blocks: Sequence[HasBlockId]) -> None:
        """O(nodes + blocks), and for a node that is split, its pages before the split."""
        self.num_changes += 1
        for node in self.tree.cut_out([block.block_id for block in blocks]):
            self._lock(node)

    def _lock(self, node: TreeNode) -> None:
        self.pool.touch(node.blocks)
        if node.lock_ref == 0:
            self._num_used += len(node.blocks)
        node.lock_ref += 1

    def release(self, blocks: Sequence[HasBlockId]) -> None:
        for block in blocks:
            if self.pool.blocks[block.block_id].ref_cnt == 1:
                raise ValueError(f"cannot release block {block.block_id}: no request uses it")
        nodes = self.tree.cut_out([block.block_id for block in blocks])
        self.num_changes += 1
        self._clock += 1
        for node in nodes:
            self.pool.free(node.blocks)
            node.lock_ref -= 1
            node.last_access = self._clock
            if node.lock_ref == 0:
                self._num_used -= len(node.blocks)
                self._queue(node)

    def _queue(self, node: TreeNode) -> None:
        """Add `node` to the heap if it can be evicted now. Called after it lost a lock, a child or
        its last pages."""
        is_candidate = not (node.is_root or node.children or node.lock_ref)
        if is_candidate and not node.is_queued:
            heappush(self._heap, (node.last_access, next(self._serial), node))
            node.is_queued = True

    def _pop_oldest_leaf(self) -> TreeNode:
        """Pop the least recently used leaf. Amortised O(log nodes): each entry that is corrected or
        dropped is paid for by an earlier use."""
        while True:
            time, _, node = heappop(self._heap)
            node.is_queued = False
            if time == node.last_access and not node.children and node.lock_ref == 0:
                return node
            self._queue(node)

    def _pop_lru(self, num_blocks: int) -> list[Block]:
        victims: list[Block] = []
        while len(victims) < num_blocks:
            leaf = self._pop_oldest_leaf()
            victims += self.tree.trim(leaf, num_blocks - len(victims))
            self._queue(leaf if leaf.blocks else leaf.above)
        return victims

    def clear(self) -> None:
        super().clear()
        self.tree.roots.clear()
        self._heap.clear()
        self._num_used = 0

    @property
    def num_evictable_blocks(self) -> int:
        return self.num_cached_blocks - self._num_used

    def cached_contents(self) -> Iterator[CachedContent]:
        nodes = [node for node in self.tree.nodes() if not node.is_root]
        for node in sorted(nodes, key=lambda node: (node.last_access, -node.end)):
            if node.contents is None:
                node.contents = self._contents_of(node)
            yield from reversed(node.contents)

    def _contents_of(self, node: TreeNode) -> list[CachedContent]:
        root = node.above
        while not root.is_root:
            root = root.above
        parent = node.above.blocks[-1].block_id if node.above.blocks else None
        contents = []
        for index, block in enumerate(node.blocks):
            tokens = tuple(node.key[index * self.page_size : (index + 1) * self.page_size])
            contents.append(
                CachedContent(block, parent, tokens, root.extra_keys, begins_node=index == 0)
            )
            parent = block.block_id
        return contents
