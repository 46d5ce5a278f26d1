"""Changes of an engine's prefix cache, published to routers as vLLM's KV events.

    cache   block_cached, blocks_evicted, blocks_invalidated    medium "GPU", whatever the device is
    tiers   told(hash, is it here?)                           "CPU" for the host, "STORAGE": disk
            |
            v   under one lock: the held blocks with their media, and the events to be sent
    a separate thread takes the events once per step, packs and sends them (`kv_publisher.py`)

`CacheChanges` takes the place of the cache's listener, the tiers or none, and calls it. Any cache
reports whole blocks, each with its parent, so the nodes of a radix tree and their splits are not
visible.

A block's hash is that of chapter 3's chain, by which tiers and pools know the block too.

When the device's cache becomes empty, and when a slow thread leaves more than `max_pending_changes`
block changes unsent, the stream restarts: `AllBlocksCleared`, then each block that is held. So a
stream is either complete or starts again.

Not published: tier blocks of an earlier process until they have been on the device once (their
tokens are unknown here), and the content of a pool shared by engines.

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, cast

from base_scheduler import SchedulerPlugin
from common.serve.kv_publisher import EventPublisher
from common.serve.kv_wire import (
    CLEARED,
    CPU,
    GPU,
    STORAGE,
    Event,
    HeldBlock,
    add_removed,
    add_stored,
)
from grouped_kv_memory import GroupedKVMemory
from kv_tiers import ignore_change
from prefix_cache import NormalKeys
from prefix_cache_local import compute_block_hash
from request_chain import root_keys
from tiered_cache import TieredCache

if TYPE_CHECKING:
    from base_scheduler import BaseScheduler
    from block_pool import Block
    from common.engine import LLMEngine
    from prefix_cache import PrefixCache
    from scheduler_interface import SchedulerOutput

MAX_PENDING_CHANGES = 100_000  # blocks
MAX_EVENTS, MAX_TOKENS = 1_000, 500_000  # per batch: vllm-router's limits are 16 MiB and 1,000


class CacheChanges:
    """Listens to `cache`. `take` and `restart_stream` belong to one
    thread, the other methods to the cache's."""

    def __init__(
        self,
        cache: PrefixCache,
        adapter_names: Mapping[str, list[str]] | None = None,
        max_pending_changes: int = MAX_PENDING_CHANGES,
    ) -> None:
        self._cache = cache
        self._listener = listener = cache.listener
        self._max_pending_changes = max_pending_changes
        self._adapter_names = adapter_names or {}  # by digest
        tiers = listener if isinstance(listener, TieredCache) else None
        self._namespace = () if tiers is None else tiers.namespace
        below = {} if tiers is None else {CPU: tiers.host, STORAGE: tiers.disk}
        self._below = {name: tier for name, tier in below.items() if tier is not None}
        self._lock = Lock()
        self._hashes: dict[int, bytes] = {}  # by block id, for blocks on the device
        self._held: dict[bytes, HeldBlock] = {}  # blocks without a medium stay until `take`
        self._removed: set[bytes] = set()  # hashes of blocks that may have no medium left
        self._pending_events: list[Event] = []
        self._num_pending_changes = 0
        self._must_restart = True

    def put_in(self) -> None:
        """Start listening. Cost: O(cached blocks x depth)."""
        by_prefix: dict[tuple, Block] = {}
        for keys, tokens, block in sorted(
            self._cache.cached_prefixes(), key=lambda prefix: len(prefix.token_ids)
        ):
            start = len(tokens) - self._cache.block_size
            self._store(block, by_prefix.get((keys, tokens[:start])), tokens[start:], keys)
            by_prefix[keys, tokens] = block
        for medium, tier in self._below.items():
            tier.on_change = lambda name, is_here, medium=medium: self._moved(name, medium, is_here)
        self._cache.listener = self

    def take_out(self) -> None:
        """Stop listening and report all blocks as removed."""
        self._cache.listener = self._listener
        for tier in self._below.values():
            tier.on_change = ignore_change
        with self._lock:
            self._held.clear()
            self._removed.clear()
            self.restart_stream()

    def set_adapter_names(self, names: Mapping[str, list[str]]) -> None:
        """Take the adapters' present names, by digest. The stream restarts if they have changed
        and a cached block has an adapter."""
        if names == self._adapter_names:
            return
        with self._lock:
            self._adapter_names = names
            if any(block.adapter is not None for block in self._held.values()):
                self.restart_stream()

    # -- called by the device's cache

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        self._store(block, parent, token_ids, extra_keys)
        if self._listener is not None:
            self._listener.block_cached(block, parent, token_ids, extra_keys)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """Tiers copy the blocks first, so a demoted block always has a medium. If they raise, the
        blocks leave the cache nevertheless."""
        try:
            if self._listener is not None:
                self._listener.blocks_evicted(blocks)
        finally:
            self._forget(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        try:
            if self._listener is not None:
                self._listener.blocks_invalidated(blocks)
        finally:
            self._forget(blocks)

    def _store(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        before = None if parent is None else self._hashes[parent.block_id]
        roots = root_keys(self._namespace, extra_keys) if before is None else None
        name = compute_block_hash(before, token_ids, roots)
        keys = {tag: value.partition(":")[2] for tag, value in extra_keys}
        adapter = keys.pop("lora", None)
        held = HeldBlock(before, token_ids, adapter, tuple(keys.values()) if parent is None else ())
        with self._lock:
            self._hashes[block.block_id] = name
            self._held.setdefault(name, held)
            self._add(name, GPU)
            for medium, tier in self._below.items():
                if name in tier:  # stored before its tokens were known here
                    self._add(name, medium)

    def _forget(self, blocks: Iterable[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._remove(self._hashes.pop(block.block_id, b""), GPU)
            if not self._hashes:
                self.restart_stream()

    def _moved(self, name: bytes, medium: str, is_here: bool) -> None:
        """Called by a tier, in any thread."""
        with self._lock:
            if name in self._held:
                (self._add if is_here else self._remove)(name, medium)

    # -- events to be sent

    def _add(self, name: bytes, medium: str) -> None:
        block = self._held[name]
        if medium in block.media:
            return
        block.media += (medium,)
        if self._count_change():
            for lora_name in block.lora_names(self._adapter_names):
                add_stored(self._pending_events, name, block, medium, lora_name)

    def _remove(self, name: bytes, medium: str) -> None:
        block = self._held.get(name)
        if block is None:  # left over from an interrupted call
            return
        block.media = tuple(other for other in block.media if other != medium)
        self._removed.add(name)
        if self._count_change():
            for lora_name in block.lora_names(self._adapter_names):
                add_removed(self._pending_events, name, medium, lora_name)

    def _count_change(self) -> bool:
        self._num_pending_changes += 1
        if self._num_pending_changes > self._max_pending_changes:
            self.restart_stream()
        return not self._must_restart

    def restart_stream(self) -> None:
        """Restart the stream with the next batch, for readers that missed a batch for good."""
        self._must_restart = True
        self._pending_events = []

    @property
    def has_news(self) -> bool:
        return self._must_restart or bool(self._pending_events)

    def take(self) -> Iterator[list[Event]]:
        """Yield the events since the last call, in batches."""
        with self._lock:
            events = self._pending_events
            self._pending_events = []
            self._num_pending_changes = 0
            all_held = None
            if self._must_restart:
                all_held = {name: (held, held.media) for name, held in self._held.items()}
            self._must_restart = False
            adapter_names = self._adapter_names
            for name in self._removed:
                if not self._held[name].media:
                    del self._held[name]
            self._removed.clear()
        if all_held is not None:
            events = self._snapshot_events(all_held, adapter_names)
        batch = list[Event]()
        num_tokens = 0
        for event in events:
            num_tokens += len(event.get("token_ids", ()))
            if len(batch) == MAX_EVENTS or (batch and num_tokens > MAX_TOKENS):
                yield batch
                batch = []
                num_tokens = len(event.get("token_ids", ()))
            batch.append(event)
        if batch:
            yield batch

    def _snapshot_events(
        self,
        all_held: Mapping[bytes, tuple[HeldBlock, tuple[str, ...]]],
        adapter_names: Mapping[str, list[str]],
    ) -> list[Event]:
        """Return events that describe all held blocks, parents before their children."""
        events: list[Event] = [CLEARED]
        for medium in (GPU, *self._below):
            remaining = {name: held for name, (held, media) in all_held.items() if medium in media}
            for name in reversed(list(remaining)):  # a path that starts at a leaf is one event
                path = []
                while name in remaining:
                    path.append((name, held := remaining.pop(name)))
                    name = held.parent
                lora_names = path[0][1].lora_names(adapter_names) if path else ()
                for lora_name in lora_names:
                    for name, held in reversed(path):
                        add_stored(events, name, held, medium, lora_name)
        return events


class KVEvents(SchedulerPlugin):
    """Publishes one engine's KV events from construction until `take_out`, starting with all cached
    blocks. Create it between two steps, in the engine's thread. Addresses as in `EventPublisher`.
    Raises `ValueError`, and then leaves the engine unchanged."""

    def __init__(
        self, engine: LLMEngine, endpoint: str, replay_endpoint: str | None = None, topic: str = ""
    ) -> None:
        if engine.prefix_cache is None:
            raise ValueError("kv_events needs a prefix cache, which this engine does not have")
        if isinstance(engine.kv_manager, GroupedKVMemory):  # its cache may be wrapped
            raise ValueError("kv_events is not supported for layers with a window")
        self._engine = weakref.proxy(engine)  # because the engine references this object
        self._changes = CacheChanges(engine.prefix_cache, engine.adapters_by_digest)
        self.publisher = EventPublisher(self._changes, endpoint, replay_endpoint, topic)
        try:
            self._changes.put_in()
        except BaseException:  # raised by a user's cache
            self.publisher.close()
            raise
        scheduler = cast("BaseScheduler", engine.scheduler)
        scheduler.set_plugins([*scheduler.plugins, self])
        self._close = weakref.finalize(engine, self.publisher.close)  # if `take_out` is not called
        self.publisher.start()

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Wake the publisher, which sends while the step is computed."""
        self._changes.set_adapter_names(self._engine.adapters_by_digest)
        if self._changes.has_news:
            self.publisher.wake()

    def take_out(self, engine: LLMEngine) -> None:
        """Stop publishing, after a last `AllBlocksCleared`. The engine is as it was before."""
        self._changes.take_out()
        scheduler = cast("BaseScheduler", engine.scheduler)
        scheduler.set_plugins([plugin for plugin in scheduler.plugins if plugin is not self])
        self._close()
