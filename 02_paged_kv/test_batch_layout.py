"""The layout of a batch against the same thing worked out token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import batch_layout
from batch_layout import Queries, all_to_device, compose_in_order, to_device
from block_delta import PagedRunnerState
from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
from request import Request, SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput

CPU = torch.device("cpu")
PARAMS = SamplingParams()


def queries(*columns: list[int]) -> Queries:
    """Rows, starts, lengths, and numbers of logit rows (1 each by default)."""
    rows, starts, lens, num_logit_rows = map(np.array, (*columns, [1] * len(columns[0]))[:4])
    return Queries(rows, starts, lens, num_logit_rows)


def append(state: PagedRunnerState, **blocks: list[int]) -> None:
    names, num = list(blocks), len(blocks)
    changes = CachedRequestData(
        names, [[]] * num, [0] * num, [0] * num, [(new,) for new in blocks.values()]
    )
    state.apply(SchedulerOutput(scheduled_cached_reqs=changes))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_stands_at_its_position_and_writes_to_its_slot(block_size, seed):
    rng = random.Random(seed)
    manager = KVCacheManager(BlockPool(400), block_size)
    state = PagedRunnerState(2, 90)
    rows, starts, lens, requests = [], [], [], []
    for i in range(9):
        request = Request.from_tokens(f"r{i}", [rng.randrange(1000) for _ in range(40)])
        stop = rng.randint(1, 40)
        assert manager.allocate_slots(request, stop)
        block_ids = list(manager.get_block_ids(request.request_id))
        half = rng.randint(0, len(block_ids))
        state.admit(
            NewRequestData(
                request.request_id, request.all_token_ids, PARAMS, 0, (block_ids[:half],)
            )
        )
        append(state, **{request.request_id: block_ids[half:]})
        rows.append(state.row_of[request.request_id])
        starts.append(rng.randint(0, stop - 1))
        lens.append(stop - starts[-1])
        requests.append(request)
    columns = list(zip(requests, rows, starts, lens, strict=True))
    rng.shuffle(columns)  # a query's number is not its request's row
    requests, rows, starts, lens = zip(*columns, strict=True)
    layout = compose_in_order(state, queries(rows, starts, lens), block_size).on(CPU)
    tokens, positions, slots, ends = [], [], [], [0]
    for request, start, n in zip(requests, starts, lens, strict=True):
        tokens += request.all_token_ids[start : start + n]
        positions += range(start, start + n)
        slots += manager.slot_mapping(request.request_id, start, start + n)
        ends.append(len(positions))
    (attention,) = layout.attention
    assert layout.input_ids.tolist() == tokens
    assert layout.positions.tolist() == positions
    assert attention.slot_mapping.tolist() == slots
    assert attention.query_start_loc.tolist() == ends
    stops = [start + n for start, n in zip(starts, lens, strict=True)]
    assert attention.seq_lens.tolist() == stops
    assert (attention.max_query_len, attention.max_seq_len) == (max(lens), max(stops))
    assert attention.block_tables.shape[1] == -(-max(stops) // block_size)
    for row, (request, stop) in enumerate(zip(requests, stops, strict=True)):
        num_blocks = -(-stop // block_size)
        known = list(manager.get_block_ids(request.request_id))[:num_blocks]
        assert attention.block_tables[row, :num_blocks].tolist() == known


def test_columns_grow_when_rows_run_out_and_rows_are_given_again():
    state = PagedRunnerState(2, 3)
    for name in "abcde":
        state.admit(NewRequestData(name, [ord(name)], PARAMS, 0, ([7, 8] if name == "b" else [],)))
    assert sorted(state.row_of.values()) == [0, 1, 2, 3, 4]
    append(state, b=[9])
    append(state, b=[])
    row = state.row_of["a"]
    state.release("a")
    state.admit(NewRequestData("f", [1, 2, 3], PARAMS))
    assert state.row_of["f"] == row and state.block_ids("f") == []
    assert state.block_ids("b") == [7, 8, 9]
    assert [state.requests[name].tokens(0, 9) for name in "bf"] == [[ord("b")], [1, 2, 3]]


def test_a_plan_does_not_change_when_the_columns_do():
    """Trap 34: what was handed out is a copy."""
    state = PagedRunnerState(1, 2)
    state.admit(NewRequestData("a", [1, 2, 3, 4, 5], PARAMS, 0, ([3, 4],)))
    layout = compose_in_order(state, queries([0], [0], [5]), 4).on(CPU)
    for column in (state.token_ids, state.groups[0].block_tables, state.num_tokens):
        column[:] = 6
    assert layout.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert layout.attention[0].block_tables.tolist() == [[3, 4]]
    assert layout.attention[0].slot_mapping.tolist() == [12, 13, 14, 15, 16]
    assert to_device(np.array([1]), CPU).tolist() == [1]


def test_logits_are_wanted_of_the_last_tokens_of_each_query():
    state = PagedRunnerState(3, 4)
    for name, block_ids in {"a": [5, 6], "b": [7], "c": [8, 9]}.items():
        state.admit(NewRequestData(name, [1] * 7, PARAMS, 0, (block_ids,)))
    rows = queries([0, 1, 2], [2, 0, 4], [4, 3, 3], [1, 0, 2])
    layout = compose_in_order(state, rows, 4)
    batch = layout.on(CPU)
    assert layout.order.tolist() == [0, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 5, 0, 1, 2, 4, 5, 6]
    assert batch.attention[0].slot_mapping.tolist() == [22, 23, 24, 25, 28, 29, 30, 36, 37, 38]
    assert batch.attention[0].query_start_loc.tolist() == [0, 4, 7, 10]
    assert batch.logit_indices.tolist() == [3, 8, 9]
    of_b = queries([1], [0], [3], [0])
    assert compose_in_order(state, of_b, 4).on(CPU).logit_indices.tolist() == []


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
