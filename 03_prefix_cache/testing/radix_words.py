"""A radix cache in words, for its tests: each letter is a page of tokens."""

from __future__ import annotations

from cache_words import Rig, as_word
from radix_cache import RadixCache


def nodes_of(cache: RadixCache) -> dict[str, int]:
    """The tree, as the words of its nodes and their locks: `{"AB": 1, "AB.CD": 0}`."""
    return {
        ".".join(as_word(link.key, cache.page_size) for link in cache.tree.path_to(node)): (
            node.lock_ref
        )
        for node in cache.tree.nodes()
        if not node.is_root
    }


class TreeRig(Rig):
    cache: RadixCache

    def __init__(self, num_pages: int = 40, page_size: int = 4) -> None:
        super().__init__(lambda pool, size: RadixCache(size, pool), num_pages, page_size)

    def nodes(self) -> dict[str, int]:
        return nodes_of(self.cache)
