"""Counts of drafts. The formulas are tested with `spec_decode.py`."""

from __future__ import annotations

import pytest

from acceptance import SpecDecodeStats


def test_the_counts_by_hand():
    stats = SpecDecodeStats()
    assert (stats.acceptance_rate, stats.mean_accepted_length, stats.tokens_per_pass) == (0, 1, 0)
    assert stats.acceptance_by_position == []
    for drafted, accepted in ((0, 0), (2, 1), (4, 4), (2, 0)):
        stats.observe(drafted, accepted)
    assert stats == SpecDecodeStats(4, 8, 5, 3, 2, [3, 3, 1, 1], [2, 1, 1, 1])
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1, 1]
    assert stats.acceptance_rate == 5 / 8
    assert stats.mean_accepted_length == 1 + 5 / 3
    assert stats.tokens_per_pass == 9 / 4


def test_counts_can_be_added():
    passes = [(0, 0), (2, 1), (4, 4), (2, 0), (3, 3)]
    for cut in range(len(passes) + 1):
        first, second, whole = SpecDecodeStats(), SpecDecodeStats(), SpecDecodeStats()
        for stats, part in ((first, passes[:cut]), (second, passes[cut:]), (whole, passes)):
            for drafted, accepted in part:
                stats.observe(drafted, accepted)
        assert first + second == whole


def test_the_posts_names_are_keys_and_others_are_not():
    assert SpecDecodeStats()["speedup"] == 0
    with pytest.raises(KeyError):
        SpecDecodeStats()["num_tokens_saved"]
