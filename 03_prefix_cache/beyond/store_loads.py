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
time out, but not the engine. The threads start with their owner, not at the first load: Ctrl-C in a
load that starts threads could leave some of them uncounted (`worker_thread.py`).

Invariants: a load is taken once; after `take` or `cancel` it has no further effect; loads begin in
the order of their starts; Ctrl-C at any point of a caller leaves no lock taken. vLLM's connectors
poll in the same way (`get_finished` once a step).

See 03_prefix_cache/beyond/README.md"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from worker_thread import WorkerThread

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _PartialLoad(Generic[T]):
    parts: Iterator[T]
    deadline: float
    arrived: list[T] = field(default_factory=list)  # written by the thread only
    error: str | None = None
    has_ended: bool = False  # set last
    on_end: Callable[[bool], object] = bool
    is_stopped: bool = False  # taken or cancelled

    def stop(self) -> None:
        """Release the parts too, which pin blocks: a load that is not begun stays in the queue."""
        self.is_stopped = True
        self.parts = iter(())


class Loads(Generic[T]):
    """Up to `num_threads` loads at a time. `timeout_s` counts from `start`, including the wait for
    a thread."""

    def __init__(
        self,
        timeout_s: float,
        num_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._loads: dict[str, _PartialLoad[T]] = {}  # not taken yet; the oldest first
        self._queue = SimpleQueue[_PartialLoad[T]]()
        self._ends = SimpleQueue[None]()
        self._threads = [WorkerThread("kv-loads", finishes=False) for _ in range(num_threads)]

    def start(self, name: str, parts: Iterator[T], on_end: Callable[[bool], object] = bool) -> None:
        """`on_end` is called with whether all parts arrived, when the load can be taken: in its
        thread or, at `close`, in the caller's. Raises `ValueError` if a load of this name was not
        taken, `RuntimeError` after `close`."""
        if name in self._loads:
            raise ValueError(f"load {name!r} exists; take its result or cancel it")
        load = _PartialLoad(iter(parts), self._clock() + self.timeout_s, on_end=on_end)
        self._loads[name] = load  # before `on_end`, which may take the result, can be called
        self._queue.put(load)
        for thread in self._threads:  # the first that is free takes it
            thread.submit(self._read_next)

    def _read_next(self) -> None:
        """Read the parts of the oldest load that is not begun, in a thread."""
        try:
            load = self._queue.get_nowait()
        except Empty:
            return  # another thread has taken it
        try:
            while not load.is_stopped:
                part = next(load.parts, None)
                if part is None:
                    break
                load.arrived.append(part)
        except Exception as failure:
            load.error = str(failure) or repr(failure)
        all_arrived = load.error is None and not load.is_stopped  # `take` stops the load
        load.has_ended = True
        self._ends.put(None)
        load.on_end(all_arrived)

    def has_ended(self, name: str) -> bool:
        """Whether the load can be taken. Raises `ValueError` for a name that is not, or no longer,
        known."""
        load = self._loads.get(name)
        if load is None:
            raise ValueError(f"load {name!r} is unknown, or its result was taken")
        return load.has_ended or self._clock() >= load.deadline

    def take(self, name: str) -> tuple[list[T], str | None]:
        """Return the parts that arrived, and why there are not more (None: all arrived). Raises
        `ValueError` for a load that is in flight or unknown."""
        if not self.has_ended(name):
            raise ValueError(f"cannot take load {name!r}: still in flight")
        load = self._loads[name]
        error = load.error if load.has_ended else f"timed out after {self.timeout_s} s"
        arrived = load.arrived.copy()  # later ones are in no result
        self.cancel(name)
        return arrived, error

    def cancel(self, name: str) -> None:
        """Drop a load, whatever its state. Unknown names are ignored."""
        load = self._loads.pop(name, None)
        if load is not None:
            load.stop()

    def wait(self, timeout_s: float) -> None:
        """Return when some load has ended, or after `timeout_s`; immediately without a load."""
        with suppress(Empty):
            while True:
                self._ends.get_nowait()  # of loads that ended before
        loads = list(self._loads.values())
        if loads and not any(load.has_ended for load in loads):
            left_s = min(load.deadline for load in loads) - self._clock()
            with suppress(Empty):
                self._ends.get(timeout=max(0.0, min(timeout_s, left_s)))

    def close(self) -> None:
        """End every load in flight with an error. Threads stop; hanging ones are left."""
        for load in list(self._loads.values()):
            if not load.has_ended:
                load.error = "the loads were closed"
                load.has_ended = True
                load.on_end(False)
            load.stop()
        for thread in self._threads:
            thread.close()
