"""A warm engine says what a cold one says: greedy tokens are those of `transformers`, in float64,
whatever prefixes were cached, evicted, salted, shared, aborted or computed side by side.

The prompts are families: system prompts, with few-shot parts and questions behind them, so that
they share beginnings of every length, exact multiples of the block size among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bounded_loops import as_long_as
from common.assembly.assembly import kv_namespace
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.tests.engine_oracle import (
    MAX_TOKENS,
    checked_engine,
    greedy_params,
    paged_runner,
    serve,
)

BLOCK_SIZES = (1, 4, 16, 33)
CACHES = ("hash", "radix")


@pytest.mark.sample
@pytest.mark.parametrize("prefix_cache", CACHES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_warm_run_equals_a_cold_one(block_size, prefix_cache, oracle, loaded):
    """Trap 3: of a prompt that is cached whole, 16 or 48 tokens, the last block is computed."""
    engine = checked_engine(
        loaded, block_size=block_size, num_blocks=2500, prefix_cache=prefix_cache
    )
    everyone = list(range(len(oracle.prompts)))
    serve(engine, oracle, everyone, MAX_TOKENS)
    engine.reset_stats()
    for output in serve(engine, oracle, everyone[::-1], MAX_TOKENS):
        num_full = (len(output.prompt_token_ids) - 1) // block_size * block_size
        assert output.num_cached_tokens == num_full, "everything but the last token's block"
    stats = engine.stats()
    assert stats.cached_tokens == sum(
        (len(p) - 1) // block_size * block_size for p in oracle.prompts
    )
    assert stats.kv_blocks_in_use == 0 and stats.kv_blocks_cached > 0


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_requests_that_arrive_together_compute_a_shared_prefix_once(prefix_cache, oracle, loaded):
    """Trap 2: nobody computes what another request computes in the same step."""
    engine = checked_engine(loaded, block_size=4, num_blocks=500, prefix_cache=prefix_cache)
    outputs = serve(engine, oracle, [4, 4, 4, 4], 4)
    length = len(oracle.prompts[4])
    usable = (length - 1) // 4 * 4
    assert [o.num_cached_tokens for o in outputs] == [0, usable, usable, usable]
    assert engine.stats().scheduled_tokens == length + 3 * (length - usable) + 4 * 3
    assert engine.stats().num_steps == 1 + 4


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_equal_requests_share_what_they_generate(prefix_cache, oracle, loaded):
    """Two that decode the same tokens side by side keep one copy: the later one's table changes to
    the cache's block, and the runner is told."""
    engine = checked_engine(loaded, block_size=4, num_blocks=500, prefix_cache=prefix_cache)
    serve(engine, oracle, [7, 7, 7], MAX_TOKENS)
    num_tokens = len(oracle.prompts[7]) + MAX_TOKENS - 1
    assert engine.stats().kv_blocks_cached == num_tokens // 4


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_a_full_warm_pool_hits_what_it_is_about_to_evict(prefix_cache, oracle, loaded):
    """Trap 5: touched before anything is allocated, the hit survives the eviction it causes."""
    needed = -(-(len(oracle.prompts[2]) + 7) // 4)
    engine = checked_engine(loaded, block_size=4, num_blocks=1 + needed, prefix_cache=prefix_cache)
    serve(engine, oracle, [2], 8)
    for _ in range(3):
        (output,) = serve(engine, oracle, [2], 8)
        assert output.num_cached_tokens == 44


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_published_kv_is_what_its_tokens_give(prefix_cache, oracle, loaded):
    """Every cached block, recomputed from its whole prefix by an engine without a cache."""
    config = EngineConfig(block_size=4, num_blocks=120, prefix_cache=prefix_cache)
    engine = LLMEngine(config, loaded=loaded)
    for indices in ([4, 5, 8], [20, 21, 9], [11, 12, 13, 23]):
        serve(engine, oracle, indices, 9)
    prefixes = list(engine.prefix_cache.cached_prefixes())
    assert len(prefixes) > 30
    for prefix in prefixes:
        plain = LLMEngine(
            EngineConfig(block_size=4, num_blocks=40, prefix_cache=None), loaded=loaded
        )
        plain.add_request("a", list(prefix.token_ids), greedy_params(2))
        plain.step()
        block_id = plain.kv_manager.get_block_ids("a")[len(prefix.token_ids) // 4 - 1]
        for mine, theirs in (
            (engine.kv_cache.key_cache, plain.kv_cache.key_cache),
            (engine.kv_cache.value_cache, plain.kv_cache.value_cache),
        ):
            for layer, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(
                    layer[prefix.block.block_id], other[block_id], rtol=0, atol=1e-12
                )


@pytest.mark.parametrize("prefix_cache", CACHES)
def test_a_step_that_fails_publishes_nothing(prefix_cache, oracle, loaded):
    engine = checked_engine(loaded, block_size=4, num_blocks=200, prefix_cache=prefix_cache)
    forward = paged_runner(engine).forward

    def fail(batch):
        forward(batch)
        raise MemoryError("made up")

    paged_runner(engine).forward = fail
    engine.add_request("a", oracle.prompts[4], greedy_params(4))
    with pytest.raises(MemoryError):
        engine.step()
    paged_runner(engine).forward = forward
    assert engine.stats().kv_blocks_cached == 0
    (output,) = serve(engine, oracle, [4], 4)
    assert output.num_cached_tokens == 0


def test_the_cache_can_be_forgotten_between_runs_only(oracle, loaded):
    engine = LLMEngine(EngineConfig(block_size=4, num_blocks=200), loaded=loaded)
    serve(engine, oracle, [4], 4)
    engine.add_request("a", oracle.prompts[4], greedy_params(4))
    engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.stats().kv_blocks_cached > 0
    for _ in as_long_as(engine.has_unfinished_requests):
        engine.step()
    assert engine.reset_prefix_cache()
    assert engine.stats().kv_blocks_cached == 0


def test_kv_of_other_weights_is_not_ours(loaded):
    engine = LLMEngine(EngineConfig(num_blocks=10), loaded=loaded)
    again = LLMEngine(EngineConfig(num_blocks=20), loaded=loaded)
    assert kv_namespace(loaded, engine.kv_cache) == kv_namespace(loaded, again.kv_cache)
    other = load_model(loaded.path, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        next(other.model.parameters()).add_(1e-9)
    assert kv_namespace(other, engine.kv_cache) != kv_namespace(loaded, engine.kv_cache)
    other_eps = replace(loaded, config=replace(loaded.config, rms_norm_eps=0.5))
    assert kv_namespace(other_eps, engine.kv_cache) != kv_namespace(loaded, engine.kv_cache)
    other_scale = replace(loaded, config=replace(loaded.config, query_pre_attn_scalar=7.0))
    assert kv_namespace(other_scale, engine.kv_cache) != kv_namespace(loaded, engine.kv_cache)
    half = load_model(loaded.path, torch.float32, torch.device("cpu"))
    other_dtype = LLMEngine(EngineConfig(num_blocks=10), loaded=half)
    assert kv_namespace(half, other_dtype.kv_cache) != kv_namespace(loaded, engine.kv_cache)
