"""The pool of KV blocks on a real store: Mooncake, over TCP.

Engines in different processes, on different machines, share one pool; it belongs to none of them:

    key     vfs-kv3/<hash of the prefix, in hex>
    value   a block's record (`kv_store.py`)

A hash identifies a prefix, so a value never changes and no engine has to be notified. The store
itself evicts values that are long unused.

Invariants: those of `kv_store.py`; a store that fails, at any time, is an empty one from then on:
`has` finds nothing, `put` returns False, `get` raises, each within the client's time limit
(`mooncake_client.py`), and a warning reports it once.

Differences from `GlobalKVPool`: a block has one copy, in the memory that its publisher lends if
there is space, else in another's. vLLM's and SGLang's Mooncake stores use the hash as the key as
well. Source: Mooncake, arXiv 2407.00079.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_store import KVStore
from mooncake_client import MooncakeAddress, MooncakeClient, StoreDownError
from request_chain import Link

KEY_PREFIX = "vfs-kv3/"


def store_key(link: Link) -> str:
    return KEY_PREFIX + link[0].hex()


class MooncakePool(KVStore):
    """The store at `address`.

    The object is this process's client of the store: it lends `segment_nbytes` of memory, which
    `close` takes back, with the blocks in it. `host` is this machine's name for the other clients.
    No call takes longer than `timeout_s`. Raises `MooncakeUnavailableError` if there is no store or
    no library.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        segment_nbytes: int = 256 << 20,
        host: str = "127.0.0.1",
        timeout_s: float = 5.0,
    ) -> None:
        self._client = MooncakeClient(address, segment_nbytes, timeout_s=timeout_s, host=host)

    @property
    def down_reason(self) -> str | None:
        """Why the store is no longer called; None while it is in use."""
        return self._client.down_reason

    def has(self, links: Sequence[Link]) -> int:
        keys = [store_key(link) for link in links]
        try:
            return self._client.call("has", keys) if keys else 0
        except StoreDownError:
            return 0

    def get(self, links: Sequence[Link]) -> Iterator[bytes]:
        """Raises `LookupError` for a block that does not exist, `StoreDownError` if the store has
        failed."""
        for link in links:
            key = store_key(link)
            value = self._client.call("get", key)
            if not value:
                raise LookupError(f"cannot fetch {key}: not in the store, or its owner has exited")
            yield value

    def put(self, link: Link, data: bytes) -> bool:
        """Also returns False if the store has failed."""
        key = store_key(link)
        try:
            return not self._client.call("has", [key]) and self._client.call("put", key, data)
        except StoreDownError:
            return False

    def drop(self, link: Link) -> None:
        try:
            self._client.call("remove", store_key(link))
        except StoreDownError:
            return

    def close(self) -> None:
        """Close the pool. Memory that this process lent to the store is lost to the others."""
        self._client.close()
