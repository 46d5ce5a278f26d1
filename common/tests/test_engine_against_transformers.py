"""Greedy tokens are those of `transformers`: texts that end, and every mode in float32 on a device.
Random workloads in float64 are rows of `claims.py`."""

from __future__ import annotations

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
)
from common.tests.grammar_cases import small_tokenizer
from request import SamplingParams


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
