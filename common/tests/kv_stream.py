"""What a router makes of the stream of KV events, and what the cache itself says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.serve.kv_events import CacheChanges
from common.serve.kv_publisher import END, EventPublisher
from common.serve.kv_wire import CLEARED, CPU, GPU, STORAGE, Event, pack_batch, wire_hash
from prefix_cache import PrefixCache
from tiered_cache import KVTierConfig, TieredCache

LIMIT_S = 20.0


class Index:
    """It knows nothing but the stream."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, Any]] = {}
        self.places: dict[str, set[int]] = {}

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0 and events
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def AllBlocksCleared(self) -> None:
        self.places.clear()

    def BlockRemoved(self, block_hashes: list[int], medium: str) -> None:
        assert self.places[medium] >= set(block_hashes), "removed, and never stored"
        self.places[medium] -= set(block_hashes)

    def BlockStored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: str | None,
        extra_keys: Sequence[list[str] | None] = (),
    ) -> None:
        here, parent = self.places.setdefault(medium, set()), parent_block_hash
        assert medium != GPU or parent is None or parent in here, "behind nothing"
        assert len(token_ids) == block_size * len(block_hashes) and lora_id is None
        for index, name in enumerate(block_hashes):
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            keys = extra_keys[index] if extra_keys else None
            block = dict(parent=parent, tokens=tokens, adapter=lora_name, keys=keys)
            assert self.blocks.setdefault(name, block) == block, "one hash, two contents"
            assert name not in here, "stored twice"
            here.add(name)
            parent = name

    def prefixes(self) -> set[tuple]:
        """What the device has: keys and tokens of each whole prefix."""
        found = set()
        for name in self.places.get(GPU, ()):
            path = [self.blocks[name]]
            while (parent := path[-1]["parent"]) is not None:
                path.append(self.blocks[parent])
            tokens = tuple(token for block in reversed(path) for token in block["tokens"])
            adapter, keys = path[-1]["adapter"], path[-1]["keys"] or []
            for block in path[:-1]:
                assert (block["keys"], block["adapter"]) == (adapter and [adapter], adapter)
            assert adapter is None or keys[0] == adapter
            found.add((adapter, *keys[1 if adapter else 0 :], tokens))
        return found


def prefixes_of(cache: PrefixCache) -> set[tuple]:
    found = set()
    for keys, tokens, _ in cache.cached_prefixes():
        named = {tag: value.removeprefix("str:") for tag, value in keys}
        salts = [named["salt"]] if "salt" in named else []
        found.add((named.get("lora"), *salts, tokens))
    return found


def tiers_of(tiers: TieredCache) -> dict[str, set[int]]:
    found = {CPU: set(map(wire_hash, tiers.host._blocks))}
    return (
        found if tiers.disk is None else {**found, STORAGE: set(map(wire_hash, tiers.disk._slots))}
    )


def take(changes: CacheChanges, index: Index) -> list[Event]:
    """Over the wire's bytes."""
    events = []
    for batch in changes.take():
        index.apply(pack_batch(batch, 0.0))
        events += batch
    return events


def check(changes: CacheChanges, index: Index, cache: PrefixCache) -> list[Event]:
    events = take(changes, index)
    assert index.prefixes() == prefixes_of(cache)
    return events


def engine_of(
    loaded, kind: str | None, tiers: KVTierConfig | None = None, **config: Any
) -> LLMEngine:
    config = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 5} | config
    config = EngineConfig(prefix_cache=kind, kv_tiers=tiers, check_invariants=True, **config)
    return LLMEngine(config, loaded=loaded)


class Reader:
    """A subscriber, who asks again for what it has missed."""

    def __init__(self, publisher: EventPublisher) -> None:
        import zmq

        context = zmq.Context.instance()
        self.socket, self.replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe("")
        assert publisher.replay_endpoint is not None
        self.replays.connect(publisher.replay_endpoint)
        self.index, self.next, self.num_anew = Index(), 0, 0
        self.last = -1  # sequence that came by itself
        self.num_restarts = 0
        self.loses: Callable[[], bool] = lambda: False

    def read(self) -> None:
        """One batch, if there is one soon, and what was missed before it."""
        if not self.socket.poll(50):
            return
        _, sequence, batch = self.socket.recv_multipart()
        if self.loses():
            return
        last, self.last = self.last, int.from_bytes(sequence, "big")
        if self.last <= last:  # another engine, or another life of it
            self.num_restarts += 1
            self.index, self.next = Index(), 0
        if self.last > self.next:
            self.catch_up()
        self.take(sequence, batch)

    def catch_up(self) -> None:
        """Once: the batches that are kept no more come anew."""
        self.replays.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.replays.poll(LIMIT_S * 1e3)
            empty, _, sequence, batch = self.replays.recv_multipart()
            assert empty == b""
            if sequence == END:
                return
            self.take(sequence, batch)

    def take(self, sequence: bytes, batch: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        is_anew = msgpack.unpackb(batch)[1][0] == CLEARED
        if number == self.next or (is_anew and number > self.next):
            self.num_anew += is_anew
            self.index.apply(batch)
            self.next = number + 1

    def read_until(self, is_enough: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not is_enough():
            assert time.monotonic() < end, "the stream does not lead there"
            self.read()

    def close(self) -> None:
        self.socket.close(0)
        self.replays.close(0)
