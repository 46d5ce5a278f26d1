"""What a prefix cache is: one contract, kept by a hash chain and by a radix tree.

A block with tokens [16, 32) of one request serves every other whose tokens in [0, 32) are the same.
A cache maps prefixes, in whole blocks, to blocks of a `BlockPool`, and is one of their holders:

    ref_cnt                     1: only the cache, evictable; 1 + n: n users, never evicted
    request's tokens            | A A A A | B B B B | C C        |      4-token blocks
    match_prefix                | block 7 | block 3 |                   the longest cached prefix

Matches, insertions and releases use a prefix. Evicted is the block whose last use is the longest
ago, of those that nobody uses and that have no cached block behind them.

A block whose content cannot be trusted is *withdrawn*, with all behind it, even while in use.

Invariants: a cached block's parent is cached; whoever uses a block uses all before it; a use of a
block is a use of all before it; the content of a cached block never changes.

Sources: vLLM's automatic prefix caching (design document); RadixAttention, arXiv 2312.07104.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from block_pool import Block, BlockPool
from request import Request, check_integers

ExtraKeys = Sequence[tuple[str, str | int]] | tuple[str, str | int]
NormalKeys = tuple[tuple[str, str], ...]


def check_extra_keys(extra_keys: ExtraKeys | None) -> tuple[tuple[str, str | int], ...]:
    """What KV depends on besides the tokens, as `(tag, value)` each; a single pair may stand alone.
    The tag keeps an adapter named X and a salt X apart. Raises `ValueError` without one, or for one
    tag used twice."""
    is_one = bool(extra_keys) and isinstance(extra_keys[0], str)
    keys: tuple[Any, ...] = (extra_keys,) if is_one else tuple(extra_keys or ())
    for key in keys:
        is_pair = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str)
        if not is_pair or type(key[1]) not in (str, int):
            raise ValueError(
                f"extra_keys must be pairs (tag, value) of a str and a str or int, got {key!r}"
            )
    if len({tag for tag, _ in keys}) != len(keys):
        raise ValueError(f"extra_keys must use each tag once, got {extra_keys!r}")
    return keys


def normalise_extra_keys(extra_keys: ExtraKeys | None) -> NormalKeys:
    """In one fixed order, so that equal keys are equal: `(("lora", "int:7"),)`."""
    if not extra_keys:
        return ()
    keys = check_extra_keys(extra_keys)
    return tuple(sorted((tag, f"{type(value).__name__}:{value}") for tag, value in keys))


class KeyedRequest(Request):
    """`extra_keys`, as `check_extra_keys` takes them, are what its KV depends on besides its
    tokens: requests that differ in them share nothing."""

    def __init__(self, *arguments: Any, extra_keys: ExtraKeys = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.extra_keys = check_extra_keys(extra_keys) if extra_keys else ()


def extra_keys_of(request: Request) -> tuple[tuple[str, str | int], ...]:
    return request.extra_keys if isinstance(request, KeyedRequest) else ()


class HasBlockId(Protocol):
    block_id: int


class PrefixMatch(NamedTuple):
    """The longest cached prefix: its blocks, head first, and the number of tokens in them."""

    blocks: list[Any]  # each has a `block_id`
    num_cached_tokens: int


class InsertResult(NamedTuple):
    """`blocks[i]` is the cache's block for the content of the i-th block given to `insert`: that
    block itself if it is now `owned`, another if it was a duplicate."""

    blocks: list[Block]
    owned: list[Block]
    duplicates: list[Block]


@dataclass(slots=True)
class CacheStats:
    """Each request is counted once, when it is admitted: tokens looked up and tokens hit."""

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
class PrefixPath:
    """What a cache remembers of one request's way into it: later calls begin where it ends."""

    state: Any = None


class Walk(NamedTuple):
    """Along which prefix one call goes."""

    token_ids: Sequence[int]
    block_size: int
    keys: NormalKeys
    path: PrefixPath

    def tokens(self, index: int) -> tuple[int, ...]:
        return tuple(self.token_ids[index * self.block_size : (index + 1) * self.block_size])


class CacheListener(Protocol):
    """Told of every block that enters or leaves a cache (tiers; routers; tests)."""

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        """`block` now holds `token_ids` behind the prefix that ends in `parent`."""

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """They still hold their content, and lose it when this returns. Children come first."""

    def blocks_withdrawn(self, blocks: Sequence[Block]) -> None:
        """They leave the cache, as far as they are in it, because their content is not to be
        trusted. Children come first, unless it is the whole pool."""


class CachedPrefix(NamedTuple):
    """One cached block and everything it depends on. For checks and pictures; O(depth)."""

    extra_keys: NormalKeys
    token_ids: tuple[int, ...]  # of the whole prefix, this block's last
    block: Block

    @property
    def num_users(self) -> int:
        return self.block.ref_cnt - 1


class PrefixCache(ABC):
    """Prefixes to blocks of `pool`, of `block_size` tokens. What every cache does alike is here;
    each has its own index, and its own books of who uses a block and since when."""

    def __init__(
        self, pool: BlockPool, block_size: int, listener: CacheListener | None = None
    ) -> None:
        check_integers(1, block_size=block_size)
        self.pool = pool
        self.block_size = block_size
        self.listener = listener
        self.stats = CacheStats()
        self._by_block_id: dict[int, Any] = {}  # where in its index the cache has a block

    def match_prefix(
        self,
        token_ids: Sequence[int],
        extra_keys: ExtraKeys | None = None,
        path: PrefixPath | None = None,
    ) -> PrefixMatch:
        """The longest cached prefix under the same extra keys. It counts as used now, but nothing
        keeps it: `touch` it before anything may be evicted."""
        keys = normalise_extra_keys(extra_keys)
        walk = Walk(token_ids, self.block_size, keys, path or PrefixPath())
        blocks = self._find(walk, 0, len(token_ids) // self.block_size)
        if blocks:
            self._use(blocks)
        return PrefixMatch(blocks, len(blocks) * self.block_size)

    @abstractmethod
    def touch(self, blocks: Sequence[HasBlockId]) -> None:
        """One user more for these cached blocks: consecutive ones of a path, head first. Raises
        `ValueError`, and changes nothing, if one of them is not cached."""

    @abstractmethod
    def release(self, blocks: Sequence[HasBlockId]) -> None:
        """One user less, given as to `touch`. They count as used now, the deepest before the rest.
        Raises `ValueError`, and changes nothing, if one of them is not cached or has no user."""

    def insert(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        extra_keys: ExtraKeys | None = None,
        *,
        start: int = 0,
        path: PrefixPath | None = None,
    ) -> InsertResult:
        """Take over computed blocks: `blocks[i]` holds block `start + i` of `token_ids`; the blocks
        before `start` are cached, and used by the caller. It keeps its reference to each; for
        content that is cached already, the reference moves to the cache's block. Raises
        `ValueError`, and changes nothing, for blocks that are free or cached already, or one before
        `start` that is not. O(new blocks) with a `path` that ends at `start`."""
        self._check_given(token_ids, blocks, start)
        keys = normalise_extra_keys(extra_keys)
        walk = Walk(token_ids, self.block_size, keys, path or PrefixPath())
        # The block before them, and those of them whose content is cached already.
        found = self._find(walk, max(start - 1, 0), start + len(blocks))
        if start and not found:
            missing = len(self._find(walk, 0, start))
            raise ValueError(f"cannot insert after {start} blocks: block {missing} is not cached")
        if start and blocks and self.num_users(found[0]) == 0:
            raise ValueError(f"cannot insert after {start} blocks: block {start - 1} is unused")
        known = [self.pool.blocks[block.block_id] for block in found[1 if start else 0 :]]
        duplicates, owned = list(blocks[: len(known)]), list(blocks[len(known) :])
        if known:
            self.touch(known)
            self.pool.free(duplicates)
        first, parent = start + len(known), found[-1] if found else None
        self._add(walk, first, parent, owned)
        self.pool.touch(owned)
        if self.listener is not None:
            before = None if parent is None else self.pool.blocks[parent.block_id]
            for index, block in enumerate(owned, first):
                self.listener.block_cached(block, before, walk.tokens(index), walk.keys)
                before = block
        return InsertResult(known + owned, owned, duplicates)

    def evict(self, num_blocks: int) -> int:
        """Give unused blocks back to the pool: `num_blocks`, or all there are. Returns how many."""
        num_blocks = max(0, min(num_blocks, self.num_evictable_blocks))
        blocks = self._pop_oldest(num_blocks)
        try:
            if self.listener is not None and blocks:
                self.listener.blocks_evicted(blocks)
        finally:  # a listener that raises loses its copy; no block is lost
            for block in blocks:
                del self._by_block_id[block.block_id]
            self.pool.free(blocks)
        return num_blocks

    def withdraw(self, block: HasBlockId) -> None:
        """Forget a cached block and all behind it. Who uses them keeps them, as blocks like any
        other, which are not cached and go back to the pool when they are freed. Raises `ValueError`
        for a block that is not cached."""
        blocks = self._take_off(block)
        try:
            if self.listener is not None:
                self.listener.blocks_withdrawn(blocks)
        finally:
            for gone in blocks:
                del self._by_block_id[gone.block_id]
            self.pool.free(blocks)

    @abstractmethod
    def begin_anew(self) -> None:
        """Forget everything, after a call that was interrupted and may have left contradictions.
        The caller tells the pool who holds its blocks; each design also clears its own books."""
        if self.listener is not None:
            self.listener.blocks_withdrawn(self.pool.blocks[1:])
        self._by_block_id.clear()

    def reset(self) -> bool:
        """Forget everything. False, and nothing has changed, while any cached block is in use."""
        if self.num_evictable_blocks != self.num_cached_blocks:
            return False
        self.evict(self.num_cached_blocks)
        return True

    def cache_computed_blocks(
        self, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None
    ) -> list[Any]:
        """For use without an engine: cache the full blocks of `token_ids`, as many as fit from the
        front, in blocks of the pool. Returns the path, which nobody uses yet."""
        found = self.match_prefix(token_ids, extra_keys).blocks
        self.touch(found)  # so that making room does not evict the very path that is extended
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

    def num_users(self, block: HasBlockId) -> int:
        """Holders of a cached block, the cache itself not counted."""
        return self.pool.blocks[block.block_id].ref_cnt - 1

    @property
    def num_cached_blocks(self) -> int:
        return len(self._by_block_id)

    @property
    @abstractmethod
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody uses."""

    def cached_block_ids(self) -> Iterable[int]:
        return self._by_block_id.keys()

    cache_hit_rate = property(lambda self: self.stats.hit_rate)  # the posts' name

    @abstractmethod
    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        """Every cached block with its whole prefix; those that nobody uses in the order in which
        they would be evicted. Not for the engine's loop."""

    def hash_of(self, block: HasBlockId) -> str:
        """The first digits of a cached block's hash, if the index has hashes."""
        return ""

    def begins_node(self, block: HasBlockId) -> bool:
        """Whether a cached block is the first of its node, if the index is a tree."""
        return False

    def tell_of_cuts(self, told: Callable[[int], object] | None) -> None:  # noqa: B027
        """Of a tree: with which block the lower part begins when a node is cut."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError` if the cache contradicts itself or its pool."""

    @abstractmethod
    def _find(self, walk: Walk, begin: int, end: int) -> list[Any]:
        """The cached ones of blocks `[begin, end)`, up to the first that is not."""

    @abstractmethod
    def _use(self, blocks: list[Any]) -> None:
        """What `_find` has found from the root on is used now."""

    @abstractmethod
    def _add(self, walk: Walk, first: int, parent: Any, blocks: list[Block]) -> None:
        """Blocks `first` and on, new ones, behind `parent`, the last that `_find` has just found;
        None: behind the root."""

    @abstractmethod
    def _pop_oldest(self, num_blocks: int) -> list[Block]:
        """Take the unused blocks out of the index whose last use is the longest ago."""

    @abstractmethod
    def _take_off(self, block: HasBlockId) -> list[Block]:
        """Take a block and all behind it out of the index, used or not. Children come first."""

    def _check_given(self, token_ids: Sequence[int], blocks: Sequence[Block], start: int) -> None:
        """What `insert` refuses whatever is cached."""
        needed = (start + len(blocks)) * self.block_size
        if len(token_ids) < needed:
            raise ValueError(f"token_ids must have {needed} ids, got {len(token_ids)}")
        if len({block.block_id for block in blocks}) != len(blocks):
            raise ValueError("cannot insert blocks: block ids must be unique within a call")
        for block in blocks:
            if block.ref_cnt < 1 or block.block_id in self._by_block_id:
                state = "free" if block.ref_cnt < 1 else "cached already"
                raise ValueError(f"cannot insert block {block.block_id}: the block is {state}")
