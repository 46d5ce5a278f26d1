from __future__ import annotations

import pytest

from bounded_loops import as_long_as


def test_a_loop_ends_with_its_condition_or_fails_after_its_limit():
    """Trap 62: a loop that takes exactly as many rounds as allowed does not fail."""
    left = [3, 2, 1]
    assert [left.pop() for _ in as_long_as(lambda: left, max_rounds=3)] == [1, 2, 3]
    assert list(as_long_as(lambda: False, max_rounds=0)) == []
    rounds = []
    with pytest.raises(AssertionError, match="not finished after 4 rounds"):
        rounds.extend(iter(as_long_as(lambda: not rounds or True, max_rounds=4)))
    with pytest.raises(AssertionError, match=r"not finished after 0\.05 s"):
        for number in as_long_as(lambda: True, max_rounds=3, seconds=0.05):
            rounds.append(number)
    assert rounds[:4] == [0, 1, 2, 3] and len(rounds) > 7
