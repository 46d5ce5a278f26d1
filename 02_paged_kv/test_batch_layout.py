"""The layout of a batch against the same thing worked out token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from batch_layout import BlockTables, Query, compose_in_order, to_device
from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
from request import Request

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_stands_at_its_position_and_writes_to_its_slot(block_size, seed):
    rng = random.Random(seed)
    manager = KVCacheManager(BlockPool(400), block_size)
    tables = BlockTables(2, 90)
    rows, starts, lens, requests = [], [], [], []
    for i in range(9):
        request = Request.from_tokens(str(i), [0])
        stop = rng.randint(1, 40)
        assert manager.allocate_slots(request, stop)
        rows.append(tables.take_row())
        block_ids = list(manager.get_block_ids(request.request_id))
        half = rng.randint(0, len(block_ids))
        tables.write(rows[-1], 0, block_ids[:half])
        tables.write(rows[-1], half, block_ids[half:])
        starts.append(rng.randint(0, stop - 1))
        lens.append(stop - starts[-1])
        requests.append(request)
    queries = list(map(Query, rows, starts, lens))
    layout = compose_in_order(tables, queries, block_size, CPU)
    positions, slots, ends = [], [], [0]
    for request, start, n in zip(requests, starts, lens, strict=True):
        positions += range(start, start + n)
        slots += manager.slot_mapping(request.request_id, start, start + n)
        ends.append(len(positions))
    attention = layout.attention
    assert layout.positions.tolist() == positions
    assert attention.slot_mapping.tolist() == slots
    assert attention.query_start_loc.tolist() == layout.query_start_loc.tolist() == ends
    stops = [start + n for start, n in zip(starts, lens, strict=True)]
    assert attention.seq_lens.tolist() == stops
    assert (attention.max_query_len, attention.max_seq_len) == (max(lens), max(stops))
    assert attention.block_tables.shape[1] == -(-max(stops) // block_size)
    for row, (request, stop) in enumerate(zip(requests, stops, strict=True)):
        num_blocks = -(-stop // block_size)
        known = list(manager.get_block_ids(request.request_id))[:num_blocks]
        assert attention.block_tables[row, :num_blocks].tolist() == known


def test_tables_grow_when_rows_run_out_and_rows_are_given_again():
    tables = BlockTables(2, 3)
    rows = [tables.take_row() for _ in range(5)]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    tables.write(rows[1], 0, [7, 8])
    tables.write(rows[1], 2, [9])
    tables.write(rows[1], 1, [])
    tables.release_row(rows[0])
    assert tables.take_row() == rows[0]
    np.testing.assert_array_equal(tables.ids[rows[1]], [7, 8, 9])


def test_a_plan_does_not_change_when_the_tables_do():
    """Trap 34: what was handed out is a copy."""
    tables = BlockTables(1, 2)
    row = tables.take_row()
    tables.write(row, 0, [3, 4])
    layout = compose_in_order(tables, [Query(row, 0, 5)], 4, CPU)
    tables.write(row, 0, [5, 6])
    assert layout.attention.block_tables.tolist() == [[3, 4]]
    assert layout.attention.slot_mapping.tolist() == [12, 13, 14, 15, 16]
    assert to_device(np.array([1]), CPU).tolist() == [1]


def test_logits_are_wanted_of_the_last_tokens_of_each_query():
    tables = BlockTables(3, 4)
    tables.write(tables.take_row(), 0, [5, 6])
    tables.write(tables.take_row(), 0, [7])
    tables.write(tables.take_row(), 0, [8, 9])
    queries = [Query(0, 2, 4), Query(1, 0, 3, num_logit_rows=0), Query(2, 4, 3, num_logit_rows=2)]
    batch = compose_in_order(tables, queries, 4, CPU)
    assert batch.order == [0, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 5, 0, 1, 2, 4, 5, 6]
    assert batch.attention.slot_mapping.tolist() == [22, 23, 24, 25, 28, 29, 30, 36, 37, 38]
    assert batch.query_start_loc.tolist() == [0, 4, 7, 10]
    assert batch.logit_indices.tolist() == [3, 8, 9]
    assert compose_in_order(tables, queries[1:2], 4, CPU).logit_indices.tolist() == []
