"""Two tiers below the engine's KV memory: host memory, and a folder with a file for each block.

Both keep whole blocks under their chain hash, drop the least recently used one when they are full,
and lose nothing else. A block that the host drops goes to the tier below it:

    put ---> HostTier ---> DiskTier ---> lost
             bytes         <chain hash in hex>.kv: a record (`kv_store.py`)

A folder outlives its process, a disk can return wrong data, and a process can die in the middle of
a write. So a file gets its name when it is complete, and nothing is trusted: a record is valid only
if the checksum over its hash, tokens and bytes is right, at every read.

All methods can be called from different threads.

Invariants: those of `kv_store.py`; never more than `max_blocks`. vLLM's and SGLang's file storages
keep one file for each block, too.

See 03_prefix_cache/beyond/README.md#tiers-down-and-up-again"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kv_store import KVStore, make_record, open_record
from request_chain import Link

logger = logging.getLogger(__name__)
_BLOCK_FILE = re.compile("[0-9a-f]{64}[.]kv")


class HostTier(KVStore):
    """A tier in memory, of `max_blocks` blocks. Dropped blocks go to `below`; it finds and reads
    the blocks of both, and keeps what it has read there. With `max_blocks` 0, everything is
    below."""

    def __init__(self, max_blocks: int, below: HostTier | None = None) -> None:
        self.max_blocks = max_blocks
        self.below = below
        self.num_read = 0  # blocks
        self._lock = threading.RLock()
        # The link and the bytes in memory of each block, the least recently used first.
        self._kept: OrderedDict[bytes, tuple[Link, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept or (self.below is not None and block_hash in self.below)

    def has(self, links: Sequence[Link]) -> int:
        with self._lock:
            num_found = 0
            while num_found < len(links) and links[num_found][0] in self:
                num_found += 1
            self.use(links[:num_found])
        return num_found

    def use(self, links: Sequence[Link]) -> None:
        """Mark those that are here as used, the first last: a chain's tail is dropped before its
        head, without which the tail could not be found."""
        with self._lock:
            for block_hash, _ in reversed(links):
                if block_hash in self._kept:
                    self._kept.move_to_end(block_hash)
        if self.below is not None:
            self.below.use(links)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        """Bytes in memory are found now, so no later eviction takes them away."""
        return self._parts([(link, self._kept.get(link[0])) for link in links])

    def _parts(self, found: Sequence[tuple[Link, tuple[Link, bytes] | None]]) -> Iterator[bytes]:
        for link, kept in found:
            if kept is not None:
                self.num_read += 1
                yield kept[1]
            elif self.below is None:
                raise LookupError(f"cannot read block {link[0].hex()}: not in the host tier")
            else:
                (data,) = self.below.get([link])
                self.put(link, data)
                yield data

    def put(self, link: Link, data: bytes) -> bool:
        block_hash = link[0]
        with self._lock:
            is_new = block_hash not in self._kept
            self._kept[block_hash] = link, self._write(link, bytes(data))
            self._kept.move_to_end(block_hash)
            if len(self._kept) > self.max_blocks:
                _, (oldest, kept) = self._kept.popitem(last=False)
                self._erase(oldest)
                if self.below is not None and self.below.has([oldest]) == 0:
                    self.below.put(oldest, kept)
        return is_new

    def drop(self, link: Link) -> None:
        with self._lock:
            if self._kept.pop(link[0], None) is not None:
                self._erase(link)
        if self.below is not None:
            self.below.drop(link)

    def _write(self, link: Link, data: bytes) -> bytes:
        """Write a block. Returns what of it is kept in memory."""
        return data

    def _erase(self, link: Link) -> None:
        """Remove what `_write` has written outside the memory."""


class DiskTier(HostTier):
    """A tier whose order of use is in memory and whose blocks are in files. Files that are in
    `folder` are its first blocks, the oldest the least recently used. Raises `OSError` if there is
    no such folder and none can be made."""

    def __init__(self, folder: str | Path, max_blocks: int) -> None:
        super().__init__(max_blocks)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        ages: dict[Path, int] = {}
        for file in self.folder.iterdir():
            if _BLOCK_FILE.fullmatch(file.name):  # other files are the user's
                with suppress(OSError):  # another engine has dropped it
                    ages[file] = file.stat().st_mtime_ns
        files = sorted(ages, key=ages.__getitem__)
        for file in files[:-max_blocks]:
            with suppress(OSError):
                file.unlink()
        for file in files[-max_blocks:]:
            block_hash = bytes.fromhex(file.stem)
            self._kept[block_hash] = (block_hash, ()), b""

    def _file(self, link: Link) -> Path:
        return self.folder / f"{link[0].hex()}.kv"

    def put(self, link: Link, data: bytes) -> bool:
        """Returns False, too, if the disk is full or broken."""
        try:
            return super().put(link, data)
        except OSError as failure:
            logger.warning("cannot write a KV block to disk: %r", failure)
            return False

    def _write(self, link: Link, data: bytes) -> bytes:
        part = self._file(link).with_suffix(f".{os.getpid()}.part")
        try:
            part.write_bytes(make_record(link, data))
            part.replace(self._file(link))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return b""

    def _erase(self, link: Link) -> None:
        try:
            self._file(link).unlink(missing_ok=True)
        except OSError as failure:  # the block is not known any more, and its record is checked
            logger.warning("cannot remove a KV block from disk: %r", failure)

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        """The iteration raises `OSError` at a file that is not here, and `ValueError` at a record
        that fails the check. Such a block is dropped."""
        for link in links:
            try:
                data = open_record(self._file(link).read_bytes(), link)
            except (OSError, ValueError):
                self.drop(link)
                raise
            self.num_read += 1
            yield data
