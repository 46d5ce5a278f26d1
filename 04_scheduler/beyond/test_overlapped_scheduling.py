"""Every scheduler of the book with steps in flight: planned one step ahead, or in a pipeline.

The fake model reads its KV through the tables, and its tokens are seen late. So a block that is
freed too early, a token lost with a preemption, a token planned after the last one, a message that
comes too early, or a double free shows as a wrong token or a broken invariant."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

import test_scheduler_runs as runs
from bounded_loops import as_long_as
from caching_fcfs_scheduler import CachingFCFSScheduler
from fake_model import FakeModelRunner
from overlap_plugin import OverlapPlugin
from pipeline_plugin import PipelinePlugin
from prefill_adder import num_expected_outputs
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import PENDING, FinishedStep, SchedulerOutput, StepOutput
from scheduler_steps import ChunksOf
from unchunked import ChunkToBudget


class DelayedRunner:
    """Withholds the tokens of a step, as a device does. Later plans refer to them by `PENDING`."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self.runner = runner
        self.state = runner.state
        self._sampled: dict[str, list[int]] = {}  # by the last step

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        cached = plan.scheduled_cached_reqs
        new_token_ids = []
        for req_id, tokens in zip(cached.req_ids, cached.new_token_ids, strict=True):
            assert PENDING not in tokens[:-1], f"{req_id!r}: only the last token can be unknown"
            if tokens and tokens[-1] == PENDING:
                tokens = [*tokens[:-1], *self._sampled[req_id]]
            new_token_ids.append(tokens)
        known = replace(cached, new_token_ids=new_token_ids, pending_req_ids=[])
        step = self.runner.execute(replace(plan, scheduled_cached_reqs=known))
        self._sampled = {req_id: [*tokens] for req_id, tokens in step.wait().token_ids.items()}
        return step


class StagedRunner:
    """Each stage is a whole model with its own KV memory. The first one computes a plan at once,
    stage s when s more have begun or a caller waits, which is as late as possible. All stages must
    return the same tokens."""

    def __init__(self, make: Callable[[], FakeModelRunner], num_stages: int) -> None:
        self.stages = [make() for _ in range(num_stages)]
        self.state = self.stages[0].state  # has seen every plan
        self.in_flight: deque[StagedStep] = deque()

    def execute(self, plan: SchedulerOutput) -> StagedStep:
        tokens = plan.scheduled_cached_reqs.new_token_ids
        assert not any(PENDING in new for new in tokens), "the first stage needs the token id"
        self.in_flight.append(StagedStep(self, plan))
        for num_younger, step in enumerate(reversed(self.in_flight)):
            step.is_due = num_younger + 1
        for step in self.in_flight:  # earlier steps have progressed further
            step.go_through(step.is_due)
        return self.in_flight[-1]


class StagedStep:
    def __init__(self, runner: StagedRunner, plan: SchedulerOutput) -> None:
        self.runner = runner
        self.plan = plan
        self.outputs: list[StepOutput] = []  # of the stages that it has passed
        self.is_due = 0

    def go_through(self, num_stages: int) -> None:
        for stage in self.runner.stages[len(self.outputs) : num_stages]:
            self.outputs.append(stage.execute(self.plan).wait())
            assert self.outputs[-1].token_ids == self.outputs[0].token_ids

    def wait(self) -> StepOutput:
        assert self.runner.in_flight.popleft() is self, "steps must end in order"
        self.go_through(len(self.runner.stages))
        return self.outputs[-1]


class OverlappedWorld(runs.World):
    num_in_flight = 2

    def __init__(self, memory: Any, kind: type = Scheduler, **options: Any) -> None:
        self.plugin = OverlapPlugin()
        super().__init__(memory, kind, **options)
        self.runner = DelayedRunner(self.runner)


class PipelinedWorld(runs.World):
    def __init__(
        self,
        memory: Any,
        kind: type = Scheduler,
        num_stages: int = 2,
        num_in_flight: int = 3,
        **options: Any,
    ) -> None:
        self.plugin = PipelinePlugin(num_stages)
        self.num_in_flight = num_in_flight
        super().__init__(memory, kind, **options)
        size = memory.block_size
        self.runner = StagedRunner(lambda: FakeModelRunner(size, runs.VOCAB), num_stages)

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        assert 0 not in plan.num_scheduled_tokens.values()
        for request in {r for older in self.plans[:-1] for r in older.scheduled_requests}:
            if request in plan.scheduled_requests:
                assert request.num_output_placeholders in (0, 1), "it is behind by known tokens"
        return plan

    def advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        while self.may_schedule and (not self.in_flight or self.plugin.has_work):
            self.schedule()
            if self.plans[-1].is_empty:
                break
        meanwhile()
        self.settle()

    def check(self) -> None:
        """At most one step of a request samples: by the tokens that the plans compute."""
        super().check()
        sampling: Counter[int] = Counter()
        for plan in self.plans:
            for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True):
                end = start + plan.num_scheduled_tokens[request.request_id]
                is_last = end >= request.num_tokens and not request.is_finished
                sampling[id(request)] += is_last
        assert max(sampling.values(), default=0) <= 1


EACH = pytest.mark.parametrize("kind", runs.SCHEDULERS)


# -- any order of calls


WORLDS_OF_ALL = runs.SMALL_WORLDS | {"kind": st.sampled_from(runs.SCHEDULERS)}


class OverlappedMachine(runs.SchedulerMachine):
    world_type = OverlappedWorld

    @initialize(**WORLDS_OF_ALL)
    def start(self, **options):
        super().start(**options)


class PipelinedMachine(runs.SchedulerMachine):
    """Trap 51; and Trap 82: a name is used again while a step of its last request is in flight."""

    world_type = PipelinedWorld

    @initialize(**WORLDS_OF_ALL, num_stages=st.integers(1, 4), num_more=st.integers(0, 1))
    def start(self, kind, num_stages, num_more, **options):
        options |= {"num_stages": num_stages, "num_in_flight": num_stages + num_more}
        if kind is Scheduler and options["seed"] % 2:
            options["chunk_policy"] = ChunkToBudget()
        super().start(kind=kind, **options)


OverlappedMachine.TestCase.settings = PipelinedMachine.TestCase.settings = runs.SETTINGS
TestOverlappedMachine = pytest.mark.net(OverlappedMachine.TestCase)
TestPipelinedMachine = pytest.mark.net(PipelinedMachine.TestCase)

TWO = [([0, 1, 1], 2, 1), ([0, 1, 2], 1, 0)]
THREE = [*TWO, ([0, 1], 2, 1)]
OVERLAP = (OverlappedWorld, 2)
TWO_STEPS = (PipelinedWorld, 2)
THREE_STEPS = (PipelinedWorld, 3)


@pytest.mark.net
@pytest.mark.parametrize(
    ("world", "kind", "policy", "cache", "num_tokens", "prompts", "share"),
    [
        (OVERLAP, Scheduler, "fcfs", None, 5, runs.SHORT, 0.8),
        (TWO_STEPS, Scheduler, "fcfs", None, 5, THREE, 0.7),
        *(
            pytest.param(*parameters, 1, marks=pytest.mark.slow)
            for parameters in [
                (OVERLAP, Scheduler, "fcfs", None, 5, runs.PROMPTS),
                (OVERLAP, Scheduler, "priority", None, 5, runs.PROMPTS),
                (OVERLAP, PrefillFirstScheduler, "fcfs", None, 5, runs.PROMPTS),
                (OVERLAP, CachingFCFSScheduler, None, None, 5, runs.PROMPTS),
                (OVERLAP, Scheduler, "fcfs", "hash", 5, runs.PROMPTS),
                (THREE_STEPS, Scheduler, "fcfs", None, 2, TWO),  # prompts in two chunks
                (THREE_STEPS, Scheduler, "fcfs", None, 5, runs.PROMPTS),
                (THREE_STEPS, Scheduler, "priority", None, 2, TWO),
                (THREE_STEPS, Scheduler, "fcfs", "hash", 5, THREE),
                (THREE_STEPS, PrefillFirstScheduler, "fcfs", None, 2, TWO),
                (THREE_STEPS, CachingFCFSScheduler, None, None, 5, runs.PROMPTS),
            ]
        ),
    ],
)
def test_every_interleaving_of_requests_with_steps_in_flight(
    world, kind, policy, cache, num_tokens, prompts, share
):
    world_type, num_in_flight = world
    num_blocks = {Scheduler: 5, PrefillFirstScheduler: 9, CachingFCFSScheduler: 6}[kind]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": num_tokens}
    if policy is not None:
        options |= {"policy": policy, "max_preemptions": 2}
    if world_type is PipelinedWorld:
        options["num_in_flight"] = num_in_flight
        if policy is not None:
            options["chunk_policy"] = ChunkToBudget()
    memory = runs.make_memory(cache, num_blocks, 2)
    runs.explore(world_type(memory, kind, **options), prompts, share)


# -- case by case


def make_world(
    kind=Scheduler, cache=None, num_blocks=40, block_size=4, world_type=OverlappedWorld, **options
):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 100} | options
    return world_type(runs.make_memory(cache, num_blocks, block_size), kind, **options)


def make_request(name: str = "a", max_tokens: int = 6, num_prompt: int = 3, **more: Any) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)
    return Request(name, [(i * i) % runs.VOCAB for i in range(num_prompt)], params)


@EACH
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_planned_behind_the_last_token_allowed(kind, max_tokens) -> None:
    """Not a slot more than it needs: the last position of its last block is never written."""
    world = make_world(kind, num_blocks=2, block_size=2)
    world.take(make_request(max_tokens=max_tokens, num_prompt=5 - max_tokens))
    plans = []
    for _ in as_long_as(world.scheduler.has_unfinished_requests, 20):
        world.step()
        plans += [plan.num_scheduled_tokens for plan in world.plans]
    assert all(plan == {} for plan in plans[max_tokens:]), plans
    world.run()
    assert world.plugin.num_discarded_tokens == 0


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_full_block_is_published_though_the_next_step_was_planned_before(block_size) -> None:
    world = make_world(cache="hash", block_size=block_size)
    world.take(request := make_request(max_tokens=9, num_prompt=2 * block_size + 1))
    for _ in as_long_as(lambda: not request.is_finished, 20):
        if request.output_token_ids:
            num_cached = world.scheduler.kv_memory.cache.num_cached_blocks
            assert num_cached == (request.num_tokens - 1) // block_size, request
        world.step()


def test_memory_after_the_last_token_is_not_needed_though_it_is_pending() -> None:
    """`a` ends where its page does, and its last token is pending while `b` takes the last page."""
    options = {"init_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    world = make_world(PrefillFirstScheduler, num_blocks=4, block_size=2, **options)
    world.take(request := make_request("a", max_tokens=2, num_prompt=3))
    world.schedule()
    assert (request.num_output_placeholders, num_expected_outputs(request)) == (1, 1)
    world.take(make_request("b", max_tokens=3, num_prompt=1))
    world.run()
    assert not any(request.num_preemptions for request in world.requests.values())


@EACH
@pytest.mark.parametrize(("num_in_flight", "num_stages"), [(2, 2), (3, 3), (1, 3)])
def test_decodes_are_split_evenly_and_take_turns(kind, num_in_flight, num_stages) -> None:
    """With one plan at a time, too: who was admitted first would always be first."""
    options = {"num_stages": num_stages, "num_in_flight": num_in_flight}
    world = make_world(kind, world_type=PipelinedWorld, num_blocks=200, **options)
    for i in range(6):
        world.take(make_request(f"r{i}", max_tokens=40))
    world.advance()
    planned = []
    for _ in range(30):
        while world.may_schedule and world.plugin.has_work:
            world.schedule()
            planned.append(sorted(world.plans[-1].num_scheduled_tokens))
        world.settle()
    assert {*map(len, planned)} == {6 // num_stages}
    for first in range(len(planned) - num_stages + 1):
        turns = planned[first : first + num_stages]
        assert len({name for turn in turns for name in turn}) == 6, "each has its turn"
    world.run()


@pytest.mark.parametrize(("world_type", "num_decodes"), [(OverlappedWorld, 8), (PipelinedWorld, 4)])
def test_a_chunk_leaves_budget_for_the_decodes_of_its_own_plan_only(world_type, num_decodes):
    policy = ChunksOf(4)
    options = {"chunk_policy": policy, "max_num_seqs": 9, "max_num_batched_tokens": 12}
    world = make_world(world_type=world_type, **options)
    world.num_in_flight = 2
    world.take(make_request("long", num_prompt=120))
    for i in range(8):
        world.take(make_request(f"r{i}", max_tokens=30, num_prompt=1))
    world.advance()
    policy.size = 100
    for _ in range(6):
        world.advance()
    share = dict(world.plans[-1].num_scheduled_tokens)
    assert (share.pop("long"), len(share)) == (12 - num_decodes, num_decodes)
    world.run()
