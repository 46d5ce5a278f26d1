"""Who may use an engine now: one thread at a time, of the process that made it.

Each line of a step relies on what the line before has left. A second thread in between, or a forked
copy that writes to the same workers, would leave an engine whose tokens are wrong. So whoever comes
second is told at once: to wait would only hide that two threads do not make an engine faster. What
may come from anywhere, at any time (the end of a request), is asked for, and done between two
steps by the thread whose turn it is."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class EngineLock:
    """A `with` that does not wait, and may be nested. Raises `RuntimeError`."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._num_deferring = 0
        self.deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self.check_process()
        if not self.take():
            raise RuntimeError(
                "the engine is in use by another thread: add_request() and step() are not "
                "thread-safe (abort_request() and close() are); create one engine per thread"
            )

    def __exit__(self, *_: object) -> None:
        self.release()

    def check_process(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise RuntimeError(
                f"cannot use the engine of process {self._pid} in process {pid}, a fork without "
                "its threads and workers; create an engine after the fork"
            )

    def take(self, timeout_s: float = 0) -> bool:
        return self._lock.acquire(timeout_s > 0, timeout_s or -1)

    def release(self) -> None:
        self._lock.release()
        self.run_deferred()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """For whose turn it is: what is asked for meanwhile, by whomever, is done afterwards."""
        before = self._num_deferring
        try:
            self._num_deferring = before + 1
            yield
        finally:
            self._num_deferring = before

    def clear(self) -> None:
        """Nobody is in the middle of anything, whatever an interrupt has left."""
        self._num_deferring = 0

    def run_or_defer(self, what: Callable[[], None]) -> None:
        """Have it done by whose turn it is; here and now, if that is nobody's, or this thread's and
        not in the middle of something. A fork asks for nothing: a generator that ends there."""
        if os.getpid() != self._pid:
            return
        self.deferred.append(what)
        self.run_deferred()

    def run_deferred(self) -> None:
        """Who asked in vain was before the other's release, so that one sees it. What is
        interrupted is done again."""
        while self.deferred and not self._num_deferring and self.take():
            try:
                with self.deferring():
                    while self.deferred:
                        self._do(self.deferred[0])
            finally:
                self._lock.release()

    def _do(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            self.deferred.popleft()
            raise
        self.deferred.popleft()


def exclusive(method: Method) -> Method:
    """A method of a class with a `lock`."""

    @wraps(method)
    def taken(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **keywords)

    return cast(Method, taken)
