"""Counts of drafts. The formulas are tested with `spec_decode.py`."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from acceptance import SpecDecodeStats


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))))
def test_no_draft_is_lost_in_the_counts(passes):
    stats = SpecDecodeStats()
    for drafted, accepted in passes:
        stats.observe(drafted, accepted)
    drafted_passes = [(drafted, accepted) for drafted, accepted in passes if drafted]
    assert stats.num_passes == len(passes)
    assert stats.num_tokens == stats.num_passes + stats.num_accepted
    assert stats.num_drafted == sum(stats.drafted_by_position) == sum(d for d, _ in passes)
    assert stats.num_accepted == sum(stats.accepted_by_position) == sum(a for _, a in passes)
    assert stats.num_drafted_passes == len(drafted_passes)
    assert stats.num_rejections == sum(a < d for d, a in passes)
    for counts in (stats.drafted_by_position, stats.accepted_by_position):
        assert counts == sorted(counts, reverse=True), "behind a rejection none is accepted"
        assert len(counts) == max((d for d, _ in passes), default=0)
    for i, share in enumerate(stats.acceptance_by_position):
        reached = [a for d, a in drafted_passes if d > i]
        assert share == pytest.approx(sum(a > i for a in reached) / len(reached))
    assert 1 <= stats.mean_accepted_length <= 6 and 0 <= stats.acceptance_rate <= 1


def test_the_counts_by_hand():
    stats = SpecDecodeStats()
    assert (stats.acceptance_rate, stats.mean_accepted_length, stats.tokens_per_pass) == (0, 1, 0)
    assert stats.acceptance_by_position == []
    for drafted, accepted in ((0, 0), (2, 1), (4, 4), (2, 0)):
        stats.observe(drafted, accepted)
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


def test_the_reading_material_s_names_are_keys():
    stats = SpecDecodeStats()
    stats.observe(4, 2)
    names = ("num_draft", "num_accepted", "acceptance_rate", "speedup")
    assert [stats[name] for name in names] == [4, 2, 0.5, 3]
    with pytest.raises(KeyError):
        stats["num_tokens_saved"]
