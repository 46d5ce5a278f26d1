from __future__ import annotations

import time

import pytest

from bounded_loops import as_long_as


def test_it_goes_round_until_the_condition_is_false():
    left = [3, 2, 1]
    rounds = []
    for i in as_long_as(lambda: left):
        left.pop()
        rounds.append(i)
    assert rounds == [0, 1, 2]
    assert list(as_long_as(lambda: False, max_rounds=0)) == []


def test_it_fails_after_the_last_round_that_it_may_take():
    """Trap 62: a loop that takes exactly as many rounds as allowed does not fail."""
    rounds = []
    with pytest.raises(AssertionError, match="not finished after 4 rounds"):
        for i in as_long_as(lambda: True, max_rounds=4):
            rounds.append(i)
    assert rounds == [0, 1, 2, 3]
    assert len(list(as_long_as(lambda left=[1] * 4: left and left.pop(), max_rounds=4))) == 4


def test_with_a_time_the_number_of_rounds_does_not_matter():
    start = time.monotonic()
    num_rounds = 0
    with pytest.raises(AssertionError, match=r"not finished after 0\.05 s"):
        for _ in as_long_as(lambda: True, max_rounds=3, seconds=0.05):
            num_rounds += 1
    assert num_rounds > 3 and time.monotonic() - start < 5
