"""Buckets, their padding and what lies in them, replayed in every way; and that the emulator
reports each rule of a graph that is broken."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from batch_layout import Queries, compose_in_order
from common.runner.batch_state import BatchState
from common.runner.graph_emulator import EmulatedGraphs, GraphError, Recorder
from common.runner.graphs import (
    COLUMNS,
    CannotCapture,
    CudaGraphs,
    DecodeGraphs,
    EagerGraphs,
    StaticMemory,
    bucket_of,
    column_stride,
    graph_buckets,
)
from common.runner.kv_sizing import allocate_kv_cache
from common.sampling.sampling_columns import SamplingColumns
from paged_attention import TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import NewRequestData
from tensor_attention import TensorAttentionBackend, TensorPlan

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
            getattr(x, name).fill_(i)
        assert all((getattr(x, name) == i).all() for i, name in enumerate(COLUMNS))


# -- steps of a model


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


def make_graphs(random_loaded, graphs=None, backend=None) -> DecodeGraphs:
    """Over a cache full of numbers, with NaN in the null block."""
    kv_cache = allocate_kv_cache(random_loaded, NUM_BLOCKS, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    for cache in kv_cache.key_cache + kv_cache.value_cache:
        cache.normal_(generator=generator)
        cache[0] = torch.nan
    parts = random_loaded.model, kv_cache, backend or TensorAttentionBackend()
    return DecodeGraphs(graphs or EmulatedGraphs(), *parts, MAX_NUM_ROWS, MAX_MODEL_LEN)


def run(graphs: DecodeGraphs, num_steps: int = 8) -> Iterator[torch.Tensor]:
    """Logits of steps with few and many rows in turn, so that each leaves data for the next."""
    state, rng = make_state(0, graphs.model.num_groups), random.Random(0)
    for i in range(num_steps):
        queries = decode(state, (MAX_NUM_ROWS, 1, 3, 5, 2)[i % 5], rng)
        yield step(graphs, state, queries)


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
@pytest.mark.parametrize("kind", ["eager", "emulated", "CUDA"])
def test_padding_changes_no_row(kind, num_groups, random_loaded, monkeypatch) -> None:
    """Every number of rows, each step against the same one without padding, by chapter 2's
    attention."""
    deal(random_loaded, num_groups, monkeypatch)
    if kind == "CUDA":
        with monkeypatch.context() as patch:
            FakeCuda().install(patch)
            graphs = make_graphs(random_loaded, CudaGraphs(CPU))
    else:
        graphs = make_graphs(random_loaded, EagerGraphs() if kind == "eager" else EmulatedGraphs())
    addresses = set()
    for seed in range(3):
        state, rng = make_state(seed, num_groups), random.Random(seed)
        for n in (6, 1, 3, 2, 5, 4, 1):
            queries, plain_cache = decode(state, n, rng), copy.deepcopy(graphs.kv_cache)
            batch = compose_in_order(state, queries, BLOCK_SIZE).on(CPU)
            batch.plan_attention(TorchAttentionBackend(), graphs.model.num_heads, plain_cache)
            expected = graphs.model(batch, plain_cache)
            found = step(graphs, state, queries)
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
            for cache, right in zip(graphs.kv_cache.key_cache, plain_cache.key_cache, strict=True):
                torch.testing.assert_close(cache[1:], right[1:], atol=1e-9, rtol=0)
            addresses |= {found.data_ptr()} if len(found) else set()
    assert len(addresses) == 1 and graphs.num_replays == 21


def test_steps_that_are_replayed_and_the_bounds_they_are_captured_with(random_loaded) -> None:
    """The largest is captured first, on padding alone."""
    order: list[int] = []

    class Spy(EagerGraphs):
        def capture(self, bucket, function, tensors) -> None:
            order.append(bucket)
            assert function().shape == (bucket, 97)

    class Backend(TensorAttentionBackend):
        def plan(self, metadata, num_heads, key_cache):
            assert (metadata.slot_mapping == -1).all()
            assert (metadata.max_query_len, metadata.max_seq_len) == (1, 32)
            assert metadata.block_tables.shape == (order[-1], 8)
            return super().plan(metadata, num_heads, key_cache)

    cache = allocate_kv_cache(random_loaded, 5, BLOCK_SIZE)
    parts = random_loaded.model, cache, Backend(), 20, MAX_MODEL_LEN
    graphs = DecodeGraphs(Spy(), *parts)
    assert order == [20, 16, 8, 4, 2, 1]
    assert not any(c[1:].any() for c in cache.key_cache + cache.value_cache)
    for n, bucket in ((1, 1), (3, 4), (17, 20), (20, 20), (21, None)):
        one = Queries(*(np.ones(n, dtype=np.int64) for _ in range(4)))
        assert graphs.bucket_for(one) == bucket
        assert graphs.bucket_for(one._replace(num_tokens=np.arange(n) + 2)) is None


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
    """In one pool, on one side stream."""
    cuda = FakeCuda()
    with monkeypatch.context() as patch:
        cuda.install(patch)
        graphs = make_graphs(random_loaded, CudaGraphs(CPU))
    one = ["waits", ("warm-up", True), "warm", "waits", ("capture", "pool", "thread_local")]
    assert cuda.events == ["stream", *one * len(graphs.buckets)]


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


# -- the emulator: an error names the fault, or, where a GPU would continue, logits are wrong


@pytest.mark.parametrize("name", list(StaticMemory(1, 1, CPU).inputs(1).by_name()))
def test_an_input_that_is_somewhere_else_or_is_forgotten(name, random_loaded, monkeypatch) -> None:
    """The step is written to the new place, and the graph reads the old one. What a step does not
    write is unusable: out of range, or the null block."""
    graphs = make_graphs(random_loaded)
    for bucket, x in graphs.inputs.items():
        graphs.inputs[bucket] = replace(x, **{name: getattr(x, name).clone()})
    with pytest.raises(GraphError, match=f"address changed .*: {name}$"):
        list(run(graphs))
    right, real = list(run(make_graphs(random_loaded, EagerGraphs()), 1)), StaticMemory.fill
    graphs = make_graphs(random_loaded)

    def fill(memory, columns, tables) -> None:
        x = memory.inputs(tables.shape[1]).by_name()[name]
        before = x.clone()
        real(memory, columns, tables)
        x.copy_(before)

    monkeypatch.setattr(StaticMemory, "fill", fill)
    with suppress(GraphError, IndexError):
        assert not torch.equal(*run(graphs, 1), *right)


def test_a_weight_or_a_cache_that_is_somewhere_else(random_loaded) -> None:
    graphs, mlp = make_graphs(random_loaded), random_loaded.model.layers[1].mlp
    before = mlp.mlp_norm_weight
    mlp.mlp_norm_weight = nn.Parameter(before.clone(), requires_grad=False)
    try:
        with pytest.raises(GraphError, match=r"layers\.1\.mlp\.mlp_norm_weight"):
            list(run(graphs))
    finally:
        mlp.mlp_norm_weight = before
    graphs.kv_cache.value_cache[0] = graphs.kv_cache.value_cache[0].clone()
    with pytest.raises(GraphError, match="KV cache 2"):
        list(run(graphs))


PADDING: dict[str, Callable] = {
    f"{name} of padding must": partial(lambda name, x, n: x[name][..., n:].fill_(7), name)
    for name in ("slot_mapping", "seq_lens", "input_ids", "positions")
}
PADDING["block_tables of padding must"] = lambda x, n: x["block_tables"][:, n:].fill_(5)
PADDING["query_start_loc must"] = lambda x, n: x["query_start_loc"][n:].add_(1)


@pytest.mark.parametrize("reason", PADDING)
def test_wrong_padding(reason: str, random_loaded, monkeypatch) -> None:
    """Trap 54: rows of a larger step that are left behind."""
    graphs, real = make_graphs(random_loaded), StaticMemory.fill

    def fill(memory, columns, tables) -> None:
        real(memory, columns, tables)
        x = memory.inputs(tables.shape[1]).by_name()
        PADDING[reason](x, int(x["query_start_loc"][-1]))

    monkeypatch.setattr(StaticMemory, "fill", fill)
    with pytest.raises(GraphError, match=reason):
        list(run(graphs))


class Plan(TensorPlan):
    """`fault`: the padding is written to slot 9, keys a slot late, or a value to slot 9; scratch
    memory is read, or the null block with a weight of zero."""

    fault = ""

    def write_kv(self, key, value, key_cache, value_cache) -> None:
        slots = self.metadata.slot_mapping
        if self.fault == "padding":
            self.slot_mapping = torch.where(slots < 0, 9, slots)
        elif self.fault == "behind":
            self.slot_mapping = torch.where(slots < 0, -1, slots + 1)
        elif self.fault == "of another":
            value_cache[2, 1] = value[0]
        super().write_kv(key, value, key_cache, value_cache)

    def attend(self, query, key_cache, value_cache, scale):
        output = super().attend(query, key_cache, value_cache, scale)
        if self.fault == "scratch":
            return torch.cat([torch.empty_like(output)[:, :1], output[:, 1:]], dim=1)
        return output + 0 * value_cache[0].sum() if self.fault == "null block" else output


def backend_of(plan: Callable[..., TensorPlan]) -> TensorAttentionBackend:
    backend = TensorAttentionBackend()
    backend.plan = plan  # pyright: ignore[reportAttributeAccessIssue]
    return backend


@pytest.mark.parametrize("fault", ["padding", "behind", "of another", "scratch", "null block"])
def test_a_kernel_that_reads_or_writes_what_is_not_its_own(fault: str, random_loaded) -> None:
    """The first replay on a GPU might find zeros where memory was not written."""
    graphs = make_graphs(random_loaded, backend=backend_of(type("", (Plan,), {"fault": fault})))
    if fault in ("scratch", "null block"):
        assert all(x.isnan().all() for x in run(graphs) if len(x))
    else:
        with pytest.raises(GraphError, match=r"slots must be in \[.*\], got \["):
            list(run(graphs))


class Waiting(TensorPlan):
    def __init__(self, read, metadata, *rest) -> None:
        super().__init__(metadata, *rest)
        self.read = read

    def attend(self, *arguments):
        self.read(self.metadata)
        return super().attend(*arguments)


WAITS = {
    "item": lambda m: m.seq_lens.max().item(),
    "__int__": lambda m: int(m.seq_lens[0]),
    "__bool__": lambda m: bool((m.slot_mapping >= 0).all()),
    "__index__": lambda m: range(m.seq_lens[0]),
    "tolist": lambda m: m.seq_lens.tolist(),
    "numpy": lambda m: m.seq_lens.numpy(),
    "__array__": lambda m: sum(m.seq_lens.__array__()),
    "cpu": lambda m: m.seq_lens.cpu(),
    "nonzero": lambda m: m.seq_lens.nonzero(),
    "aten.index.Tensor": lambda m: m.seq_lens[m.seq_lens > 0],
    "aten.index_put_": lambda m: m.seq_lens.clone().index_put_((m.seq_lens > 0,), m.seq_lens[0]),
    "aten.lift_fresh": lambda m: m.seq_lens + torch.tensor([1]),
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operation_that_waits_for_a_device_is_not_captured(name: str, random_loaded) -> None:
    backend = backend_of(partial(Waiting, WAITS[name]))
    with pytest.raises(CannotCapture, match=f"^{name}.*synchronizes with the device"):
        make_graphs(random_loaded, backend=backend)
