"""A prefix cache for layers in groups: chapter 3's hash chain, with keys (group, hash).

    window 6, blocks of 4          tokens   0-3   4-7  8-11 12-15   next: token 16
    group 0   every position                 x     x     x     x
    group 1   what a window sees             x     -     -     x       12-15, but not 11
    the longest prefix that holds            4 tokens

A prefix holds in a group that sees every position if all its blocks are cached, and in one with a
window if its last `window - 1` tokens are: earlier tokens are not read, so they may be missing.
Both must hold at one length. If a prefix is shortened for one group, it may no longer hold in
another, so the groups are checked in turn until all agree. The result is the longest prefix,
because each group rejects only lengths that do not hold.

So here a parent can be evicted before its child, which chapter 3's caches forbid. The cache has no
references: a block that no request holds keeps its content until the pool allocates it again, and
the pool's free order is the order of eviction.

Invariants: for one (group, hash) at most one block is known; a block is known by at most one key;
its content has not changed since it was published. vLLM's pool is such a cache, and its coordinator
of several managers checks them in turn.

See 03_prefix_cache/beyond/GROUPS.md"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from block_pool import Block, BlockPool
from prefix_cache import CacheStats
from request_chain import Link


@dataclass(slots=True, eq=False)
class GroupedBlock:
    """The content of `block`: KV of `group`'s layers for the last tokens of `chain[: index +
    1]`."""

    block: Block
    group: int
    chain: list[Link]  # of the request that published it
    index: int

    @property
    def key(self) -> tuple[int, bytes]:
        return self.group, self.chain[self.index][0]


class GroupedPrefixCache:
    """Known prefixes in blocks of `pool`. `windows`: the window of each group in tokens; None sees
    every position."""

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int | None]) -> None:
        self.pool = pool
        self.block_size = block_size
        self.stats = CacheStats()
        self.num_changes = 0  # grows when a block becomes known or unknown
        # Whole blocks before a block's end that the next token sees.
        self._num_seen = [None if w is None else -(-(w - 1) // block_size) for w in windows]
        self._by_key: dict[tuple[int, bytes], GroupedBlock] = {}
        self._by_block_id: dict[int, GroupedBlock] = {}

    def longest_hit(self, chain: Sequence[Link]) -> int:
        """Blocks of the longest prefix that holds in every group."""
        hashes = [link[0] for link in chain]
        num_agreeing = 0
        group = 0
        while num_agreeing < len(self._num_seen):
            num_blocks = self._longest_in(group, hashes)
            num_agreeing = num_agreeing + 1 if num_blocks == len(hashes) else 1
            hashes = hashes[:num_blocks]
            group = (group + 1) % len(self._num_seen)
        return len(hashes)

    def _longest_in(self, group: int, hashes: Sequence[bytes]) -> int:
        num_seen = self._num_seen[group]
        if num_seen is None:
            missing = (i for i, name in enumerate(hashes) if (group, name) not in self._by_key)
            return next(missing, len(hashes))
        # From the right: are all blocks cached that a token after `length` sees?
        length = index = len(hashes)
        while index > max(0, length - num_seen):
            index -= 1
            if (group, hashes[index]) not in self._by_key:
                length = index
        return length

    def find(self, chain: Sequence[Link], num_blocks: int) -> list[list[Block]]:
        """The blocks that each group needs for a prefix of `num_blocks` that holds: its last
        blocks."""
        found = []
        for group, num_seen in enumerate(self._num_seen):
            first = 0 if num_seen is None else max(0, num_blocks - num_seen)
            keys = [(group, name) for name, _ in chain[first:num_blocks]]
            found.append([self._by_key[key].block for key in keys])
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a reference to known blocks, whether they have any or not."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self.pool.touch([block for block in blocks if block.ref_cnt])
        self.pool.reclaim(free)

    def publish(self, group: int, chain: list[Link], index: int, block: Block) -> Block:
        """Publish `block`, which holds block `index` of `chain`. Returns the block that is known
        for that content: this one, or an earlier one, which takes over its reference."""
        new = GroupedBlock(block, group, chain, index)
        known = self._by_key.setdefault(new.key, new)
        if known is new:
            self.num_changes += 1
            self._by_block_id[block.block_id] = new
        else:
            self.hold([known.block])
            self.pool.free([block])
        return known.block

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        """Remove blocks that are being reallocated."""
        for block in blocks:
            known = self._by_block_id.pop(block.block_id, None)
            if known is not None:
                self.num_changes += 1
                del self._by_key[known.key]

    @property
    def num_cached_blocks(self) -> int:
        return len(self._by_block_id)

    def reset(self) -> bool:
        """Clear the cache. Returns False, and changes nothing, while any of it is in use."""
        if any(known.block.ref_cnt for known in self._by_block_id.values()):
            return False
        self.clear()
        return True

    def clear(self) -> None:
        self.num_changes += 1
        self._by_key.clear()
        self._by_block_id.clear()

    def cached_prefixes(self) -> Iterator[GroupedBlock]:
        """All known blocks in no order, for checks."""
        return iter(self._by_block_id.values())

    def check_invariants(self) -> None:
        assert len(self._by_key) == len(self._by_block_id)
        for known in self._by_block_id.values():
            assert self._by_key[known.key] is known, known
