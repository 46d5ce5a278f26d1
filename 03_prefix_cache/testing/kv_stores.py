"""Every store of KV blocks, faults between a store and its user, and an engine that uses one.

KV is bytes here. A block's bytes are a function of the whole prefix, of its keys and of the model,
computed without the chain's hashes: KV of another prefix cannot look right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from bounded_loops import as_long_as
from cache_checks import check_memory
from global_kv_pool import GlobalKVPool
from kv_connector import KVConnector
from kv_memory import ComputedBlocks, NotReady
from kv_store import KVStore
from kv_tiers import DiskTier, HostTier
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of
from request import Request, SamplingParams
from request_chain import Link

NBYTES = 40
Tags = Sequence[tuple[str, str | int]]
MODEL = (("model", "tiny"), ("dtype", "float64"))
WAIT_S = 20.0  # never waited for, unless the test fails


STORES: dict[str, Callable[[Path, int], KVStore]] = {  # arguments: a folder, a size in blocks
    "host": lambda folder, size: HostTier(size),
    "disk": lambda folder, size: DiskTier(folder / "kv", size),
    "pool": lambda folder, size: GlobalKVPool(size),
}
"""A store is a class with four methods. Mooncake is added by a fixture: it has to be started."""


class FaultyStore(KVStore):
    """A store with faults on the way to it. Reads stand still while `hold` is clear; then `lie`
    makes of them what it wants. Calls that `broken` names raise; "negative" counts below zero."""

    def __init__(self, inner: KVStore) -> None:
        self.inner = inner
        self.hold = threading.Event()
        self.entered = threading.Event()
        self.hold.set()
        self.lie: Callable[[list[bytes]], list[bytes]] = list
        self.broken = ""

    def _call(self, name: str) -> None:
        if name in self.broken.split():
            raise ConnectionError(f"{name}: no answer")

    def has(self, links: Sequence[Link]) -> int:
        self._call("has")
        return -1 if self.broken == "negative" else self.inner.has(links)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        self._call("get")
        return self._read(self.inner.get(links))

    def _read(self, records: Iterator[bytes]) -> Iterator[bytes]:
        self.entered.set()
        assert self.hold.wait(WAIT_S)
        self._call("next")
        yield from records if self.lie is list else self.lie(list(records))

    def put(self, link: Link, data: bytes) -> bool:
        self._call("put")
        return self.inner.put(link, data)

    def drop(self, link: Link) -> None:
        self._call("drop")
        self.inner.drop(link)


class ByteMemory:
    """A KV memory, and the order in which its blocks were written and read."""

    block_nbytes = NBYTES

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.written: list[int] = []
        self.read: list[int] = []
        self.thread = threading.get_ident()

    def read_block(self, block_id: int) -> bytes:
        assert threading.get_ident() == self.thread
        self.read.append(block_id)
        return self.data[block_id]

    def write_block(self, block_id: int, data: bytes | memoryview) -> None:
        assert threading.get_ident() == self.thread, "only the engine writes to its memory"
        assert len(data) == NBYTES
        self.written.append(block_id)
        self.data[block_id] = bytes(data)


def make_request(request_id: str, tokens: Sequence[int], keys: Tags = ()) -> KeyedRequest:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return KeyedRequest(request_id, tokens, params, extra_keys=keys)


def true_kv(request: Request, index: int, block_size: int, namespace: Tags) -> bytes:
    """The bytes of block `index`, which depend on everything before it, and on nothing else."""
    prefix = tuple(request.all_token_ids[: (index + 1) * block_size])
    everything = (prefix, sorted(extra_keys_of(request)), sorted(namespace), block_size)
    return blake2b(repr(everything).encode(), digest_size=NBYTES).digest()


class ByteEngine:
    """A memory with a `LoadingKVCacheManager`; every request is computed immediately."""

    def __init__(
        self, connector: KVConnector, cache: PrefixCache, namespace: Sequence[tuple[str, str]]
    ) -> None:
        self.io = ByteMemory()
        self.cache = cache
        self.namespace = namespace
        self.connector = connector
        connector.bind(self.io, cache.block_size, namespace)
        self.manager = LoadingKVCacheManager(cache.pool, cache.block_size, cache, connector)

    def begin(self, request: Request) -> None:
        """Look the request up; its load begins."""
        assert self.manager.get_computed_blocks(request) is NotReady.LOADING

    def wait_until_ready(self, request: Request) -> ComputedBlocks:
        def is_waiting() -> bool:
            return isinstance(self.manager.get_computed_blocks(request), NotReady)

        for _ in as_long_as(is_waiting, seconds=60):
            self.manager.wait_for_loads()
            check_memory(self.manager)
        computed = self.manager.get_computed_blocks(request)
        assert isinstance(computed, ComputedBlocks)
        return computed

    def serve(self, tokens: Sequence[int], keys: Tags = (), is_error: bool = False) -> int:
        """Admit a request, compute it, check every byte, and free it, possibly after an error.
        Returns the number of tokens that were not computed. All requests have one id."""
        request = make_request("served", tokens, keys)
        manager = self.manager
        size = self.cache.block_size
        computed = self.wait_until_ready(request)
        num_new = request.num_tokens - computed.num_tokens
        assert manager.allocate_slots(request, num_new, computed=computed)
        num_full = request.num_tokens // size
        right = [true_kv(request, index, size, self.namespace) for index in range(num_full)]
        block_ids = manager.get_block_ids("served")
        for index in range(len(computed.blocks), num_full):
            self.io.data[block_ids[index]] = right[index]
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, request.num_tokens)
        block_ids = manager.get_block_ids("served")
        assert [self.io.data[block_id] for block_id in block_ids[:num_full]] == right
        check_memory(manager, [request])
        if is_error:
            request.has_bad_kv = True
        manager.free(request)
        check_memory(manager)
        return computed.num_tokens
