"""Record blocks as events: which request takes, shares, frees and caches them, and block tables.

    pool     wrapped by PoolWatch       blocks taken, shared, freed
    cache    wrapped by CacheWatch      look-ups, publications, evictions, splits of its tree
    loads    `LoadListener`             KV that is loaded from elsewhere
    tables   compared                   after the pool's work for a request

The wrappers replace the pool and the cache in the memory and in the cache, and are removed again;
they call the wrapped object and record. Any cache with the contract of chapter 3 can be wrapped.

A pool does not know the request that it works for. The memory has its id (`current_req_id`), or the
loads, when they act for one request within a call for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from block_pool import Block, BlockPool
from common.events.event_kinds import (
    Event,
    Evicted,
    Freed,
    LoadBegun,
    Loaded,
    LoadEnded,
    Matched,
    Published,
    Shared,
    Split,
    Table,
    Taken,
)
from common.events.event_log import EventLog
from grouped_kv_memory import GroupedKVMemory
from kv_connector import KVConnector
from kv_loads import KVLoads, Load, LoadListener
from kv_memory import UncachedKVCacheManager
from prefix_cache import (
    CacheListener,
    CacheStats,
    ExtraKeys,
    HasBlockId,
    InsertResult,
    MatchCursor,
    PrefixCache,
    PrefixMatch,
)
from request_chain import Link


class LoadingMemory(Protocol):
    """A KV memory with a connector."""

    loads: KVLoads


class MemoryWatch(LoadListener):
    """Records all block events of one `memory`, from `put_in` to `take_out`."""

    def __init__(
        self, log: EventLog, memory: UncachedKVCacheManager, connector: KVConnector | None
    ) -> None:
        self.log, self.memory, self.connector = log, memory, connector
        self.pool, self.cache = memory.pool, memory.cache
        self._groups = memory.groups if isinstance(memory, GroupedKVMemory) else ()
        self.windows = memory.windows if isinstance(memory, GroupedKVMemory) else ()
        self._loads_for: str | None = None
        self._num_loaded = {} if connector is None else dict(connector.num_loaded_blocks())
        self._tables: dict[str, list[list[int]]] = {}  # by request, one per group, as recorded last
        self._touched: str | None = None  # the request that the pool worked for last
        self.num_found = 0  # tokens found by the last look-up

    @property
    def loads(self) -> KVLoads | None:
        return None if self.connector is None else cast(LoadingMemory, self.memory).loads

    def put_in(self, request_ids: Sequence[str]) -> None:
        """Install the wrappers. `request_ids` are the requests that may already have tables."""
        self._tables = {name: self._tables_of(name) for name in request_ids}
        pool = cast(BlockPool, PoolWatch(self.pool, self))
        self._put_in_pool(pool)
        if self.cache is None:
            return
        if self._groups:
            self.memory.cache = cast(PrefixCache, GroupedCacheWatch(self.cache, self))
            return
        self.cache.on_split(lambda block_id: self.note(Split(block_id)))
        cache = self.memory.cache = cast(PrefixCache, CacheWatch(self.cache, self))
        if self.loads is not None:
            self.loads.cache, self.loads.listener = cache, self

    def _put_in_pool(self, pool: BlockPool) -> None:
        """Set the pool of the memory, its groups and the cache."""
        caches = () if self.cache is None else (self.cache,)
        for holder in (self.memory, *self._groups, *caches):
            holder.pool = pool

    def _tables_of(self, request_id: str) -> list[list[int]]:
        return [list(ids) for ids in self.memory.get_tables(request_id)]

    def take_out(self) -> None:
        self._put_in_pool(self.pool)
        if self.cache is None:
            return
        self.memory.cache = self.cache
        if self._groups:
            return
        self.cache.on_split(None)
        if self.loads is not None:
            self.loads.cache, self.loads.listener = self.cache, LoadListener()

    # -- the request that the pool works for

    @property
    def who(self) -> str | None:
        return self._loads_for or self.memory.current_req_id

    def note(self, event: Event) -> None:
        """Record an event, after the table changes of the pool's previous work."""
        self.settle()
        self.log.note(event)

    def note_pool(self, event: Taken | Shared | Freed | Evicted) -> None:
        if self._touched != self.who:
            self.settle()
        self._touched = self.who
        self.log.note(event)

    def note_published(self, event: Published) -> None:
        """Record a publication, after which the cache's blocks replace the given ones in the
        request's table."""
        self.note(event)
        self._touched = event.request

    def settle(self) -> None:
        """Record the tables that changed since the last call."""
        request_id, self._touched = self._touched, None
        if request_id is None:
            return
        tables = self._tables_of(request_id)
        known = self._tables.get(request_id) or [[] for _ in tables]
        for group, (now, before) in enumerate(zip(tables, known, strict=True)):
            keep = 0
            while keep < min(len(now), len(before)) and now[keep] == before[keep]:
                keep += 1
            if now != before:
                self.log.note(Table(request_id, keep, now[keep:], group))
        self._tables[request_id] = tables
        if not any(tables):
            del self._tables[request_id]

    # -- loads

    @contextmanager
    def acting_for(self, request_id: str) -> Iterator[None]:
        before, self._loads_for = self._loads_for, request_id
        try:
            yield
        finally:
            self._loads_for = before

    def load_begun(self, load: Load) -> None:
        self.note(LoadBegun(load.request.request_id, _ids(load.prefix), _ids(load.blocks)))

    def load_arrived(self, load: Load) -> None:
        assert self.connector is not None
        before, self._num_loaded = self._num_loaded, dict(self.connector.num_loaded_blocks())
        counts = {tier: num - before.get(tier, 0) for tier, num in self._num_loaded.items()}
        sources = {tier: num for tier, num in counts.items() if num}
        if load.blocks and not sources:
            sources = {"store": len(load.blocks)}
        self.note(Loaded(load.request.request_id, _ids(load.blocks), sources))

    def load_ended(self, request_id: str) -> None:
        self.note(LoadEnded(request_id))


class PoolWatch:
    """A `BlockPool` that records. `says` is the event for freed blocks; None: nothing is recorded,
    because the cache is working and records the whole operation."""

    def __init__(self, pool: BlockPool, watch: MemoryWatch) -> None:
        self._pool, self._watch = pool, watch
        self.says: type[Freed] | type[Evicted] | None = Freed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def allocate(self, num_blocks: int) -> list[Block] | None:
        blocks = self._pool.allocate(num_blocks)
        if blocks is not None:
            self._watch.note_pool(Taken(self._watch.who, _ids(blocks)))
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        self._pool.touch(blocks)
        if self.says is not None and blocks:
            self._watch.note_pool(Shared(self._watch.who, _ids(blocks)))

    def free(self, blocks: Sequence[Block]) -> None:
        self._pool.free(blocks)
        if not blocks or self.says is None:
            return
        if self.says is Freed:
            self._watch.note_pool(Freed(self._watch.who, _ids(blocks)))
        else:
            self._watch.note_pool(Evicted(_ids(blocks)))

    def reclaim(self, blocks: Sequence[Block]) -> None:
        self._pool.reclaim(blocks)
        if self.says is not None and blocks:
            self._watch.note_pool(Shared(self._watch.who, _ids(blocks)))

    @contextmanager
    def saying(self, says: type[Evicted] | None) -> Iterator[None]:
        before, self.says = self.says, says
        try:
            yield
        finally:
            self.says = before


class CacheWatch:
    """A `PrefixCache` with any index, wrapped to record its events."""

    def __init__(self, cache: PrefixCache, watch: MemoryWatch) -> None:
        self._cache, self._watch = cache, watch
        self._pool = cast(PoolWatch, cache.pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def stats(self) -> CacheStats:
        return self._cache.stats

    @stats.setter
    def stats(self, stats: CacheStats) -> None:
        self._cache.stats = stats

    @property
    def listener(self) -> CacheListener | None:
        return self._cache.listener

    @listener.setter
    def listener(self, listener: CacheListener | None) -> None:
        self._cache.listener = listener

    def match_prefix(
        self,
        token_ids: Sequence[int],
        extra_keys: ExtraKeys | None = None,
        cursor: MatchCursor | None = None,
    ) -> PrefixMatch:
        match = self._cache.match_prefix(token_ids, extra_keys, cursor)
        self._watch.num_found = match.num_cached_tokens
        if match.blocks:
            self._watch.note(Matched(self._watch.who, _ids(match.blocks)))
        return match

    def insert(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[Block],
        extra_keys: ExtraKeys | None = None,
        *,
        start: int = 0,
        cursor: MatchCursor | None = None,
    ) -> InsertResult:
        given, cache = _ids(blocks), self._cache
        self._watch.settle()
        with self._pool.saying(None):
            result = cache.insert(token_ids, blocks, extra_keys, start=start, cursor=cursor)
        if given:
            who, hashes = self._watch.who or "", [cache.hash_of(block) for block in result.blocks]
            hashes = hashes if any(hashes) else []
            heads = [block.block_id for block in result.owned if cache.begins_node(block)]
            event = Published(who, start, given, _ids(result.blocks), hashes, heads)
            self._watch.note_published(event)
        return result

    def evict(self, num_blocks: int) -> int:
        with self._pool.saying(Evicted):
            return self._cache.evict(num_blocks)

    def invalidate(self, block: HasBlockId) -> None:
        with self._pool.saying(Evicted):
            self._cache.invalidate(block)

    def reset(self) -> bool:
        with self._pool.saying(Evicted):
            return self._cache.reset()


class GroupedCacheWatch(CacheWatch):
    """A `GroupedPrefixCache`, wrapped. Cached blocks that no request holds belong to the pool."""

    _cache: Any
    _found: Sequence[Sequence[Block]] = ()
    _published = Published("", 0, [], [])  # the last event

    def find(self, chain: Sequence[Link], num_blocks: int) -> list[list[Block]]:
        self._found = found = self._cache.find(chain, num_blocks)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Record the blocks of the last `find`, by group, and hold `blocks`."""
        for group, found in enumerate(self._found):
            self._watch.note(Matched(self._watch.who, _ids(found), group))
        self._cache.hold(blocks)

    def publish(self, group: int, chain: list[Link], index: int, block: Block) -> Block:
        who, last = self._watch.who or "", self._published
        goes_on = (last.request, last.group, last.start + len(last.given)) == (who, group, index)
        if not goes_on or not self._watch.log.ends_with(last):
            self._watch.settle()
            last = self._published = Published(who, index, [], [], [], [], group)
            self._watch.note_published(last)
        with self._pool.saying(None):
            kept = self._cache.publish(group, chain, index, block)
        last.given.append(block.block_id)
        last.kept.append(kept.block_id)
        last.hashes.append(chain[index][0].hex()[:8])
        return kept

    def remove_blocks(self, blocks: Sequence[Block]) -> None:
        with self._noting_what_goes(blocks):
            self._cache.remove_blocks(blocks)

    def invalidate(self, chain: Sequence[Link]) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with self._noting_what_goes(self._all()):
            return self._cache.invalidate(chain)

    def reset(self) -> bool:
        with self._noting_what_goes(self._all()):
            return self._cache.reset()

    def _all(self) -> list[Block]:
        return [known.block for known in self._cache.cached_prefixes()]

    @contextmanager
    def _noting_what_goes(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Record which of `blocks` are no longer cached after the `with` body. Only these are
        checked, because most steps forget the blocks they allocate, and that must stay cheap."""
        before = [block for block in blocks if self._cache.is_cached(block)]
        yield
        if gone := [block.block_id for block in before if not self._cache.is_cached(block)]:
            self._watch.note(Evicted(gone))


def _ids(blocks: Sequence[HasBlockId]) -> list[int]:
    return [block.block_id for block in blocks]
