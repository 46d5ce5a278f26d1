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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from global_kv_pool import KVBlock


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
