"""Every layer has one place, no place has two layers, and a group is of one kind."""

from __future__ import annotations

import itertools

import pytest

from common.models.layer_groups import deal_layers

F = None


@pytest.mark.parametrize(
    ("windows", "found"),
    [
        ([F] * 3, ((F,), 3, 0)),
        ([8] * 3, ((8,), 3, 0)),
        ([8, 8, 8, 8, 8, F] * 4, ((F, 8, 8, 8, 8, 8), 4, 0)),
        ([8] * 22 + [F] * 4, ((F,) + (8,) * 6, 4, 2)),
        ([8, F, 8, F, 8], ((F, 8, 8), 2, 1)),
        ([8] * 7 + [F] * 6, ((F, 8), 7, 1)),  # by sixes five places would be unused
        ([8, F, 4], ((F, 4, 8), 1, 0)),
        ([8, F, 99, 100], ((F, F, 8, 99), 1, 0)),  # of 100 tokens, that many are all there are
    ],
)
def test_known_patterns(windows, found):
    groups = deal_layers(windows, 100)
    num_unused = len(groups.windows) * groups.num_tensors - len(groups.places)
    assert (groups.windows, groups.num_tensors, num_unused) == found


@pytest.mark.net
def test_every_pattern_of_five_layers_whole_and_divided_over_stages():
    for windows in itertools.product([F, 2, 3], repeat=5):
        whole = deal_layers(windows, 10)
        assert len(set(whole.places)) == 5
        for window, (group, tensor) in zip(windows, whole.places, strict=True):
            assert whole.windows[group] == window and 0 <= tensor < whole.num_tensors
        assert {group for group, _ in whole.places} == set(range(len(whole.windows)))
        assert whole.have_windows == (set(windows) != {F})
        assert whole.windows[0] is F or F not in windows, "the first group sees everything"
        assert whole.of_stage(range(5)) == whole
        for cut in range(1, 5):
            stages = [whole.of_stage(layers) for layers in (range(cut), range(cut, 5))]
            assert [stage.windows for stage in stages] == [whole.windows] * 2
            groups = [group for stage in stages for group, _ in stage.places]
            assert groups == [group for group, _ in whole.places]
            for stage in stages:
                assert len(set(stage.places)) == len(stage.places)
                last_tensor = max(tensor for _, tensor in stage.places)
                assert stage.num_tensors == last_tensor + 1, "none is unused by all"
