"""Graphs, compiled code and every mode in float32: which steps are replayed, who compiles, and what
is said where neither can be had. On a CPU, graphs by the emulator. Random runs in float64 are the
array's (`equivalence.py`)."""

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
from common.runner.graphs import GraphRunner, graph_buckets
from common.runner.overlap import OverlappedEngineCore
from common.tests.adapter_cases import by_peft, save_adapter
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    checked_engine,
    finish,
    greedy_params,
    num_replays,
    paged_runner,
    serve,
)
from common.tests.grammar_cases import small_tokenizer
from common.tests.small_models import CPU, subject
from compiled_attention import HeadMajorKVCache
from paged_attention_triton import TritonAttentionBackend
from request import SamplingParams
from tensor_attention import TensorAttentionBackend
from tiered_cache import KVTierConfig
from window_attention import WindowBackend

GRAPHS = dict(emulate_graphs=True, max_model_len=100)


def test_every_bucket_with_requests_that_come_and_go(oracle, loaded) -> None:
    """And are preempted: each number of rows finds its bucket, and each bucket is replayed."""
    how = dict(overlap_scheduling=True, preempt_every=7, shuffle_batch=True, block_size=4)
    engine = checked_engine(loaded, max_num_seqs=9, **GRAPHS, **how)
    runner, found = paged_runner(engine), set()
    assert isinstance(runner, GraphRunner)
    replay = runner.graphs.replay
    runner.graphs.replay = lambda bucket, *rest: found.add(bucket) or replay(bucket, *rest)
    for i in range(12):
        engine.add_request(str(i), oracle.prompts[i], greedy_params(min(MAX_TOKENS, 3 + 2 * i)))
    for name, output in finish(engine).items():
        i = int(name)
        assert output.outputs[0].token_ids == oracle.expected(i, min(MAX_TOKENS, 3 + 2 * i))
    assert found == set(graph_buckets(9))


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
    """The shipped checkpoint does not compile by itself, nor does a GPU, whose attention is
    kernels; nor what has to keep its bits."""
    cuda, auto, many = torch.device("cuda"), EngineConfig(), COMPILE_FROM_PARAMETERS
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
        tiers = KVTierConfig(0, 500, tmp_path / "kv", write_policy="write_through")
        config = dict(compile=is_compiled, block_size=4, num_blocks=800, kv_tiers=tiers)
        engine = checked_engine(family_loaded, **config)
        assert isinstance(engine.kv_cache, HeadMajorKVCache) == is_compiled
        outputs = serve(engine, family_oracle, [2, 8], MAX_TOKENS)
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


# -- every mode in float32, and texts that end

MODES = {
    "eager": dict(enforce_eager=True, overlap_scheduling=False),
    "graphs": dict(overlap_scheduling=False),
    "overlap": dict(overlap_scheduling=True),
    "speculation": dict(speculative={"method": "ngram", "min_ngram": 1, "adaptive": False}),
    "chunks": dict(chunked_prefill=5, prefix_cache=None),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_in_float32_on_the_device(
    mode: str, device: torch.device, random_oracle: Oracle, tmp_path
) -> None:
    """On a GPU, kernels and graphs. (On a CPU, attention in PyTorch and the emulator of graphs.)"""
    path, indices = random_oracle.path, [3, 5, 7]
    attention = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapter = save_adapter(path, tmp_path / "a", **attention) if mode == "graphs" else None
    how = dict(num_blocks=100, max_num_seqs=4, max_model_len=100) | MODES[mode]
    how |= dict(emulate_graphs=device.type == "cpu" and mode != "eager")
    how |= dict(adapters=adapter and {"a": adapter})
    engine = checked_engine(load_model(path, torch.float32, device), **how)
    serve(engine, random_oracle, indices, MAX_TOKENS)
    took_place = {
        "eager": num_replays(engine) == 0,
        "graphs": num_replays(engine) > 0,
        "overlap": isinstance(engine.core, OverlappedEngineCore),
        "speculation": engine.stats().num_drafted_tokens > 0,
    }
    assert took_place.get(mode, True)
    if adapter is not None:
        prompts = [random_oracle.prompts[i] for i in indices]
        outputs = engine.generate_batch(prompts, greedy_params(8), adapter=["a"] * 3).values()
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == by_peft(path, adapter, prompts, 8)


@pytest.mark.parametrize("chunks", [False, 8])
def test_kernels_in_an_engine(chunks: bool | int, device: torch.device) -> None:
    """Chapter 2's compute whole prompts, chapter 6's chunks; layers have windows."""
    oracle = subject("turns").oracle
    how = dict(attention_backend="triton", chunked_prefill=chunks, block_size=4, num_blocks=60)
    engine = checked_engine(load_model(oracle.path, torch.float32, device), max_num_seqs=2, **how)
    serve(engine, oracle, [1, 2], 3)
    assert isinstance(paged_runner(engine).backend, WindowBackend | TritonAttentionBackend)


def test_the_tokenizers_own_eos_ends_a_text_like_those_of_the_files(
    random_oracle: Oracle, random_loaded
) -> None:
    """Trap 81: a chat fine-tune of a base model, whose config.json has the base model's EOS."""
    prompts, own = random_oracle.prompts[:6], random_oracle.continuations[0][4]
    listed = random_oracle.continuations[1][6]
    loaded = replace(random_loaded, generation_eos_token_ids=(listed,))
    tokenizer = Tokenizer(small_tokenizer().backend, own)
    engine = checked_engine(loaded, tokenizer=tokenizer, num_blocks=400, overlap_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for ends, asked in [((own, listed), params), ((), replace(params, ignore_eos=True))]:
        for i, output in enumerate(engine.generate_batch(prompts, asked).values()):
            completion = output.outputs[0]
            assert completion.token_ids == random_oracle.expected(i, MAX_TOKENS, ends)
            is_over = completion.token_ids[-1] in ends
            assert completion.finish_reason == ("stop" if is_over else "length")
            assert completion.stop_reason is None
