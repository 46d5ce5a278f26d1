"""One thread that runs jobs in order, for a caller that Ctrl-C may interrupt at any point.

A `ThreadPoolExecutor` starts its thread in the first `submit`. An interrupt there leaves a thread
that is not counted, and the next `submit` starts a second one. Waiting for a `Future` takes and
releases a lock in Python code: an interrupt there raises "cannot release un-acquired lock", or
leaves the lock taken. Here the thread starts with its owner, and a caller waits in
`SimpleQueue.get`, which either returns or is interrupted.

Invariants: jobs run in the order in which they were submitted, each at most once; the result of a
job is stored before the job counts as done, so an interrupted wait can be repeated.

See 01_batching/beyond/README.md"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadJob(Generic[T]):
    """A future result, with the method names of a `Future`. One thread at a time waits for it."""

    def __init__(self, work: Callable[[], T] | None = None) -> None:
        self._work = work
        self._taken_by: dict[str, str] = {}  # the first entry wins: atomic
        self._is_over = False
        self._signal = SimpleQueue[None]()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, in the thread, unless the job was cancelled."""
        if not self.begin():
            return
        work = self._work
        self._work = None
        assert work is not None
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)
        del self, work  # the traceback of an error would hold them in a cycle

    def begin(self) -> bool:
        """Start the job, unless it was cancelled. Returns True if nothing can cancel it from now
        on."""
        return self._taken_by.setdefault("by", "thread") == "thread"

    def set_result(self, value: T) -> None:
        self._value = value
        self._is_over = True
        self._signal.put(None)

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._is_over = True
        self._signal.put(None)

    def cancel(self) -> bool:
        """Cancel a job that has not begun. Returns whether it is cancelled."""
        if self._is_over or self._taken_by.setdefault("by", "cancel") != "cancel":
            return False
        self._signal.put(None)
        return True

    def cancelled(self) -> bool:
        return self._taken_by.get("by") == "cancel"

    def done(self) -> bool:
        return self._is_over or self.cancelled()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job is done, at most `timeout_s`. Returns whether it is."""
        with suppress(Empty):
            # CPython 3.11 waits forever in a late `get(timeout=...)` unless a `get` failed before.
            self._signal.get_nowait()
        if not self.done():
            with suppress(Empty):
                self._signal.get(timeout=timeout_s)
        return self.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait, and return the result. Raises what the job raised, `CancelledError` or
        `TimeoutError`."""
        error = self.exception(timeout_s)
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # no cycle, as above
        return self._value

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        if not self.wait(timeout_s):
            raise TimeoutError
        if self.cancelled():
            raise CancelledError
        return self._error


_Jobs = SimpleQueue[ThreadJob[Any] | None]


class WorkerThread:
    """A thread that ends at `close`, or with its owner. With `finishes`, the submitted jobs are
    done first, and waited for; otherwise they are cancelled, except a job that has begun, which is
    not waited for."""

    def __init__(self, name: str, finishes: bool = True) -> None:
        self._jobs = _Jobs()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._end = weakref.finalize(self, _end, self._jobs, self._thread, finishes)
        self._thread.start()

    def submit(self, work: Callable[..., T], *arguments: Any) -> ThreadJob[T]:
        """Queue a job. Raises `RuntimeError` after `close`."""
        if not self._end.alive:
            raise RuntimeError("cannot run the call: the worker thread is closed")
        job = ThreadJob(partial(work, *arguments))
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread. Can be called again."""
        self._end()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # nothing is held while the thread waits


def _end(jobs: _Jobs, thread: threading.Thread, finishes: bool) -> None:
    with suppress(Empty):
        while not finishes:
            if (job := jobs.get_nowait()) is not None:
                job.cancel()
    jobs.put(None)
    if finishes and thread is not threading.current_thread() and thread.is_alive():
        thread.join()
