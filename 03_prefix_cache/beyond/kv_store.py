"""A store of KV blocks outside the engine's memory: in host memory, in a file, on other machines.

    has    how many of these blocks, from the front, are there     fast, in the engine's loop
    get    their bytes, one block after the other                  slow, in a thread of `Loads`
    put    keep a block
    drop   remove a block whose content is not trusted

A block is named by a *link* of its request's chain: its hash, which covers the whole prefix, and
its tokens. A new store is one class with these four methods, and need not be reliable: what leaves
the process is a *record*, which its reader checks.

Invariants: a record that was damaged, cut or stored under another link is never taken for a block;
an engine never depends on a store, so one that has lost a block, is slow, raises or is gone costs
only a computation.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from request_chain import Link


class KVStore(ABC):
    """Blocks by link. `get` is iterated in another thread, and `drop` is called there, too."""

    @abstractmethod
    def has(self, links: Sequence[Link]) -> int:
        """Return how many links, from the front, are in the store. These blocks count as used, but
        they are not pinned: a block may be gone a moment later."""

    @abstractmethod
    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        """Return an iterator of the bytes of these blocks, in this order. Only the iteration may be
        slow; it must end by itself, because the process waits for it at its end. It raises at the
        first block that is missing."""

    @abstractmethod
    def put(self, link: Link, data: bytes) -> bool:
        """Keep a copy of a block. Returns False if the store has the block, or no space."""

    @abstractmethod
    def drop(self, link: Link) -> None:
        """Remove a block, because its content is not trusted. Unknown links are ignored."""


# -- a block outside the process

CHECKSUM_BYTES = 16


def compute_checksum(link: Link, data: bytes | memoryview) -> bytes:
    """The checksum of a block. It covers hash and tokens too: right bytes under a wrong hash are
    wrong bytes."""
    block_hash, token_ids = link
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<QQ", len(block_hash), len(token_ids)) + block_hash)
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    digest.update(data)
    return digest.digest()


def make_record(link: Link, data: bytes) -> bytes:
    """The checksum and the KV bytes."""
    return compute_checksum(link, data) + data


def open_record(record: bytes, link: Link) -> bytes:
    """The KV bytes of a record. Raises `ValueError` if it is not exactly what was written for this
    link."""
    data = record[CHECKSUM_BYTES:]
    if record[:CHECKSUM_BYTES] != compute_checksum(link, data):
        raise ValueError("cannot read the record: wrong checksum")
    return data
