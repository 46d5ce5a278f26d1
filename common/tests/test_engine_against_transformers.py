"""Whatever the engine is told to do, greedy tokens are those of `transformers`, in float64.

Each case is one seeded random workload: which prompts, how many tokens, when they arrive, who is
aborted and when, which block size, how many run at once, how tight the token budget and the block
pool are. A failing case is one seed: `pytest -k 'workload and 17'`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.requests.tokenizer import Tokenizer
from common.runner.overlap import OverlappedEngineCore
from common.tests.adapter_cases import by_peft, save_adapter
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    checked_engine,
    greedy_params,
    num_replays,
    serve,
    serve_a_crowd,
)
from common.tests.grammar_cases import small_tokenizer
from request import SamplingParams


def draw_config(rng: random.Random, oracle: Oracle) -> EngineConfig:
    """Budgets and pools between "the largest request barely fits" and "all fit at once"."""
    block_size = rng.choice([1, 4, 16, 33])
    longest = max(map(len, oracle.prompts))
    largest = -(-(longest + MAX_TOKENS - 1) // block_size)
    return EngineConfig(
        block_size=block_size,
        num_blocks=1 + rng.choice([largest, largest + 1, 3 * largest, 64 * largest]),
        max_num_seqs=rng.choice([1, 3, 64]),
        max_num_batched_tokens=rng.choice([longest, longest + 1, 2 * longest, 4096]),
        check_invariants=True,
        shuffle_batch=rng.random() < 0.5,
        prefix_cache=rng.choice([None, "hash", "radix"]),
    )


def run_workload(seed: int, oracle: Oracle, loaded) -> None:
    rng = random.Random(seed)
    eos = rng.sample([t for tokens in oracle.continuations for t in tokens], 2)
    loaded = replace(loaded, generation_eos_token_ids=tuple(eos))
    engine = LLMEngine(draw_config(rng, oracle), loaded=loaded)
    crowd = {"num_requests": rng.randint(1, 12), "abort_share": rng.choice([0, 0.15]), "eos": eos}
    outputs = serve_a_crowd(engine, oracle, rng, seed, **crowd)
    completions = [(o, c) for o in outputs for c in o.outputs]
    if not any(completion.finish_reason == "abort" for _, completion in completions):
        # The last token of each is never fed back; what was cached is not computed.
        num_fed = sum(len(o.prompt_token_ids) + len(c.token_ids) - 1 for o, c in completions)
        stats = engine.stats()
        num_computed = num_fed - stats.cached_tokens + stats.recomputed_tokens
        assert stats.scheduled_tokens == num_computed, f"seed {seed}"


@pytest.mark.sample(seed=8)
@pytest.mark.parametrize("seed", range(200))
def test_random_workload_on_a_random_model(seed: int, random_oracle: Oracle, random_loaded) -> None:
    run_workload(seed, random_oracle, random_loaded)


@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_random_workload_on_the_shipped_checkpoint(
    seed: int,
    shipped_oracle: Oracle,
    shipped_loaded,
) -> None:
    run_workload(seed, shipped_oracle, shipped_loaded)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_tokenizers_own_eos_ends_a_text_like_those_of_the_files(
    overlaps: bool, random_oracle: Oracle, random_loaded
) -> None:
    """Trap 81: a chat fine-tune of a base model, whose config.json has the base model's EOS."""
    prompts, own = random_oracle.prompts[:6], random_oracle.continuations[0][4]
    listed = random_oracle.continuations[1][6]
    config = EngineConfig(num_blocks=400, check_invariants=True, overlap_scheduling=overlaps)
    loaded = replace(random_loaded, generation_eos_token_ids=(listed,))
    tokenizer = Tokenizer(small_tokenizer().backend, own)
    engine = LLMEngine(config, loaded=loaded, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for ends, asked in [
        ((own, listed), params),
        ((), replace(params, ignore_eos=True)),
    ]:
        outputs = engine.generate_batch(prompts, asked).values()
        for i, output in enumerate(outputs):
            completion = output.outputs[0]
            assert completion.token_ids == random_oracle.expected(i, MAX_TOKENS, ends)
            is_over = completion.token_ids[-1] in ends
            assert completion.finish_reason == ("stop" if is_over else "length")
            assert completion.stop_reason is None
    (later,) = engine.generate_batch(prompts[:1], replace(params, min_tokens=8)).values()
    assert own not in later.outputs[0].token_ids[:8]


MODES = {
    "eager": dict(enforce_eager=True, overlap_scheduling=False),
    "graphs": dict(overlap_scheduling=False),
    "overlap": dict(overlap_scheduling=True),
    "speculation": dict(speculative={"method": "ngram", "min_ngram": 1, "adaptive": False}),
    "chunks": dict(chunked_prefill=5, prefix_cache=None),
    "adapters": dict(),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_float32_on_the_device(
    mode: str, device: torch.device, random_oracle: Oracle, tmp_path
) -> None:
    """On a GPU, kernels and graphs. (On a CPU, attention in PyTorch and the emulator of graphs.)"""
    path, indices = random_oracle.path, [3, 5, 7]
    prompts = [random_oracle.prompts[i] for i in indices]
    attention = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapters = (
        {"a": save_adapter(path, tmp_path / "a", **attention)} if mode == "adapters" else None
    )
    engine = checked_engine(
        load_model(path, torch.float32, device),
        num_blocks=100,
        max_num_seqs=4,
        max_model_len=100,
        adapters=adapters,
        emulate_graphs=device.type == "cpu" and mode != "eager",
        **MODES[mode],
    )
    serve(engine, random_oracle, indices, MAX_TOKENS)
    stats = engine.stats()
    took_place = {
        "eager": num_replays(engine) == 0,
        "graphs": num_replays(engine) > 0,
        "overlap": isinstance(engine.core, OverlappedEngineCore),
        "speculation": stats.num_drafted_tokens > 0,
        "chunks": stats.num_steps > MAX_TOKENS + 1,
    }
    assert took_place.get(mode, True)
    if adapters is not None:
        expected = by_peft(path, adapters["a"], prompts, 8)
        outputs = engine.generate_batch(prompts, greedy_params(8), adapter=["a"] * 3).values()
        assert [output.outputs[0].token_ids for output in outputs] == expected
