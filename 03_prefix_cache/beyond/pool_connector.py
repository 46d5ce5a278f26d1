"""A connector from an engine to a store that it shares with others: look up, load, save.

    request    | local cache    | in the store         | computed here      |
               0                ^ num_computed_tokens  ^                    ^ last token: computed
    admission    `has`, of the links after the local hit
    load         `get`, in the background; then the bytes are written to the blocks
    end          `put` of the full blocks that the store does not have

A block is identified by the chained hash of the local cache, extended by the engine's namespace
(model, dtype, layout) and the request's extra keys (`request_chain.py`). So blocks that another
model or another tenant published are not even found.

The store need not be reliable. It gets a record of each block, with a checksum over hash, tokens
and bytes; a record that does not match ends the load before it, and is dropped, so that a good one
can replace it.

Invariants: those of `store_connector.py`; a block is written only if it has the requested hash and
tokens and as many bytes as a block of this engine.

See 03_prefix_cache/beyond/README.md#a-pool-that-engines-share"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_store import KVStore, make_record, open_record
from request import Request
from request_chain import Link
from store_connector import StoreConnector


class PoolConnector(StoreConnector):
    """A `KVConnector` to `pool`, which is shared: its creator closes it."""

    def __init__(self, pool: KVStore, load_timeout_s: float = 5.0) -> None:
        super().__init__(pool, load_timeout_s)

    def _read(self, links: Sequence[Link]) -> Iterator[bytes]:
        return self._checked(links, self.store.get(links))

    def _checked(self, links: Sequence[Link], records: Iterator[bytes]) -> Iterator[bytes]:
        """Runs in a thread of `Loads`. The store's iterator is exhausted before `links` is."""
        for record, link in zip(records, links, strict=False):
            try:
                data = open_record(record, link)
            except ValueError:
                self.store.drop(link)
                raise
            yield data

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """Publishes the deepest block first, and marks the whole chain as used afterwards: the
        store drops a tail before its head, without which the tail could not be found."""
        links = self._trusted(self._chains.chain(request, len(block_ids)))
        num_known = max(0, self.store.has(links))
        for link, block_id in reversed(list(zip(links, block_ids))[num_known:]):
            self.store.put(link, make_record(link, self.io.read_block(block_id)))
        if 0 < num_known < len(links):
            self.store.has(links)
