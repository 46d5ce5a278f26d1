"""Buckets, their padding and what lies in them: every case that can come, up to a few rows."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from batch_layout import Queries, compose_in_order
from common.runner.batch_state import BatchState
from common.runner.graph_emulator import Recorder
from common.runner.graphs import (
    COLUMNS,
    CannotCapture,
    CudaGraphs,
    DecodeGraphs,
    EagerGraphs,
    GraphRunner,
    StaticMemory,
    bucket_of,
    column_stride,
    graph_buckets,
)
from common.runner.kv_sizing import allocate_kv_cache
from common.sampling.runner_plugin import RunnerPlugin, StepRows, UploadBuffer
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import AttentionMetadata, TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput
from tensor_attention import TensorAttentionBackend

CPU = torch.device("cpu")
MAX_NUM_ROWS = 6  # rows
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
            bucket = bucket_of(n, buckets)
            assert bucket in buckets and bucket >= n
            assert not any(n <= other < bucket for other in buckets)
        assert bucket_of(max_rows + 1, buckets) is None, max_rows


@pytest.mark.parametrize("num_groups", [1, 3])
def test_every_column_of_every_bucket_is_aligned_and_apart(num_groups: int) -> None:
    """Kernels are compiled for addresses that 16 divides."""
    memory = StaticMemory(299, 7, CPU, num_groups)
    for bucket in graph_buckets(299) + list(range(1, 299)):
        x = memory.inputs(bucket)
        assert column_stride(bucket) >= bucket + 1
        groups = *x.slot_mapping, *x.block_tables
        assert {t.data_ptr() % 16 for t in (*x.by_name().values(), *groups)} == {0}
        assert {name: tuple(t.shape) for name, t in x.by_name().items()} == {
            **dict.fromkeys(COLUMNS, (bucket,)),
            "query_start_loc": (bucket + 1,),
            "slot_mapping": (num_groups, bucket),
            "block_tables": (num_groups, bucket, 7),
        }
        for i, name in enumerate(COLUMNS):
            memory.columns.fill_(-5)
            getattr(x, name).fill_(i)
            others = [getattr(x, other).flatten() for other in COLUMNS if other != name]
            assert (torch.cat(others) == -5).all()


# -- padding


def make_state(seed: int, num_groups: int = 1) -> BatchState:
    """`MAX_NUM_ROWS` requests of different lengths, whose blocks lie anywhere, in each group of
    layers."""
    rng = random.Random(seed)
    num_columns, columns = -(-MAX_MODEL_LEN // BLOCK_SIZE), SamplingColumns()
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


def random_steps(num_each: int = 6, num_groups: int = 1):
    """Steps of every number of rows for every bucket that they fit."""
    for bucket in range(1, MAX_NUM_ROWS + 1):
        for n in range(1, bucket + 1):
            for seed in range(num_each):
                state = make_state(seed, num_groups)
                yield bucket, state, decode(state, n, random.Random(f"{bucket} {n} {seed}"))


# -- steps of a model


def make_graphs(random_loaded, graphs=None, backend=None) -> DecodeGraphs:
    """Over a cache full of numbers, with NaN in the null block."""
    kv_cache = allocate_kv_cache(random_loaded, NUM_BLOCKS, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    for cache in kv_cache.key_cache + kv_cache.value_cache:
        cache.normal_(generator=generator)
        cache[0] = torch.nan
    plan_arguments = random_loaded.model, kv_cache, backend or TensorAttentionBackend()
    return DecodeGraphs(graphs or EagerGraphs(), *plan_arguments, MAX_NUM_ROWS, MAX_MODEL_LEN)


def deal(random_loaded, num_groups: int, monkeypatch) -> None:
    """The last layer's block tables become those of the others, or its own."""
    model = random_loaded.model
    groups = replace(model.groups, windows=(None,) * num_groups)
    monkeypatch.setattr(model, "groups", groups)
    monkeypatch.setattr(model.layers[-1].attention, "group", num_groups - 1)


@pytest.fixture(scope="module")
def graphs(random_loaded) -> DecodeGraphs:
    return make_graphs(random_loaded)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_padding_changes_no_row(num_groups: int, random_loaded, monkeypatch) -> None:
    """Against the same step without padding, by chapter 2's attention."""
    deal(random_loaded, num_groups, monkeypatch)
    graphs = make_graphs(random_loaded)
    for bucket, state, queries in random_steps(num_each=2, num_groups=num_groups):
        plain_cache = copy.deepcopy(graphs.kv_cache)
        batch = compose_in_order(state, queries, BLOCK_SIZE).on(CPU)
        batch.plan_attention(TorchAttentionBackend(), graphs.model.num_heads, plain_cache)
        expected = graphs.model(batch, plain_cache)
        if bucket not in graphs.buckets:
            bucket = bucket_of(bucket, graphs.buckets)
        layout = graphs.compose(state, queries, BLOCK_SIZE, bucket)
        laid_out = layout.on(CPU)
        assert layout.order.tolist() == list(range(len(queries.rows)))
        logits = graphs.replay(bucket, len(queries.rows), len(laid_out.logit_indices))
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
        for cache, right in zip(graphs.kv_cache.key_cache, plain_cache.key_cache, strict=True):
            torch.testing.assert_close(cache[1:], right[1:], atol=1e-9, rtol=0)


def test_steps_that_are_replayed(graphs: DecodeGraphs) -> None:
    state, rng = make_state(0), random.Random(0)
    buckets = [graphs.bucket_for(decode(state, n, rng)) for n in range(1, MAX_NUM_ROWS + 1)]
    assert buckets == [1, 2, 4, 4, 6, 6]
    two = decode(state, 2, rng)
    assert graphs.bucket_for(two._replace(num_tokens=np.array([1, 2]))) is None
    seven = Queries(*(np.ones(7, dtype=np.int64) for _ in range(4)))
    assert graphs.bucket_for(seven) is None


def test_inputs_staged_by_a_plugin_are_read_without_a_graph(graphs: DecodeGraphs) -> None:
    class Ones(RunnerPlugin):
        name = "ones"

        def stage(self, step: StepRows, upload: UploadBuffer):
            return upload.add(np.ones_like(step.queries.rows))

    def plans(req_id: str) -> list[SchedulerOutput]:
        new = NewRequestData(req_id, [1, 2, 3], SamplingParams(temperature=0), 0, ([1],))
        known = CachedRequestData([req_id], [[4]], [3], [1], [()])
        first = SchedulerOutput([new], num_scheduled_tokens={req_id: 3})
        return [first, SchedulerOutput([], known, num_scheduled_tokens={req_id: 1})]

    tokens = []
    for plugins in ([], [Ones()]):
        state = BatchState(MAX_NUM_ROWS, 8, SamplingColumns(), plugins)
        parts = graphs.model, graphs.kv_cache, TensorAttentionBackend(), state, Sampler(97)
        runner, num_before = GraphRunner(*parts, graphs=graphs), graphs.num_replays
        tokens.append([runner.execute(plan).wait().token_ids for plan in plans("a")])
        assert graphs.num_replays - num_before == (not plugins)
    assert tokens[0] == tokens[1]


def test_the_largest_is_captured_first_and_on_padding_alone(random_loaded) -> None:
    """Each planned for itself, with numbers that are bounds of whatever comes."""
    order: list[int] = []
    seen: list[AttentionMetadata] = []

    class Spy(EagerGraphs):
        def capture(self, bucket, function, tensors) -> None:
            order.append(bucket)
            for _ in range(2):
                assert function().shape == (bucket, 97)

    class Backend(TensorAttentionBackend):
        def plan(self, metadata, num_heads, key_cache):
            seen.append(metadata)
            assert (metadata.slot_mapping == -1).all()
            assert (metadata.max_query_len, metadata.max_seq_len) == (1, 32)
            assert metadata.block_tables.shape == (len(metadata.seq_lens), 8)
            return super().plan(metadata, num_heads, key_cache)

    cache = allocate_kv_cache(random_loaded, 5, BLOCK_SIZE)
    DecodeGraphs(Spy(), random_loaded.model, cache, Backend(), 20, MAX_MODEL_LEN)
    assert order == [20, 16, 8, 4, 2, 1]
    assert len(seen) == 2 * len(order)
    assert not any(c[1:].any() for c in cache.key_cache + cache.value_cache)


# -- CUDA graphs, on a PyTorch whose `torch.cuda` is made up


class FakeStream:
    def __init__(self, events: list) -> None:
        self.events = events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append("waits")


class FakeCuda:
    """Records what is computed inside of `graph`, and computes it again, to the same addresses.
    A capture in which something fails fails again when it ends, as in PyTorch 2.11: its stream is
    still the current one, and the allocator still records for its pool."""

    def __init__(self) -> None:
        self.events: list = []
        self.stream = self.main_stream = FakeStream(self.events)
        self.recording: list[str] = []  # pools

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "device": lambda device: nullcontext(),
            "current_device": lambda: 0,
            "Stream": lambda device=None: self.events.append("stream") or FakeStream(self.events),
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "stream": lambda stream: self.on(stream is not self.main_stream),
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": Recorder,
            "graph": self.graph,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        patch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: self.events.append("free"))

    def end(self, device: int, pool: str) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)

    @contextmanager
    def on(self, is_side: bool):
        self.events.append(("warm-up", is_side))
        yield
        self.events.append("warm")

    @contextmanager
    def graph(self, graph, pool, capture_error_mode):
        self.events.append(("capture", pool, capture_error_mode))
        self.stream = FakeStream(self.events)
        self.recording.append(pool)
        try:
            with graph:
                yield
        except BaseException as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.recording.remove(pool)
        self.stream = self.main_stream
        graph.replay = partial(replay_in_place, graph.calls)


def replay_in_place(calls: list) -> None:
    for call in calls:
        results = tree_leaves(call.func(*call.args, **call.kwargs))
        for old, new in zip(call.results, results, strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def test_cuda_graphs_are_captured_after_a_warm_up(random_loaded, monkeypatch) -> None:
    """In one pool, on one side stream, and all with their logits where the largest has its own."""
    cuda = FakeCuda()
    with monkeypatch.context() as patch:
        cuda.install(patch)
        graphs = make_graphs(random_loaded, CudaGraphs(CPU))
    one = ["waits", ("warm-up", True), "warm", "waits", ("capture", "pool", "thread_local")]
    assert cuda.events == ["stream", *one * len(graphs.buckets)]
    plain = DecodeGraphs(
        EagerGraphs(), graphs.model, graphs.kv_cache, graphs.backend, MAX_NUM_ROWS, MAX_MODEL_LEN
    )
    addresses = set()
    state, rng = make_state(0), random.Random(0)
    for n in (6, 1, 3, 2, 5, 4, 1):
        queries, found = decode(state, n, rng), []
        for way in (graphs, plain):
            bucket = way.bucket_for(queries)
            assert bucket is not None
            batch = way.compose(state, queries, BLOCK_SIZE, bucket).on(CPU)
            num_logit_rows = len(batch.logit_indices)
            found.append(way.replay(bucket, n, num_logit_rows))
        assert torch.equal(*found)
        addresses |= {logits.data_ptr() for logits in found[:1] if len(logits)}
    assert len(addresses) == 1


class Failing:
    """A step that is captured when it is called for the third time."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.step, self.num_calls = step, 0

    def __call__(self) -> torch.Tensor:
        self.num_calls += 1
        return self.step() if self.num_calls == 3 else torch.ones(4)


@pytest.mark.parametrize(
    "error, raised",
    [
        (RuntimeError, CannotCapture),
        (torch.OutOfMemoryError, torch.OutOfMemoryError),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_after_a_capture_that_fails_the_engine_is_on_its_own_stream(
    error, raised, monkeypatch
) -> None:
    """The first failure is reported. Out of memory is no reason to continue without graphs."""

    def step() -> torch.Tensor:
        raise error("operation not permitted when stream is capturing\nmore")

    cuda = FakeCuda()
    with monkeypatch.context() as patch:
        cuda.install(patch)
        with pytest.raises(raised, match="operation not permitted when stream is capturing"):
            CudaGraphs(CPU).capture(4, Failing(step), None)
    assert cuda.stream is cuda.main_stream
    assert not cuda.recording and cuda.events[-1] == "free"


ON_A_GPU = """
import torch
from common.runner.graphs import CannotCapture, CudaGraphs

device = torch.device("cuda", torch.cuda.current_device())
x, stream = torch.ones(4, device=device), torch.cuda.current_stream()
try:
    CudaGraphs(device).capture(4, lambda: x * x.sum().item(), None)
except CannotCapture as error:
    print(error)
assert torch.cuda.current_stream() == stream
torch.cuda.empty_cache()
graphs = CudaGraphs(device)
graphs.capture(4, lambda: x + 1, None)
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
