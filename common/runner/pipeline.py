"""The loop of a pipeline: several plans under way, one in each stage.

    stage 0   | A | B | A' | B' | A''        A, A', A''   plans for one half of those who decode
    stage 1       | A | B  | A' | B' | A''   B, B'        for the other half
    host              ^plan A' when A has come out, before anybody waits for B

This loop runs instead of chapter 1's where `pipeline_parallel_size` is more than one: the same
three lines, the third some plans behind the first. What that asks of a scheduler is in chapter 4's
`beyond/pipeline_plugin.py`: nobody is planned on behind a token that is under way, so an overlapped
loop's `PENDING` has no place here; the first stage needs the id.

    begin    as long as fewer than `num_in_flight` plans are under way and somebody is behind
    finish   the oldest; its requests are behind again, and the next call begins with them

A pipeline of P stages is full with P plans. One more may wait in front of the first stage, so that
it need not wait for the host; only work that depends on no result can be in it, so that is a chunk
of a prompt or a newcomer, never a decode.

Invariants: steps end in the order in which they were planned; every plan is executed once, and its
output is taken once. A plan for nobody goes through the stages too, for what else it tells them,
but counts as no step unless it is all that is under way or somebody was preempted for it."""

from __future__ import annotations

from collections.abc import Sequence

from common.runner.overlap import InFlightPlans, OverlappedEngineCore, QueuedRunner
from request import check_integers
from scheduler_interface import EngineCoreOutput, SchedulerInterface
from step_record import preemptions_of


class PipelinedEngineCore(OverlappedEngineCore):
    """A step returns what one plan brought, the oldest."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        runner: QueuedRunner,
        in_flight_plans: InFlightPlans,
        num_in_flight: int,
    ) -> None:
        check_integers(1, num_in_flight=num_in_flight)
        super().__init__(scheduler, runner, in_flight_plans)
        self.num_in_flight = num_in_flight

    def step(self) -> Sequence[EngineCoreOutput]:
        """If it raises, so have all steps that were under way."""
        steps = self._in_flight
        try:
            self._begin_all()
            while True:
                plan, _ = steps[0]
                results = self._finish()
                if not plan.is_empty or preemptions_of(plan)[0] or not steps:
                    return results
        except BaseException:
            self.give_up()
            raise

    def _begin_all(self) -> None:
        """Behind a plan for nobody, nothing is planned: what lets somebody in is a result."""
        steps = self._in_flight
        num_busy = sum(not plan.is_empty for plan, _ in steps)
        while not steps or (num_busy < self.num_in_flight and self.in_flight_plans.has_work):
            self._begin()
            if steps[-1][0].is_empty:
                break
            num_busy += 1
