"""Loads in the background; with stores they are tested in `test_pool_connector.py`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bounded_loops import as_long_as
from store_loads import NUM_THREADS, Loads

WAIT_S = 20.0  # never waited for, unless the test fails
PARTS = [b"a", b"b", b"c"]


class World:
    """Loads with a deadline after 5 s of a clock that the test sets. The first load of each thread
    stands still before each of its parts, until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.num_begun = 0
        self.entered = threading.Semaphore(0)
        self.open = [threading.Semaphore(0) for _ in range(NUM_THREADS)]
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr("store_loads.time", clock)
        known = set(threading.enumerate())
        self.loads = Loads(5.0)
        for name in range(NUM_THREADS):
            self.loads.start(str(name), self.parts(name))
            assert self.entered.acquire(timeout=WAIT_S), "another thread is free"
        self.threads = set(threading.enumerate()) - known

    def parts(self, name: int) -> Iterator[bytes]:
        for part in PARTS:
            self.num_begun += 1
            self.entered.release()
            assert self.open[name].acquire(timeout=WAIT_S)
            yield part

    def run(self, parts: Iterator[bytes]) -> tuple[list[bytes], str | None]:
        """The result of another load, after all that the threads have begun."""
        self.loads.start("run", parts)
        for _ in as_long_as(lambda: not self.loads.has_ended("run"), max_rounds=9):
            self.loads.wait(WAIT_S)
        return self.loads.take("run")

    def let_through(self, num_parts: int) -> None:
        for each in self.open:
            each.release(num_parts)

    def close(self) -> None:
        """Waits for no thread, and ends all."""
        self.loads.close()
        self.let_through(20)
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def raising() -> Iterator[bytes]:
    yield from PARTS[:2]
    raise OSError("cable cut")


@pytest.mark.net
def test_what_has_arrived_at_the_end_is_the_result_once(monkeypatch):
    """Loads are let through by one part each. Late parts are in no result."""
    world = World(monkeypatch)
    loads = world.loads
    world.let_through(1)
    for _ in range(NUM_THREADS):
        assert world.entered.acquire(timeout=WAIT_S)
    assert not loads.has_ended("0")
    world.now_s = 5.0
    results = [loads.take(str(name)) for name in range(NUM_THREADS)]
    with pytest.raises(KeyError, match="0"):
        loads.take("0")
    loads.cancel("0")
    world.let_through(20)
    assert world.run(iter(PARTS)) == (PARTS, None) and world.run(iter(())) == ([], None)
    assert world.run(raising()) == (PARTS[:2], "cable cut")
    world.close()
    assert results == [(PARTS[:1], "timed out after 5.0 s")] * NUM_THREADS
    assert world.num_begun == 2 * NUM_THREADS
    with pytest.raises(RuntimeError, match="after shutdown"):
        loads.start("b", iter(PARTS))


@pytest.mark.parametrize("end", ["cancel", "take", "close"])
def test_a_load_that_is_over_before_it_begins_is_not_read_and_holds_no_block(end, monkeypatch):
    """The threads hang in others, so the load stays in its queue."""
    world = World(monkeypatch)
    world.loads.start("b", parts := world.parts(0))
    pinned = weakref.ref(parts)
    del parts
    world.now_s = 5.0
    taken = getattr(world.loads, end)(*["b"] * (end != "close"))
    assert pinned() is None and taken in (None, ([], "timed out after 5.0 s"))
    world.close()
    assert world.num_begun == NUM_THREADS
