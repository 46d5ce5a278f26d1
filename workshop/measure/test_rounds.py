"""Rounds are fair to every setting, and their numbers are those of the runs."""

from __future__ import annotations

from workshop.measure.rounds import median_of, ratios, run_in_turn, spread


def test_each_round_starts_with_another_setting_and_the_first_is_not_counted() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    assert run_in_turn("abc", run, 3) == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}
    assert "".join(order) == "abcbcacababc"


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00-3.00)"
    assert spread(range(11), 1, 10, 90) == "5.0 (1.0-9.0)"
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == "3.00 (2.00-4.00)"
    assert median_of([{"s": 4, "t": 0}, {"s": 1, "t": 9}], "s") == 2.5
