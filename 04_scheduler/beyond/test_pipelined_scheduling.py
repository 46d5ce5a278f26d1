"""Every scheduler of the book with several steps under way, in stages that are apart in time.

The fake model reads its KV through the tables, in each stage at another time. So a block that is
given away too early, a token that is lost with a preemption, a message that comes too soon, or
anything that is released twice, shows as a wrong token or a broken invariant."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

import test_scheduler_runs as runs
from bounded_loops import as_long_as
from caching_fcfs_scheduler import CachingFCFSScheduler
from fake_model import FakeModelRunner
from pipelined_books import PipelinedBooks, pipelined
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus, SamplingParams
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepHandle
from scheduler_steps import preempting
from staged_runner import StagedRunner

SCHEDULERS = (Scheduler, PrefillFirstScheduler, CachingFCFSScheduler)


class PipelinedWorld(runs.World):
    """Some steps are under way, and the invariants hold at any moment."""

    is_settled = True

    def __init__(
        self,
        memory,
        kind: type = Scheduler,
        num_stages: int = 2,
        num_in_flight: int = 3,
        num_micro_batches: int | None = None,
        **options,
    ) -> None:
        options["num_micro_batches"] = num_micro_batches or num_stages
        super().__init__(memory, pipelined(kind), **options)
        size = memory.block_size
        self.runner = StagedRunner(lambda: FakeModelRunner(size, runs.VOCAB), num_stages)
        self.num_in_flight = num_in_flight
        self.under_way: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    @property
    def plans(self) -> list[SchedulerOutput]:
        return [plan for plan, _ in self.under_way]

    @property
    def may_schedule(self) -> bool:
        return len(self.under_way) < self.num_in_flight

    def schedule(self) -> None:
        plan = self.plan()
        assert 0 not in plan.num_scheduled_tokens.values()
        for older in self.plans:
            for request in older.scheduled_requests:
                if request in plan.scheduled_requests:
                    assert request.num_pending_tokens in (0, 1), "it is behind by known tokens"
        self.under_way.append((plan, self.runner.execute(plan)))

    def update(self) -> None:
        plan, handle = self.under_way.popleft()
        self.take(plan, handle.wait())

    def advance(self) -> None:
        while self.may_schedule and (not self.under_way or self.scheduler.has_work):
            self.schedule()
            if self.plans[-1].is_empty:
                break
        self.update()

    def run(self, most: int = 300) -> None:
        for _ in as_long_as(self.scheduler.has_unfinished_requests, most):
            self.step()
        while self.under_way:
            self.update()
        self.check_end()


def at_most_one_step_samples(world: PipelinedWorld) -> None:
    """Said once more, without the books: by what the plans compute."""
    counts = Counter(
        id(request)
        for plan in world.plans
        for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True)
        if start + plan.num_scheduled_tokens[request.request_id] >= request.num_tokens
        and not request.is_finished
    )
    assert max(counts.values(), default=0) <= 1


class PipelinedMachine(runs.SchedulerMachine):
    kind = PipelinedWorld


PipelinedMachine.TestCase.settings = runs.SchedulerMachine.TestCase.settings
TestPipelinedMachine = PipelinedMachine.TestCase


@pytest.mark.parametrize(
    ("cache", "kind", "policy"),
    [
        (None, Scheduler, "fcfs"),
        (None, Scheduler, "priority"),
        (None, PrefillFirstScheduler, "fcfs"),
        (None, CachingFCFSScheduler, None),
        pytest.param("hash", Scheduler, "fcfs", marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests_with_steps_under_way(cache, kind, policy):
    prompts = [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)]
    num_blocks = {Scheduler: 5, PrefillFirstScheduler: 9, CachingFCFSScheduler: 6}[kind]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 5}
    if policy is not None:
        options |= {"policy": policy, "max_preemptions": 2}
    runs._explore(PipelinedWorld(runs.make_memory(cache, num_blocks, 2), kind, **options), prompts)
