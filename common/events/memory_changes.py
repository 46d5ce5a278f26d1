"""Which blocks of an engine's KV memory changed, as parts of a frame (`frames.py`).

    pool      `allocate`, `touch`, `free` and `reclaim` of the one pool object are shadowed, so that
              every part that shares the pool is noticed; the last use of a block gives the order
    cache     observed; a cache for groups of layers: shadowed methods as well
    loads     their listener
    tables    compared, for the requests that the pool worked for

A part is read for the values when the frame is taken. Nothing scans the pool or the cache after
`put_in`.

See common/events/README.md#the-format-version-2"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from block_pool import Block
from common.events.engine_frame import cached_row, cached_rows, grouped_row, loads_of, tables_of
from common.events.frames import diff
from common.events.listener_chain import observe, stop_observing
from grouped_kv_memory import GroupedKVMemory
from kv_loads import Load, LoadListener
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import NormalKeys, PrefixCache, PrefixMatch

if TYPE_CHECKING:
    from common.assembly.assembly import EngineParts


class MemoryChanges(LoadListener):
    """Blocks of one KV memory that changed since the last `take`."""

    def __init__(self, parts: EngineParts, found: Callable[[PrefixMatch], object]) -> None:
        memory = parts.kv_memory
        self.memory = memory
        self.pool = memory.pool
        self.cache = memory.cache
        self._found = found
        self._connector = parts.connector
        self._is_grouped = isinstance(memory, GroupedKVMemory)
        self.windows = memory.windows if isinstance(memory, GroupedKVMemory) else ()
        self.loads = memory.loads if isinstance(memory, LoadingKVCacheManager) else None
        self._undo: list[Callable[[], object]] = []
        self._loads_for: str | None = None
        self._num_from_store = 0
        # Since the last `take`, each in the order of the last occurrence:
        self._touched: dict[int, None] = {}
        self._used: dict[int, None] = {}  # cached blocks without a user
        self._tables: dict[str | None, None] = {}  # requests whose tables may have changed
        self._entered: dict[int, dict[str, Any] | None] = {}  # None: left the cache
        self._cached: set[int] = set()
        self._known: dict[str, Any] = {"tables": {}, "loads": {}, "loaded": {}}  # at that time

    # -- install and remove

    def put_in(self, request_ids: Iterable[str]) -> None:
        pool = self.pool
        cache = self.cache
        tables = {name: tables_of(self.memory, name) for name in request_ids}
        self._known["tables"] = {name: found for name, found in tables.items() if found}
        self._shadow(pool, "allocate", lambda blocks, *_: self._touch(blocks or ()))
        self._shadow(pool, "touch", lambda _, blocks: self._touch(blocks))
        self._shadow(pool, "reclaim", lambda _, blocks: self._touch(blocks))
        self._shadow(pool, "free", lambda _, blocks: self._freed(blocks))
        if cache is None:
            return
        self._cached = {int(block) for block, _ in cached_rows(cache)}
        if self._is_grouped:
            grouped: Any = cache
            self._shadow(cache, "publish", self._published)
            self._shadow(cache, "remove_blocks", lambda _, blocks: self._left(blocks))
            clear = grouped.clear

            def noting_clear() -> None:
                self._left([pool.blocks[b] for b in self._cached])
                clear()

            grouped.clear = noting_clear
            self._undo.append(lambda: delattr(grouped, "clear"))
            return
        self._shadow(cache, "match_prefix", self._matched)
        observe(cache, self)
        cache.on_split(self._split)
        if self.loads is not None:
            self._known |= {"loads": loads_of(self.loads), "loaded": self._loaded()}
            self.loads.listener = self

    def take_out(self) -> None:
        for undo in self._undo:
            undo()
        if self.cache is not None and not self._is_grouped:
            self.cache.on_split(None)
            stop_observing(self.cache, self)
            if self.loads is not None:
                self.loads.listener = LoadListener()

    def _shadow(self, part: Any, name: str, note: Callable[..., object]) -> None:
        """Call `note` with the result and the arguments of each call of this object's method."""
        method = getattr(part, name)

        def noting(*arguments: Any, **keywords: Any) -> Any:
            result = method(*arguments, **keywords)
            note(result, *arguments)
            return result

        setattr(part, name, noting)
        self._undo.append(lambda: delattr(part, name))

    # -- called while a step is planned or its results are processed

    def _touch(self, blocks: Sequence[Block]) -> None:
        touched = self._touched
        for block in blocks:
            touched.pop(block.block_id, None)
            touched[block.block_id] = None
        self._tables[self.memory.current_req_id] = None

    def _freed(self, blocks: Sequence[Block]) -> None:
        self._touch(blocks)
        if self._cached:
            self._use(block for block in reversed(blocks) if block.block_id in self._cached)

    def _use(self, blocks: Iterable[Any]) -> None:
        """Mark cached blocks without a user as used now; the deepest comes first."""
        for block in blocks:
            if self.pool.blocks[block.block_id].ref_cnt == 1:
                self._used.pop(block.block_id, None)
                self._used[block.block_id] = None

    def _matched(self, match: PrefixMatch, *_: Any) -> None:
        self._found(match)
        self._use(reversed(match.blocks))

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        cache = cast(PrefixCache, self.cache)
        parent_id = None if parent is None else parent.block_id
        row = cached_row(cache, block, parent_id, token_ids, extra_keys)
        self._enter(block, row)

    def _enter(self, block: Block, row: dict[str, Any]) -> None:
        row["by"] = self._loads_for or self.memory.current_req_id or ""
        self._entered[block.block_id] = row
        self._cached.add(block.block_id)
        self._tables[self.memory.current_req_id] = None

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        self._left(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        self._left(blocks)

    def _left(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.block_id in self._cached:
                self._cached.discard(block.block_id)
                self._entered[block.block_id] = None
                self._used.pop(block.block_id, None)

    def _split(self, block_id: int) -> None:
        """This block now begins a node."""
        self._entered.setdefault(block_id, {})  # {}: only this changed
        if row := self._entered[block_id]:
            row["begins_node"] = True

    def _published(self, kept: Block, group: int, chain: Any, index: int, block: Block) -> None:
        if kept is block:
            grouped: Any = self.cache
            self._enter(block, grouped_row(grouped._by_block_id[block.block_id]))
        self._tables[self.memory.current_req_id] = None

    @contextmanager
    def acting_for(self, request_id: str) -> Iterator[None]:
        before = self._loads_for
        self._loads_for = request_id
        try:
            yield
        finally:
            self._loads_for = before

    def load_arrived(self, load: Load) -> None:
        if not self._connector_counts():
            self._num_from_store += len(load.blocks)

    def _connector_counts(self) -> Mapping[str, int]:
        return {} if self._connector is None else self._connector.num_loaded_blocks()

    def _loaded(self) -> dict[str, int]:
        counts = {tier: num for tier, num in self._connector_counts().items() if num}
        return counts | ({"store": self._num_from_store} if self._num_from_store else {})

    # -- the changes

    @property
    def has_changed(self) -> bool:
        return bool(self._touched or self._entered)

    def take(self) -> dict[str, Any]:
        """Return the changes of the frame since the last call. A change may repeat what was, and
        remove what is not there."""
        changes: dict[str, Any] = {}
        if self._touched:
            counts = {block: self.pool.blocks[block].ref_cnt for block in self._touched}
            changes["refs"] = {str(block): [num] if num else None for block, num in counts.items()}
            changes["free"] = [list(counts), [block for block, num in counts.items() if not num]]
        if self.cache is not None and not self._is_grouped:
            self._take_evictable(changes)
        if self._entered:
            change_of = lambda row: row and [row] if row != {} else {"begins_node": [True]}  # noqa: E731
            changes["cached"] = {str(b): change_of(row) for b, row in self._entered.items()}
        if self._tables:
            self._take_tables(changes)
        self._touched = {}
        self._used = {}
        self._tables = {}
        self._entered = {}
        if self.loads is not None:
            for name, now in (("loads", loads_of(self.loads)), ("loaded", self._loaded())):
                if now != self._known[name]:
                    changes[name] = diff(self._known[name], now)
                    self._known[name] = now
        return changes

    def _take_evictable(self, changes: dict[str, Any]) -> None:
        blocks = self.pool.blocks
        cached = self._cached
        used = self._used
        is_unused = lambda block: block in cached and blocks[block].ref_cnt == 1  # noqa: E731
        changed = [b for b in {**self._touched, **used, **self._entered}
                   if b in cached or b in self._entered]  # fmt: skip
        removed = [block for block in changed if block in used or not is_unused(block)]
        if removed:
            changes["evictable"] = [removed, [block for block in used if is_unused(block)]]

    def _take_tables(self, changes: dict[str, Any]) -> None:
        known = self._known["tables"]
        tables = {}
        for name in self._tables:
            if name is None:
                continue
            before = known.get(name)
            now = tables_of(self.memory, name)
            if not now:
                if known.pop(name, None) is not None:
                    tables[name] = None
            elif now != before:
                tables[name] = [now] if before is None else diff(before, now)
                known[name] = now
        if tables:
            changes["tables"] = tables
