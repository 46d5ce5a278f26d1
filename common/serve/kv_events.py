"""Changes of an engine's prefix cache, published to routers as vLLM's KV events.

    cache   block_cached, blocks_evicted, blocks_invalidated
            |
            v   under one lock: the held blocks, and the events to be sent
    a separate thread takes the events once per step, packs and sends them (`kv_publisher.py`)

`CacheChanges` takes the place of the cache's listener, the tiers or none, and calls it. Any cache
reports whole blocks, each with its parent, so the nodes of a radix tree and their splits are not
visible.

A block's hash is that of chapter 3's chain. When the cache becomes empty, and when a reader has
missed batches for good, the stream restarts: `AllBlocksCleared`, then each block that is held. So a
stream is either complete or starts again. Tiers and pools below the device are not published.

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, cast

from base_scheduler import SchedulerPlugin
from common.serve.kv_publisher import EventPublisher
from common.serve.kv_wire import CLEARED, Event, HeldBlock, add_removed, add_stored
from grouped_kv_memory import GroupedKVMemory
from prefix_cache import NormalKeys
from prefix_cache_local import compute_block_hash

if TYPE_CHECKING:
    from base_scheduler import BaseScheduler
    from block_pool import Block
    from common.engine import LLMEngine
    from prefix_cache import PrefixCache
    from scheduler_interface import SchedulerOutput

MAX_EVENTS = 1_000  # per batch: vllm-router's limits are 1,000 and 16 MiB
MAX_TOKENS = 500_000


class CacheChanges:
    """Observes `cache`. `take` and `restart_stream` belong to one thread, the other methods to the
    cache's. `adapter_names()`: the names that requests have for an adapter, by its digest."""

    def __init__(
        self, cache: PrefixCache, adapter_names: Callable[[], Mapping[str, list[str]]]
    ) -> None:
        self._cache = cache
        self._adapter_names = adapter_names
        self._lock = Lock()
        self._held: dict[int, HeldBlock] = {}  # by block id
        self._events: list[Event] = []  # to be sent
        self._must_restart = True
        self._listener = cache.listener  # tiers, or none: told after this one of a cached block,
        cache.listener = self  # and before it of a removed one, which they copy

    def take_out(self) -> None:
        """Stop listening and report all blocks as removed."""
        self._cache.listener = self._listener
        with self._lock:
            self._held.clear()
            self._must_restart = True

    # -- called by the cache

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        before = None if parent is None else self._held[parent.block_id].name
        keys = {tag: value.partition(":")[2] for tag, value in extra_keys}
        digest = keys.pop("lora", None)
        lora_name = None if digest is None else self._adapter_names().get(digest, [digest])[0]
        held = HeldBlock(
            name=compute_block_hash(before, token_ids, None if before else extra_keys),
            parent=before,
            token_ids=token_ids,
            lora_name=lora_name,
            salts=() if before else tuple(keys.values()),
        )
        with self._lock:
            self._held[block.block_id] = held
            add_stored(self._events, held)
        if self._listener is not None:
            self._listener.block_cached(block, parent, token_ids, extra_keys)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """If the listener raises, the blocks leave the cache nevertheless."""
        try:
            if self._listener is not None:
                self._listener.blocks_evicted(blocks)
        finally:
            self._remove(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        try:
            if self._listener is not None:
                self._listener.blocks_invalidated(blocks)
        finally:
            self._remove(blocks)

    def _remove(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                if block.block_id in self._held:  # else left over from an interrupted call
                    add_removed(self._events, self._held.pop(block.block_id))
            self._must_restart |= not self._held

    # -- events to be sent

    def restart_stream(self) -> None:
        """Restart the stream with the next batch, for readers that missed a batch for good."""
        self._must_restart = True

    @property
    def has_news(self) -> bool:
        return self._must_restart or bool(self._events)

    def take(self) -> Iterator[list[Event]]:
        """Yield the events since the last call, in batches."""
        with self._lock:
            events = self._all_events() if self._must_restart else self._events
            self._must_restart = False
            self._events = []
        batch: list[Event] = []
        num_tokens = 0
        for event in events:
            num_new = len(event.get("token_ids", ()))
            if batch and (len(batch) == MAX_EVENTS or num_tokens + num_new > MAX_TOKENS):
                yield batch
                batch = []
                num_tokens = 0
            batch.append(event)
            num_tokens += num_new
        if batch:
            yield batch

    def _all_events(self) -> list[Event]:
        """Return events that describe all held blocks, parents before their children."""
        events: list[Event] = [CLEARED]
        remaining = {held.name: held for held in self._held.values()}
        for name in reversed(list(remaining)):  # a path that starts at a leaf is one event
            path: list[HeldBlock] = []
            parent: bytes | None = name
            while parent in remaining:
                path.append(remaining.pop(parent))
                parent = path[-1].parent
            for held in reversed(path):
                add_stored(events, held)
        return events


class KVEvents(SchedulerPlugin):
    """Publishes one engine's KV events from construction until `take_out`. Create it in the
    engine's thread, before anything is cached. Addresses as in `EventPublisher`. Raises
    `ValueError`, and then leaves the engine unchanged."""

    def __init__(
        self, engine: LLMEngine, endpoint: str, replay_endpoint: str | None = None
    ) -> None:
        cache = engine.prefix_cache
        if cache is None:
            raise ValueError("kv_events needs a prefix cache, which this engine does not have")
        if cache.num_cached_blocks:
            raise ValueError("kv_events needs an empty prefix cache (reset_prefix_cache)")
        if isinstance(engine.kv_manager, GroupedKVMemory):  # its cache may be wrapped
            raise ValueError("kv_events is not supported for layers with a window")
        proxy = weakref.proxy(engine)  # because the engine references this object
        self._changes = CacheChanges(cache, lambda: proxy.adapters_by_digest)
        try:
            self.publisher = EventPublisher(self._changes, endpoint, replay_endpoint)
        except ValueError:
            self._changes.take_out()
            raise
        scheduler = cast("BaseScheduler", engine.scheduler)
        scheduler.set_plugins([*scheduler.plugins, self])
        self.publisher.start()

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Wake the publisher, which sends while the step is computed."""
        if self._changes.has_news:
            self.publisher.wake()

    def take_out(self, engine: LLMEngine) -> None:
        """Stop publishing, after a last `AllBlocksCleared`. The engine is as it was before."""
        self._changes.take_out()
        scheduler = cast("BaseScheduler", engine.scheduler)
        scheduler.set_plugins([plugin for plugin in scheduler.plugins if plugin is not self])
        self.publisher.close()
