"""Loops for tests that end, whatever the code under test does.

`while engine.has_unfinished_requests(): engine.step()` ends only if the engine is correct, so with
a bug the test hangs without a message (Trap 62). With a limit it fails, and shows where:

    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic


def as_long_as(
    condition: Callable[[], object], max_rounds: int = 5000, seconds: float | None = None
) -> Iterator[int]:
    """Yield 0, 1, 2, ... as long as `condition()` is true. Raises `AssertionError` after
    `max_rounds` rounds or, if the loop waits for another thread or process, after `seconds`."""
    num_rounds = 0
    start = monotonic()
    while condition():
        if seconds is None:
            assert num_rounds < max_rounds, f"not finished after {max_rounds} rounds"
        else:
            assert monotonic() - start < seconds, f"not finished after {seconds} s"
        yield num_rounds
        num_rounds += 1
