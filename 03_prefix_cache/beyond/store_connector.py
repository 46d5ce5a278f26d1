"""A connector whose KV comes from stores: the part that tiers and pools share.

    lookup       the links after the local hit, up to the first that no store has
    load         bytes that are in this process are there already; `Loads` reads the others
    end          what arrived, up to the first block that is missing, is written to the device

Only the engine's thread writes to the engine's memory: threads bring bytes, and `get_finished_load`
writes them. So a cancelled load writes nothing, however late its bytes arrive.

Invariants: those of `kv_connector.py`; only as many bytes as a block of this engine has are
written; no state is kept for a request that is gone.

vLLM's connectors to LMCache and Mooncake write from their own threads straight into GPU memory,
which is faster, and the reason why cancelling is hard there.

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kv_connector import KVBlockIO, KVConnector
from request import Request
from request_chain import Link, RequestChains
from store_loads import Loads

logger = logging.getLogger(__name__)

Found = list[tuple[Link, bytes | None]]  # None: to be read by `Loads`


@dataclass(slots=True, eq=False)
class _Destination:
    block_ids: list[int]
    found: Found
    is_background: bool


class StoreConnector(KVConnector):
    """A load that takes longer than `load_timeout_s` ends with the blocks that have arrived. Raises
    `ValueError` if `load_timeout_s` is not positive."""

    def __init__(
        self,
        load_timeout_s: float,
        num_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not load_timeout_s > 0:
            raise ValueError(f"load_timeout_s must be > 0, got {load_timeout_s}")
        # By request, the result of the last lookup, with bytes: allocating for a load evicts
        # blocks, and pushes others out of the host.
        self._found: dict[str, Found] = {}
        self._loading: dict[str, _Destination] = {}
        self._loads = Loads[bytes](load_timeout_s, num_threads, clock)

    def bind(self, io: KVBlockIO, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        super().bind(io, block_size, namespace)
        self._chains = RequestChains(block_size, namespace)

    def _links(self, request: Request, num_computed_tokens: int) -> list[Link]:
        """The links that can be loaded: short of the last token, which is always computed."""
        start = num_computed_tokens // self.block_size
        num_usable = (request.num_tokens - 1) // self.block_size
        return self._chains.chain(request, num_usable)[start:]

    def _offer(self, request: Request, found: Found) -> tuple[int, bool]:
        self._found[request.request_id] = found
        return len(found) * self.block_size, any(data is None for _, data in found)

    def _start(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_external_tokens: int,
        read: Callable[[Sequence[Link]], Iterator[bytes]],
    ) -> None:
        """Start the load of what was found. `read` is a store's `get`. Raises `ValueError` if the
        blocks do not hold exactly these tokens, or while a load of this request is in flight."""
        request_id = request.request_id
        if len(block_ids) * self.block_size != num_external_tokens:
            raise ValueError(f"{len(block_ids)} block_ids must hold {num_external_tokens} tokens")
        if request_id in self._loading:
            raise ValueError(f"cannot load request {request_id!r}: a load is in flight")
        found = self._found.pop(request_id)[: len(block_ids)]
        links = [link for link, data in found if data is None]
        if links:
            try:
                parts = read(links)
            except Exception as failure:
                logger.warning("cannot start to load KV: %r", failure)
                parts = iter(())
            self._loads.start(request_id, parts)
        self._loading[request_id] = _Destination(list(block_ids), found, bool(links))

    def get_finished_load(self, request_id: str) -> int | None:
        load = self._loading[request_id]
        read = list[bytes]()
        error = None
        if load.is_background:
            if not self._loads.has_ended(request_id):
                return None
            read, error = self._loads.take(request_id)
        del self._loading[request_id]
        arrived = self._arrived(load.found, iter(read))
        for (link, _), data in reversed(list(zip(load.found, arrived, strict=False))):
            self._keep(link, data)  # the deepest as the oldest
        for block_id, data in zip(load.block_ids, arrived, strict=False):
            self.io.write_block(block_id, data)
        self._count(load.found, len(arrived))
        if len(arrived) < len(load.found):
            error = error or "the next block is missing, or has another size"
            logger.warning("%d of %d blocks were loaded: %s", len(arrived), len(load.found), error)
        return len(arrived) * self.block_size

    def _arrived(self, found: Found, read: Iterator[bytes]) -> list[bytes]:
        """The blocks from the front, up to the first that is missing or has another size."""
        arrived: list[bytes] = []
        for _, in_memory in found:
            data = next(read, None) if in_memory is None else in_memory
            if data is None or len(data) != self.io.block_nbytes:
                break
            arrived.append(data)
        return arrived

    def _keep(self, link: Link, data: bytes) -> None:
        """Called for each block that arrived, so that it can be kept nearer to the engine."""

    def _count(self, found: Found, num_arrived: int) -> None:
        """Called when a load has ended with its first `num_arrived` blocks."""

    def cancel_load(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._loads.cancel(request_id)

    def wait_for_load(self, timeout_s: float) -> None:
        self._loads.wait(timeout_s)

    def close(self) -> None:
        """Cancel all loads. Stores that others share stay open. Can be called again."""
        for request_id in list(self._loading):
            self.cancel_load(request_id)
        self._loads.close()
