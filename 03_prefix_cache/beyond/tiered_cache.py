"""KV that does not fit into the engine's memory: copied to host memory and disk, and loaded back.

    device   a PrefixCache; evicts a block     |                     ^ loaded before admission
    host     HostTier                          v copied down         |
    disk     DiskTier, a checked file          v pushed out of host  | read in the background

A `TieredCache` listens to the device's prefix cache. Blocks that are evicted there are copied to
the host first (write-back), or were copied when they were published (write-through: then an
eviction costs nothing, and every block is copied once, hit or not). Blocks that do not fit into the
host go to disk; blocks that do not fit on disk are lost.

The way back is a `KVConnector`: a request whose prefix continues in a lower tier waits for it,
while others pass. Host blocks are available immediately. Disk blocks are read and verified by one
thread into separate memory; the engine's thread writes them to the device. Copies in lower tiers
stay, so a block that is evicted again needs no second copy.

Invariants: those of `kv_connector.py`; no tier exceeds its limit; a block that is corrupt, or does
not arrive in time, ends the load before it, and is computed.

SGLang's HiCache and vLLM's offloading connectors do this with pinned memory and copy streams, and
overlap the copies with the layers of the forward pass.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from block_pool import Block
from kv_connector import KVBlockIO, KVConnector
from kv_tiers import DiskTier, HostTier
from prefix_cache_local import compute_block_hash
from request import Request
from request_chain import RequestChains, root_keys
from worker_thread import ThreadJob, WorkerThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVTierConfig:
    """Sizes of the tiers below the device, in blocks; 0 leaves one out.

    `disk_path` is the path of a file, which outlives the engine and serves the next one; None: a
    temporary file. `write_policy` is `"write_back"` or `"write_through"`. A load that takes longer
    than `load_timeout_s` ends with the blocks that have arrived. Raises `ValueError` that names
    field and value.
    """

    host_blocks: int
    disk_blocks: int = 0
    disk_path: str | Path | None = None
    write_policy: str = "write_back"
    load_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("host_blocks", "disk_blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        if self.host_blocks + self.disk_blocks == 0:
            raise ValueError("host_blocks or disk_blocks must be > 0, got 0 for both")
        if self.disk_path is not None and not isinstance(self.disk_path, str | Path):
            raise ValueError(f"disk_path must be a path or None, got {self.disk_path!r}")
        if self.disk_path is not None and Path(self.disk_path).is_dir():
            raise ValueError(f"disk_path must be a file, not a folder, got {self.disk_path!r}")
        if self.write_policy not in ("write_back", "write_through"):
            raise ValueError(
                f"write_policy must be 'write_back' or 'write_through', got {self.write_policy!r}"
            )
        if not self.load_timeout_s > 0:
            raise ValueError(f"load_timeout_s must be > 0, got {self.load_timeout_s!r}")


@dataclass(slots=True)
class TierStats:
    """Blocks loaded from each tier, blocks copied down, and loads that ended early."""

    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_saved: int = 0
    num_short_loads: int = 0


@dataclass(slots=True, eq=False)
class _TierLoad:
    hashes: list[bytes]
    block_ids: list[int]
    data: list[bytes | None]  # the disk's entries are filled by the reader, from the front
    from_disk: list[int]  # their indices
    deadline: float
    reading: ThreadJob[None] | None = None
    is_cancelled: bool = False


@dataclass(slots=True)
class _Below:
    """State that `bind` makes, because it depends on the size of a block."""

    chains: RequestChains
    disk: DiskTier | None
    folder: tempfile.TemporaryDirectory | None = field(default=None)


class TieredCache(KVConnector):
    """Host and disk tiers: the listener of a `PrefixCache`, and a `KVConnector`."""

    def __init__(self, config: KVTierConfig) -> None:
        self.config = config
        self.stats = TierStats()
        self.host = HostTier(config.host_blocks)
        self._hash_of: dict[int, bytes] = {}  # of every cached block on the device
        # By request, the result of the last lookup: hashes, and the bytes if they are in the host.
        # Kept here, because allocating for a load evicts blocks, and pushes others out of the host.
        self._found: dict[str, list[tuple[bytes, bytes | None]]] = {}
        self._loads: dict[str, _TierLoad] = {}
        self._reader = WorkerThread("kv-tier-reader")

    def bind(self, io: KVBlockIO, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        """Raises `OSError` if the file cannot be made."""
        super().bind(io, block_size, namespace)
        folder, path = None, self.config.disk_path
        if self.config.disk_blocks and path is None:
            folder = tempfile.TemporaryDirectory(prefix="kv-tier-")
            path = Path(folder.name) / "blocks"
        disk = None
        if path is not None and self.config.disk_blocks:
            disk = DiskTier(path, self.config.disk_blocks, io.block_nbytes)
        self._below = _Below(RequestChains(block_size, namespace), disk, folder)

    @property
    def disk(self) -> DiskTier | None:
        return self._below.disk

    # -- down: notifications of the device's cache

    def block_cached(
        self,
        block: Block,
        parent: Block | None,
        token_ids: tuple[int, ...],
        extra_keys: tuple[tuple[str, str], ...],
    ) -> None:
        """O(1): the parent's hash is known."""
        if parent is None:
            keys = root_keys(self.namespace, extra_keys)
            block_hash = compute_block_hash(None, token_ids, keys)
        else:
            block_hash = compute_block_hash(self._hash_of[parent.block_id], token_ids)
        self._hash_of[block.block_id] = block_hash
        if self.config.write_policy == "write_through":
            self._save(block_hash, block)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        """Children come first, so in the lower tiers they are older than their parents, and leave
        first too."""
        for block in blocks:
            self._save(self._hash_of.pop(block.block_id), block)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        """Remove the blocks here too, above all from a file that serves the next engine."""
        for block in blocks:
            block_hash = self._hash_of.pop(block.block_id, None)
            if block_hash is None:
                continue
            self.host.drop(block_hash)
            if self.disk is not None:
                self.disk.drop(block_hash)

    def _save(self, block_hash: bytes, block: Block) -> None:
        if self.host.get(block_hash) is not None:
            return
        if self.disk is not None and block_hash in self.disk:
            self.disk.use(block_hash)
            return
        self.stats.num_saved += 1
        self._put(block_hash, self.io.read_block(block.block_id))

    def _put(self, block_hash: bytes, data: bytes) -> None:
        """Copy a block to the host; blocks evicted from there go to disk, unless they are there."""
        for old_hash, old_data in self.host.put(block_hash, data):
            if self.disk is None:
                continue
            if old_hash in self.disk:
                self.disk.use(old_hash)
            else:
                self.disk.put(old_hash, old_data)

    # -- up: calls of the manager

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        start = num_computed_tokens // self.block_size
        num_usable = (request.num_tokens - 1) // self.block_size  # the last token is computed
        found: list[tuple[bytes, bytes | None]] = []
        for block_hash, _ in self._below.chains.chain(request, num_usable)[start:]:
            data = self.host.get(block_hash)
            if data is None and (self.disk is None or block_hash not in self.disk):
                break
            found.append((block_hash, data))
        self._found[request.request_id] = found
        return len(found) * self.block_size, any(data is None for _, data in found)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        found = self._found.pop(request.request_id)[: len(block_ids)]
        hashes, data = [block_hash for block_hash, _ in found], [block for _, block in found]
        from_disk = [place for place, block in enumerate(data) if block is None]
        deadline = time.monotonic() + self.config.load_timeout_s
        load = _TierLoad(hashes, list(block_ids), data, from_disk, deadline)
        if from_disk:
            load.reading = self._reader.submit(self._read, load)
        self._loads[request.request_id] = load

    def _read(self, load: _TierLoad) -> None:
        """Read a load's blocks on the reader's thread. Writes to the load's own list, never to the
        device."""
        disk = self.disk
        assert disk is not None
        for place in load.from_disk:
            if load.is_cancelled:
                return
            load.data[place] = disk.read(load.hashes[place])
            if load.data[place] is None:
                return  # later blocks are of no use

    def get_finished_load(self, request_id: str) -> int | None:
        load = self._loads[request_id]
        is_read = load.reading is None or load.reading.done()
        if not is_read and time.monotonic() < load.deadline:
            return None
        del self._loads[request_id]
        load.is_cancelled = True
        arrived: list[bytes] = []  # up to the first that is missing
        for data in load.data:
            if data is None:
                break
            arrived.append(data)
        for block_id, data in zip(load.block_ids, arrived, strict=False):
            self.io.write_block(block_id, data)
        self._count(load, arrived)
        return len(arrived) * self.block_size

    def _count(self, load: _TierLoad, arrived: list[bytes]) -> None:
        """Count hits. Blocks read from disk are kept in the host as well, the deepest as the
        oldest."""
        num_arrived = len(arrived)
        from_disk = [place for place in load.from_disk if place < num_arrived]
        self.stats.num_disk_hits += len(from_disk)
        self.stats.num_host_hits += num_arrived - len(from_disk)
        for place in reversed(from_disk):
            self._put(load.hashes[place], arrived[place])
        if num_arrived < len(load.hashes):
            self.stats.num_short_loads += 1
            error = load.reading.exception() if load.reading and load.reading.done() else None
            logger.warning(
                "%d of %d blocks came back from the KV tiers: %s",
                num_arrived,
                len(load.hashes),
                error or "the next block is corrupt, missing or late",
            )

    def cancel_load(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.is_cancelled = True

    def num_loaded_blocks(self) -> Mapping[str, int]:
        return {"host": self.stats.num_host_hits, "disk": self.stats.num_disk_hits}

    def clear(self) -> None:
        if self.disk is not None:
            self.disk.clear()

    def wait_for_load(self, timeout_s: float) -> None:
        reading = [load.reading for load in self._loads.values()]
        if reading and not any(job is None or job.done() for job in reading):
            assert reading[0] is not None
            reading[0].wait(timeout_s)  # they are read in this order

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """Nothing to do: blocks are copied down when the device evicts them."""
        self._found.pop(request.request_id, None)

    def close(self) -> None:
        """Stop the reader; a named file stays, for the next engine. Can be called again."""
        for request_id in list(self._loads):
            self.cancel_load(request_id)
        self._reader.close()
        if self.disk is not None:
            self.disk.close()
        if self._below.folder is not None:
            self._below.folder.cleanup()

    def check_invariants(self) -> None:
        assert len(self.host) <= self.config.host_blocks
        assert len(set(self._hash_of.values())) == len(self._hash_of), "a hash is cached twice"
        if self.disk is not None:
            assert len(self.disk) <= self.config.disk_blocks
            self.disk.check_invariants()
