"""Loads of KV blocks in the background, each with a deadline.

A load is an iterator of parts, usually the bytes of blocks. A thread takes one part after the other
until there are no more, the iterator raises, or the load is cancelled. The caller polls, and takes
what has arrived when the load has ended or its deadline has passed.

    start -> in flight -+-> all arrived ----> taken
                        +-> raised ---------> taken: the parts before, and an error
                        +-> deadline -------> taken: the parts until it is taken, and an error
                        +-> cancelled: dropped immediately

A thread cannot be stopped from outside: one that hangs in a read is left alone, and its later parts
are discarded. Until then it serves no other load, so a store that hangs makes other loads wait, and
time out, but not the engine.

Invariants: a load is taken once; after `take` or `cancel` it has no further effect; loads begin in
the order of their starts; the caller waits for no lock of a thread. vLLM's connectors poll in the
same way (`get_finished` once a step).

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

NUM_THREADS = 4  # loads that are read at the same time


@dataclass(slots=True, eq=False)
class _PartialLoad:
    parts: Iterator[bytes]
    deadline: float
    arrived: list[bytes] = field(default_factory=list)  # written by the thread only

    def read(self) -> None:
        """Read all parts, in a thread."""
        while (part := next(self.parts, None)) is not None:
            self.arrived.append(part)


class Loads:
    """`timeout_s` counts from `start`, including the wait for a thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loads: dict[str, tuple[_PartialLoad, Future[None]]] = {}  # not taken yet
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-loads")

    def start(self, name: str, parts: Iterator[bytes]) -> None:
        """Raises `RuntimeError` after `close`."""
        load = _PartialLoad(parts, time.monotonic() + self.timeout_s)
        self._loads[name] = load, self._threads.submit(load.read)

    def has_ended(self, name: str) -> bool:
        """Whether the load can be taken."""
        load, reading = self._loads[name]
        return reading.done() or time.monotonic() >= load.deadline

    def take(self, name: str) -> tuple[list[bytes], str | None]:
        """Return the parts that arrived, and why there are not more (None: all arrived)."""
        load, reading = self._loads[name]
        error = f"timed out after {self.timeout_s} s"
        if reading.done():
            failure = reading.exception()
            error = None if failure is None else str(failure) or repr(failure)
        arrived = load.arrived.copy()  # later ones are in no result
        self.cancel(name)
        return arrived, error

    def cancel(self, name: str) -> None:
        """Drop a load, whatever its state. Unknown names are ignored."""
        if name in self._loads:
            load, _ = self._loads.pop(name)
            load.parts = iter(())  # its thread reads no more, and it holds no bytes

    def wait(self, timeout_s: float) -> None:
        """Return when some load has ended, or after `timeout_s`; immediately without a load."""
        wait([reading for _, reading in self._loads.values()], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Drop every load. Threads stop; hanging ones are left."""
        for name in list(self._loads):
            self.cancel(name)
        self._threads.shutdown(wait=False, cancel_futures=True)
