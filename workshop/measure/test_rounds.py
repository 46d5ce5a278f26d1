"""Rounds are fair to every setting."""

from __future__ import annotations

from workshop.measure.rounds import run_in_turn


def test_each_round_starts_with_another_setting_and_the_first_is_not_counted() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    assert run_in_turn("abc", run, 3) == {"a": [6, 8, 10], "b": [4, 9, 11], "c": [5, 7, 12]}
    assert "".join(order) == "abcbcacababc"
