"""Buckets, their padding and what lies in them, replayed in every way; and that the emulator
reports each rule of a graph that is broken."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from batch_layout import Queries, compose_in_order
from common.runner.batch_state import BatchState
from common.runner.graphs import (
    CannotCapture,
    DecodeGraphs,
    StaticMemory,
    bucket_of,
    graph_buckets,
)
from common.runner.kv_sizing import allocate_kv_cache
from common.sampling.sampling_columns import SamplingColumns
from common.tests.graph_emulator import EagerGraphs, EmulatedGraphs, GraphError
from common.tests.tensor_attention import TensorAttentionBackend, TensorPlan
from paged_attention import TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import NewRequestData

CPU = torch.device("cpu")
MAX_NUM_ROWS = 6
BLOCK_SIZE, NUM_BLOCKS = 4, 40
MAX_MODEL_LEN = 30


# -- buckets


def test_buckets() -> None:
    """Trap 33: 17 to 20 have a bucket when `max_num_seqs` is 20."""
    for max_rows in (*range(1, 70), 255, 256, 257, 1000):
        buckets = graph_buckets(max_rows)
        usual = {n for n in range(1, max_rows) if n in (1, 2, 4, 8) or n % 16 == 0}
        assert buckets == sorted(usual | {max_rows})
        for n in range(1, max_rows + 1):
            assert bucket_of(n, buckets) == min(bucket for bucket in buckets if bucket >= n)
        assert bucket_of(max_rows + 1, buckets) is None, max_rows


@pytest.mark.parametrize("num_groups", [1, 3])
def test_every_column_of_every_bucket_is_aligned_and_apart(num_groups: int) -> None:
    """Kernels are compiled for addresses that 16 divides."""
    memory = StaticMemory(299, 7, CPU, num_groups)
    for bucket in graph_buckets(299) + list(range(1, 299, 3)):
        x = memory.inputs(bucket)
        columns = [getattr(x, field.name) for field in fields(x)]
        groups = *x.slot_mapping, *x.block_tables
        assert {t.data_ptr() % 16 for t in (*columns, *groups)} == {0}
        assert x.query_start_loc.shape == (bucket + 1,)
        assert x.block_tables.shape == (num_groups, bucket, 7)
        for i, column in enumerate(columns):
            column.fill_(i)
        assert all((column == i).all() for i, column in enumerate(columns))


# -- steps of a model


def make_state(seed: int, num_groups: int = 1) -> BatchState:
    """`MAX_NUM_ROWS` requests of different lengths, whose blocks lie anywhere, in each group of
    layers."""
    rng = random.Random(seed)
    num_columns = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    columns = SamplingColumns()
    state = BatchState(MAX_NUM_ROWS, num_columns, columns, num_groups=num_groups)
    pools = [rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1) for _ in range(num_groups)]
    for i in range(MAX_NUM_ROWS):
        tokens = [rng.randrange(97) for _ in range(rng.choice([1, 3, 4, 5, 8, 17, 20]))]
        num_blocks = -(-len(tokens) // BLOCK_SIZE) + rng.randrange(2)
        tables = tuple([blocks.pop() for _ in range(num_blocks)] for blocks in pools)
        params = SamplingParams(temperature=0)
        state.admit(NewRequestData(str(i), tokens, params, 0, tables))
    return state


def decode(state: BatchState, n: int, rng: random.Random) -> Queries:
    """The last known token of `n` requests, or an earlier one that is not sampled from."""
    rows = np.array(rng.sample(range(MAX_NUM_ROWS), n), dtype=np.int64)
    starts = np.array([rng.randrange(state.num_tokens[row]) for row in rows], dtype=np.int64)
    is_last = starts + 1 == state.num_tokens[rows]
    return Queries(rows, starts, np.ones_like(rows), is_last.astype(np.int64))


def make_graphs(random_loaded, graphs=None) -> DecodeGraphs:
    """Over a cache full of numbers, with NaN in the null block."""
    kv_cache = allocate_kv_cache(random_loaded, NUM_BLOCKS, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    for cache in kv_cache.key_cache + kv_cache.value_cache:
        cache.normal_(generator=generator)
        cache[0] = torch.nan
    parts = random_loaded.model, kv_cache, TensorAttentionBackend()
    return DecodeGraphs(graphs or EmulatedGraphs(), *parts, MAX_NUM_ROWS, MAX_MODEL_LEN)


def step(graphs: DecodeGraphs, state: BatchState, queries: Queries) -> torch.Tensor:
    bucket = graphs.bucket_for(queries)
    assert bucket is not None
    layout = graphs.compose(state, queries, BLOCK_SIZE, bucket)
    assert layout.order.tolist() == list(range(len(queries.rows)))
    num_logit_rows = len(layout.on(CPU).logit_indices)
    return graphs.replay(bucket, len(queries.rows), num_logit_rows)


def deal(random_loaded, num_groups: int, patch: pytest.MonkeyPatch) -> None:
    """The last layer's block tables become those of the others, or its own."""
    model = random_loaded.model
    patch.setattr(model, "groups", replace(model.groups, windows=(None,) * num_groups))
    patch.setattr(model.layers[-1].attention, "group", num_groups - 1)


@pytest.mark.net
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("kind", [EagerGraphs, EmulatedGraphs])
def test_padding_changes_no_row(kind, num_groups, random_loaded, monkeypatch) -> None:
    """Every number of rows, each step against the same one without padding, by chapter 2's
    attention."""
    deal(random_loaded, num_groups, monkeypatch)
    graphs = make_graphs(random_loaded, kind())
    assert {x.block_tables.shape[2] for x in graphs.inputs.values()} == {-(-MAX_MODEL_LEN // 4)}
    addresses = set()
    for seed in range(3):
        state = make_state(seed, num_groups)
        rng = random.Random(seed)
        for n in (6, 1, 3, 2, 5, 4, 1):
            queries = decode(state, n, rng)
            plain_cache = copy.deepcopy(graphs.kv_cache)
            batch = compose_in_order(state, queries, BLOCK_SIZE).on(CPU)
            batch.plan_attention(TorchAttentionBackend(), graphs.model.num_heads, plain_cache)
            expected = graphs.model(batch, plain_cache)
            found = step(graphs, state, queries)
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
            for cache, right in zip(graphs.kv_cache.key_cache, plain_cache.key_cache, strict=True):
                torch.testing.assert_close(cache[1:], right[1:], atol=1e-9, rtol=0)
            addresses |= {found.data_ptr()} if len(found) else set()
    assert len(addresses) == 1 and graphs.num_replays == 21


# -- CUDA graphs

ON_A_GPU = """
import torch
from common.runner.graphs import CannotCapture, CudaGraphs

device = torch.device("cuda", torch.cuda.current_device())
x, stream = torch.ones(4, device=device), torch.cuda.current_stream()
try:
    CudaGraphs(device).capture(4, lambda: x * x.sum().item())
except CannotCapture as error:
    print(error)
assert torch.cuda.current_stream() == stream
torch.cuda.empty_cache()
graphs = CudaGraphs(device)
graphs.capture(4, lambda: x + 1)
x += 1
assert graphs.replay(4, 4).tolist() == [3] * 4
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_goes_on_after_a_step_that_waits_for_it() -> None:
    """In a process of its own: PyTorch 2.11 is in a state there that no other test shall meet."""
    found = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "captur" in found.stdout


@pytest.mark.parametrize("name", ["slot_mapping", "seq_lens"])
def test_the_emulator_reports_what_a_gpu_gets_wrong(name, random_loaded, monkeypatch) -> None:
    """An input that is somewhere else: the step is written to the new place, and the graph reads
    the old one. Trap 54: padding that is left behind by a larger step. And a step that waits."""
    state = make_state(0)
    rng = random.Random(0)
    steps = [decode(state, n, rng) for n in (MAX_NUM_ROWS, 1, 3, 5)]
    graphs = make_graphs(random_loaded)
    for bucket, x in graphs.inputs.items():
        graphs.inputs[bucket] = replace(x, **{name: getattr(x, name).clone()})
    with pytest.raises(GraphError, match=f"address changed .*: {name}$"):
        step(graphs, state, steps[0])
    graphs = make_graphs(random_loaded)
    real = StaticMemory.fill

    def fill(memory, columns, tables) -> None:
        real(memory, columns, tables)
        x = memory.inputs(tables.shape[1])
        getattr(x, name)[..., int(x.query_start_loc[-1]) :].fill_(7)

    monkeypatch.setattr(StaticMemory, "fill", fill)
    with pytest.raises(GraphError, match=f"{name} of padding must"):
        for queries in steps:
            step(graphs, state, queries)

    class Reads(TensorPlan):
        def attend(self, *arguments):
            self.metadata.seq_lens.max().item()
            return super().attend(*arguments)

    monkeypatch.setattr(TensorAttentionBackend, "plan", lambda _, *arguments: Reads(*arguments))
    with pytest.raises(CannotCapture, match=r"^item.*synchronizes with the device"):
        make_graphs(random_loaded)
