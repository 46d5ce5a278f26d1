"""Every scheduler of the book with several steps in flight, in stages that run at different times.

The fake model reads its KV through the tables, in each stage at another time. So a block that is
freed too early, a token lost with a preemption, a message that comes too early, or a double free
shows as a wrong token or a broken invariant."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

import test_overlapped_scheduling as overlapped
import test_scheduler_runs as runs
from caching_fcfs_scheduler import CachingFCFSScheduler
from fake_model import FakeModelRunner
from pipeline_plugin import PipelinePlugin
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput
from scheduler_steps import preempting
from staged_runner import StagedRunner
from unchunked import ChunkToBudget

SCHEDULERS = overlapped.SCHEDULERS


class PipelinedWorld(runs.WorldUnderWay):
    def __init__(
        self,
        memory,
        kind: type = Scheduler,
        num_stages: int = 2,
        num_in_flight: int = 3,
        num_micro_batches: int | None = None,
        **options,
    ) -> None:
        if num_micro_batches is None:
            num_micro_batches = num_stages
        self.plugin = PipelinePlugin(num_micro_batches)
        self.num_in_flight = num_in_flight
        super().__init__(memory, kind, **options)
        size = memory.block_size
        self.runner = StagedRunner(lambda: FakeModelRunner(size, runs.VOCAB), num_stages)

    def schedule(self) -> None:
        older = self.plans
        super().schedule()
        newest = self.plans[-1]
        assert 0 not in newest.num_scheduled_tokens.values()
        for request in {r for plan in older for r in plan.scheduled_requests}:
            if request in newest.scheduled_requests:
                assert request.num_output_placeholders in (0, 1), "it is behind by known tokens"

    def advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        while self.may_schedule and (not self.in_flight or self.plugin.has_work):
            self.schedule()
            if self.plans[-1].is_empty:
                break
        meanwhile()
        self.update()


def at_most_one_step_samples(world: PipelinedWorld) -> None:
    """The same check without the scheduler's state: by the tokens that the plans compute."""
    counts = Counter(
        id(request)
        for plan in world.plans
        for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True)
        if start + plan.num_scheduled_tokens[request.request_id] >= request.num_tokens
        and not request.is_finished
    )
    assert max(counts.values(), default=0) <= 1


class PipelinedMachine(runs.SchedulerMachine):
    world_type = PipelinedWorld

    @initialize(**runs.SMALL_WORLDS, num_stages=st.sampled_from([2, 3]))
    def start(self, **options):
        super().start(**options)


PipelinedMachine.TestCase.settings = runs.SchedulerMachine.TestCase.settings
TestPipelinedMachine = PipelinedMachine.TestCase

TWO = [([0, 1, 1], 2, 1), ([0, 1, 2], 1, 0)]
THREE = [*TWO, ([0, 1], 2, 1)]
LONGER = [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)]


@pytest.mark.parametrize(
    ("kind", "policy", "cache", "num_tokens", "num_in_flight", "prompts", "share"),
    [
        (Scheduler, "fcfs", None, 5, 2, THREE, 0.8),
        *(
            pytest.param(*parameters, 1, marks=pytest.mark.slow)
            for parameters in [
                (Scheduler, "fcfs", None, 5, 2, THREE),
                (Scheduler, "fcfs", None, 2, 3, TWO),  # prompts in two chunks
                (PrefillFirstScheduler, "fcfs", None, 5, 2, THREE),
                (CachingFCFSScheduler, None, None, 5, 3, THREE),
                (Scheduler, "fcfs", None, 5, 3, LONGER),
                (Scheduler, "priority", None, 5, 3, THREE),
                (Scheduler, "priority", None, 2, 3, TWO),
                (Scheduler, "fcfs", "hash", 5, 3, THREE),
                (PrefillFirstScheduler, "fcfs", None, 5, 3, THREE),
                (PrefillFirstScheduler, "fcfs", None, 2, 3, TWO),
                (CachingFCFSScheduler, None, None, 5, 3, LONGER),
            ]
        ),
    ],
)
def test_every_interleaving_of_requests_with_several_steps_in_flight(
    kind, policy, cache, num_tokens, num_in_flight, prompts, share
):
    """Add, schedule, update, preempt, abort, stop, in every order, in two stages, the second as
    late as possible. From every seventh reachable state, every request is run to the end."""
    num_blocks = {Scheduler: 5, PrefillFirstScheduler: 9, CachingFCFSScheduler: 6}[kind]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": num_tokens}
    if policy is not None:
        options |= {"policy": policy, "max_preemptions": 2, "chunk_policy": ChunkToBudget()}
    memory = runs.make_memory(cache, num_blocks, 2)
    world = PipelinedWorld(memory, kind, num_in_flight=num_in_flight, **options)
    runs._explore(world, prompts, share)


@pytest.mark.sample
@pytest.mark.parametrize("cache", runs.CACHES)
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_run_says_what_an_uninterrupted_one_says(seed, kind, cache):
    """Trap 51. Trickling arrivals, every policy, chunks, pools of hardly more than one request,
    forced preemption, aborts while steps are in flight, one to four stages."""
    rng = random.Random(f"{seed} {kind} {cache}")
    memory, to_come = runs.random_load(rng, cache, spare_blocks=(0, 1))
    options = runs.random_options(rng, kind)
    if kind is CachingFCFSScheduler:
        options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], 16)
    elif rng.random() < 0.5:
        options |= {
            "chunk_policy": ChunkToBudget(),
            "max_num_batched_tokens": rng.choice([3, 5, 9]),
        }
    num_stages = rng.randint(1, 4)
    world = PipelinedWorld(memory, kind, num_stages, num_stages + rng.randint(0, 1), **options)
    world.check = lambda: at_most_one_step_samples(world) or runs.World.check(world)
    runs.run_at_random(world, rng, to_come, has_aborts=seed % 3 == 0)
    world.run()


# -- case by case


make_world = partial(overlapped.make_world, world_type=PipelinedWorld)
make_request = overlapped.make_request


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_request_in_flight_is_not_planned_and_others_are(kind) -> None:
    world = make_world(kind)
    world.add(request := make_request())
    world.schedule()
    assert (request.num_computed_tokens, request.num_output_placeholders) == (3, 1)
    assert not world.plugin.has_work
    world.add(make_request("b"))
    assert world.plugin.has_work
    world.schedule()
    assert [list(plan.num_scheduled_tokens) for plan in world.plans] == [["a"], ["b"]]
    world.update()
    assert request.num_output_placeholders == 0 and request.num_tokens == 4
    world.schedule()
    assert list(world.plans[-1].num_scheduled_tokens) == ["a"]
    world.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(("num_requests", "num_stages"), [(8, 2), (7, 2), (7, 3), (3, 4), (8, 1)])
def test_decodes_are_split_evenly_and_take_turns(kind, num_requests, num_stages) -> None:
    world = make_world(kind, num_stages=num_stages, num_blocks=200)
    world.num_in_flight = num_stages
    for i in range(num_requests):
        world.add(make_request(f"r{i}", max_tokens=40))
    world.advance()
    share, planned = -(-num_requests // num_stages), []
    for _ in range(30):
        while world.may_schedule and world.plugin.has_work:
            world.schedule()
            planned.append(list(world.plans[-1].num_scheduled_tokens))
        world.update()
    assert max(map(len, planned)) == share
    for first in range(len(planned) - num_stages + 1):
        names = [name for plan in planned[first : first + num_stages] for name in plan]
        assert len(names) >= num_requests, (first, planned)
        assert len(set(names)) == num_requests, "everybody, in so many plans in a row"
    world.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_no_request_is_overtaken_by_one_that_was_ready_later(kind) -> None:
    """One plan at a time: who was admitted first would always be first."""
    world = make_world(kind, num_stages=3, num_blocks=200)
    world.num_in_flight = 1
    for i in range(6):
        world.add(make_request(f"r{i}", max_tokens=30))
    world.advance()
    turns = []
    for _ in range(9):
        world.schedule()
        turns.append(sorted(world.plans[-1].num_scheduled_tokens))
        world.update()
    assert turns == 3 * [["r0", "r1"], ["r2", "r3"], ["r4", "r5"]]
    world.run()


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler])
def test_chunks_of_one_prompt_follow_each_other(kind) -> None:
    options = {"chunk_policy": ChunkToBudget()}
    if kind is PrefillFirstScheduler:
        options = {"chunked_prefill_size": 4}
    world = make_world(kind, max_num_batched_tokens=4, **options)
    world.add(request := make_request(num_prompt=11, max_tokens=2))
    while world.may_schedule:
        world.schedule()
    assert [plan.start_positions for plan in world.plans] == [[0], [4], [8]]
    assert request.num_output_placeholders == 1, "the last one samples"
    world.update()
    world.update()
    assert request.num_output_placeholders == 1 and not world.plugin.has_work
    world.run()


class TakesBack(Scheduler):
    """Roll back the last computed position, as chapter 5's scheduler does after a rejected
    draft."""

    def append_sampled_tokens(self, request, start, end, output):
        result = super().append_sampled_tokens(request, start, end, output)
        if not request.is_finished:
            self.rollback_computed_tokens(request, 1)
        return result


def test_rolled_back_positions_of_a_preempted_request_are_not_counted_as_lost() -> None:
    """A preempted request has no KV; two of the three positions that it had computed count as
    lost."""
    world = make_world(TakesBack, max_num_batched_tokens=3)
    world.add(request := make_request(max_tokens=3))
    world.schedule()
    with preempting(world.scheduler):
        world.schedule()
    world.update()
    assert request.num_computed_tokens == 0
    world.update()
    world.schedule()
    assert world.scheduler.get_stats().total_recomputed_tokens == 2


def test_a_step_in_flight_does_not_publish_the_new_block_of_a_preempted_request() -> None:
    """A chunk of `a` is in flight when `a` is preempted. If `a` ran again immediately, the end of
    that step would publish its new block before it is written."""
    world = make_world(cache="hash", max_num_batched_tokens=4, chunk_policy=ChunkToBudget())
    world.num_in_flight = 9
    world.add(request := make_request(num_prompt=12))
    world.schedule()
    world.schedule()
    world.scheduler.preempt(request)
    world.schedule()
    assert world.plans[-1].is_empty
    world.update()
    world.update()
    assert world.scheduler.kv_memory.cache.num_cached_blocks == 0
    world.schedule()
    assert world.plans[-1].start_positions == [0]
    world.run()


def test_a_chunk_leaves_budget_for_the_decodes_of_its_own_plan_only() -> None:
    """Eight requests decode after a long prompt, four of them in the other plan."""
    from chunk_policy import ChunkedPrefill

    policy = ChunkedPrefill(long_prefill_token_threshold=4)
    world = make_world(chunk_policy=policy, max_num_batched_tokens=10, max_num_seqs=9)
    world.num_in_flight = 2
    world.add(make_request("long", num_prompt=60))
    for i in range(8):
        world.add(make_request(f"r{i}", max_tokens=30, num_prompt=1))
    for _ in range(4):
        world.advance()
    for _ in range(4):
        world.schedule()
        share = dict(world.plans[-1].num_scheduled_tokens)
        assert (share.pop("long"), len(share)) == (4, 4)
        world.update()
    world.run()


def test_num_micro_batches_is_checked() -> None:
    with pytest.raises(ValueError, match=r"num_micro_batches must be .*>= 1, got 0"):
        make_world(num_micro_batches=0, num_stages=0)


# -- with a step in flight, overlapped or in a pipeline

WORLDS = (overlapped.OverlappedWorld, PipelinedWorld)


@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler])
@pytest.mark.parametrize("world_type", WORLDS)
def test_a_token_in_flight_is_kept_if_its_request_is_preempted(world_type, kind) -> None:
    world = make_world(kind, world_type=world_type)
    world.add(request := make_request())
    world.schedule()
    with preempting(world.scheduler):
        world.schedule()
    assert (request.num_computed_tokens, request.num_output_placeholders) == (0, 1)
    assert request.status == RequestStatus.PREEMPTED
    if world.may_schedule:
        world.schedule()
        assert world.plans[-1].is_empty, "it waits for its token"
    world.update()
    assert (request.num_tokens, request.num_output_placeholders) == (4, 0)
    assert world.scheduler.kv_memory.num_blocks_in_use == 0
    world.schedule()
    resumed = world.plans[-1].scheduled_cached_reqs
    assert resumed.new_token_ids == [request.all_token_ids] and resumed.resumed_req_ids == {"a"}
    world.run()


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("world_type", WORLDS)
def test_a_request_aborted_in_flight_gets_no_token_and_can_be_added_again(world_type, kind) -> None:
    world = make_world(kind, world_type=world_type)
    world.add(request := make_request())
    world.schedule()
    world.scheduler.abort_request("a")
    assert world.scheduler.kv_memory.num_blocks_in_use == 0
    world.add(again := make_request(max_tokens=3))
    world.schedule()
    assert [list(plan.num_scheduled_tokens) for plan in world.plans] == [["a"], ["a"]]
    world.check()
    world.run()
    assert request.output_token_ids == [] and request.finish_reason == "abort"
    assert again.output_token_ids == runs.continuation(again.prompt_token_ids, 3, runs.VOCAB)
    assert world.num_discarded_tokens == 3


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("world_type", WORLDS)
def test_plans_that_failed_leave_nothing_pending(world_type, kind) -> None:
    """Running requests are aborted, as the engine does it; preempted ones are recomputed."""
    world = make_world(kind, world_type=world_type)
    world.add(request := make_request())
    world.add(other := make_request("b", max_tokens=1))  # and its only token is pending
    world.schedule()
    if kind is not CachingFCFSScheduler:
        with preempting(world.scheduler):
            world.schedule()
    world.lose_plans()
    assert request.num_output_placeholders == other.num_output_placeholders == 0
    for request_id in list(world.scheduler.running):
        world.scheduler.abort_request(request_id)
    world.run()
    world.add(make_request("c"))
    world.run()


def test_a_step_of_another_request_of_the_same_name_keeps_nothing_back() -> None:
    """Trap 82: the first one has ended."""
    plugin, ended, preempted = PipelinePlugin(2), *(Request.from_tokens("a", [1]) for _ in range(2))
    plan = SchedulerOutput()
    plan.scheduled_requests, plan.num_scheduled_tokens = [ended], {"a": 1}
    plugin.on_plan(plan)
    ended.num_output_placeholders = 0
    ended.num_preemptions = preempted.num_preemptions = 1
    assert plugin.can_start(preempted) and not plugin.can_start(ended)
