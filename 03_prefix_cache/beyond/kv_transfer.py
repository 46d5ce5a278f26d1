"""Copies of KV blocks that run in the background, each with a deadline.

A transfer is an iterator of blocks. A thread takes one block after the other until there are no
more, the iterator raises, the deadline passes, or a caller cancels. The blocks that arrived until
then are its result.

    start -> in flight -+-> complete ------> result taken: dropped
                        +-> timed out ----> (blocks that arrived in time, and an error)
                        +-> raised -------> (blocks that arrived before, and an error)
                        +-> cancelled: dropped immediately

A thread cannot be stopped from outside: one that hangs in a copy is left alone, and its later
blocks are discarded. Until then it serves no other transfer, so a store that hangs makes other
transfers wait, and time out, but not the engine.

Invariants: a transfer ends exactly once; after its end, or after `cancel` returns, it has no
further effect; deadlines are in the order of the starts; callbacks run without any lock. vLLM's
connectors poll in the same way (`get_finished` once a step).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from kv_pool import KVBlock, KVPool, TransferCallback, TransferResult

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Transfer:
    request_id: str
    blocks: Iterator[KVBlock]
    callback: TransferCallback | None
    on_arrival: Callable[[Sequence[KVBlock]], None] | None
    deadline: float  # as time.monotonic()
    arrived: list[KVBlock] = field(default_factory=list)
    is_over: bool = False


class BackgroundTransfers:
    """Up to `num_transfer_threads` transfers at a time, started in the order of the calls.

    `transfer_timeout_s` counts from `start`, including the wait for a thread. Threads begin with
    the first transfer. Raises `ValueError` for a number or a time that is not positive.
    """

    def __init__(self, num_transfer_threads: int = 4, transfer_timeout_s: float = 10.0) -> None:
        limits = {
            "num_transfer_threads": num_transfer_threads,
            "transfer_timeout_s": transfer_timeout_s,
        }
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        self.num_threads = num_transfer_threads
        self.timeout_s = transfer_timeout_s
        self._changed = threading.Condition()
        self._transfers: dict[str, _Transfer] = {}  # in flight; the oldest first
        self._results: dict[str, TransferResult] = {}  # complete, and not taken yet
        self._jobs: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    # -- the caller's side

    def start(
        self,
        request_id: str,
        blocks: Iterator[KVBlock],
        callback: TransferCallback | None = None,
        on_arrival: Callable[[Sequence[KVBlock]], None] | None = None,
    ) -> None:
        """Transfer `blocks` in the background. `on_arrival(blocks)` runs before the result is
        visible, under this object's lock; `callback(request_id, result)` after it, without the
        lock.

        Raises `ValueError` if `request_id` is known, `RuntimeError` after `close`.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("cannot start a transfer: the pool is closed")
            if request_id in self._transfers or request_id in self._results:
                raise ValueError(f"transfer {request_id!r} exists; take its result or cancel it")
            deadline = time.monotonic() + self.timeout_s
            transfer = _Transfer(request_id, blocks, callback, on_arrival, deadline)
            self._transfers[request_id] = transfer
            self._start_threads()
            self._changed.notify_all()
        self._jobs.put(transfer)

    def is_complete(self, request_id: str) -> bool:
        with self._changed:
            if request_id not in self._results and request_id not in self._transfers:
                raise ValueError(f"transfer {request_id!r} is unknown, or its result was taken")
            return request_id in self._results

    def take_result(self, request_id: str) -> TransferResult:
        with self._changed:
            if not self.is_complete(request_id):
                raise ValueError(f"cannot take transfer {request_id!r}: still in flight")
            return self._results.pop(request_id)

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._results.pop(request_id, None)
            transfer = self._transfers.pop(request_id, None)
            if transfer is not None:
                transfer.is_over = True

    def close(self) -> None:
        """End every transfer in flight with an error. Threads stop; hanging ones are left."""
        with self._changed:
            self._is_closed = True
            in_flight = list(self._transfers.values())
            num_workers = max(len(self._threads) - 1, 0)
            self._threads.clear()
            self._changed.notify_all()
        for transfer in in_flight:
            self._end(transfer, "the pool was closed")
        for _ in range(num_workers):
            self._jobs.put(None)

    # -- the threads' side

    def _start_threads(self) -> None:
        if not self._threads:
            targets = [self._watch] + [self._work] * self.num_threads
            self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while (transfer := self._jobs.get()) is not None:
            error = None
            try:
                self._copy(transfer)
            except Exception as failure:
                error = str(failure) or repr(failure)
            self._end(transfer, error)

    def _copy(self, transfer: _Transfer) -> None:
        while not transfer.is_over:
            block = next(transfer.blocks, None)
            if block is None:
                return
            transfer.arrived.append(block)  # blocks that come after the end are in no result

    def _watch(self) -> None:
        """End transfers that have passed their deadline; the oldest one is always the next."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                oldest = next(iter(self._transfers.values()), None)
                left_s = None if oldest is None else oldest.deadline - time.monotonic()
                if oldest is None or left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
            self._end(oldest, f"timed out after {self.timeout_s} s")

    def _end(self, transfer: _Transfer, error: str | None) -> None:
        with self._changed:
            if transfer.is_over:
                return
            transfer.is_over = True
            del self._transfers[transfer.request_id]
            result = TransferResult(tuple(transfer.arrived), error)
            try:
                if transfer.on_arrival is not None:
                    transfer.on_arrival(result.blocks)
            except Exception as failure:
                result = TransferResult((), f"cannot be kept: {failure!r}")
            self._results[transfer.request_id] = result
        if transfer.callback is not None:
            try:
                transfer.callback(transfer.request_id, result)
            except Exception:
                logger.exception("the callback of transfer %r failed", transfer.request_id)

    def check_invariants(self) -> None:
        with self._changed:
            in_flight = list(self._transfers.values())
            assert self._transfers.keys().isdisjoint(self._results), "complete, but in flight"
            assert not any(transfer.is_over for transfer in in_flight), "finished, but in flight"
            deadlines = [transfer.deadline for transfer in in_flight]
            assert deadlines == sorted(deadlines), "transfers are not in order of deadline"
            assert not (self._is_closed and self._threads), "threads outlive the pool"


class TransferringPool(KVPool):
    """A `KVPool` whose transfers run in the background."""

    _transfers: BackgroundTransfers

    def is_transfer_complete(self, request_id: str) -> bool:
        return self._transfers.is_complete(request_id)

    def transfer_result(self, request_id: str) -> TransferResult:
        return self._transfers.take_result(request_id)

    def cancel_transfer(self, request_id: str) -> None:
        self._transfers.cancel(request_id)
