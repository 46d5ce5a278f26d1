"""One thread, one recovery rule: what a call of an engine finds, and what it leaves.

A public call marks the engine busy when it begins, and clears the mark when it ends. So a call that
was interrupted, between whatever two lines, leaves the mark. The mark is the frame of the call, so
the next call can see which of three things has happened:

    no mark                           nothing: the call runs
    a mark, its frame on a stack      it is called from within that call: by a signal handler, by
                                      `on_step`, by a generator that is collected. `abort_request`
                                      and `close` are done when that call ends; others are refused
    a mark, its frame on no stack     that call was interrupted: the engine recovers first

Recovery, which a step that raises runs too: requests that have started end with an error, block
tables and prefix cache are emptied, and the next plan tells the runner to forget every request.
Requests that have not started stay queued.

The engine belongs to the thread and to the process that made it. Each line of a step relies on what
the line before left, so a second thread would make wrong tokens, and a forked copy would write to
the same workers.

See common/README.md"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class EngineCalls:
    """The base of an engine whose public methods are decorated with `public`."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._pid = os.getpid()
        self._call: FrameType | None = None  # the mark
        self._is_recovering = False  # stays True if a recovery does not come to its end

    def _recover(self, error: BaseException | None) -> None:
        """Recover from a call that raised `error`, or (None) was interrupted. Can be interrupted,
        because the next call begins with it again."""
        raise NotImplementedError

    def _finish_call(self) -> None:
        """Do what was asked for from within the call. Can be interrupted and called again."""
        raise NotImplementedError

    def _begin_call(self, frame: FrameType) -> None:
        """Mark the engine busy. Raises `RuntimeError` within another call."""
        if self._is_in_call():
            raise RuntimeError(
                "cannot call the engine from within a call of it (on_step, a signal handler): only "
                "abort_request() and close() can, and are done when that call ends"
            )
        is_interrupted = self._call is not None or self._is_recovering
        self._call = frame
        if is_interrupted:
            self._run_recovery(None)

    def _run_recovery(self, error: BaseException | None) -> None:
        self._is_recovering = True
        self._recover(error)
        self._is_recovering = False

    def _end_call(self) -> None:
        self._finish_call()
        self._call = None
        self._finish_call()  # what a signal handler has asked for since the line above the last

    def _is_in_call(self) -> bool:
        """Whether the frame of the mark is on the stack of any thread."""
        if self._call is None:
            return False
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                if frame is self._call:
                    return True
                frame = frame.f_back
        return False

    def _is_owner(self) -> bool:
        return self._pid == os.getpid() and self._thread_id == threading.get_ident()

    def _check_process(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise RuntimeError(
                f"cannot use the engine of process {self._pid} in process {pid}, a fork without "
                "its threads and workers; create an engine after the fork"
            )

    def _check_owner(self) -> None:
        self._check_process()
        if not self._is_owner():
            raise RuntimeError(
                "the engine belongs to the thread that made it, and this is another one; create "
                "one engine per thread, or an AsyncLLM, which takes requests and aborts from any "
                "thread (close() works from any thread)"
            )


def public(method: Method) -> Method:
    """Decorate a method of an `EngineCalls`: it is a call, by the engine's thread."""

    @wraps(method)
    def call(self: EngineCalls, *arguments: Any, **keywords: Any) -> Any:
        self._check_owner()
        self._begin_call(sys._getframe())
        try:
            result = method(self, *arguments, **keywords)
        except Exception:  # it was refused, or has recovered
            if not self._is_recovering:
                self._end_call()
            raise
        self._end_call()
        return result

    return cast(Method, call)
