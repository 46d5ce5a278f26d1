from __future__ import annotations

import itertools

import pytest

from common.models.ranks import Ranks


@pytest.mark.parametrize("tp_size, num_stages", [*itertools.product((1, 2, 3), (1, 2, 3, 4))])
def test_every_rank_has_a_place_and_stages_have_every_layer_once(tp_size, num_stages):
    every = [Ranks(tp_size, num_stages, rank) for rank in range(tp_size * num_stages)]
    assert [r.stage * tp_size + r.tp_rank for r in every] == list(range(len(every)))
    assert [r.stage for r in every if r.is_output_rank] == [num_stages - 1]
    assert sum(r.is_first_stage for r in every) == sum(r.is_last_stage for r in every) == tp_size
    for num_layers in range(num_stages, 14):
        for tp_rank in range(tp_size):
            stages = [r.layers(num_layers) for r in every if r.tp_rank == tp_rank]
            assert list(itertools.chain(*stages)) == list(range(num_layers))
            sizes = list(map(len, stages))
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == min(sizes), "the last one has the head too"
            assert sizes[0] == min(sizes[:-1] or sizes), "and the first one the embedding"
