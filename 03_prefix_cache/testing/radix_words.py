"""A radix cache in words, for its tests: each letter is a page of tokens."""

from __future__ import annotations

from block_pool import Block
from cache_words import Rig, as_word
from radix_cache import RadixCache


class TreeRig(Rig):
    def __init__(self, num_pages: int = 40, page_size: int = 4) -> None:
        super().__init__(lambda pool, size: RadixCache(size, pool), num_pages, page_size)

    def nodes(self) -> dict[str, int]:
        """The tree, as the words of its nodes and their locks: `{"AB": 1, "AB.CD": 0}`."""
        assert isinstance(self.cache, RadixCache)
        tree, size = self.cache.tree, self.block_size
        return {
            ".".join(as_word(link.key, size) for link in tree.path_to(node)): node.lock_ref
            for node in tree.nodes()
            if not node.is_root
        }

    def found(self, letters: str) -> list[Block]:
        return self.cache.match_prefix(self.spell(letters)).blocks
