"""Two tiers below the engine's KV memory: host memory, and a file.

Both keep whole blocks under their chain hash, drop the least recently used one when they are full,
and lose nothing else. The file is divided into records of one size, mapped into memory:

    | file header | record 0                                             | record 1 | ...
                  | magic | chain hash | length | checksum | block bytes |
                    8       32           8        16         block_nbytes

A file outlives its process, a disk can return wrong data, and a process can die in the middle of a
write. So nothing is trusted: a record is valid only if the checksum over its hash, tokens and bytes
is right, at every read. A record is made invalid before its bytes change and valid after.

Both tiers report, to a listener if there is one, which hash was added (True) and removed (False).
All methods can be called from different threads; the listener is called in theirs, under the tier's
lock.

Invariants: those of `kv_store.py`; never more than `max_blocks`; a hash is in at most one record.

See 03_prefix_cache/beyond/README.md#tiers-down-and-up-again"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kv_store import MAGIC, RECORD_HEADER, KVStore, LRUBlocks, open_record, record_header
from request_chain import Link

_FILE_HEADER = struct.Struct("<16sQ")  # format, block_nbytes
_FORMAT = b"kv tier file 2\0\0"


def ignore_change(block_hash: bytes, is_here: bool) -> None:
    """The default listener of a tier, which does nothing."""


class HostTier(KVStore):
    """A tier in memory. Evicted blocks go to `below`, if there is one."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.below: KVStore | None = None
        self.on_change: Callable[[bytes, bool], object] = ignore_change
        self._lock = threading.Lock()
        self._blocks: LRUBlocks[tuple[Link, bytes]] = LRUBlocks()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def has(self, links: Sequence[Link]) -> int:
        with self._lock:
            return self._blocks.num_leading(links)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        for link in links:
            yield self._blocks[link[0]][1]  # one look-up: needs no lock

    def put(self, link: Link, data: bytes) -> bool:
        """A tier of size 0 passes the block on."""
        if self.max_blocks == 0:
            self._spill(link, data)
            return False
        with self._lock:
            is_new = link[0] not in self._blocks
            is_full = is_new and len(self._blocks) >= self.max_blocks
            evicted = [self._blocks.pop_oldest()[1]] if is_full else []
            self._blocks[link[0]] = link, bytes(data)
            self._blocks.move_to_end(link[0])
            self.on_change(link[0], True)
            for old_link, _ in evicted:
                self.on_change(old_link[0], False)
        for old_link, old_data in evicted:
            self._spill(old_link, old_data)
        return is_new

    def _spill(self, link: Link, data: bytes) -> None:
        if self.below is not None and not self.below.has([link]):
            self.below.put(link, data)

    def drop(self, link: Link) -> None:
        with self._lock:
            if self._blocks.pop(link[0], None) is not None:
                self.on_change(link[0], False)


class DiskTier(KVStore):
    """A tier in a memory-mapped file. An existing file is reused if it fits.

    Raises `ValueError` for sizes below 1, and `OSError` if the file cannot be made.
    """

    def __init__(self, path: str | Path, max_blocks: int, block_nbytes: int) -> None:
        for name, value in (("max_blocks", max_blocks), ("block_nbytes", block_nbytes)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.path = Path(path)
        self.max_blocks = max_blocks
        self.block_nbytes = block_nbytes
        self.num_corrupt = 0
        self.on_change: Callable[[bytes, bool], object] = ignore_change
        self._lock = threading.Lock()
        self._slots: LRUBlocks[int] = LRUBlocks()
        self._record_nbytes = RECORD_HEADER.size + block_nbytes
        self._open()
        used = set(self._slots.values())
        self._free = [slot for slot in range(max_blocks - 1, -1, -1) if slot not in used]

    def _open(self) -> None:
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115
        header = _FILE_HEADER.pack(_FORMAT, self.block_nbytes)
        if self._file.read(len(header)) != header:  # new, or of another engine
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
        size = _FILE_HEADER.size + self.max_blocks * self._record_nbytes
        os.truncate(self._file.fileno(), size)  # added bytes read as zeros: no magic, no record
        if hasattr(os, "posix_fallocate"):  # else a disk that fills up later ends the process
            os.posix_fallocate(self._file.fileno(), 0, size)
        self._map = mmap.mmap(self._file.fileno(), size)
        for slot in range(self.max_blocks):
            magic, block_hash, _, _ = RECORD_HEADER.unpack_from(self._map, self._offset(slot))
            if magic == MAGIC and block_hash not in self._slots:
                self._slots[block_hash] = slot

    def _offset(self, slot: int) -> int:
        return _FILE_HEADER.size + slot * self._record_nbytes

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def has(self, links: Sequence[Link]) -> int:
        with self._lock:
            return self._slots.num_leading(links)

    def put(self, link: Link, data: bytes) -> bool:
        """Raises `ValueError` unless `data` is `block_nbytes` long."""
        if len(data) != self.block_nbytes:
            raise ValueError(f"data must have {self.block_nbytes} bytes, got {len(data)}")
        block_hash = link[0]
        with self._lock:
            slot = self._slots.pop(block_hash, None)
            is_new = slot is None
            if slot is None:
                slot = self._free.pop() if self._free else self._evict_oldest()
            offset = self._offset(slot)
            payload = offset + RECORD_HEADER.size
            self._map[offset : offset + len(MAGIC)] = bytes(len(MAGIC))  # invalid from here ...
            self._map[payload : payload + len(data)] = data
            self._map[offset:payload] = record_header(link, data)  # ... to here
            self._slots[block_hash] = slot
            self.on_change(block_hash, True)
        return is_new

    def _evict_oldest(self) -> int:
        block_hash, slot = self._slots.pop_oldest()
        self.on_change(block_hash, False)
        return slot

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        for link in links:
            yield self.read(link)

    def read(self, link: Link) -> bytes:
        """Return the block's bytes, verified. Raises `LookupError` if it is not here, and
        `ValueError` for a record that fails the check, which is dropped."""
        with self._lock:
            slot = self._slots[link[0]]
            offset = self._offset(slot)
            record = self._map[offset : offset + self._record_nbytes]
        try:
            return open_record(record, link)
        except ValueError:
            self._drop_corrupt(link[0], slot)
            raise

    def _drop_corrupt(self, block_hash: bytes, slot: int) -> None:
        with self._lock:
            if self._slots.get(block_hash) == slot:  # not rewritten in the meantime
                del self._slots[block_hash]
                self._free.append(slot)
                self.num_corrupt += 1
                self.on_change(block_hash, False)

    def drop(self, link: Link) -> None:
        """Remove a block, if it is here, from the file as well."""
        with self._lock:
            slot = self._slots.pop(link[0], None)
            if slot is not None:
                offset = self._offset(slot)
                self._map[offset : offset + len(MAGIC)] = bytes(len(MAGIC))
                self._free.append(slot)
                self.on_change(link[0], False)

    def clear(self) -> None:
        """Free the slots whose `put` was interrupted: their records are not valid."""
        with self._lock:
            used = set(self._slots.values())
            self._free = [slot for slot in range(self.max_blocks) if slot not in used]

    def close(self) -> None:
        """Write back and close the file. Can be called again."""
        if not self._file.closed:
            self._map.flush()
            self._map.close()
            self._file.close()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if slots and index are inconsistent."""
        with self._lock:
            slots = [*self._slots.values(), *self._free]
            assert sorted(slots) == list(range(self.max_blocks)), "a slot is missing or used twice"
