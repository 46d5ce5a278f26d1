"""A composed batch against the plainest way to say it: one token after the other."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mixed_batch import compose, short_first
from test_batch_layout import check_layout, in_columns, make_state, steps


@pytest.mark.net
@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 4))
def test_every_token_stands_once_at_its_place_and_the_short_ones_in_front(step, threshold):
    """Each request has positions of its own, not one counter for the batch (Trap 32)."""
    block_size, queries = step
    state = make_state(len(queries), block_size)
    layout = compose(state, in_columns(queries), block_size, threshold)
    short = [i for i in range(len(queries)) if queries[i].num_tokens <= threshold]
    long = [i for i in range(len(queries)) if queries[i].num_tokens > threshold]
    assert layout.order.tolist() == short + long  # each side in the order it was given
    (meta,) = check_layout(layout, state, queries, block_size).attention
    assert list(meta.query_starts) == meta.query_start_loc.tolist()
    assert list(meta.host_seq_lens) == meta.seq_lens.tolist()
    assert meta.num_short == len(short)


def test_the_short_ones_in_front_keep_their_order_in_a_large_batch():
    order, num_short = short_first([9, 1] * 50)  # a sort that is stable for small batches only
    assert order.tolist() == [*range(1, 100, 2), *range(0, 100, 2)] and num_short == 50
