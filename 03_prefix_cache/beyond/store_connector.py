"""A connector whose KV comes from a store: the part that tiers and pools share.

    lookup       the links after the local hit, up to the first that the store does not have
    load         `Loads` reads their bytes in the background
    end          what arrived, up to the first block that is missing, is written to the device

Only the engine's thread writes to the engine's memory: threads bring bytes, and `get_finished_load`
writes them. So a cancelled load writes nothing, however late its bytes arrive.

Invariants: those of `kv_connector.py`; only as many bytes as a block of this engine has are
written; no state is kept for a request that is gone; an exception of the store is caught here.

vLLM's connectors to LMCache and Mooncake write from their own threads straight into GPU memory,
which is faster, and the reason why cancelling is hard there.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kv_connector import KVBlockIO, KVConnector
from kv_store import KVStore
from request import Request
from request_chain import Link, RequestChains
from store_loads import Loads

logger = logging.getLogger(__name__)


class StoreConnector(KVConnector):
    """A load that takes longer than `load_timeout_s` ends with the blocks that have arrived. Raises
    `ValueError` if `load_timeout_s` is not positive."""

    def __init__(self, store: KVStore, load_timeout_s: float) -> None:
        if not load_timeout_s > 0:
            raise ValueError(f"load_timeout_s must be > 0, got {load_timeout_s}")
        self.store = store
        # By request, the blocks that its last lookup found, to be read. Those in this process's
        # memory are held here: allocating for a load evicts blocks, and pushes others out.
        self._found: dict[str, Iterator[bytes]] = {}
        self._loading: dict[str, list[int]] = {}  # ids of the blocks that will be written
        self._loads = Loads(load_timeout_s)
        self._refused: set[bytes] = set()  # hashes of blocks that are not trusted

    def bind(self, io: KVBlockIO, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        super().bind(io, block_size, namespace)
        self._chains = RequestChains(block_size, namespace)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        num_usable = (request.num_tokens - 1) // self.block_size  # the last token is computed
        chain = self._trusted(self._chains.chain(request, num_usable))
        links = chain[num_computed_tokens // self.block_size :]
        try:
            links = links[: max(0, self.store.has(links))] if links else []
            self._found[request.request_id] = self._read(links)
        except Exception as failure:
            logger.warning("cannot query the KV store: %r", failure)
            links = []
        return len(links) * self.block_size, bool(links)

    def _trusted(self, chain: Sequence[Link]) -> Sequence[Link]:
        """The chain up to the first link that is refused: all after it were computed from it."""
        return list(takewhile(lambda link: link[0] not in self._refused, chain))

    def refuse(self, request: Request, num_blocks: int) -> None:
        chain = self._chains.chain(request, num_blocks)
        self._refused.update(link[0] for link in chain)
        for link in chain:
            self.store.drop(link)

    def _read(self, links: Sequence[Link]) -> Iterator[bytes]:
        return self.store.get(links)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        name = request.request_id
        self._loads.start(name, self._found.pop(name))
        self._loading[name] = list(block_ids)

    def get_finished_load(self, request_id: str) -> int | None:
        if not self._loads.has_ended(request_id):
            return None
        block_ids = self._loading.pop(request_id)
        arrived, error = self._loads.take(request_id)
        num_written = 0
        for block_id, data in zip(block_ids, arrived, strict=False):
            if len(data) != self.io.block_nbytes:
                break
            self.io.write_block(block_id, data)
            num_written += 1
        if num_written < len(block_ids):
            reason = error or "the next block is missing, or has another size"
            logger.warning("%d of %d blocks were loaded: %s", num_written, len(block_ids), reason)
        return num_written * self.block_size

    def cancel_load(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._loads.cancel(request_id)

    def wait_for_load(self, timeout_s: float) -> None:
        self._loads.wait(timeout_s)

    def close(self) -> None:
        """Cancel all loads. Stores that others share stay open. Can be called again."""
        self._loading.clear()
        self._loads.close()
