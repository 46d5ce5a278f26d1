"""A radix cache in words, for its tests: each letter is a page of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from block_pool import Block
from prefix_cache import MatchCursor
from radix_cache import RadixCache
from radix_tree import TreeNode


def ids(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class Rig:
    """A cache on its own pool, and requests in words: each letter is a page."""

    def __init__(self, page_size: int = 4, num_pages: int = 40) -> None:
        self.cache = RadixCache(page_size=page_size, num_pages=num_pages)
        self.pool = self.cache.pool
        self.page_size = page_size

    def spell(self, letters: str, num_extra: int = 0) -> list[int]:
        tokens = [100 * ord(letter) + i for letter in letters for i in range(self.page_size)]
        return tokens + list(range(num_extra))

    def hold(self, letters: str, cursor: MatchCursor | None = None) -> list[Block]:
        """Cache the word as a request that uses it from now on."""
        found = self.cache.match_prefix(self.spell(letters), None, cursor).blocks
        self.cache.touch(found)
        num_new = len(letters) - len(found)
        new = (self.pool.allocate(num_new) if num_new else None) or []
        tokens = self.spell(letters)
        return found + self.cache.insert(tokens, new, start=len(found), cursor=cursor).blocks

    def warm(self, letters: str) -> list[Block]:
        blocks = self.hold(letters)
        self.cache.release(blocks)
        return blocks

    def hits(self, letters: str) -> int:
        return len(self.cache.match_prefix(self.spell(letters)).blocks)

    def nodes(self) -> dict[str, int]:
        """The tree, as the words of its nodes and their locks: `{"AB": 1, "AB.CD": 0}`."""
        tree = self.cache.tree
        return {
            ".".join(self.word(link) for link in tree.path_to(node)): node.lock_ref
            for node in tree.nodes()
            if not node.is_root
        }

    def word(self, node: TreeNode) -> str:
        return "".join(chr(token // 100) for token in node.key[:: self.page_size])

    def check(self) -> None:
        self.cache.check_invariants()
        self.pool.check_invariants()
