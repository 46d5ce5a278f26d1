"""Two tiers below the engine's KV memory: host memory, and a file.

Both keep whole blocks under their chain hash, drop the least recently used one when they are full,
and lose nothing else. The file is divided into records of one size, mapped into memory:

    | file header | record 0                                             | record 1 | ...
                  | magic | chain hash | length | checksum | block bytes |
                    8       32           8        32         block_nbytes

A file outlives its process, a disk can return wrong data, and a process can die in the middle of a
write. So nothing is trusted: a record is valid only if the checksum over its hash, length and bytes
is right, at every read. A record is made invalid before its bytes change and valid after.

Both tiers report, to a listener if there is one, which hash was added (True) and removed (False).
Invariants: never more than `max_blocks`; a hash is in at most one record; `read` returns the data
that `put` was given under that hash, or None.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

_FILE_HEADER = struct.Struct("<16sQ")  # format, block_nbytes
_FORMAT = b"kv tier file 1\0\0"
_RECORD_HEADER = struct.Struct("<8s32sQ32s")  # magic, chain hash, length, checksum
_MAGIC = b"KVBLOCK\0"


class HostTier:
    """A tier in memory: chain hash -> bytes."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.on_change: Callable[[bytes, bool], object] = ignore_change
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def get(self, block_hash: bytes) -> bytes | None:
        """Return a block's bytes, and mark it as used."""
        data = self._blocks.get(block_hash)
        if data is not None:
            self._blocks.move_to_end(block_hash)
        return data

    def drop(self, block_hash: bytes) -> None:
        if self._blocks.pop(block_hash, None) is not None:
            self.on_change(block_hash, False)

    def put(self, block_hash: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        """Store a block. Returns the evicted blocks: at most one, which is the given one if the
        tier has size 0."""
        if self.max_blocks == 0:
            return [(block_hash, data)]
        is_full = len(self._blocks) == self.max_blocks and block_hash not in self._blocks
        evicted = [self._blocks.popitem(last=False)] if is_full else []
        self._blocks[block_hash] = data
        self._blocks.move_to_end(block_hash)
        self.on_change(block_hash, True)
        for old_hash, _ in evicted:
            self.on_change(old_hash, False)
        return evicted


class DiskTier:
    """A tier in a memory-mapped file: chain hash -> bytes. An existing file is reused if it fits.

    `put` and `read` can be called from different threads; `on_change` is called in theirs. Raises
    `ValueError` for sizes below 1, and `OSError` if the file cannot be made.
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
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._record_nbytes = _RECORD_HEADER.size + block_nbytes
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
            magic, block_hash, _, _ = _RECORD_HEADER.unpack_from(self._map, self._offset(slot))
            if magic == _MAGIC and block_hash not in self._slots:
                self._slots[block_hash] = slot

    def _offset(self, slot: int) -> int:
        return _FILE_HEADER.size + slot * self._record_nbytes

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def use(self, block_hash: bytes) -> None:
        """Mark a block as used, if it is here."""
        with self._lock:
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)

    def put(self, block_hash: bytes, data: bytes) -> None:
        """Store a block. Raises `ValueError` unless `data` is `block_nbytes` long."""
        if len(data) != self.block_nbytes:
            raise ValueError(f"data must have {self.block_nbytes} bytes, got {len(data)}")
        with self._lock:
            slot = self._slots.pop(block_hash, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._evict_oldest()
            offset = self._offset(slot)
            payload = offset + _RECORD_HEADER.size
            self._map[offset : offset + len(_MAGIC)] = bytes(len(_MAGIC))  # invalid from here ...
            self._map[payload : payload + len(data)] = data
            checksum = _checksum(block_hash, data)
            header = _RECORD_HEADER.pack(_MAGIC, block_hash, len(data), checksum)
            self._map[offset:payload] = header  # ... to here
            self._slots[block_hash] = slot
            self.on_change(block_hash, True)

    def _evict_oldest(self) -> int:
        block_hash, slot = self._slots.popitem(last=False)
        self.on_change(block_hash, False)
        return slot

    def read(self, block_hash: bytes) -> bytes | None:
        """Return the block's bytes, verified, and mark it as used. None if it is not here; a record
        that fails the check is dropped."""
        with self._lock:
            slot = self._slots.get(block_hash)
            if slot is None:
                return None
            offset = self._offset(slot)
            record = self._map[offset : offset + self._record_nbytes]
            self._slots.move_to_end(block_hash)
        magic, found, length, checksum = _RECORD_HEADER.unpack_from(record)
        data = record[_RECORD_HEADER.size :]
        is_intact = (magic, found, length) == (_MAGIC, block_hash, self.block_nbytes)
        if is_intact and checksum == _checksum(block_hash, data):
            return data
        self._drop(block_hash, slot)
        return None

    def drop(self, block_hash: bytes) -> None:
        """Remove a block, if it is here, from the file as well."""
        with self._lock:
            slot = self._slots.pop(block_hash, None)
            if slot is not None:
                offset = self._offset(slot)
                self._map[offset : offset + len(_MAGIC)] = bytes(len(_MAGIC))
                self._free.append(slot)
                self.on_change(block_hash, False)

    def _drop(self, block_hash: bytes, slot: int) -> None:
        with self._lock:
            if self._slots.get(block_hash) == slot:  # not rewritten in the meantime
                del self._slots[block_hash]
                self._free.append(slot)
                self.num_corrupt += 1
                self.on_change(block_hash, False)

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


def ignore_change(block_hash: bytes, is_here: bool) -> None:
    """The default listener of a tier, which does nothing."""


def _checksum(block_hash: bytes, data: bytes) -> bytes:
    digest = blake2b(block_hash, digest_size=32)
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)
    return digest.digest()
