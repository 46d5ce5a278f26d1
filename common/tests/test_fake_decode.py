"""A decode step on a GPU that is not there: nothing of it waits, or is on the wrong side.

`FakeTensorMode` has tensors on "cuda" without memory: every operation, kernels included, says what
it would return and on which device. So these raise, in whatever line does it: tensors of two
devices in one operation, the host that reads one (item, tolist, bool), a copy between the two
sides that `to_device` does not make. A build of PyTorch without CUDA cannot index such tensors in
Python: `_Indexing` does that by the operations behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_launch
from common.assembly.assembly import set_regions
from common.models.experts.expert_config import qwen3_moe
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.runner.batch_state import BatchState
from common.runner.graph_emulator import NoReads, check_no_wait
from common.runner.graphs import DecodeGraphs, EagerGraphs, GraphRunner, ReplayMetadata
from common.runner.kv_sizing import allocate_kv_cache
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from common.sampling.test_waits import KINDS
from common.tests.pretend_device import replace_everywhere
from mixed_attention_triton import MixedTritonAttentionBackend
from mixed_batch import compose
from scheduler_interface import PENDING, CachedRequestData, NewRequestData, SchedulerOutput
from workshop.measure.bench.random_weights import QWEN3_0_6B

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class Moved(Exception):
    """A tensor went from one side to the other."""


class _Watcher(TorchDispatchMode):
    """Counts launches, all but views and memory that nothing fills, and sees copies between the two
    sides."""

    num_launches = 0
    is_serving = False  # before that, tables are made on the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is not aten.lift_fresh:  # the layout is made on the host
            check_no_wait(func, tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        is_new = storages(result) - storages((args, kwargs)) and "empty" not in func.__name__
        self.num_launches += bool(func._schema.is_mutable or is_new)
        if func.overloadpacket in (aten.to, aten._to_copy, aten.copy_):
            sides = {x.device.type for x in (*args[:2], result) if isinstance(x, torch.Tensor)}
            if len(sides) > 1 and self.is_serving:
                raise Moved(f"{func} from one device to another")
        return result


def storages(values: object) -> set[int]:
    tensors = (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


_BY_OPERATION = {torch.Tensor.copy_: aten.copy_, torch.Tensor.__invert__: aten.bitwise_not}


class _Indexing(TorchFunctionMode):
    """`x[...]`, `x[...] = y` and the like by operations."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            x, key, value = args
            if isinstance(key, torch.Tensor):
                return aten.index_put_(x, [key], value)
            part = _index(x, key)
            return (aten.copy_ if isinstance(value, torch.Tensor) else aten.fill_)(part, value)
        return _BY_OPERATION.get(func, func)(*args, **(kwargs or {}))


def _index(x: torch.Tensor, key: Any) -> torch.Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    missing = x.dim() - sum(k is not None and k is not Ellipsis for k in keys)
    indices: dict[int, torch.Tensor] = {}
    dim = 0
    for k in keys:
        if k is Ellipsis:
            dim += missing
        elif k is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(k, slice):
            x, dim = aten.slice(x, dim, k.start, k.stop, k.step or 1), dim + 1
        elif isinstance(k, torch.Tensor):
            indices[dim], dim = k, dim + 1
        else:
            x = aten.select(x, dim, k)
    return aten.index(x, [indices.get(i) for i in range(max(indices) + 1)]) if indices else x


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watcher]:
    """While it lasts, new tensors are fake, and `to_device` brings arrays to the GPU."""
    watcher = _Watcher()

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    def from_device(tensor: torch.Tensor):
        return lambda: pytest.fail("a step was read: there is nothing to read")

    def row_uniforms(sampling, stream: int) -> np.ndarray:  # all of it is the host's
        return np.zeros(len(sampling.rows))

    with monkeypatch.context() as patch:
        replace_everywhere(patch, to_device, from_device, row_uniforms)
        patch.setattr(kernel_launch, "architecture_of", lambda device: 90)
        with FakeTensorMode(), torch.inference_mode(), _Indexing(), NoReads(), watcher:
            yield watcher


QWEN2 = replace(QWEN3_0_6B, has_qk_norm=False, qkv_bias=True, num_hidden_layers=3)
OF_EXPERTS = dict(num_hidden_layers=2, num_experts=16, num_experts_per_tok=4)
EXPERTS = qwen3_moe({**OF_EXPERTS, "moe_intermediate_size": 768})
MODELS = {"Qwen2": QWEN2, "experts": replace(QWEN3_0_6B, num_hidden_layers=2, experts=EXPERTS)}
MAX_SEQS = 24


class CapturingOnce(EagerGraphs):
    def capture(self, bucket, function, tensors) -> None:
        super().capture(bucket, function, tensors)
        function()


def make_graphs(gpu: _Watcher, config) -> DecodeGraphs:
    model = DecoderModel(config, torch.bfloat16, CUDA)
    set_regions(model, False, is_triton=True)
    gpu.is_serving = True
    kv_cache = allocate_kv_cache(LoadedModel(model, config), 2000, 16)
    backend = MixedTritonAttentionBackend()
    backend.is_interpreted = False
    return DecodeGraphs(CapturingOnce(), model, kv_cache, backend, MAX_SEQS, 4096)


def test_launches_of_a_decode_step(monkeypatch) -> None:
    """On a GPU, a step of a small model takes as long as they do: with 28 layers, 287."""
    counts = []
    for num_layers in (1, 2):
        with fake_gpu(monkeypatch) as gpu:
            graphs = make_graphs(gpu, replace(QWEN3_0_6B, num_hidden_layers=num_layers))
            gpu.num_launches = 0
            graphs._compute(4)
        counts.append(gpu.num_launches)
    assert counts == [17, 27]


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


@pytest.mark.parametrize("model", MODELS)
def test_whole_steps_that_are_begun_a_step_ahead(model: str, monkeypatch) -> None:
    """Layout, tokens that are pending, the model and every kind of sampling: nothing is read."""
    config = MODELS[model]
    with fake_gpu(monkeypatch) as gpu:
        graphs = make_graphs(gpu, config)
        state = BatchState(MAX_SEQS, 256, SamplingColumns(eos_token_ids=(0,)))
        where = graphs.model, graphs.kv_cache, graphs.backend, state
        sampler = Sampler(config.vocab_size - 10)
        runner = GraphRunner(*where, sampler, compose=compose, graphs=graphs)
        plan = first_step()
        for step in (plan, next_step(plan, 0), next_step(plan, 1)):
            batch = runner.prepare(step)
            assert batch is not None
            assert isinstance(batch.attention[0], ReplayMetadata) == (step is not plan)
            logits = runner.forward(batch)
            assert logits.shape == (len(KINDS), config.vocab_size) and logits.device == CUDA
            output = runner.state.sampled = batch.pending_output.begin(logits)
            assert output.tokens.shape == (len(KINDS),) and output.tokens.device == CUDA
        assert graphs.num_replays == 2
