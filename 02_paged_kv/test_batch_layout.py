"""The layout of a batch against the same thing worked out token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import batch_layout
from batch_layout import Queries, StepLayout, all_to_device, compose_in_order, to_device
from block_delta import PagedRunnerState
from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
from request import Request, SamplingParams
from scheduler_interface import NewRequestData

CPU = torch.device("cpu")
PARAMS = SamplingParams()


def compose(state: PagedRunnerState, queries: list, block_size: int) -> StepLayout:
    rows = [state.row_of[request.request_id] for request, *_ in queries]
    columns = [rows, *list(zip(*queries, strict=True))[1:]]
    return compose_in_order(state, Queries(*map(np.array, columns)), block_size)


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_stands_at_its_position_and_writes_to_its_slot(block_size, seed):
    """Trap 29: positions. Trap 32: each request has its own. Trap 34: what was handed out is a
    copy."""
    rng = random.Random(seed)
    manager = KVCacheManager(BlockPool(400), block_size)
    state = PagedRunnerState(2, 90)
    queries = []  # (request, start, number of tokens, number of logit rows)
    for i in range(9):
        request = Request.from_tokens(f"r{i}", [rng.randrange(1000) for _ in range(40)])
        stop = rng.randint(1, 40)
        assert manager.allocate_slots(request, stop)
        tables = manager.get_tables(request.request_id)
        state.admit(NewRequestData(f"r{i}", request.all_token_ids, PARAMS, 0, tables))
        start = rng.randint(0, stop - 1)
        queries.append((request, start, stop - start, rng.randint(0, stop - start)))
    rng.shuffle(queries)  # a query's number is not its request's row
    layout = compose(state, queries, block_size)
    assert layout.order.tolist() == list(range(9))
    batch = layout.on(CPU)
    compose(state, [(*query[:2], 1, 1) for query in queries], block_size).on(CPU)
    for column in (state.token_ids, state.groups[0].block_tables, state.num_tokens):
        column[:] = 6
    tokens, positions, slots, logit_rows, ends = [], [], [], [], [0]
    for request, start, n, num_logit_rows in queries:
        tokens += request.all_token_ids[start : start + n]
        positions += range(start, start + n)
        slots += manager.slot_mapping(request.request_id, start, start + n)
        ends.append(len(positions))
        logit_rows += range(ends[-1] - num_logit_rows, ends[-1])
    (attention,) = batch.attention
    assert batch.input_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.logit_indices.tolist() == logit_rows
    assert attention.slot_mapping.tolist() == slots
    assert attention.query_start_loc.tolist() == ends
    stops = [start + n for _, start, n, _ in queries]
    assert attention.seq_lens.tolist() == stops
    assert attention.max_query_len == max(n for _, _, n, _ in queries)
    assert attention.max_seq_len == max(stops)
    assert attention.block_tables.shape[1] == -(-max(stops) // block_size)
    for row, ((request, *_), stop) in enumerate(zip(queries, stops, strict=True)):
        num_blocks = -(-stop // block_size)
        known = list(manager.get_block_ids(request.request_id))[:num_blocks]
        assert attention.block_tables[row, :num_blocks].tolist() == known


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_layout_arrives_on_a_device_unchanged_and_in_one_copy(device, monkeypatch):
    copies, is_there = [], device == "cpu" or torch.cuda.is_available()

    def copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(to_device(array, device if is_there else CPU))
        return copies[-1]

    monkeypatch.setattr(batch_layout, "to_device", copy)
    table = np.arange(21, dtype=np.int32).reshape(3, 7)
    none, flags = np.zeros(0, dtype=np.int64), np.array([True, False, True])
    arrays = [np.arange(5), none, table, table[:, 2:5], flags, np.arange(3)]
    tensors = all_to_device(torch.device(device), *arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    if device == "cuda":
        (packed,) = copies
        starts = [t.data_ptr() - packed.data_ptr() for t in tensors if len(t)]
        assert [start % 16 for start in starts] == [0] * 5
