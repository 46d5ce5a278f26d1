"""The work of the measuring step of a GPU, run here on a CPU with a fake reader of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from common.engine_config import EngineConfig
from common.features.adapters.adapter_slots import AdapterSlots
from common.models.loader import LoadedModel
from common.models.model_config import SCORED
from common.runner import kv_sizing
from common.runner.kv_sizing import KVDemand, Peers, make_kv_cache
from common.sampling import sampling_constraints, speculative_sampler
from common.sampling.sampler import Sampler
from common.sampling.sampling_rules import (
    BITS,
    LOGPROBS,
    MIN_TOKENS,
    TOKEN_RULES,
    WIDE,
)
from common.sampling.speculative_sampler import SpeculativeSampler
from kv_budget import MemoryReading
from paged_attention import TorchAttentionBackend
from rejection_sampler import rejection_sample
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

TINY = replace(
    QWEN3_0_6B,
    vocab_size=300,  # the last lanes are padding
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=4096,
)
VOCAB_SIZE = 290
BLOCK_BYTES = 2 * 2 * 16 * 1 * 4 * 4  # keys and values, layers, tokens, heads, head_dim, float32


def test_a_cpu_is_asked_for_its_free_memory_and_runs_a_short_step(loaded, monkeypatch) -> None:
    steps = spy_on_forward(monkeypatch)
    monkeypatch.setattr(kv_sizing, "free_memory_bytes", lambda: 2 * 500 * BLOCK_BYTES)
    config = EngineConfig(max_num_seqs=1000)
    assert make(config, loaded, max_model_len=4096).num_blocks == 500
    assert steps == [([8], 1)]
    monkeypatch.undo()
    assert make(EngineConfig(max_num_seqs=2), loaded, max_model_len=160).num_blocks == 2 * 10 + 1


def test_memory_of_several_ranks_is_requested_together(loaded, monkeypatch) -> None:
    monkeypatch.setattr(kv_sizing, "free_memory_bytes", lambda: 2 * 500 * BLOCK_BYTES)
    config = EngineConfig(max_num_seqs=2, num_blocks=501)
    demand = demand_of(config, loaded)
    assert make_kv_cache(demand).num_blocks == 501
    with pytest.raises(ValueError, match=r"num_blocks=501 .* on each of 2 ranks, but only 0"):
        make_kv_cache(demand, Peers(num_here=2))


# -- a GPU


class FakeMemory:
    """A `MemoryReader` of a GPU on which the step's activations peak at `peak` bytes. Graphs add
    the memory they keep to `kept`."""

    def __init__(self, peak: int, events: list) -> None:
        self.peak, self.events = peak, events
        self.num_reads, self.kept = 0, 0

    def reset(self) -> None:
        self.events.append("reset")

    def read(self) -> MemoryReading:
        self.events.append("read")
        self.num_reads += 1
        return MemoryReading(
            total=40_000 * BLOCK_BYTES,
            free=27_000 * BLOCK_BYTES - self.kept,
            reserved=10_000 * BLOCK_BYTES + self.kept,
            # PyTorch gives back the activations before it captures.
            peak_reserved=10_000 * BLOCK_BYTES
            + max(self.kept, self.peak if self.num_reads == 2 else 0),
        )


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model(TINY)


def demand_of(config: EngineConfig, loaded: LoadedModel, max_model_len=4096, draft=None, **rest):
    backend = TorchAttentionBackend()
    return KVDemand(config, loaded, draft, backend, max_model_len, VOCAB_SIZE, **rest)


def make(config: EngineConfig, loaded: LoadedModel, max_model_len=4096, memory=None, **rest):
    return make_kv_cache(demand_of(config, loaded, max_model_len, **rest), memory=memory)


def spy_on_forward(monkeypatch: pytest.MonkeyPatch) -> list:
    real, steps = kv_sizing.run_forward, []

    def run_forward(*step) -> torch.Tensor:
        _, _, _, seq_lens, num_logit_rows, *staged = step
        steps.append((list(seq_lens), num_logit_rows))
        logits = real(*step)
        for of_plugins in staged:  # of a prompt as many rows as are ever scored at once
            scored = of_plugins[SCORED]
            assert [len(read()) for read in scored._reads] == [min(256, sum(seq_lens))]
        return logits

    monkeypatch.setattr(kv_sizing, "run_forward", run_forward)
    return steps


def test_the_peak_is_that_of_sampling_the_most_rows_there_can_be(loaded, monkeypatch) -> None:
    """Between the two readings, twice: all rows of 48 requests, each with every constraint, a
    grammar and log-probabilities, after a forward pass of as many tokens as a step may have."""
    events: list = []
    forbid = sampling_constraints.forbid
    steps = spy_on_forward(monkeypatch)

    class SpySampler(Sampler):
        def sample(self, logits, batch):
            output = super().sample(logits, batch)
            sampling, columns = batch.sampling, batch.sampling.columns
            everything = WIDE | sum(BITS.values()) | MIN_TOKENS | LOGPROBS | TOKEN_RULES
            assert (sampling.needs == everything).all() and len(sampling.needs) == len(logits)
            assert (columns.top_k < VOCAB_SIZE).all()
            assert (sampling.num_outputs < columns.min_tokens[sampling.rows]).all()
            assert all(len(found[0].top) == 20 for found in output.logprobs.values())
            events.append((self.vocab_size, len(output.logprobs), logits.shape))
            return output

    def spy_on_forbid(logits, at, bits) -> torch.Tensor:
        events.append((at.tolist() == list(range(48)), bits.shape, bits.dtype))
        return forbid(logits, at, bits)

    monkeypatch.setattr(kv_sizing, "Sampler", SpySampler)
    monkeypatch.setattr(sampling_constraints, "forbid", spy_on_forbid)
    monkeypatch.setattr(kv_sizing, "find_spec", lambda name: object())  # as if it were there
    monkeypatch.setitem(sys.modules, "common.features.grammars", None)  # nothing of it is loaded
    config = EngineConfig(max_num_seqs=48, max_num_batched_tokens=200)
    make(config, loaded, max_model_len=90, memory=FakeMemory(0, events))
    twice = [(True, (48, 10), torch.int32), (VOCAB_SIZE, 48, (48, 300))] * 2
    assert events == ["reset", "read", *twice, "read", "reset"]
    assert steps == [([90, 90, 20], 48)] * 2


def test_the_peak_of_the_largest_step_is_not_given_to_kv_and_neither_are_graphs(loaded) -> None:
    """Graphs keep scratch memory as long as they live, in addition to a step's, so they exist while
    memory is read, and not later. KV gets what neither needs, however large the other is."""
    events: list = []
    memory = FakeMemory(7 * BLOCK_BYTES, events)

    class Graphs:
        def __init__(self, kv_cache) -> None:
            events.append(kv_cache.num_blocks)
            memory.kept = 5 * BLOCK_BYTES

        def __del__(self) -> None:
            events.append("gone")

    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=160)
    kv_cache = make(config, loaded, memory=memory, make_graphs=Graphs)
    # 90 % of 40,000; 10,000 without the warm-up's 10 blocks and null block; 3,000 of others.
    assert kv_cache.num_blocks == 36_000 - (10_000 - 11) - 7 - 5 - 3_000
    around = ["reset", "read", 10 + 1, "reset", "read", "gone"]
    assert events == ["reset", "read", "read", *around, "reset"]
    events.clear()
    make(replace(config, num_blocks=50), loaded, memory=memory, make_graphs=Graphs)
    assert events == []  # nothing is measured
    half = replace(config, gpu_memory_utilization=0.5)
    kv_cache = make(half, loaded, memory=FakeMemory(4000 * BLOCK_BYTES, []))
    assert kv_cache.num_blocks == 20_000 - (10_000 - 11) - 4000 - 3_000


def test_in_the_largest_step_every_request_has_an_adapter_of_the_highest_rank(loaded) -> None:
    """In each matrix, the last layer's too: a whole prompt is scored in that step."""
    slots, sizes = AdapterSlots(loaded.model, 3, 16), []
    for addition in slots.additions:
        assert addition.ranks[1] == [16] * len(addition.names)

        def add(rows, x, y, add=addition.add) -> torch.Tensor:
            sizes.append((len(x), len(rows.order), rows.segments))
            return add(rows, x, y)

        addition.add = add
    config = EngineConfig(max_num_seqs=48, max_num_batched_tokens=200)
    make(config, loaded, max_model_len=90, memory=FakeMemory(0, []), adapters=slots)
    assert sizes == [(200, 200, [(1, 0, 200)])] * len(slots.additions) * 2


def test_drafts_are_part_of_the_largest_step(loaded, monkeypatch) -> None:
    """Five rows a request. The logits of a draft model stay in memory the whole time."""
    steps, verified = spy_on_forward(monkeypatch), []

    class SpySampler(SpeculativeSampler):
        def __init__(self, sampler, draft_probs: Callable) -> None:
            super().__init__(sampler, draft_probs, reject=self.spy)

        def spy(self, target_probs, drafts, draft_probs, *rest):
            verified.append((target_probs.shape, len(drafts), draft_probs.shape))
            return rejection_sample(target_probs, drafts, draft_probs, *rest)

    monkeypatch.setattr(speculative_sampler, "SpeculativeSampler", SpySampler)
    speculative = {"method": "draft", "num_spec_tokens": 4}
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=38, speculative=speculative)
    draft_too = make(config, loaded, 64, draft=loaded, memory=FakeMemory(0, []))
    # 38 tokens: 7 requests of 5 rows, one of 3.
    assert steps == [([38], 38)] * 2
    assert verified == [((38, VOCAB_SIZE), 30, (30, VOCAB_SIZE))] * 2
    steps.clear()
    config = replace(config, speculative={"method": "ngram", "num_spec_tokens": 4})
    make(config, loaded, 64, memory=FakeMemory(0, []))
    assert steps == [([38], 38)] * 2 and len(verified) == 2
    assert draft_too.num_blocks == 8 * 4 + 1
