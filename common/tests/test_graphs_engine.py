"""Graphs and compiled code, beyond the array (`equivalence.py`): who wants them, what is said where
they cannot be had, and every mode in float32."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import decode_attention
from common.engine import EngineConfig
from common.engine_config import COMPILE_FROM_PARAMETERS
from common.models.loader import load_model
from common.models.regions import compiled_linear, compiled_regions
from common.requests.tokenizer import Tokenizer
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    checked_engine,
    num_replays,
    paged_runner,
    serve,
)
from common.tests.grammar_cases import small_tokenizer
from common.tests.small_models import CPU, subject
from common.tests.tensor_attention import TensorAttentionBackend
from compiled_attention import HeadMajorKVCache
from paged_attention_triton import TritonAttentionBackend
from request import SamplingParams
from tiered_cache import KVTierConfig

GRAPHS = dict(emulate_graphs=True, max_model_len=100)


def test_what_cannot_be_captured_is_announced_and_served(
    oracle, loaded, monkeypatch, caplog
) -> None:
    def plan(self, metadata, num_heads, key_cache):
        assert metadata.seq_lens.max().item() >= 0

    monkeypatch.setattr(TensorAttentionBackend, "plan", plan)
    with caplog.at_level(logging.WARNING):
        engine = checked_engine(loaded, **GRAPHS)
    assert "decode steps run without graphs: item synchronizes with the device" in caplog.text
    serve(engine, oracle, [0, 3], max_tokens=4)
    assert num_replays(engine) == 0


def test_who_wants_graphs_and_who_compiles() -> None:
    """A small model does not compile by itself, nor does a GPU, nor what has to keep its bits."""
    cuda = torch.device("cuda")
    auto = EngineConfig()
    many = COMPILE_FROM_PARAMETERS
    assert auto.wants_graphs(cuda) and not auto.wants_graphs(CPU)
    assert not EngineConfig(enforce_eager=True).wants_graphs(cuda)
    assert EngineConfig(emulate_graphs=True).wants_graphs(CPU)
    with pytest.raises(ValueError, match=r"emulate_graphs must .*enforce_eager, got True"):
        EngineConfig(emulate_graphs=True, enforce_eager=True)
    assert auto.wants_compiled(many, CPU) and not auto.wants_compiled(many - 1, CPU)
    assert not auto.wants_compiled(many, cuda)
    assert not EngineConfig(compile=False).wants_compiled(many, CPU)
    assert not EngineConfig(batch_invariant=True).wants_compiled(many, CPU)
    assert EngineConfig(compile=True).wants_compiled(1, CPU)


# -- compiled code


@pytest.mark.needs("C++ compiler")
def test_engines_share_kv_whatever_the_order_of_their_memory(
    family_oracle: Oracle, family_loaded, tmp_path
) -> None:
    """What leaves an engine is in the order of the chapters' shapes."""
    for is_compiled in (True, False, True):
        tiers = KVTierConfig(0, 500, tmp_path / "kv")
        config = dict(compile=is_compiled, block_size=4, num_blocks=800, kv_tiers=tiers)
        engine = checked_engine(family_loaded, **config)
        assert isinstance(engine.kv_cache, HeadMajorKVCache) == is_compiled
        outputs = serve(engine, family_oracle, [2, 8], MAX_TOKENS)
        engine.reset_prefix_cache()  # everything is evicted
        engine.close()
    lengths = [len(family_oracle.prompts[i]) for i in (2, 8)]
    assert [o.num_cached_tokens for o in outputs] == [(n - 1) // 4 * 4 for n in lengths]


@pytest.mark.needs("C++ compiler")
def test_another_number_of_threads_compiles_nothing(
    family_oracle: Oracle, family_loaded, monkeypatch
) -> None:
    """A compiler that made code for a number of threads compiled again in each step (Trap 89)."""
    before = torch.get_num_threads()
    engine = checked_engine(family_loaded, compile=True, num_threads=2, num_blocks=100)
    for module in (decode_attention, compiled_regions, compiled_linear):
        monkeypatch.setattr(module, "load_library", lambda *_, **__: pytest.fail("it compiles"))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    try:
        for num_threads in (2, 1, 3):
            torch.set_num_threads(num_threads)
            serve(engine, family_oracle, [2, 8], 5)
    finally:
        torch.set_num_threads(before)


# -- on the device, in float32


@pytest.mark.parametrize(
    "mode",
    [
        dict(enforce_eager=True),
        dict(overlap_scheduling=True),
        dict(speculative={"method": "ngram", "min_ngram": 1, "adaptive": False}),
        dict(chunked_prefill=5, prefix_cache=None),
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_every_mode_in_float32(mode: dict, device: torch.device, random_oracle: Oracle) -> None:
    """On a GPU, kernels and graphs. (On a CPU, attention in PyTorch and the emulator of graphs.)"""
    how = dict(num_blocks=100, max_num_seqs=4, max_model_len=100) | mode
    how["emulate_graphs"] = device.type == "cpu" and "enforce_eager" not in mode
    loaded = load_model(random_oracle.path, torch.float32, device)
    serve(checked_engine(loaded, **how), random_oracle, [3, 5, 7], MAX_TOKENS)


@pytest.mark.parametrize("chunks", [False, 8])
def test_kernels_in_an_engine(chunks: bool | int, device: torch.device) -> None:
    """Chapter 2's compute whole prompts, chapter 6's chunks; layers have windows."""
    oracle = subject("turns").oracle
    how = dict(attention_backend="triton", chunked_prefill=chunks, block_size=4, num_blocks=60)
    engine = checked_engine(load_model(oracle.path, torch.float32, device), max_num_seqs=2, **how)
    serve(engine, oracle, [1, 2], 3)
    assert isinstance(paged_runner(engine).backend, TritonAttentionBackend)


def test_the_tokenizers_own_eos_ends_a_text_like_those_of_the_files(
    random_oracle: Oracle, random_loaded
) -> None:
    """Trap 81: a chat fine-tune of a base model, whose config.json has the base model's EOS."""
    own, listed = random_oracle.continuations[0][4], random_oracle.continuations[1][6]
    loaded = replace(random_loaded, generation_eos_token_ids=(listed,))
    tokenizer = Tokenizer(small_tokenizer().backend, own)
    engine = checked_engine(loaded, tokenizer=tokenizer, num_blocks=400)
    for ends in ((own, listed), ()):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=not ends)
        for i, output in enumerate(
            engine.generate_batch(random_oracle.prompts[:6], params).values()
        ):
            (completion,) = output.outputs
            assert completion.token_ids == random_oracle.expected(i, MAX_TOKENS, ends)
            is_over = completion.token_ids[-1] in ends
            assert completion.finish_reason == ("stop" if is_over else "length")
