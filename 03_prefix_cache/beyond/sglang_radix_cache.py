"""The radix cache in SGLang's words: requests are handed over, sizes are tokens, a tree prints.

    cache_unfinished_request   what one chunk has computed, others may use at once
    cache_finished_request     and everything is let go of
    evictable_size             cached tokens that nobody uses
    protected_size             cached tokens that somebody uses
    pretty_print               a line for each node

The engine calls none of them: its manager publishes through the contract of `prefix_cache.py`, with
either cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from block_pool import Block
from prefix_cache import ExtraKeys, PrefixPath
from radix_cache import RadixCache
from radix_tree import RadixTree


class SGLangRadixCache(RadixCache):
    """A `RadixCache` with these names."""

    def cache_unfinished_request(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        extra_keys: ExtraKeys | None = None,
        *,
        path: PrefixPath | None = None,
    ) -> list[Block]:
        """Cache the full pages of a request that goes on. `token_ids` are those whose KV is
        written, `blocks` the request's whole table. Returns the table to go on with: duplicates are
        exchanged, the rest is as given."""
        num_full = len(token_ids) // self.page_size
        start = 0
        while start < num_full and self.owns(blocks[start]):
            start += 1
        given = blocks[start:num_full]
        result = self.insert(token_ids, given, extra_keys, start=start, path=path)
        return [*blocks[:start], *result.blocks, *blocks[num_full:]]

    def cache_finished_request(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        extra_keys: ExtraKeys | None = None,
        *,
        path: PrefixPath | None = None,
    ) -> None:
        """Cache the full pages and let go of everything: the unaligned tail, pages taken ahead and
        duplicates go back to the pool. Arguments as above."""
        table = self.cache_unfinished_request(token_ids, blocks, extra_keys, path=path)
        num_full = len(token_ids) // self.page_size
        self.pool.free(table[num_full:][::-1])
        self.release(table[:num_full])

    @property
    def evictable_size(self) -> int:
        """Tokens, as in SGLang; divide by `page_size` for pages."""
        return self.num_evictable_blocks * self.page_size

    @property
    def protected_size(self) -> int:
        return (self.num_cached_blocks - self.num_evictable_blocks) * self.page_size

    def pretty_print(self) -> None:
        """Print the tree: tokens and pages (block ids) of each node, and how often it is locked."""
        print(self)

    def __str__(self) -> str:
        head = (
            f"RadixCache, page_size {self.page_size}: "
            f"{self.protected_size} tokens protected, {self.evictable_size} evictable"
        )
        return "\n".join([head, *tree_lines(self.tree)])


def tree_lines(tree: RadixTree) -> Iterator[str]:
    """One for each node, indented below its parent."""
    stack = [(root, 0) for root in reversed(tree.roots.values())]
    while stack:
        node, depth = stack.pop()
        if node.is_root:
            keys = " ".join(f"{tag}={value}" for tag, value in node.extra_keys)
            yield f"root {keys}".rstrip()
        else:
            pages = shorten([block.block_id for block in node.blocks])
            yield f"{'  ' * depth}[{shorten(node.key)}] pages {pages}, lock_ref {node.lock_ref}"
        stack += [(child, depth + 1) for child in reversed(node.children.values())]


def shorten(numbers: Sequence[int], num_shown: int = 6) -> str:
    """`1 2 3 4 5 .. 9`: the last, and as many from the front as there is room for."""
    if len(numbers) <= num_shown:
        return " ".join(map(str, numbers))
    return f"{' '.join(map(str, numbers[: num_shown - 1]))} .. {numbers[-1]}"
