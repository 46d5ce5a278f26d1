"""Chapter 2's scheduler with a cache: look up then size, wait for equals, publish afterwards."""

from __future__ import annotations

import random

import pytest

from block_pool import BlockPool
from bounded_loops import as_long_as
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from kv_memory import UncachedKVCacheManager
from kv_served_world import Engine
from request import Request, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS, SchedulerOutput, StepOutput


def greedy(request_id: str, tokens: list[int], max_tokens: int = 1) -> Request:
    return Request.from_tokens(request_id, tokens, max_tokens)


def make_scheduler(
    make_cache, num_usable: int = 40, block_size: int = 4, **limits: int
) -> CachingFCFSScheduler:
    pool = BlockPool(num_usable + 1)
    cache = make_cache(pool, block_size)
    return CachingFCFSScheduler(CachedKVCacheManager(pool, block_size, cache), **limits)


def step(scheduler: CachingFCFSScheduler, token: int = 7) -> SchedulerOutput:
    plan = scheduler.schedule()
    token_ids = {request_id: [token] for request_id in plan.num_scheduled_tokens}
    scheduler.update_from_output(plan, StepOutput(token_ids))
    scheduler.check_invariants()
    scheduler.kv_memory.check_invariants(scheduler.running.values())
    return plan


def test_work_is_sized_after_the_look_up(make_cache):
    """Trap 4. A prompt of 33 tokens of which 32 are cached costs one of a budget of 40."""
    scheduler = make_scheduler(make_cache, max_num_batched_tokens=40)
    prompt = list(range(100, 133))
    scheduler.add_request(greedy("a", prompt))
    assert step(scheduler).num_scheduled_tokens == {"a": 33}
    scheduler.add_request(greedy("b", prompt))
    scheduler.add_request(greedy("c", [1] * 39))
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"b": 1, "c": 39}
    assert plan.start_positions == [32, 0]
    assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [32, 0]


def test_it_is_looked_up_again_at_every_attempt(make_cache):
    """Trap 4: what is cached while a request waits counts when it is admitted."""
    scheduler = make_scheduler(make_cache, max_num_seqs=1)
    scheduler.add_request(greedy("a", [1] * 9, max_tokens=2))
    scheduler.add_request(greedy("b", [1] * 9))
    assert step(scheduler).num_scheduled_tokens == {"a": 9}
    assert step(scheduler).num_scheduled_tokens == {"a": 1}
    assert step(scheduler).num_scheduled_tokens == {"b": 1}


@pytest.mark.parametrize("num_samples", [2, 4])
def test_samples_of_one_prompt_compute_its_full_blocks_once(make_cache, num_samples):
    """14 tokens in blocks of 4: three full blocks are computed by the first, and the two tokens
    behind them by each."""
    scheduler = make_scheduler(make_cache)
    prompt = list(range(100, 114))
    for index in range(num_samples):
        scheduler.add_request(greedy(f"{index}", prompt, max_tokens=3))
    assert step(scheduler).num_scheduled_tokens == {"0": 14}, "the others wait for its blocks"
    plan = step(scheduler)
    assert plan.num_scheduled_tokens == {"0": 1} | {f"{i}": 2 for i in range(1, num_samples)}
    tables = [scheduler.kv_memory.get_block_ids(f"{i}")[:3] for i in range(num_samples)]
    assert tables == [tables[0]] * num_samples
    for _ in as_long_as(scheduler.has_unfinished_requests, max_rounds=2):
        step(scheduler)
    assert scheduler.kv_memory.num_blocks_in_use == 0


def test_without_a_cache_each_sample_computes_the_whole_prompt():
    manager = UncachedKVCacheManager(BlockPool(41), 4)
    scheduler = CachingFCFSScheduler(manager)
    for index in range(3):
        scheduler.add_request(greedy(f"{index}", [1] * 14))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"0": 14, "1": 14, "2": 14} and plan.block_moves == []


def test_requests_overtake_only_one_that_is_not_ready(make_cache):
    """`b` waits for blocks that `a` computes, so `c` overtakes it; `d` does not fit the budget, and
    `e`, which would, stays after it in the queue."""
    scheduler = make_scheduler(make_cache, max_num_batched_tokens=20)
    for request_id, tokens in (
        ("a", [1] * 9),
        ("b", [1] * 9),
        ("c", [2] * 5),
        ("d", [3] * 9),
        ("e", [4]),
    ):
        scheduler.add_request(greedy(request_id, tokens))
    assert step(scheduler).num_scheduled_tokens == {"a": 9, "c": 5}
    assert step(scheduler).num_scheduled_tokens == {"b": 1, "d": 9, "e": 1}


@pytest.mark.parametrize("max_num_seqs", [3, 2])
def test_a_step_does_not_search_a_long_queue(make_cache, max_num_seqs):
    """Thousands of samples of one prompt wait for the first; `c`, the third, is tried or not."""
    scheduler = make_scheduler(make_cache, max_num_seqs=max_num_seqs)
    for request_id, tokens in (("a", [1] * 9), ("b", [1] * 9), ("c", [2] * 5)):
        scheduler.add_request(greedy(request_id, tokens))
    assert ("c" in step(scheduler).num_scheduled_tokens) == (max_num_seqs == 3)


def test_a_refused_request_keeps_nothing_and_may_wait(make_cache):
    scheduler = make_scheduler(make_cache, num_usable=5)
    scheduler.add_request(greedy("a", [1] * 9, max_tokens=4))  # reserves 12 positions
    scheduler.add_request(greedy("b", [1] * 8 + [2] * 5, max_tokens=4))
    assert step(scheduler).num_scheduled_tokens == {"a": 9}
    in_use = scheduler.kv_memory.num_blocks_in_use
    scheduler.add_request(greedy("c", [3]))
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 5}
    assert in_use == 3 and scheduler.kv_memory.num_blocks_in_use == 5
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 1}, "no block for c"
    assert scheduler.requests["c"].num_cached_tokens == 0


def test_blocks_of_a_failed_step_are_not_published(make_cache):
    """Trap 61. The request ends, and the next one with its prompt computes it again."""
    scheduler = make_scheduler(make_cache)
    scheduler.add_request(greedy("a", [1] * 9))
    plan = scheduler.schedule()
    (result,) = scheduler.update_from_output(plan, StepOutput(errors={"a": NO_FINITE_LOGITS}))
    assert result.finish_reason == "error" and result.finish_detail == NO_FINITE_LOGITS
    assert scheduler.kv_memory.cache.num_cached_blocks == 0
    assert scheduler.kv_memory.num_blocks_in_use == 0
    scheduler.add_request(greedy("b", [1] * 9))
    assert step(scheduler).num_scheduled_tokens == {"b": 9}


def test_a_plan_that_was_aborted_publishes_nothing(make_cache):
    """Trap 15."""
    scheduler = make_scheduler(make_cache)
    scheduler.add_request(greedy("a", [1] * 9))
    plan = scheduler.schedule()
    scheduler.abort_request("a")
    assert scheduler.update_from_output(plan, StepOutput({"a": [7]})) == []
    assert scheduler.kv_memory.cache.num_cached_blocks == 0


def test_the_runner_gets_changed_table_entries(make_cache):
    """Trap 2: `a` and `b` decode into one block; the second to publish takes the first's."""
    scheduler = make_scheduler(make_cache)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    scheduler.add_request(Request("a", [1, 2], params))
    scheduler.add_request(Request("b", [1, 2], params))
    for _ in range(3):
        plan = step(scheduler)
        assert plan.block_moves == []
    plan = step(scheduler)
    (move,) = plan.block_moves
    table = scheduler.kv_memory.get_block_ids("a")
    assert (move.req_id, move.block_index, move.block_id) == ("b", 0, table[0])
    assert scheduler.kv_memory.get_block_ids("b")[0] == table[0]


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
