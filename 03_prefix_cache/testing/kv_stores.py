"""Every store of KV blocks, for tests that run with each, and faults between a store and its user.

A new store is one class with four methods, like `SlowDict`, and one row of `STORES`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from global_kv_pool import GlobalKVPool
from kv_bytes import NBYTES
from kv_store import RECORD_HEADER, KVStore, SharedStore
from kv_tiers import DiskTier, HostTier
from request_chain import Link

WAIT_S = 20.0  # never waited for, unless the test fails
RECORD_NBYTES = RECORD_HEADER.size + NBYTES


class SlowDict(KVStore):
    """A throw-away store: a dictionary with a delay."""

    def __init__(self) -> None:
        self.blocks: dict[Link, bytes] = {}

    def has(self, links: Sequence[Link]) -> int:
        return next((i for i, link in enumerate(links) if link not in self.blocks), len(links))

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        for link in links:
            time.sleep(0.001)
            yield self.blocks[link]

    def put(self, link: Link, data: bytes) -> bool:
        return self.blocks.setdefault(link, copy := bytes(data)) is copy

    def drop(self, link: Link) -> None:
        self.blocks.pop(link, None)


STORES: dict[str, Callable[[Path, int], SharedStore]] = {  # arguments: a folder, a size in blocks
    "slow dict": lambda folder, size: SlowDict(),
    "host": lambda folder, size: HostTier(size),
    "disk": lambda folder, size: DiskTier(folder / "kv", size, RECORD_NBYTES),
    "pool": lambda folder, size: GlobalKVPool(size),
}
"""The real Mooncake store is added by a fixture, because it has to be started."""


class FaultyStore(KVStore):
    """A store with faults on the way to it, which drops at the end what was put. Reads stand still
    while `hold` is clear; then `lie` makes of them what it wants. Calls that `broken` names raise;
    "negative" counts below zero."""

    num_read_threads = 4

    def __init__(self, shared: SharedStore, whole: FaultyStore | None = None, node_id: str = "any"):
        self.shared, self.whole, self.inner = shared, whole or self, shared.at_node(node_id)
        self.hold, self.entered = threading.Event(), threading.Event()
        self.hold.set()
        self.lie: Callable[[list[bytes]], list[bytes]] = list
        self.broken, self.links = "", list[Link]()

    def at_node(self, node_id: str) -> FaultyStore:
        return FaultyStore(self.shared, self.whole, node_id)

    def _call(self, name: str) -> None:
        if name in self.whole.broken.split():
            raise ConnectionError(f"{name}: no answer")

    def has(self, links: Sequence[Link]) -> int:
        self._call("has")
        return -1 if self.whole.broken == "negative" else self.inner.has(links)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        self._call("get")
        return self._read(self.inner.get(links))

    def _read(self, records: Iterator[bytes]) -> Iterator[bytes]:
        self.whole.entered.set()
        assert self.whole.hold.wait(WAIT_S)
        self._call("next")
        yield from records if self.whole.lie is list else self.whole.lie(list(records))

    def put(self, link: Link, data: bytes) -> bool:
        self._call("put")
        self.whole.links.append(link)
        return self.inner.put(link, data)

    def drop(self, link: Link) -> None:
        self._call("drop")
        self.inner.drop(link)

    def close(self) -> None:
        self.broken = ""
        self.hold.set()
        for link in self.links:
            self.inner.drop(link)
