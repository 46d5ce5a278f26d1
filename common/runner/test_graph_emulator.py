"""Each rule of a graph is broken, and the emulator reports it: by an error that names the fault,
or, where a GPU would continue, by logits that are obviously wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import common.runner.graphs as module
from common.runner.graph_emulator import EmulatedGraphs, GraphError
from common.runner.graphs import CannotCapture, DecodeGraphs, EagerGraphs, StaticMemory
from common.runner.test_graphs import (
    BLOCK_SIZE,
    MAX_NUM_ROWS,
    deal,
    decode,
    make_graphs,
    make_state,
)
from tensor_attention import TensorAttentionBackend, TensorPlan


def make(random_loaded, backend=None, graphs=None) -> DecodeGraphs:
    return make_graphs(random_loaded, graphs or EmulatedGraphs(), backend)


def backend_of(plan: Callable[..., TensorPlan]) -> TensorAttentionBackend:
    backend = TensorAttentionBackend()
    backend.plan = plan  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def steps(num: int = 8, num_groups: int = 1):
    """Steps with few and many rows in turn, so that each leaves data for the next."""
    state, rng = make_state(0, num_groups), random.Random(0)
    for i in range(num):
        yield state, decode(state, (MAX_NUM_ROWS, 1, 3, 5, 2)[i % 5], rng)


def run(graphs: DecodeGraphs, num_steps: int = 8) -> list[torch.Tensor]:
    """Logits of every step."""
    found = []
    for state, queries in steps(num_steps, graphs.model.num_groups):
        bucket = graphs.bucket_for(queries)
        assert bucket is not None
        step = graphs.compose(state, queries, BLOCK_SIZE, bucket).on(torch.device("cpu"))
        found.append(graphs.replay(bucket, len(queries.rows), len(step.logit_indices)).clone())
    return found


def is_right(random_loaded, graphs: DecodeGraphs, num_steps: int = 8) -> bool:
    """By the same steps, each computed by the function itself."""
    expected = run(make(random_loaded, graphs=EagerGraphs()), num_steps)
    pairs = zip(run(graphs, num_steps), expected, strict=True)
    return all(torch.equal(found, right) for found, right in pairs)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_replays_are_right(num_groups: int, random_loaded, monkeypatch) -> None:
    """With one table for all layers, and with another one for the last layer."""
    deal(random_loaded, num_groups, monkeypatch)
    graphs = make(random_loaded)
    assert is_right(random_loaded, graphs) and graphs.num_replays == 8


# -- addresses


@pytest.mark.parametrize("name", list(StaticMemory(1, 1, torch.device("cpu")).inputs(1).by_name()))
def test_an_input_that_is_somewhere_else(name: str, random_loaded) -> None:
    """The step is written to the new place, and the graph reads the old one."""
    graphs = make(random_loaded)
    run(graphs)
    for bucket, x in graphs.inputs.items():
        graphs.inputs[bucket] = replace(x, **{name: getattr(x, name).clone()})
    with pytest.raises(GraphError, match=f"address changed .*: {name}$"):
        run(graphs)


def test_a_weight_or_a_cache_that_is_somewhere_else(random_loaded) -> None:
    graphs, model = make(random_loaded), random_loaded.model
    mlp = model.layers[1].mlp
    before = mlp.mlp_norm_weight
    mlp.mlp_norm_weight = nn.Parameter(before.clone(), requires_grad=False)
    try:
        with pytest.raises(GraphError, match=r"layers\.1\.mlp\.mlp_norm_weight"):
            run(graphs)
    finally:
        mlp.mlp_norm_weight = before
    graphs.kv_cache.value_cache[0] = graphs.kv_cache.value_cache[0].clone()
    with pytest.raises(GraphError, match="KV cache 2"):
        run(graphs)


# -- padding


@pytest.mark.parametrize("name", [*module.COLUMNS, "block_tables"])
def test_a_step_that_forgets_an_input(name: str, random_loaded, monkeypatch) -> None:
    """The stale input is unusable: out of range, or the null block."""
    graphs = make(random_loaded)
    real = StaticMemory.fill

    def fill(memory, columns, tables) -> None:
        x = memory.inputs(tables.shape[1]).by_name()[name]
        before = x.clone()
        real(memory, columns, tables)
        x.copy_(before)

    monkeypatch.setattr(StaticMemory, "fill", fill)
    with suppress(GraphError, IndexError):
        assert not is_right(random_loaded, graphs, num_steps=1)


def column(name: str, value: int) -> Callable:
    def change(columns, tables, n, bucket) -> None:
        columns[module.COLUMNS.index(name), n:bucket] = value

    return change


def live_blocks(columns, tables, n, bucket) -> None:
    tables[:, n:] = tables[:, :1]


def query_tokens(columns, tables, n, bucket) -> None:
    starts = columns[module.COLUMNS.index("query_start_loc")]
    starts[: bucket + 1] = range(bucket + 1)


PADDING: dict[str, Callable] = {
    **{
        f"{name} of padding must": column(name, value)
        for name, value in dict(slot_mapping=7, seq_lens=3, input_ids=5, positions=2).items()
    },
    "block_tables of padding must": live_blocks,
    "query_start_loc must": query_tokens,
}


@pytest.mark.parametrize("reason", PADDING)
def test_wrong_padding(reason: str, random_loaded, monkeypatch) -> None:
    """Trap 54: rows of a larger step that are left behind."""
    graphs, real = make(random_loaded), module.pad_step

    def pad_step(state, queries, block_size, bucket):
        columns, tables = real(state, queries, block_size, bucket)
        PADDING[reason](columns, tables, len(queries.rows), bucket)
        return columns, tables

    monkeypatch.setattr(module, "pad_step", pad_step)
    with pytest.raises(GraphError, match=reason):
        run(graphs)


@pytest.mark.parametrize("slot", ["of padding", "behind", "of another"])
def test_a_kernel_that_writes_to_a_wrong_slot(slot: str, random_loaded) -> None:
    """Padding goes to slot 9, or one key is written one slot later, or also in slot 9."""

    class Plan(TensorPlan):
        def write_kv(self, key, value, key_cache, value_cache) -> None:
            slots = self.metadata.slot_mapping
            if slot == "of padding":
                self.slot_mapping = torch.where(slots < 0, 9, slots)
            elif slot == "behind":
                self.slot_mapping = torch.where(slots < 0, -1, slots + 1)
            else:
                value_cache[2, 1] = value[0]
            super().write_kv(key, value, key_cache, value_cache)

    with pytest.raises(GraphError, match=r"slots must be in \[.*\], got \["):
        run(make(random_loaded, backend_of(Plan)))


# -- host values


def test_a_number_of_the_step_is_that_of_the_capture(random_loaded) -> None:
    """A backend that looks no further than the longest sequence of the step, a number that it is
    told: right when it is called, and wrong when it is replayed."""

    class Backend(TensorAttentionBackend):
        longest = 8

        def plan(self, metadata, num_heads, key_cache):
            num_blocks = -(-self.longest // BLOCK_SIZE)
            tables = metadata.block_tables[:, :num_blocks]
            metadata = replace(metadata, block_tables=tables)
            return super().plan(metadata, num_heads, key_cache)

    def notified(graphs: DecodeGraphs) -> DecodeGraphs:
        compose = graphs.compose

        def composed(state, queries, block_size, bucket):
            graphs.backend.longest = int(queries.starts.max()) + 1
            return compose(state, queries, block_size, bucket)

        graphs.compose = composed
        return graphs

    right = notified(make(random_loaded, Backend(), EagerGraphs()))
    assert is_close(random_loaded, right)
    wrong = notified(make(random_loaded, Backend()))
    assert not is_close(random_loaded, wrong)


def is_close(random_loaded, graphs: DecodeGraphs) -> bool:
    expected = run(make(random_loaded, graphs=EagerGraphs()))
    pairs = zip(run(graphs), expected, strict=True)
    return all(torch.allclose(found, right, atol=1e-9, rtol=0) for found, right in pairs)


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
    with pytest.raises(CannotCapture, match=f"^{name}.*synchronizes with the device"):
        make(random_loaded, backend_of(partial(Waiting, WAITS[name])))
    longest = lambda metadata: metadata.seq_lens.max() + len(metadata.seq_lens)  # noqa: E731
    make(random_loaded, backend_of(partial(Waiting, longest)))


# -- memory


def test_unwritten_scratch_memory_is_nan(random_loaded) -> None:
    """The first replay on a GPU might find zeros there."""

    class Plan(TensorPlan):
        def attend(self, query, *arguments):
            output = torch.empty_like(query)
            attended = super().attend(query, *arguments)
            output[:, 1:] = attended[:, 1:]
            return output

    assert all(x.isnan().all() for x in run(make(random_loaded, backend_of(Plan))) if len(x))


def test_logits_last_until_the_next_replay(random_loaded) -> None:
    """In any bucket, because all share the memory of the logits."""
    graphs = make(random_loaded)
    state, rng = make_state(0), random.Random(0)
    kept: list[torch.Tensor] = []
    for n in (MAX_NUM_ROWS, 1, 2, 4):
        queries = decode(state, n, rng)
        bucket = graphs.bucket_for(queries)
        assert bucket is not None
        graphs.compose(state, queries, BLOCK_SIZE, bucket).on(torch.device("cpu"))
        kept.append(graphs.replay(bucket, n, n))
        assert kept[-1].isfinite().all()
    assert len({logits.data_ptr() for logits in kept}) == 1
    assert kept[0][4:].isnan().all()  # rows that the last one did not write


def test_the_null_block_may_hold_anything(random_loaded) -> None:
    """The null block is NaN in each replay, so a backend that reads it with a weight of zero is
    wrong."""

    class Plan(TensorPlan):
        def attend(self, query, key_cache, value_cache, scale):
            output = super().attend(query, key_cache, value_cache, scale)
            return output + 0 * value_cache[0].sum()

    assert all(x.isnan().all() for x in run(make(random_loaded, backend_of(Plan))) if len(x))
