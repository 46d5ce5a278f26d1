"""A connector from an engine to a pool of KV blocks: look up, load, save.

    request    | local cache    | in the pool          | computed here      |
               0                ^ num_computed_tokens  ^                    ^ last token: computed
    admission    query of the hashes after the local hit
    load         a transfer in the background; its bytes are checked, then written to the blocks
    end          publish the full blocks that the pool does not have

A block is identified by the chained hash of the local cache, extended by the engine's namespace
(model, dtype, layout) and the request's extra keys (`request_chain.py`). So blocks that another
model or another tenant published are not even found.

Only the engine's thread writes to the engine's memory: the transfer's thread brings bytes, and
`get_finished_load` writes them. So a cancelled load writes nothing, however late its bytes arrive.

Invariants: those of `kv_connector.py`; a block is written only if it has the requested hash and
tokens and as many bytes as a block of this engine; an exception of the pool is caught here.

vLLM's connectors to LMCache and Mooncake write from their own threads straight into GPU memory,
which is faster, and the reason why cancelling is hard there.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kv_connector import KVBlockIO, KVConnector
from kv_pool import KVPool, TransferResult
from request import Request
from request_chain import Link, RequestChains

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolConnectorStats:
    """`num_failed_loads`: those that brought fewer tokens than requested, or none."""

    num_loads: int = 0
    num_failed_loads: int = 0
    num_tokens_loaded: int = 0
    num_blocks_published: int = 0


@dataclass(slots=True, eq=False)
class _PoolLoad:
    transfer_id: str
    block_ids: tuple[int, ...]
    expected: list[Link]
    deadline: float
    has_ended: bool = False  # guarded by the connector's condition


class PoolConnector(KVConnector):
    """A `KVConnector` to `pool` for the engine on `node_id`.

    A load that has not arrived after `load_timeout_s` has failed. The pool is shared, so its
    creator closes it. Raises `ValueError` if `load_timeout_s` is not positive.
    """

    def __init__(
        self,
        pool: KVPool,
        node_id: str,
        load_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not load_timeout_s > 0:
            raise ValueError(f"load_timeout_s must be > 0, got {load_timeout_s}")
        self.pool = pool
        self.node_id = node_id
        self.load_timeout_s = load_timeout_s
        self.stats = PoolConnectorStats()
        self._clock = clock
        # In blocks, at the last lookup.
        self._starts: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._loads: dict[str, _PoolLoad] = {}  # by request id
        self._ended = threading.Condition()

    def bind(self, io: KVBlockIO, block_size: int, namespace: Sequence[tuple[str, str]]) -> None:
        super().bind(io, block_size, namespace)
        self._chains = RequestChains(block_size, namespace)

    # -- load

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        start = num_computed_tokens // self.block_size
        num_usable = (request.num_tokens - 1) // self.block_size  # the last token is computed here
        if num_usable <= start:
            return 0, False
        chain = self._chains.chain(request, num_usable)[start:]
        try:
            num_tokens, node_ids = self.pool.query([block_hash for block_hash, _ in chain])
        except Exception as failure:
            logger.warning("cannot query the KV pool: %r", failure)
            return 0, False
        if num_tokens != len(node_ids) * self.block_size:  # blocks of another size
            return 0, False
        self._starts[request] = start
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Raises `ValueError` if the blocks do not hold exactly these tokens, or while a load of
        this request is in flight."""
        if len(block_ids) * self.block_size != num_external_tokens:
            raise ValueError(f"{len(block_ids)} block_ids must hold {num_external_tokens} tokens")
        if request.request_id in self._loads:
            raise ValueError(f"cannot load request {request.request_id!r}: a load is in flight")
        start = self._starts[request]
        expected = self._chains.chain(request, start + len(block_ids))[start:]
        # Other engines number their requests from 0 too: the request's id would not be unique.
        transfer_id = f"{self.node_id}/{uuid.uuid4().hex}"
        deadline = self._clock() + self.load_timeout_s
        load = _PoolLoad(transfer_id, tuple(block_ids), expected, deadline)
        self._loads[request.request_id] = load
        self.stats.num_loads += 1
        try:
            hashes = [block_hash for block_hash, _ in expected]
            self.pool.async_transfer(
                transfer_id, hashes, self.node_id, lambda *_: self._set_ended(load)
            )
        except Exception as failure:
            logger.warning("cannot start a transfer from the KV pool: %r", failure)
            self._set_ended(load)

    def _set_ended(self, load: _PoolLoad) -> None:
        """Called on the transfer's thread."""
        with self._ended:
            load.has_ended = True
            self._ended.notify_all()

    def get_finished_load(self, request_id: str) -> int | None:
        load = self._loads[request_id]
        result = self._take_result(load)
        if result is None:
            return None
        del self._loads[request_id]
        num_tokens = self._write(load, result) * self.block_size
        self.stats.num_tokens_loaded += num_tokens
        if num_tokens < len(load.block_ids) * self.block_size:
            self.stats.num_failed_loads += 1
            logger.warning("only %s of a load arrived: %s", num_tokens, result.error)
        return num_tokens

    def _take_result(self, load: _PoolLoad) -> TransferResult | None:
        """The result of a load; None while it is in flight."""
        try:
            if self.pool.is_transfer_complete(load.transfer_id):
                return self.pool.transfer_result(load.transfer_id)
            if self._clock() < load.deadline:
                return None
            error = f"nothing after {self.load_timeout_s} s"
        except Exception as failure:
            error = repr(failure)
        self._cancel(load)
        return TransferResult((), error)

    def _write(self, load: _PoolLoad, result: TransferResult) -> int:
        """Write blocks from the front, up to the first that does not match. Returns how many."""
        num_written_slots = 0
        for block_id, link, block in zip(
            load.block_ids, load.expected, result.blocks, strict=False
        ):
            is_ours = (block.block_hash, tuple(block.token_ids)) == link
            if not is_ours or len(block.kv_data) != self.io.block_nbytes:
                break
            self.io.write_block(block_id, block.kv_data)
            num_written_slots += 1
        return num_written_slots

    def cancel_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._cancel(load)

    def _cancel(self, load: _PoolLoad) -> None:
        try:
            self.pool.cancel_transfer(load.transfer_id)
        except Exception as failure:
            logger.warning("cannot cancel a transfer from the KV pool: %r", failure)

    def wait_for_load(self, timeout_s: float) -> None:
        """Returns immediately if nothing is being loaded."""
        loads = list(self._loads.values())
        if loads:
            timeout_s = min(timeout_s, min(load.deadline for load in loads) - self._clock())
            with self._ended:
                self._ended.wait_for(lambda: any(load.has_ended for load in loads), timeout_s)

    # -- save

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        """Publishes the deepest block first, and marks the whole chain as used afterwards: the pool
        drops a tail before its head, without which the tail could not be found."""
        try:
            chain = self._chains.chain(request, len(block_ids))
            hashes = [block_hash for block_hash, _ in chain]
            num_known = len(self.pool.query(hashes)[1])
            for (block_hash, tokens), block_id in reversed(
                list(zip(chain, block_ids, strict=True))[num_known:]
            ):
                kv_data = self.io.read_block(block_id)
                is_new = self.pool.publish(block_hash, self.node_id, tokens, kv_data)
                self.stats.num_blocks_published += is_new
            if 0 < num_known < len(hashes):
                self.pool.query(hashes)
        except Exception as failure:
            logger.warning("cannot save %r to the KV pool: %r", request.request_id, failure)

    def invalidate(self, request: Request, start: int, end: int) -> None:
        try:
            self.pool.invalidate([name for name, _ in self._chains.chain(request, end)[start:]])
        except Exception as failure:
            logger.warning("cannot invalidate blocks of %r: %r", request.request_id, failure)

    def close(self) -> None:
        """Cancel all loads. The pool stays open."""
        for request_id in list(self._loads):
            self.cancel_load(request_id)
