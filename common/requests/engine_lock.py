"""The engine's lock: one thread at a time can use an engine, in the process that made it.

Each line of a step relies on the state that the previous line left. A second thread in between, or
a forked copy that writes to the same workers, would produce wrong tokens. So the second caller gets
an error immediately: waiting would only hide that two threads do not make an engine faster. Calls
that are allowed from any thread at any time (aborting a request) are deferred, and the thread that
holds the lock runs them between two steps.

See common/README.md"""

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
    """A reentrant lock whose `with` never waits. Raises `RuntimeError` if another thread has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
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
        """For the thread with the lock: defer the calls of any thread until after this block."""
        before = self._num_deferring
        try:
            self._num_deferring = before + 1
            yield
        finally:
            self._num_deferring = before

    def clear(self) -> None:
        """Reset the deferring state, which an interrupt can leave set."""
        self._num_deferring = 0

    def run_or_defer(self, callback: Callable[[], None]) -> None:
        """Run `callback` immediately, if the lock is free, or held by this thread and not
        deferring; otherwise the thread with the lock runs it. No effect in a forked process, where
        a generator may end."""
        if os.getpid() != self._pid:
            return
        self.deferred.append(callback)
        self.run_deferred()

    def run_deferred(self) -> None:
        """Run the deferred calls if the lock is free. If another thread has the lock, it runs them
        when it releases the lock. An interrupted call is run again."""
        while self.deferred and not self._num_deferring and self.take():
            try:
                with self.deferring():
                    while self.deferred:
                        self._do(self.deferred[0])
            finally:
                self._lock.release()

    def _do(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            self.deferred.popleft()
            raise
        self.deferred.popleft()


def exclusive(method: Method) -> Method:
    """Decorate a method of a class with a `lock`, so that it holds the lock."""

    @wraps(method)
    def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **keywords)

    return cast(Method, wrapper)
