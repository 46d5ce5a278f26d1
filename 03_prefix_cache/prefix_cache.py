"""The interface of a prefix cache, implemented by a hash chain and by a radix tree.

A block with tokens [16, 32) of one request serves every other request whose tokens in [0, 32) are
the same. A cache maps prefixes, in whole blocks, to blocks of a `BlockPool`. It holds a reference
to each of them:

    ref_cnt                     1: only the cache, evictable; 1 + n: n users, never evicted
    request's tokens            | A A A A | B B B B | C C        |      4-token blocks
    match_prefix                | block 7 | block 3 |                   the longest cached prefix

Matching, inserting and releasing a prefix count as a use. The cache evicts the least recently used
block that no request uses and no cached block extends.

If some content cannot be trusted, all blocks are *withdrawn*: removed from the cache, even while in
use.

Invariants: a cached block's parent is cached; a request that uses a block uses all blocks before
it; a use of a block is a use of all blocks before it; the content of a cached block never changes.

Sources: vLLM's automatic prefix caching (design document); RadixAttention, arXiv 2312.07104.

See 03_prefix_cache/README.md#the-interface-of-a-cache"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from block_pool import Block, BlockPool
from request import Request, check_integers

# On what KV depends besides the tokens, as `(tag, value)` pairs. The tag keeps an adapter named X
# and a salt X apart.
ExtraKeys = Sequence[tuple[str, str | int]]
NormalKeys = tuple[tuple[str, str], ...]


def normalise_extra_keys(extra_keys: ExtraKeys | None) -> NormalKeys:
    """Sort the pairs, so that equal keys compare equal: `(("lora", "int:7"),)`."""
    keys = extra_keys or ()
    return tuple(sorted((tag, f"{type(value).__name__}:{value}") for tag, value in keys))


class KeyedRequest(Request):
    """A request whose KV also depends on `extra_keys`. Requests with different extra keys share no
    blocks."""

    def __init__(self, *arguments: Any, extra_keys: ExtraKeys = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.extra_keys = tuple(extra_keys)


def extra_keys_of(request: Request) -> tuple[tuple[str, str | int], ...]:
    return request.extra_keys if isinstance(request, KeyedRequest) else ()


class HasBlockId(Protocol):
    block_id: int


class PrefixMatch(NamedTuple):
    """The longest cached prefix: its blocks, head first, and the number of tokens in them."""

    blocks: list[Any]  # each has a `block_id`
    num_cached_tokens: int


@dataclass(slots=True)
class CacheStats:
    """Tokens looked up and tokens hit. Each request is counted once, at admission."""

    num_requests: int = 0
    num_tokens_looked_up: int = 0
    num_tokens_hit: int = 0

    def record(self, num_tokens: int, num_hit: int) -> None:
        self.num_requests += 1
        self.num_tokens_looked_up += num_tokens
        self.num_tokens_hit += num_hit

    @property
    def hit_rate(self) -> float:
        return self.num_tokens_hit / max(self.num_tokens_looked_up, 1)


@dataclass(slots=True)
class MatchCursor:
    """What a cache remembers of a request's prefix, so that later calls need not hash it again."""

    state: Any = None


class PrefixKey(NamedTuple):
    """The prefix that one call of the cache works on."""

    token_ids: Sequence[int]
    block_size: int
    keys: NormalKeys
    cursor: MatchCursor

    def tokens(self, index: int) -> tuple[int, ...]:
        return tuple(self.token_ids[index * self.block_size : (index + 1) * self.block_size])


class CacheListener(Protocol):
    """Notified of every block that enters or leaves a cache (for tiers, routers, tests)."""

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        """`block` now holds `token_ids`, following the prefix that ends in `parent`."""

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """Called while the blocks still hold their content, which is lost when this returns.
        Children come first."""

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        """The blocks, which are the whole pool, leave the cache if they are in it, because their
        content is not trusted."""


class CachedContent(NamedTuple):
    """What a cached block holds: `token_ids`, after the prefix that ends in block `parent_id`."""

    block: Block
    parent_id: int | None
    token_ids: tuple[int, ...]
    extra_keys: NormalKeys
    block_hash: bytes = b""  # if the index has hashes
    begins_node: bool = False  # the first of its node, if the index is a tree


class PrefixCache(ABC):
    """Map prefixes to blocks of `pool`, of `block_size` tokens each. The base class has what both
    caches share; each subclass has its own index, and tracks which blocks are in use and when they
    were last used."""

    def __init__(
        self, pool: BlockPool, block_size: int, listener: CacheListener | None = None
    ) -> None:
        check_integers(1, block_size=block_size)
        self.pool = pool
        self.block_size = block_size
        self.listener = listener
        self.stats = CacheStats()
        # Grows with every change of `cached_contents`, of a block's users or of the order.
        self.num_changes = 0
        self._by_block_id: dict[int, Any] = {}  # where each block is in the cache's index

    def match_prefix(
        self,
        token_ids: Sequence[int],
        extra_keys: ExtraKeys | None = None,
        cursor: MatchCursor | None = None,
    ) -> PrefixMatch:
        """Return the longest cached prefix under the same extra keys. The blocks are marked as used
        now, but are not held: `touch` them before anything can be evicted."""
        keys = normalise_extra_keys(extra_keys)
        prefix = PrefixKey(token_ids, self.block_size, keys, cursor or MatchCursor())
        blocks = self._match(prefix, 0, len(token_ids) // self.block_size)
        self.num_changes += len(blocks)
        if blocks:
            self._mark_used(blocks)
        return PrefixMatch(blocks, len(blocks) * self.block_size)

    @abstractmethod
    def touch(self, blocks: Sequence[HasBlockId]) -> None:
        """Add a user to these cached blocks: consecutive blocks of one prefix, head first."""

    @abstractmethod
    def release(self, blocks: Sequence[HasBlockId]) -> None:
        """Remove a user from these cached blocks, given as to `touch`. They are marked as used now,
        the deepest before the others."""

    def insert(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        extra_keys: ExtraKeys | None = None,
        *,
        start: int = 0,
        cursor: MatchCursor | None = None,
    ) -> list[Block]:
        """Publish computed blocks: `blocks[i]` holds block `start + i` of `token_ids`; the blocks
        before `start` are cached, and used by the caller.

        Returns the cache's block for each content: the given one or, if it was cached already,
        another one, to which the caller's reference moves.
        """
        keys = normalise_extra_keys(extra_keys)
        prefix = PrefixKey(token_ids, self.block_size, keys, cursor or MatchCursor())
        # The block before the new ones, and those of the new ones whose content is already cached.
        found = self._match(prefix, max(start - 1, 0), start + len(blocks))
        assert not start or found, f"block {start - 1} is not cached"
        known = [self.pool.blocks[block.block_id] for block in found[1 if start else 0 :]]
        owned = list(blocks[len(known) :])
        if known:
            self.touch(known)
            self.pool.free(blocks[: len(known)])
        self.num_changes += 1
        first = start + len(known)
        parent = found[-1] if found else None
        self._insert(prefix, first, parent, owned)
        self.pool.touch(owned)
        if self.listener is not None:
            before = None if parent is None else self.pool.blocks[parent.block_id]
            for index, block in enumerate(owned, first):
                self.listener.block_cached(block, before, prefix.tokens(index), prefix.keys)
                before = block
        return known + owned

    def evict(self, num_blocks: int) -> int:
        """Return up to `num_blocks` unused blocks to the pool. Returns how many were evicted."""
        num_blocks = max(0, min(num_blocks, self.num_evictable_blocks))
        self.num_changes += num_blocks
        blocks = self._pop_lru(num_blocks)
        try:
            if self.listener is not None and blocks:
                self.listener.blocks_evicted(blocks)
        finally:  # if the listener raises, it loses its copy, but no block is lost
            for block in blocks:
                del self._by_block_id[block.block_id]
            self.pool.free(blocks)
        return num_blocks

    def withdraw_all(self) -> None:
        """Empty the cache, because some content is not trusted. Requests that use blocks keep them
        as ordinary blocks, which return to the pool when they are freed."""
        blocks = [self.pool.blocks[block_id] for block_id in self._by_block_id]
        self.clear()
        self.pool.free(blocks)

    @abstractmethod
    def clear(self) -> None:
        """Clear the cache after a call that was interrupted and may have left it inconsistent. The
        caller tells the pool which references remain; each subclass also clears its own index."""
        if self.listener is not None:
            self.listener.blocks_invalidated(self.pool.blocks[1:])
        self.num_changes += 1
        self._by_block_id.clear()

    def reset(self) -> bool:
        """Clear the cache. Returns False, and changes nothing, while any cached block is in use."""
        if self.num_evictable_blocks != self.num_cached_blocks:
            return False
        self.evict(self.num_cached_blocks)
        return True

    def cache_computed_blocks(
        self, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None
    ) -> list[Any]:
        """Cache the full blocks of `token_ids`, without an engine: as many as fit, from the front,
        in blocks of the pool. Returns the cached blocks, head first, which have no user yet."""
        found = self.match_prefix(token_ids, extra_keys).blocks
        self.touch(found)  # so that `evict` does not evict the prefix that is being extended
        num_missing = len(token_ids) // self.block_size - len(found)
        self.evict(num_missing - self.pool.num_free_blocks)
        num_new = min(num_missing, self.pool.num_free_blocks)
        if num_new:
            new = self.pool.allocate(num_new) or []
            self.insert(token_ids, new, extra_keys, start=len(found))
            found = self.match_prefix(token_ids, extra_keys).blocks
        self.release(found)
        return found

    def owns(self, block: HasBlockId) -> bool:
        return block.block_id in self._by_block_id

    @property
    def num_cached_blocks(self) -> int:
        return len(self._by_block_id)

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no request uses."""

    def cached_block_ids(self) -> Iterable[int]:
        return self._by_block_id.keys()

    @abstractmethod
    def cached_contents(self) -> Iterator[CachedContent]:
        """Every cached block; unused ones in the order in which they would be evicted."""

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the cache contradicts its pool."""
        users = [self.pool.blocks[block_id].ref_cnt - 1 for block_id in self._by_block_id]
        assert min(users, default=0) >= 0, "the cache has no reference to one of its blocks"
        assert users.count(0) == self.num_evictable_blocks, "unused blocks"

    @abstractmethod
    def _match(self, prefix: PrefixKey, begin: int, end: int) -> list[Any]:
        """Return the cached blocks among blocks `[begin, end)`, up to the first one that is not
        cached."""

    @abstractmethod
    def _mark_used(self, blocks: list[Any]) -> None:
        """Mark blocks that `_match` returned, from the root on, as used now."""

    @abstractmethod
    def _insert(self, prefix: PrefixKey, first: int, parent: Any, blocks: list[Block]) -> None:
        """Add new blocks to the index, the first with index `first`. They follow `parent`, the last
        block that `_match` just returned; None: they start at the root."""

    @abstractmethod
    def _pop_lru(self, num_blocks: int) -> list[Block]:
        """Remove the least recently used blocks without users from the index, and return them."""
