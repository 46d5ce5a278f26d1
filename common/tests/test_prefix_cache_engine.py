"""A warm engine says what a cold one says: greedy tokens are those of `transformers`, in float64.

The prompts are families: system prompts, with few-shot parts and questions behind them, so that
they share beginnings of every length, exact multiples of the block size among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cache_checks import cached_prefixes
from common.assembly.assembly import kv_namespace
from common.engine import EngineConfig, LLMEngine
from common.models.loader import load_model
from common.requests.input_processor import seed_of_sample
from common.tests.engine_oracle import Oracle, checked_engine, greedy_params, serve
from common.tests.small_models import CPU, subject
from request import SamplingParams

CACHES = pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
ROWS = [("family", "hash", 16), ("family", "radix", 1), ("family", "radix", 33)]
ROWS += [("turns", "hash", 4), ("windows", "hash", 1)]


@pytest.mark.parametrize(("model", "prefix_cache", "block_size"), ROWS)
def test_a_warm_run_equals_a_cold_one(model, block_size, prefix_cache):
    """Trap 3: of a prompt that is cached whole, 16 or 48 tokens, the last block is computed. All
    can be forgotten between runs."""
    which = subject(model)
    config = dict(block_size=block_size, num_blocks=2500, prefix_cache=prefix_cache)
    engine = checked_engine(which.loaded, **config)
    everyone = range(len(which.oracle.prompts))
    serve(engine, which.oracle, list(everyone), 8)
    engine.reset_stats()
    for output in serve(engine, which.oracle, list(everyone)[::-1], 8):
        num_full = (len(output.prompt_token_ids) - 1) // block_size * block_size
        assert output.num_cached_tokens == num_full, "everything but the last token's block"
    engine.add_request("a", max(which.oracle.prompts, key=len), greedy_params(4))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort_request("a")
    assert engine.stats().kv_blocks_in_use == 0 < engine.stats().kv_blocks_cached
    assert engine.reset_prefix_cache() and engine.stats().kv_blocks_cached == 0


@CACHES
def test_requests_that_arrive_together_compute_a_shared_prefix_once(prefix_cache, oracle, loaded):
    """Trap 2: nobody computes what another request computes in the same step; and of tokens that
    are decoded side by side there is one copy."""
    engine = checked_engine(loaded, block_size=4, num_blocks=500, prefix_cache=prefix_cache)
    outputs = serve(engine, oracle, [4, 4, 4, 4], 4)
    length = len(oracle.prompts[4])
    usable = (length - 1) // 4 * 4
    assert [o.num_cached_tokens for o in outputs] == [0, usable, usable, usable]
    assert engine.stats().scheduled_tokens == length + 3 * (length - usable) + 4 * 3
    assert engine.stats().num_steps == 1 + 4
    assert engine.stats().kv_blocks_cached == (length + 4 - 1) // 4


@CACHES
def test_a_full_warm_pool_hits_what_it_is_about_to_evict(prefix_cache, oracle, loaded):
    """Trap 5: touched before anything is allocated, the hit survives the eviction it causes."""
    needed = -(-(len(oracle.prompts[2]) + 7) // 4)
    engine = checked_engine(loaded, block_size=4, num_blocks=1 + needed, prefix_cache=prefix_cache)
    serve(engine, oracle, [2], 8)
    for _ in range(3):
        (output,) = serve(engine, oracle, [2], 8)
        assert output.num_cached_tokens == 44


@CACHES
def test_published_kv_is_what_its_tokens_give(prefix_cache, oracle, loaded):
    """Every cached block, recomputed from its whole prefix by an engine without a cache."""
    config = EngineConfig(block_size=4, num_blocks=120, prefix_cache=prefix_cache)
    engine = LLMEngine(config, loaded=loaded)
    for indices in ([4, 5, 8], [20, 21, 9], [11, 12, 13, 23]):
        serve(engine, oracle, indices, 9)
    prefixes = list(cached_prefixes(engine.prefix_cache))
    assert len(prefixes) > 30
    config = replace(config, prefix_cache=None)
    for prefix in prefixes[::3]:
        plain = LLMEngine(config, loaded=loaded)
        plain.add_request("a", list(prefix.token_ids), greedy_params(2))
        plain.step()
        block_id = plain.kv_manager.get_block_ids("a")[len(prefix.token_ids) // 4 - 1]
        for name in ("key_cache", "value_cache"):
            mine, theirs = (getattr(each.kv_cache, name) for each in (engine, plain))
            for layer, other in zip(mine, theirs, strict=True):
                found = layer[prefix.block.block_id]
                wanted = other[block_id]
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_kv_of_other_weights_is_not_ours(loaded):
    def namespace(of, num_blocks: int = 10) -> object:
        engine = LLMEngine(EngineConfig(num_blocks=num_blocks), loaded=of)
        return kv_namespace(of, engine.kv_cache)

    ours = namespace(loaded)
    assert namespace(loaded, num_blocks=20) == ours
    others = [load_model(loaded.path, dtype, CPU) for dtype in (torch.float64, torch.float32)]
    with torch.no_grad():
        next(others[0].model.parameters()).add_(1e-9)
    for change in (dict(rms_norm_eps=0.5), dict(query_pre_attn_scalar=7.0)):
        others.append(replace(loaded, config=replace(loaded.config, **change)))
    assert ours not in map(namespace, others)


# -- samples: requests of their own that share their prompt through the cache


def prompt_of(oracle: Oracle, remainder: int) -> list[int]:
    """A prompt whose last block of 4 holds so many tokens; 0: it is full."""
    return next(p for p in oracle.prompts if len(p) > 20 and len(p) % 4 == remainder)


@pytest.mark.sample
@pytest.mark.parametrize("scheduler", ["two_phase", "prefill_first", "fcfs"])
@pytest.mark.parametrize("cache", ["hash", "radix", None])
@pytest.mark.parametrize("remainder", [0, 1, 3])
def test_full_blocks_of_a_prompt_are_scheduled_once_for_all_samples(
    remainder, cache, scheduler, random_oracle, random_loaded
) -> None:
    """But for the block of the last token, whose logits each needs (Trap 3). Without a cache each
    sample computes its own."""
    prompt = prompt_of(random_oracle, remainder)
    config = dict(block_size=4, num_blocks=200, prefix_cache=cache, scheduler=scheduler)
    engine = checked_engine(random_loaded, **config)
    (output,) = engine.generate_batch([prompt], greedy_params(6, 4)).values()
    expected = random_oracle.expected(random_oracle.prompts.index(prompt), 6)
    assert [c.token_ids for c in output.outputs] == [expected] * 4
    num_shared = 0 if cache is None else (len(prompt) - 1) // 4 * 4
    assert engine.stats().cached_tokens == 3 * num_shared
    assert engine.stats().scheduled_tokens == 4 * (len(prompt) + 5) - 3 * num_shared


def test_samples_are_what_their_seeds_give_alone(random_oracle, random_loaded) -> None:
    engine = checked_engine(random_loaded, block_size=4, num_blocks=200)
    prompt = prompt_of(random_oracle, 1)
    several = SamplingParams(n=4, seed=5, max_tokens=8)
    seeds = [seed_of_sample(5, i) for i in range(4)]
    assert seeds[0] == 5 and 6 not in seeds, "the second would be the text of the next seed"
    (output,) = engine.generate_batch([prompt], several).values()
    alone = [replace(several, n=1, seed=seed) for seed in seeds]
    outputs = engine.generate_batch([prompt] * 4, alone).values()
    found = [completion.token_ids for completion in output.outputs]
    assert found == [output.outputs[0].token_ids for output in outputs]
    assert len(set(map(tuple, found))) == 4
