"""The pool of KV blocks on a real store: Mooncake, over TCP.

Engines in different processes, on different machines, share one pool; it belongs to none of them:

    key     vfs-kv1/<hash of the prefix, in hex>
    value   | magic, number of tokens, number of KV bytes, checksum | token ids | KV bytes |

A hash identifies a prefix, so a value never changes and no engine has to be notified. The checksum
covers hash, tokens and bytes: a value that was damaged, cut or stored under a wrong key is a miss,
and is removed so that a good one can replace it. The store itself evicts values that are long
unused.

Invariants: those of `kv_pool.py`; a store that fails, at any time, is an empty one from then on:
`query` finds nothing, `publish` returns False, a transfer ends with an error, each within the
client's time limit (`mooncake_client.py`), and a warning reports it once.

Differences from `GlobalKVPool`: `node_ids` are the store's own names of clients; a block has one
copy, in the memory that its publisher lends if there is space, else in another's; `publish` does
not compare its tokens with those in the store, which would cost as much as the block;
`total_cached_blocks` counts every key of the store. vLLM's and SGLang's Mooncake stores use the
hash as the key as well. Source: Mooncake, arXiv 2407.00079.
"""

from __future__ import annotations

import http.client
import re
import struct
from collections.abc import Sequence

from kv_pool import CHECKSUM_BYTES, KVBlock, TransferCallback
from kv_transfer import BackgroundTransfers, TransferringPool
from mooncake_client import MooncakeClient, StoreDownError
from mooncake_master import MooncakeAddress

KEY_PREFIX = "vfs-kv1/"
MAGIC = b"vfs1"
_HEADER = struct.Struct(f"<4sIQ{CHECKSUM_BYTES}s")


def store_key(block_hash: bytes) -> str:
    return KEY_PREFIX + block_hash.hex()


def encode_block(block: KVBlock) -> tuple[bytes, bytes]:
    """Header and KV bytes; the value is their concatenation."""
    num_tokens = len(block.token_ids)
    head = _HEADER.pack(MAGIC, num_tokens, len(block.kv_data), block.checksum)
    return head + struct.pack(f"<{num_tokens}q", *block.token_ids), block.kv_data


def decode_block(value: bytes | bytearray, block_hash: bytes, node_id: str) -> KVBlock:
    """The block of this hash, as a copy on `node_id`. Raises `ValueError` if the value is not
    exactly what was encoded."""
    if len(value) < _HEADER.size:
        raise ValueError(f"value must be at least one header long, got {len(value)} bytes")
    magic, num_tokens, kv_nbytes, checksum = _HEADER.unpack_from(value)
    kv_start = _HEADER.size + 8 * num_tokens
    if magic != MAGIC or len(value) != kv_start + kv_nbytes:
        raise ValueError("cannot decode the value: wrong header")
    token_ids = struct.unpack_from(f"<{num_tokens}q", value, _HEADER.size)
    kv_data = bytes(memoryview(value)[kv_start:])
    block = KVBlock(block_hash, node_id, token_ids, kv_data, checksum)
    if not block.is_intact:
        raise ValueError("cannot decode the value: wrong checksum")
    return block


class MooncakePool(TransferringPool):
    """A `KVPool` on the store at `address`. All blocks of one pool object have the same number of
    tokens.

    The object is this process's client of the store: it lends `segment_nbytes` of memory, which
    `close` takes back, with the blocks in it. `host` is this machine's name for the other clients.
    No call takes longer than `timeout_s`, and no transfer longer than `transfer_timeout_s`. Raises
    `MooncakeUnavailableError` if there is no store or no library, `ValueError` for a time that is
    not positive.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        segment_nbytes: int = 256 << 20,
        host: str = "127.0.0.1",
        timeout_s: float = 5.0,
        transfer_timeout_s: float = 10.0,
    ) -> None:
        self.address = address
        # The client answers one call at a time: more threads would only wait.
        self._transfers = BackgroundTransfers(1, transfer_timeout_s)
        self._client = MooncakeClient(address, segment_nbytes, timeout_s=timeout_s, host=host)
        self._block_size: int | None = None  # tokens; known from the first block on

    @property
    def down_reason(self) -> str | None:
        """Why the store is no longer called; None while it is in use."""
        return self._client.down_reason

    # -- the index

    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        try:
            node_ids = self._client.locate([store_key(each) for each in block_hashes])
            if node_ids and self._block_size is None:
                self._block_size = len(self._fetch(block_hashes[0], node_ids[0]).token_ids)
        except (StoreDownError, LookupError, ValueError):
            return 0, []
        return len(node_ids) * (self._block_size or 0), node_ids

    def publish(
        self, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes
    ) -> bool:
        """Also returns False if the store has failed or has no space. Raises `ValueError` if
        `token_ids` is not as long as in the pool's other blocks."""
        if not token_ids or len(token_ids) != (self._block_size or len(token_ids)):
            raise ValueError(f"token_ids must be {self._block_size or 'some'} ids, got {token_ids}")
        key = store_key(block_hash)
        try:
            if self._client.locate([key]):
                return False
            block = KVBlock.create(block_hash, node_id, token_ids, kv_data)
            is_stored = self._client.put(key, *encode_block(block))
        except StoreDownError:
            return False
        self._block_size = len(token_ids)
        return is_stored

    def invalidate(self, block_hashes: Sequence[bytes]) -> None:
        try:
            for block_hash in block_hashes:
                self._client.remove(store_key(block_hash))
        except StoreDownError:
            return

    @property
    def total_cached_blocks(self) -> int:
        """Keys in the whole store, read from the master's counters; 0 if these are not
        available."""
        if self.address.admin is None or self.down_reason is not None:
            return 0
        connection = http.client.HTTPConnection(self.address.admin, timeout=self._client.timeout_s)
        try:
            connection.request("GET", "/metrics")
            found = re.search(rb"^master_key_count (\d+)", connection.getresponse().read(), re.M)
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
        return int(found[1]) if found else 0

    # -- transfers

    def async_transfer(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        target_node_id: str,
        callback: TransferCallback | None = None,
    ) -> None:
        """Copies into this process's memory; `target_node_id` only labels the result's blocks."""
        blocks = (self._fetch(each, target_node_id) for each in list(block_hashes))
        self._transfers.start(request_id, blocks, callback)  # runs in the transfers' thread

    def _fetch(self, block_hash: bytes, node_id: str) -> KVBlock:
        """Fetch one block. Raises `LookupError` if it does not exist, `ValueError` if it is not
        intact."""
        key = store_key(block_hash)
        value = self._client.get(key)
        if value is None:
            raise LookupError(f"cannot fetch {key}: not in the store, or its owner has exited")
        try:
            return decode_block(value, block_hash, node_id)
        except ValueError as failure:
            self._client.remove(key)
            raise ValueError(f"{key}: {failure}") from failure

    def close(self) -> None:
        """Close the pool. Memory that this process lent to the store is lost to the others."""
        self._transfers.close()
        self._client.close()
