"""The layout of a batch against the same thing worked out token by token."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from batch_layout import ComposedBatch, Queries, StepLayout, compose_in_order
from block_delta import PagedRunnerState

CPU = torch.device("cpu")


class Query(NamedTuple):
    row: int
    start: int
    num_tokens: int
    num_logit_rows: int = 1


def in_columns(queries: list[Query]) -> Queries:
    return Queries(*map(np.array, zip(*queries)))


@st.composite
def steps(draw) -> tuple[int, list[Query]]:
    """Block size and queries of a step: decodes, drafts, chunks that go on, ends of prompts. A
    query's number is not its row."""
    queries = []
    for row in draw(st.permutations(range(draw(st.integers(1, 6))))):
        start = draw(st.integers(0, 12))
        num_drafts = draw(st.sampled_from([0, 0, 1, 3]))
        num_tokens = num_drafts + (1 if num_drafts else draw(st.integers(1, 9)))
        goes_on = not num_drafts and draw(st.booleans())
        queries.append(Query(row, start, num_tokens, 0 if goes_on else 1 + num_drafts))
    return draw(st.integers(1, 5)), queries


def make_state(num_rows: int, block_size: int, num_groups: int = 1) -> PagedRunnerState:
    """Rows in which every token and every block id is another one."""
    state = PagedRunnerState(num_rows, -(-50 // block_size), num_groups)
    rng = np.random.default_rng(0)
    state.widen(50)
    for column in (state.token_ids, *state.block_tables):
        column[:] = rng.permutation(column.size).reshape(column.shape) + 1
    return state


def check_layout(
    layout: StepLayout, state: PagedRunnerState, queries: list[Query], block_size: int
) -> ComposedBatch:
    """Trap 29: positions. Trap 32: each request has its own. Trap 34: what was handed out is a
    copy."""
    ids = []
    positions = []
    slots = []
    rows_with_logits = []
    starts = [0]
    lens = []
    tables = []
    in_order = [queries[i] for i in layout.order]
    for row, start, num_tokens, num_logit_rows in in_order:
        stop = start + num_tokens
        table = state.block_tables[0, row].tolist()
        for position in range(start, stop):
            if position >= stop - num_logit_rows:
                rows_with_logits.append(len(positions))
            positions.append(position)
            ids.append(int(state.token_ids[row, position]))
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(positions))
        lens.append(stop)
        tables.append(table[: -(-stop // block_size)])
    batch = layout.on(CPU)
    for column in (state.token_ids, state.block_tables[0]):
        column[:] = 0
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.logit_indices.tolist() == rows_with_logits
    (meta,) = batch.attention
    assert meta.slot_mapping.tolist() == slots
    assert meta.query_start_loc.tolist() == starts
    assert meta.seq_lens.tolist() == lens
    assert meta.max_seq_len == max(lens)
    assert meta.max_query_len == max(query.num_tokens for query in queries)
    assert meta.block_tables.shape[1] == max(map(len, tables))
    for found, table in zip(meta.block_tables.tolist(), tables, strict=True):
        assert found[: len(table)] == table
    return batch


@pytest.mark.net
@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_token_stands_at_its_position_and_writes_to_its_slot(step):
    block_size, queries = step
    state = make_state(len(queries), block_size)
    layout = compose_in_order(state, in_columns(queries), block_size)
    assert layout.order.tolist() == list(range(len(queries)))
    check_layout(layout, state, queries, block_size)
