"""Steps on a GPU that is not there: nothing of them waits, or is on the wrong side."""

from __future__ import annotations

import torch

from common.runner.batch_state import BatchState
from common.runner.graphs import DecodeGraphs, GraphRunner
from common.runner.kv_sizing import allocate_kv_cache
from common.sampling.sampler import Sampler
from common.sampling.sampling_columns import SamplingColumns
from common.sampling.test_waits import KINDS
from common.tests.graph_emulator import EagerGraphs
from common.tests.pretend_device import place_of, pretend_device
from common.tests.small_models import subject
from common.tests.tensor_attention import TensorAttentionBackend
from mixed_batch import compose
from scheduler_interface import PENDING, CachedRequestData, NewRequestData, SchedulerOutput

MAX_SEQS = 24


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
    tokens = [[PENDING]] * n
    counts = [num_before + 1] * n
    cached = CachedRequestData(names, tokens, computed, counts, [() for _ in names], set(), names)
    return SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(names, 1)
    )


@torch.inference_mode()
def test_whole_steps_that_are_begun_a_step_ahead(monkeypatch) -> None:
    """Layout, tokens that are pending, the model and every kind of sampling: nothing is read."""
    loaded = subject("unrelated").in_float32
    with pretend_device(monkeypatch) as device:
        kv_cache = allocate_kv_cache(loaded, 100, 16)
        weights = (*loaded.model.parameters(), *loaded.model.buffers())
        for tensor in (*weights, *kv_cache.key_cache, *kv_cache.value_cache):
            tensor.place = "device"
        where = loaded.model, kv_cache, TensorAttentionBackend()
        graphs = DecodeGraphs(EagerGraphs(), *where, MAX_SEQS, 256)
        state = BatchState(MAX_SEQS, 256, SamplingColumns(eos_token_ids=(0,)))
        sampler = Sampler(loaded.config.vocab_size - 10)
        runner = GraphRunner(
            model=loaded.model,
            kv_cache=kv_cache,
            backend=TensorAttentionBackend(),
            state=state,
            sampler=sampler,
            compose=compose,
            graphs=graphs,
        )
        plan = first_step()
        device.reads = 0
        for step in (plan, next_step(plan, 0), next_step(plan, 1)):
            batch = runner.prepare(step)
            assert batch is not None
            logits = runner.forward(batch)
            assert logits.shape == (len(KINDS), loaded.config.vocab_size)
            output = runner.state.sampled = runner.sample(batch, logits)
            assert place_of(logits) == place_of(output.tokens) == "device"
            assert device.reads == 0
        assert graphs.num_replays == 2
