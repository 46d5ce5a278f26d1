"""The calls that are drawn are made, in this order; the trees are those of the code."""

from __future__ import annotations

import pytest

from plot_prefix_cache_drawings import (
    DOWN,
    FETCHED,
    PUBLISHED,
    RETURNS,
    UP,
    Call,
    pool_run,
    tier_run,
)


def must_contain(log: list[Call], drawn: list[Call]) -> None:
    """In this order; what is polled for may be asked more often."""
    rest = iter(log)
    for call in drawn:
        assert call in rest, f"{call} is not made, or not there"


@pytest.mark.parametrize("drawn", [DOWN, UP], ids=["down", "up"])
def test_the_calls_between_the_tiers(drawn: list[Call]) -> None:
    """`4 tokens` is said at the end of the run, when it is known that they came."""
    run = tier_run()
    must_contain(run.calls, [call for call in drawn if call[2] != "4 tokens"])
    assert ("tiers", "manager", "4 tokens") in run.calls
    assert run.num_evicted == run.num_from_host + run.num_from_disk == 2


def test_the_calls_of_two_engines_with_a_pool() -> None:
    must_contain(pool_run(), [*PUBLISHED, *FETCHED])


def test_what_is_returned_is_drawn_as_such() -> None:
    drawn = {what for _, _, what in DOWN + UP + PUBLISHED + FETCHED}
    assert set(RETURNS) <= drawn
