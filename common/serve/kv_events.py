"""Changes of an engine's prefix cache, published to routers as vLLM's KV events.

    engine's thread       block_cached, blocks_evicted, blocks_invalidated   ->   a queue of changes
    publisher's thread    takes them, makes events, packs and sends them (`kv_publisher.py`)

`KVEvents` takes the place of the cache's listener, the tiers or none, and calls it. Any cache
reports whole blocks, each with its parent, so the nodes of a radix tree and their splits are not
visible.

A block's hash is that of chapter 3's chain. When the cache becomes empty, and when a reader has
missed batches for good, the stream restarts: `AllBlocksCleared`, then each block that is held. So a
stream is either complete or starts again. Tiers and pools below the device are not published.

See common/serve/KV_EVENTS.md"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from common.serve.kv_publisher import EventPublisher
from common.serve.kv_wire import CLEARED, Event, HeldBlock, add_removed, add_stored, wire_hash
from grouped_kv_memory import GroupedKVMemory
from prefix_cache import NormalKeys
from prefix_cache_local import compute_block_hash

if TYPE_CHECKING:
    from block_pool import Block
    from common.engine import LLMEngine

MAX_EVENTS = 1_000  # per batch: vllm-router's limits are 1,000 and 16 MiB
MAX_TOKENS = 500_000


class CacheStream:
    """The events of a cache, from its `changes`: a block that was added, or the ids of blocks that
    were removed. Only `changes` is shared with another thread."""

    def __init__(self) -> None:
        self.changes = deque[HeldBlock | list[int]]()
        self._held: dict[int, HeldBlock] = {}  # by block id
        self._must_restart = True

    def restart_stream(self) -> None:
        """Restart the stream with the next batch, for readers that missed a batch for good."""
        self._must_restart = True

    def take(self) -> Iterator[list[Event]]:
        """Yield the events since the last call, in batches."""
        events: list[Event] = []
        for _ in range(len(self.changes)):
            change = self.changes.popleft()
            if isinstance(change, HeldBlock):
                self._held[change.block_id] = change
                add_stored(events, change)
                continue
            for block_id in change:
                if block_id in self._held:  # else left over from an interrupted call
                    add_removed(events, self._held.pop(block_id))
            self._must_restart |= not self._held
        if self._must_restart:
            events = [CLEARED]
            for held in self._held.values():  # parents before their children
                add_stored(events, held)
            self._must_restart = False
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


class KVEvents:
    """Publishes one engine's KV events from construction until `close`. Create it in the engine's
    thread, before anything is cached. Addresses as in `EventPublisher`. Raises `ValueError`, and
    then leaves the engine unchanged."""

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
        self._engine = weakref.proxy(engine)  # because the engine references this object
        stream = CacheStream()
        self._changes = stream.changes
        self._hashes: dict[int, bytes] = {}  # by block id
        self.publisher = EventPublisher(stream, endpoint, replay_endpoint)
        self._listener = cache.listener  # tiers, or none
        cache.listener = self

    def close(self) -> None:
        """Stop publishing, after a last `AllBlocksCleared`. The engine must not run meanwhile."""
        cache = self._engine.prefix_cache
        cache.listener = self._listener
        self._changes.append([*cache.cached_block_ids()])
        self.publisher.close()

    # -- called by the cache

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        before = None if parent is None else self._hashes[parent.block_id]
        keys = {tag: value.partition(":")[2] for tag, value in extra_keys}
        digest = keys.pop("lora", None)
        names = self._engine.adapters_by_digest
        name = compute_block_hash(before, token_ids, None if before else extra_keys)
        self._hashes[block.block_id] = name
        held = HeldBlock(
            block_id=block.block_id,
            name=wire_hash(name),
            parent=None if before is None else wire_hash(before),
            token_ids=token_ids,
            lora_name=digest and names.get(digest, [digest])[0],
            salts=[] if before else [*keys.values()],
        )
        self._changes.append(held)
        if self._listener is not None:
            self._listener.block_cached(block, parent, token_ids, extra_keys)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        self._changes.append([block.block_id for block in blocks])
        if self._listener is not None:
            self._listener.blocks_evicted(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        self._changes.append([block.block_id for block in blocks])
        if self._listener is not None:
            self._listener.blocks_invalidated(blocks)
