"""Loads in the background; with stores they are tested in `test_pool_connector.py`, and what they
call at their end in `test_global_kv_pool.py`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from bounded_loops import as_long_as
from store_loads import Loads

WAIT_S = 20.0  # never waited for, unless the test fails
PARTS = [b"a", b"b", b"c"]


class World:
    """Loads with a deadline after 5 s of a clock that the test sets. The first load of each thread
    stands still before each of its parts, until it is let through."""

    def __init__(self, num_threads: int = 1) -> None:
        self.now_s = 0.0
        self.num_begun = 0
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        known = set(threading.enumerate())
        self.loads = Loads[bytes](5.0, num_threads, clock=lambda: self.now_s)
        self.threads = set(threading.enumerate()) - known
        for name in "abc"[:num_threads]:
            self.loads.start(name, self.parts())
            assert self.entered.acquire(timeout=WAIT_S), "another thread is free"

    def parts(self) -> Iterator[bytes]:
        for part in PARTS:
            self.num_begun += 1
            self.entered.release()
            assert self.open.acquire(timeout=WAIT_S)
            yield part

    def run(self, parts: Iterator[bytes]) -> tuple[list[bytes], str | None]:
        """The result of another load, after all that the thread has begun."""
        self.loads.start("run", parts)
        for _ in as_long_as(lambda: not self.loads.has_ended("run"), max_rounds=9):
            self.loads.wait(WAIT_S)
        return self.loads.take("run")

    def close(self) -> None:
        """Waits for no thread, and ends all."""
        self.loads.close()
        self.open.release(20)
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def raising() -> Iterator[bytes]:
    yield from PARTS[:2]
    raise OSError("cable cut")


@pytest.mark.net
@pytest.mark.parametrize("end", ["timed out after 5.0 s", "the loads were closed"])
def test_what_has_arrived_at_the_end_is_the_result_once(end):
    """A load is let through by two parts. What comes late is in no result."""
    world = World()
    loads = world.loads
    is_closed = "closed" in end
    world.open.release(2)
    assert world.entered.acquire(timeout=WAIT_S) and world.entered.acquire(timeout=WAIT_S)
    with pytest.raises(ValueError, match="'a': still in flight"):
        loads.take("a")
    with pytest.raises(ValueError, match="'a' exists"):
        loads.start("a", iter(PARTS))
    if is_closed:
        loads.close()
        with pytest.raises(RuntimeError, match="closed"):
            loads.start("b", iter(PARTS))
    world.now_s = 5.0
    loads.wait(WAIT_S)  # returns immediately
    assert loads.has_ended("a") and (result := loads.take("a")) == (PARTS[:2], end)
    with pytest.raises(ValueError, match="'a' is unknown"):
        loads.take("a")
    loads.cancel("a")
    world.open.release(2)
    if not is_closed:
        assert world.run(iter(PARTS)) == (PARTS, None) and world.run(iter(())) == ([], None)
        assert world.run(raising()) == (PARTS[:2], "cable cut")
    world.close()
    assert result == (PARTS[:2], end) and world.num_begun == 3


@pytest.mark.parametrize("end", ["cancel", "take", "close"])
def test_a_load_that_is_over_before_it_begins_is_not_read_and_holds_no_block(end):
    """The thread hangs in another, so the load stays in its queue."""
    world = World()
    world.loads.start("b", parts := world.parts())
    pinned = weakref.ref(parts)
    del parts
    world.now_s = 5.0
    taken = getattr(world.loads, end)(*["b"] * (end != "close"))
    assert pinned() is None and taken in (None, ([], "timed out after 5.0 s"))
    world.loads.cancel("a")
    world.close()
    assert world.num_begun == 1


def test_threads_read_side_by_side_and_a_close_waits_for_none():
    world = World(num_threads=3)
    world.close()
    assert len(world.threads) == world.num_begun == 3
