"""Ctrl-C at any line of a caller, in the standard library too, and while it waits."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from worker_thread import ThreadJob, WorkerThread


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Call it, and raise `KeyboardInterrupt` at the `line`-th line that this thread executes in it.
    False: it has fewer lines."""
    left = line

    def at_line(frame: object, event: str, _: object):
        nonlocal left
        left -= event == "line"
        if left == -1 and event == "line":
            raise KeyboardInterrupt
        return at_line

    gc.disable()  # Python drops what is raised while it collects
    sys.settrace(lambda *_: at_line)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


def test_an_interrupt_at_any_line_leaves_one_thread_that_does_what_comes_next() -> None:
    """Trap 85."""
    before = set(threading.enumerate())
    worker = WorkerThread("worker")
    (thread,) = set(threading.enumerate()) - before
    for line in count():
        done: list[int] = []

        def whole_life(done: list[int] = done) -> None:
            first, second = worker.submit(done.append, 1), worker.submit(done.append, 2)
            second.cancel()
            first.result()

        was_interrupted = interrupted_at(line, whole_life)
        assert worker.submit(lambda: "next").result(60) == "next"
        assert set(threading.enumerate()) - before == {thread}
        assert done in ([], [1], [1, 2]), "in order, and once"
        if not was_interrupted:
            break
    assert line > 20
    for line in count():
        worker = WorkerThread("worker")
        job = worker.submit(lambda: "done")
        was_interrupted = interrupted_at(line, worker.close)
        worker.close()
        assert job.result(60) == "done"
        if not was_interrupted:
            break
    assert not worker._thread.is_alive()


def test_an_interrupt_while_it_waits_is_one_and_the_result_comes_later() -> None:
    """Trap 85: the signal comes when the caller is in the wait, again and again."""
    worker = WorkerThread("worker")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(5):
            goes_on = threading.Barrier(2, timeout=60)

            def send(goes_on: threading.Barrier = goes_on) -> int:
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
                return goes_on.wait()

            job = worker.submit(send)
            with pytest.raises(KeyboardInterrupt):
                job.wait(60)
            assert not job.done()
            goes_on.wait()
            assert job.result(60) in (0, 1)
    finally:
        signal.signal(signal.SIGINT, handler)
        worker.close()


def test_errors_and_ends_are_those_of_a_future() -> None:
    worker = WorkerThread("worker", finishes=False)
    goes_on = threading.Barrier(2, timeout=60)
    begun = worker.submit(lambda: (goes_on.wait(), goes_on.wait()))
    waiting = worker.submit(int)
    goes_on.wait()
    with pytest.raises(TimeoutError):
        waiting.result(0.001)
    worker.close()
    assert waiting.cancelled() and waiting.done()
    goes_on.wait()
    assert len(begun.result(60)) == 2
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(int)
    failing = WorkerThread("worker").submit(int, "x")
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            failing.result(60)


def test_a_short_wait_for_a_job_that_does_not_end_is_short() -> None:
    """In CPython 3.11 `SimpleQueue.get(timeout=...)` waits forever, once in 10,000 times."""
    waits = WorkerThread("waits")
    waits.submit(lambda: [ThreadJob[int]().wait(1e-6) for _ in range(40_000)]).result(60)
