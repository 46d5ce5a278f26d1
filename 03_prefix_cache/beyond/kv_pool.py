"""The interface of a pool of KV blocks shared by several engines, independent of the storage.

    engine "a"  -- publish ----------->  +------+  <----------- query ------------  engine "b"
    computes a prefix                    | pool |  -- async_transfer, a copy -->    needs it too
                                         +------+

A query is fast and runs in the engine's loop. Copying is slow: it runs in the background, and is
polled or reported by a callback. An engine never depends on a pool: one that has lost a block, is
slow or is gone costs only a computation.

Invariants: the blocks that `transfer_result` returns are intact and from the front of the chain; a
transfer ends once; transfer ids are unique among all users of a pool.

Implemented by `global_kv_pool.py`, in one process, and by `mooncake_pool.py`, on an external store.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

CHECKSUM_BYTES = 16


def compute_checksum(block_hash: bytes, token_ids: Sequence[int], kv_data: bytes) -> bytes:
    """The checksum of a block. It covers hash and tokens too: right bytes under a wrong hash are
    wrong bytes."""
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<QQ", len(block_hash), len(token_ids)) + block_hash)
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    digest.update(kv_data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One node's copy of one block: the keys and values of all layers, as bytes, for `token_ids`
    after the prefix that `block_hash` identifies."""

    block_hash: bytes
    node_id: str
    token_ids: tuple[int, ...]
    kv_data: bytes = field(repr=False)
    checksum: bytes = field(repr=False)

    @classmethod
    def create(
        cls, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> KVBlock:
        """Copy the data into a new block, and compute the checksum."""
        token_ids, kv_data = tuple(token_ids), bytes(kv_data)
        checksum = compute_checksum(block_hash, token_ids, kv_data)
        return cls(block_hash, node_id, token_ids, kv_data, checksum)

    @property
    def is_intact(self) -> bool:
        """Whether hash, tokens and bytes are unchanged since the block was made. O(bytes)."""
        return self.checksum == compute_checksum(self.block_hash, self.token_ids, self.kv_data)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The blocks that arrived: intact, from the front of the chain. `error` is the reason why there
    are not more; None: all arrived."""

    blocks: tuple[KVBlock, ...]
    error: str | None = None


TransferCallback = Callable[[str, TransferResult], None]


class KVPool(ABC):
    """Blocks by hash, shared by nodes. Every method can be called from any thread.

    A transfer ends once, successfully or not, by itself (there is a deadline). Its result then
    waits to be taken: `transfer_result` takes it, `cancel_transfer` discards it. Transfer ids are
    chosen by the caller, and unique among all users of the pool.
    """

    @abstractmethod
    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return `(num_matched_tokens, node_ids)` for the longest prefix of this chain that is in
        the pool. `node_ids[i]` is a node that has the i-th matched block. The blocks count as used,
        but they are not pinned: a block may be gone a moment later."""

    @abstractmethod
    def publish(
        self, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> bool:
        """Keep a copy on `node_id`. Returns False, and only marks it as used, if the node already
        has the block. Raises `ValueError` if `token_ids` is empty or differs from the pool's tokens
        for this hash."""

    @abstractmethod
    def invalidate(self, block_hashes: Sequence[bytes]) -> None:
        """Remove every copy of these blocks, because their content is not trusted. Copies that were
        already read are not affected. Unknown hashes are ignored."""

    @abstractmethod
    def async_transfer(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        target_node_id: str,
        callback: TransferCallback | None = None,
    ) -> None:
        """Copy these blocks, consecutive ones of a chain, to `target_node_id` in the background.

        `callback(request_id, result)` is called once, when the result can be taken, from another
        thread, unless the transfer is cancelled first. Raises `ValueError` if a transfer with this
        `request_id` has a result that was not taken.
        """

    @abstractmethod
    def is_transfer_complete(self, request_id: str) -> bool:
        """Whether the transfer has ended, successfully or not. Stays True until the result is
        taken. Raises `ValueError` for an id that is not, or no longer, known."""

    @abstractmethod
    def transfer_result(self, request_id: str) -> TransferResult:
        """Take the result of a complete transfer; the pool then drops the id. Raises `ValueError`
        for one that is in flight or unknown."""

    @abstractmethod
    def cancel_transfer(self, request_id: str) -> None:
        """Drop a transfer, whatever its state. The callback is not called after this returns,
        unless it is already running. Unknown ids are ignored."""

    @property
    @abstractmethod
    def total_cached_blocks(self) -> int:
        """Blocks on all nodes together, counting each copy."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Transfers in flight end with an error. Can be called again."""
