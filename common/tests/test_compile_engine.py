"""`compile`: greedy tokens are `transformers`' with it and without, in every kind of engine."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import cpp_library
import decode_attention
from common.engine import EngineConfig, LLMEngine
from common.engine_config import ATTENTION_BACKENDS, COMPILE_FROM_PARAMETERS
from common.llm import LLM
from common.models.regions import compiled_linear, compiled_regions
from common.models.regions.regions import Regions
from common.tests.engine_oracle import MAX_TOKENS, Oracle, serve
from compiled_attention import HeadMajorKVCache
from paged_attention import PagedKVCache, TorchAttentionBackend
from pool_connector import PoolConnector
from tiered_cache import KVTierConfig

CPU = torch.device("cpu")


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("shared", ["disk", "pool"])
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=str)
def test_engines_share_kv_whatever_the_order_of_their_memory(
    shared, order, family_oracle: Oracle, family_loaded, pool, tmp_path
) -> None:
    """What leaves an engine is in the order of the chapters' shapes."""
    config = EngineConfig(block_size=4, num_blocks=800, check_invariants=True)
    outputs = []
    for name in order:
        if shared == "pool":
            config = replace(config, kv_connector=PoolConnector(pool, str(name)))
        else:
            tiers = KVTierConfig(0, 500, tmp_path / "kv", write_policy="write_through")
            config = replace(config, kv_tiers=tiers)
        engine = LLMEngine(replace(config, compile=name), loaded=family_loaded)
        assert isinstance(engine.kv_cache, HeadMajorKVCache) == name
        outputs = serve(engine, family_oracle, [2, 8], MAX_TOKENS)
        engine.close()
    lengths = [len(family_oracle.prompts[i]) for i in (2, 8)]
    assert [o.num_cached_tokens for o in outputs] == [(n - 1) // 4 * 4 for n in lengths]


# -- when


def test_who_compiles() -> None:
    """The shipped checkpoint never does by itself, nor does a GPU, whose attention is kernels."""
    auto = EngineConfig()
    assert auto.wants_compiled(COMPILE_FROM_PARAMETERS, CPU)
    assert not auto.wants_compiled(COMPILE_FROM_PARAMETERS - 1, CPU)
    assert not auto.wants_compiled(10**10, torch.device("cuda"))
    assert not EngineConfig(compile=False).wants_compiled(10**10, CPU)
    assert EngineConfig(compile=True).wants_compiled(1, CPU)


@pytest.mark.parametrize("compiles", [True, "auto", False])
@pytest.mark.parametrize(
    "backend", ["own", TorchAttentionBackend(), "torch"], ids=["own", "instance", "torch"]
)
def test_who_asks_for_what_is_not_compiled_is_told_once(
    compiles, backend, family_loaded, monkeypatch, caplog
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "own", ATTENTION_BACKENDS["torch"])
    config = EngineConfig(compile=compiles, attention_backend=backend, num_blocks=20)
    LLMEngine(config, loaded=family_loaded).close()
    is_told = compiles is True and backend != "torch"
    assert caplog.text.count("compile=True does not compile attention") == is_told


@pytest.mark.needs("C++ compiler")
def test_another_number_of_threads_compiles_nothing(
    family_oracle: Oracle, family_loaded, monkeypatch
) -> None:
    """A compiler that made code for a number of threads compiled again in each step (Trap 89)."""
    before = torch.get_num_threads()
    config = EngineConfig(compile=True, num_threads=2, num_blocks=100)
    engine = LLMEngine(config, loaded=family_loaded)
    for module in (decode_attention, compiled_regions, compiled_linear):
        monkeypatch.setattr(module, "load_library", never)
    monkeypatch.setattr(torch, "compile", never)
    try:
        for num_threads in (2, 1, 3):
            torch.set_num_threads(num_threads)
            serve(engine, family_oracle, [2, 8], 5)
    finally:
        torch.set_num_threads(before)


def never(*arguments, **options):
    raise AssertionError("it compiles")


def test_the_shipped_checkpoint_is_not_compiled(monkeypatch) -> None:
    for module in (decode_attention, compiled_regions, compiled_linear):
        monkeypatch.setattr(module, "load_library", never)
    for config in ({}, {"compile": False}):
        llm = LLM(num_blocks=8, **config)
        assert type(llm.engine.kv_cache) is PagedKVCache


def test_without_a_compiler_the_engine_says_so_and_serves(
    family_oracle: Oracle, family_loaded, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(cpp_library, "COMPILERS", ())
    with caplog.at_level(logging.WARNING):
        engine = LLMEngine(EngineConfig(compile=True, num_blocks=100), loaded=family_loaded)
    reason = "cannot compile: no C++ compiler"
    assert f"decode attention is not compiled, keys are gathered: {reason}" in caplog.text
    assert f"norms and rotary embedding are not compiled: {reason}" in caplog.text
    assert type(family_loaded.model.regions) is Regions
    assert type(engine.kv_cache) is PagedKVCache
    serve(engine, family_oracle, [0, 4], 5)
