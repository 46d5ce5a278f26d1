"""The work of the measuring steps of a GPU, run here on a CPU with a fake reader of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.assembly.assembly import Limits, make_runner
from common.engine_config import EngineConfig
from common.models.loader import LoadedModel
from common.runner import kv_sizing
from common.runner.kv_sizing import Peers, make_kv_cache
from common.sampling.sampling_rules import BITS, DRAWN, LOGPROBS, MIN_TOKENS, needs_of
from kv_budget import MemoryReading
from paged_attention import PagedKVCache
from scheduler_interface import ModelRunner, RunnerInput
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


class Runner:
    """A runner that writes down the plans and their sampling."""

    def __init__(self, runner: ModelRunner, kv_cache: PagedKVCache, events: list) -> None:
        self.runner = runner
        self.events = events
        events.append(kv_cache.num_blocks)

    def execute(self, plan: RunnerInput):
        handle = self.runner.execute(plan)
        drafts = [len(ids) for ids in plan.scheduled_draft_token_ids.values()]
        self.events.append((list(plan.num_scheduled_tokens.values()), drafts))
        return handle

    def __del__(self) -> None:
        self.events.append("gone")


class FakeMemory:
    """A `MemoryReader` of a GPU on which the steps' activations peak at `peak` bytes, and graphs
    keep `kept`."""

    def __init__(self, events: list, peak: int = 0, kept: int = 0) -> None:
        self.events = events
        self.peak = peak
        self.kept = kept
        self.num_reads = 0

    def reset(self) -> None:
        self.events.append("reset")

    def read(self) -> MemoryReading:
        self.events.append("read")
        self.num_reads += 1
        kept = self.kept * (self.num_reads == 2)
        return MemoryReading(
            total=40_000 * BLOCK_BYTES,
            free=27_000 * BLOCK_BYTES - kept,
            reserved=10_000 * BLOCK_BYTES + kept,
            peak_reserved=10_000 * BLOCK_BYTES + kept + self.peak * (self.num_reads == 2),
        )


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model(TINY)


def make(config: EngineConfig, loaded, max_model_len=4096, memory=None, draft=None, peers=None):
    events = [] if memory is None else memory.events

    def make_trial(kv_cache: PagedKVCache) -> Runner:
        limits = Limits(max_model_len, VOCAB_SIZE, ())
        same = replace(config, num_blocks=kv_cache.num_blocks)
        return Runner(make_runner(same, loaded, draft, limits).runner, kv_cache, events)

    return make_kv_cache(
        config,
        loaded,
        draft=draft,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        make_runner=make_trial,
        peers=peers or Peers(),
        memory=memory,
    )


def test_a_cpu_is_asked_for_its_free_memory(loaded, monkeypatch) -> None:
    monkeypatch.setattr(kv_sizing, "free_memory_bytes", lambda: 2 * 500 * BLOCK_BYTES)
    config = EngineConfig(max_num_seqs=1000)
    assert make(config, loaded).num_blocks == 500
    monkeypatch.setattr(kv_sizing, "free_memory_bytes", lambda: 0)
    with pytest.raises(ValueError, match=r"num_blocks=501 .* on each of 2 ranks, but only 0"):
        make(replace(config, num_blocks=501), loaded, peers=Peers(num_here=2))
    monkeypatch.undo()
    assert make(EngineConfig(max_num_seqs=2), loaded, max_model_len=160).num_blocks == 2 * 10 + 1


def test_the_largest_steps_have_all_tokens_and_rows_with_every_rule_and_drafts(loaded) -> None:
    """Between the two readings: a step of as many tokens as it may have, in as few prompts, and all
    requests sampled; then all requests with as many drafts as they may have."""
    events: list = []
    speculative = {"method": "draft", "num_spec_tokens": 4, "adaptive": False}
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=38, speculative=speculative)
    kv_cache = make(config, loaded, 30, draft=loaded, memory=FakeMemory(events))
    lens = [25, 7, 1, 1, 1, 1, 1, 1]
    steps = [(lens, []), ([5] * 8, [4] * 8), ([], [])]
    assert events == ["reset", "read", 3, *steps, "read", "gone", "reset"]
    assert kv_cache.num_blocks == 8 * 2 + 1
    everything = DRAWN | sum(BITS.values()) | MIN_TOKENS | LOGPROBS
    assert needs_of(kv_sizing.largest_params(VOCAB_SIZE)) == everything


def test_the_peak_of_the_largest_steps_is_not_given_to_kv_and_neither_are_graphs(loaded) -> None:
    """The runner that is measured exists while memory is read, with its graphs, and not later."""
    events: list = []
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=160)
    memory = FakeMemory(events, peak=7 * BLOCK_BYTES, kept=5 * BLOCK_BYTES)
    kv_cache = make(config, loaded, memory=memory)
    # 90 % of 40,000; 10,000 without the trial's 1 block and null block; 3,000 of others.
    assert kv_cache.num_blocks == 36_000 - (10_000 - 2) - 7 - 5 - 3_000
    assert events[-3:] == ["read", "gone", "reset"]
    events.clear()
    make(replace(config, num_blocks=50), loaded, memory=memory)
    assert events == []  # nothing is measured
    half = replace(config, gpu_memory_utilization=0.5)
    kv_cache = make(half, loaded, memory=FakeMemory([], peak=4000 * BLOCK_BYTES))
    assert kv_cache.num_blocks == 20_000 - (10_000 - 2) - 4000 - 3_000
