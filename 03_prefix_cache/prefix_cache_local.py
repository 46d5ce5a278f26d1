"""A prefix cache as a hash chain: one dictionary lookup per block.

A block's hash covers its tokens and, through its parent's hash, everything before them:

    root(extra keys) -> h0 = H(root, tokens[0:16]) -> h1 = H(h0, tokens[16:32]) -> h2 = ...

So equal hashes mean equal prefixes. The root mixes in what else KV depends on (an adapter, a
tenant's salt): chains of two roots never meet. The hash is a cryptographic digest: with Python's
`hash` a prompt could be made to collide with another user's prefix (vLLM CVE-2025-25183).

Invariants: those of `prefix_cache.py`; `_evictable` holds exactly the cached blocks without users,
least recently used first, so every child before its parent. vLLM keeps the hashes on the pool's
blocks, and its free list has this order.

See 03_prefix_cache/README.md#the-hash-chain"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

from block_pool import Block, BlockPool
from prefix_cache import (
    CachedContent,
    CacheListener,
    ExtraKeys,
    HasBlockId,
    NormalKeys,
    PrefixCache,
    PrefixKey,
    normalise_extra_keys,
)

BLOCK_SIZE = 16
MAX_CACHED_BLOCKS = 1024
HASH_BYTES = 32


@lru_cache(maxsize=1024)
def _mix_in(parent_hash: bytes, extra_keys: NormalKeys) -> bytes:
    """Hash each part with its length first, so that different lists of keys never hash the same
    bytes."""
    digest = blake2b(parent_hash, digest_size=HASH_BYTES, person=b"extra keys")
    for part in (part.encode() for key in extra_keys for part in key):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def compute_block_hash(
    parent_hash: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None
) -> bytes:
    """The hash of a block with `token_ids` (signed 64-bit integers) after the prefix whose hash is
    `parent_hash`; None for a first block. Returns 32 bytes, the same on every machine."""
    if not parent_hash or extra_keys:
        parent_hash = _mix_in(parent_hash or b"", normalise_extra_keys(extra_keys))
    return _link(parent_hash, token_ids)


def _link(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return blake2b(parent_hash + tokens, digest_size=HASH_BYTES).digest()


def compute_hash_chain(
    token_ids: Sequence[int], block_size: int, extra_keys: ExtraKeys | None = None
) -> list[tuple[bytes, tuple[int, ...]]]:
    """`(hash, tokens)` of every full block."""
    chain: list[tuple[bytes, tuple[int, ...]]] = []
    parent_hash = None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = tuple(token_ids[start : start + block_size])
        parent_hash = compute_block_hash(parent_hash, tokens, None if chain else extra_keys)
        chain.append((parent_hash, tokens))
    return chain


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block of the pool and its content."""

    block_id: int
    block: Block
    block_hash: bytes
    token_ids: tuple[int, ...]
    parent: CachedBlock | None = field(default=None, repr=False)
    extra_keys: NormalKeys = ()
    _content: CachedContent | None = field(default=None, repr=False)

    @property
    def content(self) -> CachedContent:
        """Made once, when it is first asked for."""
        if self._content is None:
            parent_id = None if self.parent is None else self.parent.block_id
            self._content = CachedContent(
                self.block, parent_id, self.token_ids, self.extra_keys, self.block_hash
            )
        return self._content

    @property
    def num_users(self) -> int:
        """The block's `ref_cnt` minus one, because that counts the cache too."""
        return self.block.ref_cnt - 1


class PrefixCacheLocal(PrefixCache):
    """A `PrefixCache` keyed by chained hashes. Takes the engine's `pool`, or makes a pool of
    `max_cached_blocks` blocks."""

    def __init__(
        self,
        max_cached_blocks: int = MAX_CACHED_BLOCKS,
        pool: BlockPool | None = None,
        block_size: int = BLOCK_SIZE,
        listener: CacheListener | None = None,
    ) -> None:
        super().__init__(pool or BlockPool(max_cached_blocks + 1), block_size, listener)
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._evictable: OrderedDict[int, CachedBlock] = OrderedDict()

    def _match(self, prefix: PrefixKey, begin: int, end: int) -> list[CachedBlock]:
        blocks: list[CachedBlock] = []
        for index in range(begin, end):
            cached = self._by_hash.get(self._hash(prefix, index))
            if cached is None:
                break
            blocks.append(cached)
        return blocks

    def _hash(self, prefix: PrefixKey, index: int) -> bytes:
        """The hash of block `index`, in the same chain as `compute_hash_chain`. The cursor stores
        the hashes computed so far."""
        hashes = prefix.cursor.state = prefix.cursor.state or [_mix_in(b"", prefix.keys)]
        while len(hashes) <= index + 1:
            hashes.append(_link(hashes[-1], prefix.tokens(len(hashes) - 1)))
        return hashes[index + 1]

    def _insert(
        self, prefix: PrefixKey, first: int, parent: CachedBlock | None, blocks: list[Block]
    ) -> None:
        for index, block in enumerate(blocks, first):
            name = self._hash(prefix, index)
            tokens = prefix.tokens(index)
            parent = CachedBlock(block.block_id, block, name, tokens, parent, prefix.keys)
            self._by_hash[name] = self._by_block_id[block.block_id] = parent

    def _mark_used(self, blocks: list[CachedBlock]) -> None:
        for cached in reversed(blocks):
            if cached.block.ref_cnt == 1:  # only the cache holds it
                self._evictable.move_to_end(cached.block_id)

    def touch(self, blocks: Sequence[HasBlockId]) -> None:
        cached_blocks = [self._by_block_id[block.block_id] for block in blocks]
        self.num_changes += 1
        self.pool.touch([cached.block for cached in cached_blocks])
        for cached in cached_blocks:
            if cached.block.ref_cnt == 2:  # the cache and its first user
                del self._evictable[cached.block_id]

    def release(self, blocks: Sequence[HasBlockId]) -> None:
        cached_blocks = [self._by_block_id[block.block_id] for block in blocks]
        self.num_changes += 1
        for cached in cached_blocks:
            if cached.block.ref_cnt == 1:
                raise ValueError(f"cannot release block {cached.block_id}: no request uses it")
        self.pool.free([cached.block for cached in cached_blocks])
        # Deepest first, so that it is evicted before its parent.
        for cached in reversed(cached_blocks):
            if cached.block.ref_cnt == 1:
                self._evictable[cached.block_id] = cached

    def _pop_lru(self, num_blocks: int) -> list[Block]:
        victims = [self._evictable.popitem(last=False)[1] for _ in range(num_blocks)]
        for cached in victims:
            del self._by_hash[cached.block_hash]
        return [cached.block for cached in victims]

    def clear(self) -> None:
        super().clear()
        self._by_hash.clear()
        self._evictable.clear()

    @property
    def num_evictable_blocks(self) -> int:
        return len(self._evictable)

    def cached_contents(self) -> Iterator[CachedContent]:
        used = (cached for cached in self._by_block_id.values() if cached.num_users)
        return (cached.content for cached in chain(used, self._evictable.values()))
