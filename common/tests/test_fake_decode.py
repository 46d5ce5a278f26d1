"""A decode step on a GPU that is not there: nothing of it waits, or is on the wrong side."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.assembly.assembly import set_regions
from common.models.experts.expert_config import qwen3_moe
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.runner.batch_state import BatchState
from common.runner.graphs import (
    DecodeGraphs,
    EagerGraphs,
    GraphRunner,
    ReplayMetadata,
)
from common.runner.kv_sizing import allocate_kv_cache
from common.runner.model_runner import PagedModelRunner
from common.sampling.sampler import Sampler
from common.sampling.sampler_kernel import KERNELS as SAMPLER_KERNELS
from common.sampling.sampling_columns import SamplingColumns
from common.sampling.test_waits import KINDS
from common.tests.fake_gpu import CUDA, fake_gpu
from mixed_attention_triton import MixedTritonAttentionBackend
from mixed_batch import compose
from paged_attention_triton import TritonAttentionBackend
from scheduler_interface import PENDING, CachedRequestData, NewRequestData, SchedulerOutput
from split_attention_triton import SplitTritonAttentionBackend
from workshop.measure.bench.random_weights import QWEN3_0_6B

QWEN2 = replace(QWEN3_0_6B, has_qk_norm=False, qkv_bias=True, num_hidden_layers=3)
MODELS = {"Qwen3-0.6B": replace(QWEN3_0_6B, num_hidden_layers=4), "Qwen2": QWEN2}
OF_EXPERTS = dict(num_hidden_layers=2, num_experts=16, num_experts_per_tok=4)
EXPERTS = qwen3_moe({**OF_EXPERTS, "moe_intermediate_size": 768})
MODELS["experts"] = replace(QWEN3_0_6B, num_hidden_layers=2, experts=EXPERTS)
BUCKETS = [1, 2, 4, 8, 16, 24]


class CapturingOnce(EagerGraphs):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple] = []

    def capture(self, bucket, function, tensors) -> None:
        super().capture(bucket, function, tensors)
        logits = function()
        self.shapes.append((tuple(logits.shape), logits.dtype, logits.device))


def make_graphs(gpu, kind, config=QWEN2, dtype=torch.bfloat16) -> DecodeGraphs:
    model = DecoderModel(config, dtype, CUDA)
    set_regions(model, False, is_triton=True)
    gpu.is_serving = True
    kv_cache = allocate_kv_cache(LoadedModel(model, config), 2000, 16)
    backend = kind()
    backend.is_interpreted = False
    return DecodeGraphs(CapturingOnce(), model, kv_cache, backend, BUCKETS[-1], 4096)


OF_A_LAYER = ["_rotate_and_write_kernel", "_add_rms_norm_kernel", "_silu_and_multiply_kernel"]
KERNELS = {
    TritonAttentionBackend: [*OF_A_LAYER, "_paged_attention_kernel"],
    SplitTritonAttentionBackend: [
        *OF_A_LAYER,
        "_split_attention_kernel",
        "_merge_splits_kernel",
    ],
}
KERNELS[MixedTritonAttentionBackend] = KERNELS[SplitTritonAttentionBackend]


PAIRS = [*zip(KERNELS, MODELS), (MixedTritonAttentionBackend, "Qwen2")]


@pytest.mark.parametrize(("kind", "model"), PAIRS)
def test_a_decode_step_of_every_bucket(kind, model, monkeypatch) -> None:
    with fake_gpu(monkeypatch) as gpu:
        graphs = make_graphs(gpu, kind, MODELS[model])
    config = MODELS[model]
    expected = [((b, config.vocab_size), torch.bfloat16, CUDA) for b in reversed(BUCKETS)]
    assert graphs.graphs.shapes == expected
    num_launches = len(BUCKETS) * config.num_hidden_layers
    plans = {} if kind is TritonAttentionBackend else {"_plan_items_kernel": len(BUCKETS)}
    assert gpu.launches == dict.fromkeys(KERNELS[kind], num_launches) | plans


class Launches(TorchDispatchMode):
    """Counts what goes to the GPU, by operation: all but views and memory that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, is_kernel = func.__name__.split(".")[0], func.namespace == "kernels"
        is_new = storages(result) - storages((args, kwargs)) and "empty" not in name
        if func._schema.is_mutable or is_new:
            self.counts[name.rpartition("_")[0] if is_kernel else name] += 1
        return result


def storages(values: object) -> set[int]:
    tensors = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_launches_of_a_decode_step(monkeypatch) -> None:
    """On a GPU, a step of a small model takes as long as they do: with 28 layers, 287."""
    counts = []
    for num_layers in (1, 2):
        with fake_gpu(monkeypatch) as gpu:
            config = replace(QWEN3_0_6B, num_hidden_layers=num_layers)
            graphs = make_graphs(gpu, MixedTritonAttentionBackend, config)
            with Launches() as launches:
                graphs._compute(4)
        counts.append(launches.counts)
    of_a_layer = counts[1] - counts[0]
    others = counts[0] - of_a_layer
    assert of_a_layer == {
        "rms_norm": 1,
        "linear": 3,
        "_rotate_and_write_kernel": 1,
        "_split_attention_kernel": 1,
        "_merge_splits_kernel": 1,
        "_add_rms_norm_kernel": 1,
        "_silu_and_multiply_kernel": 1,
        "addmm_": 1,
    }
    assert others == {
        "embedding": 1,
        "_plan_items_kernel": 1,
        "new_zeros": 1,  # what layers attend to
        "index_select": 2,
        "rms_norm": 1,
        "mm": 1,
    }


def first_step() -> SchedulerOutput:
    """Prompts of every kind of request, in chunks."""
    new = [
        NewRequestData(name, [7] * (5 + i), params, 0, ([1 + i],))
        for i, (name, params) in enumerate(KINDS.items())
    ]
    scheduled = {data.req_id: len(data.prompt_token_ids) for data in new}
    return SchedulerOutput(new, num_scheduled_tokens=scheduled)


def next_step(first: SchedulerOutput, num_before: int) -> SchedulerOutput:
    """A token for each, from one that no host has seen."""
    names, n = list(first.num_scheduled_tokens), len(first.num_scheduled_tokens)
    computed = [length + num_before for length in first.num_scheduled_tokens.values()]
    tokens, counts = [[PENDING]] * n, [num_before + 1] * n
    cached = CachedRequestData(names, tokens, computed, counts, [() for _ in names], set(), names)
    return SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(names, 1)
    )


def test_whole_steps_that_are_begun_a_step_ahead(monkeypatch) -> None:
    """Layout, tokens that are pending, the model and every kind of sampling: nothing is read. The
    prompts are computed without a graph, in two launches or one."""
    with fake_gpu(monkeypatch) as gpu:
        graphs = make_graphs(gpu, MixedTritonAttentionBackend)
        state = BatchState(24, 256, SamplingColumns(eos_token_ids=(0,)))
        where = graphs.model, graphs.kv_cache, graphs.backend, state
        sampler = Sampler(QWEN2.vocab_size - 10, SAMPLER_KERNELS)
        runner = GraphRunner(*where, sampler, compose=compose, graphs=graphs)
        assert isinstance(runner, PagedModelRunner) and runner.device == CUDA
        gpu.launches.clear()
        plan, bucket, num_before = first_step(), BUCKETS[-1], gpu.uploads
        batch = runner.prepare(plan)
        assert batch is not None and not isinstance(batch.attention[0], ReplayMetadata)
        runner.state.sampled = batch.pending_output.begin(runner.forward(batch))
        assert gpu.launches["_split_attention_kernel"] == QWEN2.num_hidden_layers
        assert gpu.uploads == num_before + 1
        for num_outputs in range(2):
            batch = runner.prepare(next_step(plan, num_outputs))
            assert batch is not None and isinstance(batch.attention[0], ReplayMetadata)
            assert batch.attention[0].bucket == bucket and runner.state.has_pending
            logits = runner.forward(batch)
            assert logits.shape == (len(KINDS), QWEN2.vocab_size) and logits.device == CUDA
            pending_output = runner.state.sampled = batch.pending_output.begin(logits)
            assert (
                pending_output.tokens.shape == (len(KINDS),)
                and pending_output.tokens.device == CUDA
            )
        assert graphs.num_replays == 2
        assert gpu.uploads == num_before + 3, "one copy a step, whatever is sampled"
