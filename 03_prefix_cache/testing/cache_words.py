"""Prefix caches in words, for their tests: each letter is a block of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import pytest

from block_pool import Block, BlockPool
from bounded_loops import as_long_as
from cache_checks import cached_prefixes, check_cache
from kv_slots import MakeCache
from prefix_cache import ExtraKeys, HasBlockId
from radix_cache import RadixCache


def ids(blocks: Iterable[HasBlockId]) -> list[int]:
    return [block.block_id for block in blocks]


def spell(letters: str, block_size: int) -> list[int]:
    """`"AB"` in blocks of 4: `[6500, 6501, 6502, 6503, 6600, ...]`."""
    return [100 * ord(letter) + i for letter in letters for i in range(block_size)]


def as_word(token_ids: Sequence[int], block_size: int) -> str:
    return "".join(chr(token // 100) for token in token_ids[::block_size])


class Rig:
    """A cache on a pool of `num_usable` blocks, and requests in words of blocks."""

    def __init__(self, make_cache: MakeCache, num_usable: int, block_size: int) -> None:
        self.pool = BlockPool(num_usable + 1)
        self.cache = make_cache(self.pool, block_size)
        self.block_size = block_size

    def spell(self, letters: str) -> list[int]:
        return spell(letters, self.block_size)

    def hold(self, letters: str, keys: ExtraKeys | None = None) -> list[Block]:
        """Cache the prefix, as a request that uses it from now on."""
        tokens = self.spell(letters)
        match = self.cache.match_prefix(tokens, keys)
        found = [self.pool.blocks[block_id] for block_id in ids(match.blocks)]
        self.cache.touch(found)
        num_new = len(letters) - len(found)
        self.cache.evict(num_new - self.pool.num_free_blocks)
        new = (self.pool.allocate(num_new) if num_new else None) or []
        return found + self.cache.insert(tokens, new, keys, start=len(found))

    def warm(self, letters: str, keys: ExtraKeys | None = None) -> list[int]:
        """Cache the prefix and let go of it."""
        blocks = self.hold(letters, keys)
        self.cache.release(blocks)
        return ids(blocks)

    def hits(self, letters: str, keys: ExtraKeys | None = None) -> list[int]:
        """The block ids that a request would hit. It changes the order of last use."""
        match = self.cache.match_prefix(self.spell(letters), keys)
        assert match.num_cached_tokens == len(match.blocks) * self.block_size
        return ids(match.blocks)

    def snapshot(self) -> tuple[object, ...]:
        """All that anyone can see, and in which order the cache would evict."""
        shown = [
            (prefix.extra_keys, prefix.token_ids, prefix.block.block_id, prefix.num_users)
            for prefix in cached_prefixes(self.cache)
        ]
        twin = copy.deepcopy(self.cache)
        free_ids = ids(twin.pool.free_order())
        for _ in as_long_as(lambda: twin.evict(1)):
            pass
        order = ids(twin.pool.free_order())[len(free_ids) :]
        refs = [block.ref_cnt for block in self.pool.blocks]
        return sorted(shown), free_ids, order, refs, self.cache.num_evictable_blocks

    def check(self) -> None:
        check_cache(self.cache)
        self.pool.check_invariants()

    def refused(
        self, match: str | None, call: Callable[..., object], *args: object, **kwargs: object
    ) -> None:
        """The call raises `ValueError` and has changed nothing. `match` is None in tests that grade
        a task's answers, whose words are free."""
        before = self.snapshot()
        with pytest.raises(ValueError, match=match):
            call(*args, **kwargs)
        assert self.snapshot() == before
        self.check()


def nodes_of(cache: RadixCache) -> dict[str, int]:
    """The tree, as the words of its nodes and their locks: `{"AB": 1, "AB.CD": 0}`."""
    nodes: dict[str, int] = {}
    for node in cache.tree.nodes():
        path: list[str] = []
        link = node
        while not link.is_root:
            path.insert(0, as_word(link.key, cache.page_size))
            link = link.above
        if path:
            nodes[".".join(path)] = node.lock_ref
    return nodes


class TreeRig(Rig):
    cache: RadixCache

    def __init__(self, num_pages: int = 40, page_size: int = 4) -> None:
        super().__init__(lambda pool, size: RadixCache(size, pool), num_pages, page_size)

    def nodes(self) -> dict[str, int]:
        return nodes_of(self.cache)
