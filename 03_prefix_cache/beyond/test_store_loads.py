"""Loads in the background; with stores they are tested in `test_pool_connector.py`."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from store_loads import Loads

WAIT_S = 20.0  # never waited for, unless the test fails
PARTS = [b"a", b"b", b"c"]


class Gate:
    """Parts that stand still before each, until they are let through."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)
        self.num_begun = 0

    def parts(self) -> Iterator[bytes]:
        for part in PARTS:
            self.num_begun += 1
            self.entered.release()
            assert self.open.acquire(timeout=WAIT_S)
            yield part


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def now() -> list[float]:
    """The time, which the test sets."""
    return [0.0]


@pytest.fixture
def loads(now: list[float], gate: Gate) -> Iterator[Loads[bytes]]:
    """With one thread, and a deadline after 5 s."""
    loads = Loads[bytes](5.0, clock=lambda: now[0])
    yield loads
    loads.close()
    gate.open.release(20)


def finish(loads: Loads[bytes], name: str = "a") -> tuple[list[bytes], str | None]:
    while not loads.has_ended(name):
        start = time.monotonic()
        loads.wait(WAIT_S)
        assert time.monotonic() - start < WAIT_S / 2, "it is woken"
    return loads.take(name)


def run(loads: Loads[bytes], parts: Iterator[bytes]) -> tuple[list[bytes], str | None]:
    loads.start("run", parts)
    return finish(loads, "run")


def test_what_came_before_an_iterator_raises_is_the_result(loads):
    def parts():
        yield from PARTS[:2]
        raise OSError("cable cut")

    assert run(loads, parts()) == (PARTS[:2], "cable cut")
    assert run(loads, iter(PARTS)) == (PARTS, None)
    assert run(loads, iter([])) == ([], None)


def test_a_load_can_be_taken_once_and_after_its_end(loads, gate):
    loads.start("a", gate.parts())
    assert not loads.has_ended("a")
    with pytest.raises(ValueError, match="in flight"):
        loads.take("a")
    with pytest.raises(ValueError, match="'a' exists"):
        loads.start("a", iter(PARTS))
    gate.open.release(3)
    assert finish(loads) == (PARTS, None)
    for call in (loads.has_ended, loads.take):
        with pytest.raises(ValueError, match="'a' is unknown"):
            call("a")
    loads.cancel("a")
    loads.start("a", iter(PARTS))
    assert finish(loads) == (PARTS, None)


def test_what_arrived_before_the_deadline_is_the_result_and_what_comes_late_is_not(
    loads, gate, now
):
    loads.start("a", gate.parts())
    gate.open.release()
    gate.entered.acquire(timeout=WAIT_S), gate.entered.acquire(timeout=WAIT_S)
    now[0] = 4.9
    assert not loads.has_ended("a")
    now[0] = 5.0
    loads.wait(WAIT_S)  # returns immediately
    arrived, error = loads.take("a")
    assert arrived == PARTS[:1] and error == "timed out after 5.0 s"
    gate.open.release(2)
    assert run(loads, iter(())) == ([], None), "the thread is free again"
    assert arrived == PARTS[:1] and gate.num_begun == 2


def test_a_load_queued_after_one_that_hangs_times_out_too(loads, gate, now):
    for name in "ab":
        loads.start(name, gate.parts())
    assert gate.entered.acquire(timeout=WAIT_S)
    now[0] = 5.0
    assert [loads.take(name)[0] for name in "ab"] == [[], []]
    gate.open.release()
    run(loads, iter(()))
    assert gate.num_begun == 1, "a load that was taken is not begun"


@pytest.mark.parametrize("end", ["cancel", "take", "close"])
def test_a_load_that_is_over_before_it_begins_holds_no_block(end, loads, gate, now):
    """The thread hangs in another, so the load stays in its queue."""
    loads.start("hangs", gate.parts())
    assert gate.entered.acquire(timeout=WAIT_S)
    parts = Gate().parts()
    pinned = weakref.ref(parts)
    loads.start("a", parts)
    del parts
    now[0] = 5.0
    getattr(loads, end)(*["a"] * (end != "close"))
    assert pinned() is None


def test_a_load_that_ended_before_does_not_cut_a_wait_short(loads, gate):
    loads.start("before", iter(PARTS))
    loads.start("a", gate.parts())
    assert gate.entered.acquire(timeout=WAIT_S)  # the thread has left the other
    assert loads.take("before") == (PARTS, None)
    start = time.monotonic()
    loads.wait(0.02)
    assert time.monotonic() - start >= 0.02


def test_a_close_ends_loads_and_threads_and_waits_for_none(gate):
    before = set(threading.enumerate())
    loads = Loads[bytes](WAIT_S, num_threads=3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    loads.start("a", gate.parts())
    assert gate.entered.acquire(timeout=WAIT_S)
    loads.close()
    loads.close()
    with pytest.raises(RuntimeError, match="closed"):
        loads.start("b", iter(PARTS))
    gate.open.release()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert gate.num_begun == 1
    assert loads.take("a")[1] is not None


def test_a_wait_ends_at_the_first_deadline(gate, now):
    loads = Loads[bytes](2 * WAIT_S, clock=lambda: now[0])
    for name, now[0] in (("a", 0.0), ("b", WAIT_S)):
        loads.start(name, gate.parts())
    now[0], start = 2 * WAIT_S, time.monotonic()
    loads.wait(WAIT_S)
    assert time.monotonic() - start < WAIT_S / 2
    loads.close()
    gate.open.release(3)
