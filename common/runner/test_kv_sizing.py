"""The work of the measuring step of a GPU, run here on a CPU with a fake reader of memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from common.engine_config import EngineConfig
from common.features.adapters.adapter_slots import AdapterSlots
from common.models.loader import LoadedModel
from common.runner import kv_sizing
from common.runner.kv_sizing import KVDemand, Peers, make_kv_cache
from common.sampling import speculative_sampler
from common.sampling.sampling_rules import BITS, LOGPROBS, MIN_TOKENS, TOKEN_RULES, WIDE
from common.sampling.speculative_sampler import SpeculativeSampler
from kv_budget import MemoryReading
from paged_attention import TorchAttentionBackend
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
    with pytest.raises(ValueError, match=r"num_blocks=501 .* on each of 2 ranks, but only 0"):
        demand = demand_of(replace(config, num_blocks=501), loaded)
        make_kv_cache(demand, Peers(num_here=2))
    monkeypatch.undo()
    assert make(EngineConfig(max_num_seqs=2), loaded, max_model_len=160).num_blocks == 2 * 10 + 1


# -- a GPU


class FakeMemory:
    """A `MemoryReader` of a GPU on which the step's activations peak at `peak` bytes. Graphs add
    the memory they keep to `kept`."""

    def __init__(self, peak: int, events: list) -> None:
        self.peak = peak
        self.events = events
        self.num_reads = 0
        self.kept = 0

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
            peak_reserved=10_000 * BLOCK_BYTES + max(self.kept, self.peak * (self.num_reads == 2)),
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
    real = kv_sizing.run_forward
    steps = []

    def run_forward(*step) -> torch.Tensor:
        steps.append((list(step[3]), step[4]))
        return real(*step)

    monkeypatch.setattr(kv_sizing, "run_forward", run_forward)
    return steps


def test_the_largest_step_has_all_rows_with_every_constraint_drafts_and_adapters(
    loaded, monkeypatch
) -> None:
    """Between the two readings, twice: as many tokens as a step may have, a row for each request
    and draft, each with every constraint and an adapter of the highest rank, in each matrix."""
    events: list = []
    steps = spy_on_forward(monkeypatch)

    class SpySampler(SpeculativeSampler):
        def sample(self, logits, batch):
            everything = WIDE | sum(BITS.values()) | MIN_TOKENS | LOGPROBS | TOKEN_RULES
            assert (batch.sampling.needs == everything).all()
            output = super().sample(logits, batch)
            assert all(len(found[0].top) == 20 for found in output.logprobs.values())
            events.append((logits.shape, sum(map(len, batch.sampling.drafts.values()))))
            return output

    monkeypatch.setattr(speculative_sampler, "SpeculativeSampler", SpySampler)
    monkeypatch.setitem(sys.modules, "common.features.grammars", None)  # nothing of it is loaded
    slots = AdapterSlots(loaded.model, 3, 16)
    sizes = []
    for addition in slots.additions:
        assert addition.ranks[1] == [16] * len(addition.names)

        def add(rows, x, y, add=addition.add) -> torch.Tensor:
            sizes.append((len(x), len(rows.order), rows.segments))
            return add(rows, x, y)

        addition.add = add
    speculative = {"method": "draft", "num_spec_tokens": 4}
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=38, speculative=speculative)
    memory = FakeMemory(0, events)
    kv_cache = make(config, loaded, 30, draft=loaded, memory=memory, adapters=slots)
    # 38 tokens: 7 requests of 5 rows, one of 3.
    assert events == ["reset", "read", *[((38, 300), 30)] * 2, "read", "reset"]
    assert steps == [([30, 8], 38)] * 2
    assert sizes == [(38, 38, [(1, 0, 38)])] * len(slots.additions) * 2
    assert kv_cache.num_blocks == 8 * 2 + 1


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
