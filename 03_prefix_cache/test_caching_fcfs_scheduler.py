"""Chapter 2's scheduler with a cache: look up then size, wait for equals, publish afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import UncachedKVCacheManager
from kv_served_world import CachingLog, CachingLoop, Engine
from kv_slots import PREFIX_CACHES, Runner
from step_log import Case, cases_of


def make_loop(make_cache, num_blocks: int = 40, block_size: int = 4, **limits: int) -> CachingLoop:
    pool, runner = BlockPool(num_blocks + 1), Runner(block_size)
    if make_cache is None:
        return CachingLoop(UncachedKVCacheManager(pool, block_size), runner, **limits)
    manager = CachedKVCacheManager(pool, block_size, make_cache(pool, block_size))
    return CachingLoop(manager, runner, **limits)


@pytest.mark.net
@cases_of(Path(__file__).with_name("plans.txt"))
def test_plans(case: Case) -> None:
    options = dict(case.options)
    kinds = {None: None} if options.pop("cache", None) == "none" else PREFIX_CACHES
    for make_cache in kinds.values():
        CachingLog(make_loop(make_cache, **options)).perform(case)


@pytest.mark.net
@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_arrives_is_served_and_nothing_is_left(make_cache, seed):
    rng = random.Random(seed)
    engine = Engine(make_cache, rng)
    for _ in range(rng.randint(6, 12)):
        engine.submit()
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
    engine.serve_all()
    assert engine.num_admitted > 0
