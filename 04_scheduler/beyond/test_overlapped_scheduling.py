"""Every scheduler of the book, planning a step while the previous one is in flight.

The fake model reads its KV through the tables, and its tokens are seen one step late. So a block
that is freed too early, a token lost with a preemption, a token planned after the last one, or a
double free shows as a wrong token or a broken invariant."""

from __future__ import annotations

import random

import pytest

import test_scheduler_runs as runs
from bounded_loops import as_long_as
from caching_fcfs_scheduler import CachingFCFSScheduler
from delayed_runner import DelayedRunner
from overlap_plugin import OverlapPlugin
from prefill_adder import num_expected_outputs
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, SamplingParams
from scheduler import Scheduler

SCHEDULERS = (Scheduler, PrefillFirstScheduler, CachingFCFSScheduler)


class OverlappedWorld(runs.WorldUnderWay):
    def __init__(self, memory, kind: type = Scheduler, **options) -> None:
        self.plugin = OverlapPlugin()
        super().__init__(memory, kind, **options)
        self.runner = DelayedRunner(self.runner)


class OverlappedMachine(runs.SchedulerMachine):
    world_type = OverlappedWorld


OverlappedMachine.TestCase.settings = runs.SchedulerMachine.TestCase.settings
TestOverlappedMachine = OverlappedMachine.TestCase


@pytest.mark.parametrize(
    ("cache", "kind", "policy", "share"),
    [
        (None, Scheduler, "fcfs", 0.75),
        pytest.param(None, Scheduler, "fcfs", 1, marks=pytest.mark.slow),
        pytest.param(None, Scheduler, "priority", 1, marks=pytest.mark.slow),
        pytest.param(None, PrefillFirstScheduler, "fcfs", 1, marks=pytest.mark.slow),
        pytest.param(None, CachingFCFSScheduler, None, 1, marks=pytest.mark.slow),
        pytest.param("hash", Scheduler, "fcfs", 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests_with_a_step_in_flight(cache, kind, policy, share):
    """Add, schedule, update, preempt, abort, stop, in every order, with up to two steps in flight.
    From every seventh reachable state, every request is run to the end."""
    prompts = [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)]
    num_blocks = {Scheduler: 5, PrefillFirstScheduler: 9, CachingFCFSScheduler: 6}[kind]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 5}
    if policy is not None:
        options |= {"policy": policy, "max_preemptions": 2}
    world = OverlappedWorld(runs.make_memory(cache, num_blocks, 2), kind, **options)
    runs._explore(world, prompts, share)


@pytest.mark.sample
@pytest.mark.parametrize("cache", runs.CACHES)
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_run_has_the_tokens_of_an_uninterrupted_one(seed, kind, cache):
    """Trickling arrivals, every policy, pools of hardly more than one request, forced preemption,
    aborts while a step is in flight."""
    rng = random.Random(f"{seed} {kind} {cache}")
    memory, to_come = runs.random_load(rng, cache, spare_blocks=(0, 1))
    world = OverlappedWorld(memory, kind, **runs.random_options(rng, kind))
    runs.run_at_random(world, rng, to_come, has_aborts=seed % 3 == 0)
    world.run()
    assert world.runner.num_pending > 0 or world.is_forced


# -- case by case


def make_world(
    kind=Scheduler, cache=None, num_blocks=40, block_size=4, world_type=OverlappedWorld, **options
):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 100} | options
    return world_type(runs.make_memory(cache, num_blocks, block_size), kind, **options)


def make_request(name: str = "a", max_tokens: int = 6, stop_token_ids=(), num_prompt: int = 3):
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids
    )
    return Request(name, [(i * i) % runs.VOCAB for i in range(num_prompt)], params)


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_planned_behind_the_last_token_allowed(kind, max_tokens) -> None:
    """Not a slot more than it needs: the last position of its last block is never written."""
    world = make_world(kind, num_blocks=2, block_size=2)
    world.add(make_request(max_tokens=max_tokens, num_prompt=5 - max_tokens))
    plans = []
    for _ in as_long_as(world.scheduler.has_unfinished_requests, 20):
        world.step()
        plans += [plan.num_scheduled_tokens for plan in world.plans]
    assert all(plan == {} for plan in plans[max_tokens:]), plans
    world.run()
    assert world.plugin.num_discarded_tokens == 0
    assert world.scheduler.kv_memory.usage == 0


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_stop_token_shows_one_step_late_and_releases_once(kind) -> None:
    """Traps 31, 34, 40."""
    right = runs.continuation(make_request().prompt_token_ids, 6, runs.VOCAB)
    stop = next(token for i, token in enumerate(right) if i >= 2 and token not in right[:i])
    world = make_world(kind, cache="hash", block_size=1)
    world.add(request := make_request(stop_token_ids=[stop]))
    for _ in as_long_as(lambda: not request.is_finished, 20):
        world.step()
    num_outputs = right.index(stop) + 1
    assert request.output_token_ids == right[:num_outputs]
    assert [list(p.num_scheduled_tokens) for p in world.plans] == [["a"]], "one step too many"
    memory = world.scheduler.kv_memory
    assert memory.num_blocks_in_use == 0, "it has given up its memory already"
    num_cached = memory.cache.num_cached_blocks
    assert num_cached == request.num_tokens - 1, "what it was fed, the stop token not"
    world.schedule()
    assert world.plans[-1].finished_req_ids == {"a"}
    assert [world.update(), world.update()] == [None, None]
    assert world.plugin.num_discarded_tokens == 1
    assert memory.cache.num_cached_blocks == num_cached, "nobody publishes what was discarded"
    world.check()


def test_the_last_token_may_come_to_a_request_that_waits_again() -> None:
    world = make_world()
    world.add(request := make_request(max_tokens=1))
    world.add(other := make_request("b", max_tokens=9))
    world.schedule()
    world.scheduler.preempt(request)
    world.schedule()
    assert list(world.plans[-1].num_scheduled_tokens) == ["b"], "a waits for its token"
    world.update()
    assert request.finish_reason == "length" and "a" not in world.scheduler.requests
    assert len(world.scheduler.waiting) == 0
    world.run()
    assert other.num_output_tokens == 9


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_border_is_published_though_the_next_step_was_planned_before(block_size) -> None:
    """A step that fills a block does not take the fast path, whatever is decided before its end is
    seen."""
    world = make_world(cache="hash", block_size=block_size)
    world.add(request := make_request(max_tokens=9, num_prompt=2 * block_size + 1))
    for _ in as_long_as(lambda: not request.is_finished, 20):
        num_written_slots = request.num_tokens - 1
        if request.output_token_ids:
            num_cached = world.scheduler.kv_memory.cache.num_cached_blocks
            assert num_cached == num_written_slots // block_size, request
        world.step()


def test_a_chunk_leaves_a_token_for_a_decode_with_a_pending_token() -> None:
    from chunk_policy import ChunkedPrefill

    world = make_world(chunk_policy=ChunkedPrefill(), max_num_batched_tokens=8)
    world.add(make_request("a", max_tokens=20))
    world.step()
    world.add(make_request("b", num_prompt=30))
    for _ in range(3):
        world.schedule() if world.may_schedule else world.update()
        assert all("a" in plan.num_scheduled_tokens for plan in world.plans)
    world.run()


def test_no_request_is_retracted_for_a_page_after_the_last_token() -> None:
    """`a` ends where its page does, and its last token is pending while `b` takes the last page."""
    options = {"init_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    world = make_world(PrefillFirstScheduler, num_blocks=4, block_size=2, **options)
    world.add(make_request("a", max_tokens=2, num_prompt=3))
    world.schedule()
    world.add(make_request("b", max_tokens=3, num_prompt=1))
    world.run()
    assert world.scheduler.get_stats().total_preempted == 0


def test_pending_tokens_are_not_expected_once_more() -> None:
    request = make_request(max_tokens=6)
    request.num_output_placeholders = 2
    assert num_expected_outputs(request) == 4
