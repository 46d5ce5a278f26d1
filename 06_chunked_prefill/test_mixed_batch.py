"""A composed batch against the plainest way to say it: one token after the other."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from batch_layout import Queries
from block_delta import PagedRunnerState
from mixed_batch import MixedMetadata, compose, short_first

CPU = torch.device("cpu")


class Query(NamedTuple):
    row: int
    start: int
    num_tokens: int
    num_logit_rows: int = 1


def in_columns(queries: list[Query]) -> Queries:
    return Queries(*map(np.array, zip(*queries)))


@st.composite
def steps(draw) -> tuple[int, list[Query], int]:
    """Block size, queries of a step, and what counts as short."""
    queries = []
    for row in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 12))
        num_drafts = draw(st.sampled_from([0, 0, 1, 3]))
        num_tokens = num_drafts + (1 if num_drafts else draw(st.integers(1, 9)))
        goes_on = not num_drafts and draw(st.booleans())
        queries.append(Query(row, start, num_tokens, 0 if goes_on else 1 + num_drafts))
    return draw(st.integers(1, 5)), queries, draw(st.integers(1, 4))


def make_state(num_rows: int, block_size: int) -> PagedRunnerState:
    """Rows in which every token and every block id is another one."""
    state, rng = PagedRunnerState(num_rows, -(-30 // block_size)), np.random.default_rng(0)
    state.widen(30)
    for column in (state.token_ids, state.groups[0].block_tables):
        column[:] = rng.permutation(column.size).reshape(column.shape) + 1
    return state


@settings(max_examples=200, deadline=None)
@given(steps())
def test_every_token_stands_once_at_its_place_and_the_short_ones_in_front(step):
    """Each request has positions of its own, not one counter for the batch (Trap 32)."""
    block_size, queries, threshold = step
    state = make_state(len(queries), block_size)
    layout = compose(state, in_columns(queries), block_size, threshold)
    batch = layout.on(CPU)
    short = [i for i in range(len(queries)) if queries[i].num_tokens <= threshold]
    long = [i for i in range(len(queries)) if queries[i].num_tokens > threshold]
    assert layout.order.tolist() == short + long  # each side in the order it was given

    ids, positions, slots, rows_with_logits, starts = [], [], [], [], [0]
    for i in layout.order:
        query = queries[i]
        for position in range(query.start, query.start + query.num_tokens):
            num_uncomputed_tokens = query.start + query.num_tokens - 1 - position
            if num_uncomputed_tokens < query.num_logit_rows:
                rows_with_logits.append(len(positions))
            positions.append(position)
            ids.append(int(state.token_ids[query.row, position]))
            block_id = int(state.groups[0].block_tables[query.row, position // block_size])
            slots.append(block_id * block_size + position % block_size)
        starts.append(len(positions))
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.logit_indices.tolist() == rows_with_logits
    (meta,) = batch.attention
    assert meta.slot_mapping.tolist() == slots
    assert meta.query_start_loc.tolist() == starts == list(meta.query_starts)
    lens = [queries[i].start + queries[i].num_tokens for i in layout.order]
    assert meta.seq_lens.tolist() == lens == list(meta.host_seq_lens)
    assert (meta.max_seq_len, meta.max_query_len) == (
        max(lens),
        max(query.num_tokens for query in queries),
    )
    assert meta.num_short == len(short)
    short_and_long = layout.order.tolist()
    for row, i in zip(meta.block_tables.tolist(), layout.order, strict=True):
        num_blocks = -(-lens[short_and_long.index(i)] // block_size)
        assert (
            row[:num_blocks] == state.groups[0].block_tables[queries[i].row, :num_blocks].tolist()
        )


def test_the_batch_of_the_docstring():
    lens = {"A": 6, "B": 1, "C": 1, "D": 3, "E": 4}
    order, num_short = short_first(list(lens.values()), 3)
    assert ("".join("ABCDE"[i] for i in order), num_short) == ("BCDAE", 3)
    queries = [
        Query(0, 10, 6),
        Query(1, 7, 1),
        Query(2, 3, 1),
        Query(3, 5, 3, num_logit_rows=3),  # a token and two draft tokens
        Query(4, 0, 4, num_logit_rows=0),  # its prompt goes on
    ]
    batch = compose(make_state(5, 4), in_columns(queries), 4, 3).on(CPU)
    assert isinstance(batch.attention[0], MixedMetadata)
    assert batch.logit_indices.tolist() == [0, 1, 2, 3, 4, 10]


def test_a_step_of_chunks_that_go_on_has_no_logits():
    queries = in_columns([Query(0, 0, 4, 0), Query(1, 4, 4, 0)])
    batch = compose(make_state(2, 4), queries, 4).on(CPU)
    assert batch.logit_indices.tolist() == []
    assert batch.attention[0].num_short == 0
