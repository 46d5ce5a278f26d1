"""What a pool of KV blocks shared by several engines is: one interface, whatever keeps the bytes.

    engine "a"  -- publish ----------->  +------+  <----------- query ------------  engine "b"
    computes a prefix                    | pool |  -- async_transfer, a copy -->    needs it too
                                         +------+

Asking is quick and done in the engine's loop. Copying is not: it runs in the background, and is
polled for or called back. Nothing here may ever be needed: a pool that has lost a block, is slow or
is gone costs a computation.

Invariants: what `transfer_result` hands out is intact and from the front of the chain; a transfer
ends once; ids of transfers are unique among all who share a pool.

Kept by `global_kv_pool.py`, in one process, and by `mooncake_pool.py`, on a store of its own.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

CHECKSUM_BYTES = 16


def compute_checksum(block_hash: bytes, token_ids: Sequence[int], kv_data: bytes) -> bytes:
    """Covers the name and the tokens too: right bytes under a wrong name are wrong bytes."""
    digest = blake2b(digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<QQ", len(block_hash), len(token_ids)) + block_hash)
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    digest.update(kv_data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One node's copy of one block: the keys and values of `token_ids` behind the prefix that
    `block_hash` names, of all layers, as bytes."""

    block_hash: bytes
    node_id: str
    token_ids: tuple[int, ...]
    kv_data: bytes = field(repr=False)
    checksum: bytes = field(repr=False)

    @classmethod
    def create(
        cls, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> KVBlock:
        """Copies what it is given, and computes the checksum."""
        token_ids, kv_data = tuple(token_ids), bytes(kv_data)
        checksum = compute_checksum(block_hash, token_ids, kv_data)
        return cls(block_hash, node_id, token_ids, kv_data, checksum)

    @property
    def is_intact(self) -> bool:
        """Are name, tokens and bytes what they were when the block was made? O(bytes)."""
        return self.checksum == compute_checksum(self.block_hash, self.token_ids, self.kv_data)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What arrived: intact blocks, from the front of the chain. `error` says why there are not
    more; None: all are there."""

    blocks: tuple[KVBlock, ...]
    error: str | None = None


TransferCallback = Callable[[str, TransferResult], None]


class KVPool(ABC):
    """Blocks by hash, shared by nodes. Every method may be called from any thread.

    A transfer ends once, well or badly, by itself (there is a deadline). Its result then waits to
    be taken: `transfer_result` takes it, `cancel_transfer` throws it away. Transfer ids are the
    caller's choice, and unique among those who share the pool.
    """

    @abstractmethod
    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """`(num_matched_tokens, node_ids)` of the longest prefix of this chain that is in the pool.
        `node_ids[i]` is a node that has the i-th matched block, so there is one for each. It is a
        use of these blocks; it promises nothing: a block may be gone a moment later."""

    @abstractmethod
    def publish(
        self, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> bool:
        """Keep a copy on `node_id`. False, and nothing but a use, if it has the block already.

        Raises `ValueError` if `token_ids` is empty or is not what the pool has under this hash.
        """

    @abstractmethod
    def withdraw(self, block_hashes: Sequence[bytes]) -> None:
        """Forget every copy of these blocks: what is in them is not to be trusted. Who has read
        them already keeps what it has. Unknown ones are ignored."""

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
        thread, unless the transfer is cancelled first. Raises `ValueError` if `request_id` names a
        transfer whose result has not been taken.
        """

    @abstractmethod
    def is_transfer_complete(self, request_id: str) -> bool:
        """Has it ended, well or badly? Stays True until the result is taken.

        Raises `ValueError` for an id that is not, or no longer, known."""

    @abstractmethod
    def transfer_result(self, request_id: str) -> TransferResult:
        """Take the result of a transfer that is complete; the pool then forgets the id.

        Raises `ValueError` for one that is under way or unknown."""

    @abstractmethod
    def cancel_transfer(self, request_id: str) -> None:
        """Forget it, whatever its state. The callback is not called after this returns, unless it
        is running already. Unknown ids are ignored."""

    @property
    @abstractmethod
    def total_cached_blocks(self) -> int:
        """Blocks on all nodes together, each copy counted."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Transfers under way end with an error. May be called again."""
