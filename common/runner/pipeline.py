"""The engine loop of a pipeline: several plans in flight, one in each stage.

    stage 0   | A | B | A' | B' | A''        A, A', A''   plans for half of the decodes
    stage 1       | A | B  | A' | B' | A''   B, B'        plans for the other half
    host              ^plan A' when A has come out, before waiting for B

This loop replaces chapter 1's where `pipeline_parallel_size` is more than one: the same three
lines, but the third lags the first by several plans. The scheduler's part is chapter 4's
`beyond/pipeline_plugin.py`. A request is not scheduled again while its token is in flight, because
the first stage needs the id; so the overlapped loop's `PENDING` is not used here.

    begin    while fewer than `num_in_flight` plans are in flight and a request can be scheduled
    finish   the oldest plan; the next call schedules its requests again

A pipeline of P stages is full with P plans. One more plan can wait in front of the first stage, so
that the stage does not wait for the host. That plan depends on no result, so it holds prompt chunks
or new requests, never a decode.

Invariants: steps end in the order in which they were planned; every plan is executed once, and its
output is read once. An empty plan also goes through the stages, which need its other contents. It
counts as a step only if it is the only plan in flight or a request was preempted for it.

See common/parallel/README.md#the-loop"""

from __future__ import annotations

from collections.abc import Sequence

from base_scheduler import BaseScheduler
from common.runner.overlap import OverlappedEngineCore, QueuedRunner
from pipeline_plugin import PipelinePlugin
from request import check_integers
from scheduler_interface import EngineCoreOutput
from step_record import preemptions_of


class PipelinedEngineCore(OverlappedEngineCore):
    """An `OverlappedEngineCore` with up to `num_in_flight` plans in flight."""

    def __init__(
        self,
        scheduler: BaseScheduler,
        runner: QueuedRunner,
        in_flight_plans: PipelinePlugin,
        num_in_flight: int,
    ) -> None:
        check_integers(1, num_in_flight=num_in_flight)
        super().__init__(scheduler, runner, in_flight_plans)
        self.num_in_flight = num_in_flight

    def step(self) -> Sequence[EngineCoreOutput]:
        """Run one engine step: return the outputs of the oldest plan. If it raises, all steps in
        flight have failed."""
        steps = self.in_flight
        try:
            self._begin_all()
            while True:
                plan = steps[0].plan
                results = self.finish(steps.popleft())
                if not plan.is_empty or preemptions_of(plan)[0] or not steps:
                    return results
        except BaseException:
            self.give_up()
            raise

    def _begin_all(self) -> None:
        """Start plans until the pipeline is full. An empty plan ends the loop, because a request
        can only be scheduled after the next result."""
        steps = self.in_flight
        num_busy = sum(not step.plan.is_empty for step in steps)
        while not steps or (num_busy < self.num_in_flight and self.in_flight_plans.has_work):
            steps.append(self.begin())
            if steps[-1].plan.is_empty:
                break
            num_busy += 1
