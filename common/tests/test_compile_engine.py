"""`compile`: greedy tokens are `transformers`' with it and without, in every kind of engine.

Compiling takes seconds, so most tests put the plain `decode_attention` in its place: the same
backend, memory and plans, and the specification of what is compiled. Then all decodes are for it,
however few keys they have."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import compiled_attention
import decode_attention as decode_module
from common.engine import EngineConfig, LLMEngine
from common.engine_config import COMPILE_FROM_PARAMETERS
from common.kernels import compiled_regions
from common.kernels.compiled_regions import norm_and_rotate_region, rms_norm_region
from common.kernels.regions import Regions
from common.llm import LLM
from common.tests.engine_oracle import MAX_TOKENS, Oracle, serve
from common.tests.equivalence import make_config, serve_combination, subject
from common.tests.equivalence_axes import Combination
from compiled_attention import CompiledAttentionBackend, HeadMajorKVCache
from decode_attention import decode_attention
from paged_attention import PagedKVCache
from pool_connector import PoolConnector
from test_decode_attention import needs_compiler
from tiered_cache import KVTierConfig

CPU = torch.device("cpu")
CHUNKS = "two_phase chunked_prefill=3 prefix_cache=hash block_size=3 preempt_every=5"
COMBINATIONS = [
    CHUNKS,
    "two_phase chunked_prefill=False prefix_cache=radix block_size=16 preempt_every=2",
    "two_phase chunked_prefill=True speculative=ngram prefix_cache=hash block_size=33",
    "two_phase chunked_prefill=16 speculative=draft block_size=1 pool=just",
    "prefill_first chunked_prefill=16 mixing=True prefix_cache=hash preempt_every=3",
    "fcfs chunked_prefill=False block_size=3",
    "two_phase chunked_prefill=3 block_size=3 preempt_every=3 adapters=mixed grammars=mixed",
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decodes of each call of what is, or is not, compiled; whoever makes it."""
    numbers: list[int] = []
    real = CompiledAttentionBackend.__init__

    def spy(backend, decode, *arguments) -> None:
        def counted(query, *rest):
            numbers.append(len(query))
            return decode(query, *rest)

        real(backend, counted, *arguments)

    monkeypatch.setattr(CompiledAttentionBackend, "__init__", spy)
    monkeypatch.setattr(compiled_attention, "MIN_KEY_ELEMENTS", 0)
    return numbers


@pytest.fixture
def plain(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is compiled; all that would be takes part."""
    regions = Regions(rms_norm_region, norm_and_rotate_region)
    monkeypatch.setattr(compiled_regions, "compile_regions", lambda model: regions)
    monkeypatch.setattr(
        compiled_attention, "compile_decode_attention", lambda *arguments: decode_attention
    )
    return calls


def serve_compiled(text: str) -> None:
    combination = Combination.parse([f"scheduler={text.split()[0]}", *text.split()[1:]])
    which = subject("random")
    config = replace(make_config(combination), compile=True)
    tokenizer = which.tokenizer if combination.as_dict()["grammars"] else None
    engine = LLMEngine(config, loaded=which.loaded, draft=which.draft, tokenizer=tokenizer)
    assert isinstance(engine.kv_cache, HeadMajorKVCache)
    serve_combination(combination, engine)


@pytest.mark.parametrize("text", COMBINATIONS)
def test_every_token_is_right(text: str, plain: list[int]) -> None:
    serve_compiled(text)
    assert max(plain) > 1


@needs_compiler
@pytest.mark.parametrize(
    "text", [CHUNKS, *(pytest.param(t, marks=pytest.mark.slow) for t in COMBINATIONS[1:])]
)
def test_every_token_is_right_compiled(text: str, calls: list[int]) -> None:
    """The one test outside of `-m slow` that compiles."""
    serve_compiled(text)
    assert max(calls) > 1


@pytest.mark.parametrize("shared", ["disk", "pool"])
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=str)
def test_engines_share_kv_whatever_the_order_of_their_memory(
    shared, order, family_oracle: Oracle, family_loaded, pool, tmp_path, plain
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


def test_compiled_code_is_called_with_its_number_of_threads_only(
    family_oracle: Oracle, family_loaded, monkeypatch
) -> None:
    """With another one the compiler compiled again in each step, and the ninth raised (Trap 89)."""
    numbers: set[int] = set()

    def compile_nothing(function, **options):
        def compiled(*arguments):
            numbers.add(torch.get_num_threads())
            return function(*arguments)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(compiled_attention, "MIN_KEY_ELEMENTS", 0)
    before = torch.get_num_threads()
    config = EngineConfig(compile=True, num_threads=2, num_blocks=100)
    engine = LLMEngine(config, loaded=family_loaded)
    try:
        for num_threads in (2, 1, 2):
            torch.set_num_threads(num_threads)
            numbers.clear()
            serve(engine, family_oracle, [2, 8], 5)
            assert numbers == ({2} if num_threads == 2 else set())
    finally:
        torch.set_num_threads(before)


def test_the_shipped_checkpoint_is_not_compiled(monkeypatch) -> None:
    def never(*arguments):
        raise AssertionError("it compiles")

    monkeypatch.setattr(compiled_attention, "compile_decode_attention", never)
    monkeypatch.setattr(compiled_regions, "compile_regions", never)
    for config in ({}, {"compile": False}):
        llm = LLM(num_blocks=8, **config)
        assert type(llm.engine.kv_cache) is PagedKVCache


def test_without_a_compiler_the_engine_says_so_and_serves(
    family_oracle: Oracle, family_loaded, monkeypatch, caplog
) -> None:
    def fail(*arguments):
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(decode_module, "_first_call", fail)
    monkeypatch.setattr(compiled_regions, "_first_call", fail)
    with caplog.at_level(logging.WARNING):
        engine = LLMEngine(EngineConfig(compile=True, num_blocks=100), loaded=family_loaded)
    for what in ("decode attention", "norms"):
        assert f"compiling {what}" in caplog.text, "whoever waits knows for what"
    assert "keys are gathered: RuntimeError: no C++ compiler" in caplog.text
    assert "norms and rotary embedding are not compiled: RuntimeError" in caplog.text
    assert "more" not in caplog.text
    assert family_loaded.model.regions == Regions()
    assert type(engine.kv_cache) is PagedKVCache
    serve(engine, family_oracle, [0, 4], 5)
