"""The loop of a pipeline: several plans under way, one in each stage.

    stage 0   | A | B | A' | B' | A''        A, A', A''   plans for one half of those who decode
    stage 1       | A | B  | A' | B' | A''   B, B'        for the other half
    host              ^plan A' when A has come out, before anybody waits for B

The three lines of chapter 1's loop run here too, the third some plans behind the first. What that
asks of a scheduler is in chapter 4's `beyond/pipelined_books.py`: nobody is planned on behind a
token that is under way, so an overlapped loop's `PENDING` has no place here; the first stage needs
the id.

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
from typing import Any

from common.runner.overlap import OverlappedEngineCore, UnderWay
from pipelined_books import PipelinedBooks
from request import check_integers
from scheduler_interface import EngineCoreOutput, SchedulerOutput


class PipelinedEngineCore(OverlappedEngineCore):
    """A step returns what one plan brought, the oldest. `scheduler` is a `pipelined` one, and the
    runner's `execute` returns before the step is over."""

    scheduler: PipelinedBooks

    def __init__(self, *arguments: Any, num_in_flight: int, **keywords: Any) -> None:
        check_integers(1, num_in_flight=num_in_flight)
        super().__init__(*arguments, **keywords)
        self.num_in_flight = num_in_flight

    def step(self) -> Sequence[EngineCoreOutput]:
        """If it raises, so have all steps that were under way."""
        steps = self._under_way
        try:
            self._begin_all()
            while len(steps) > 1 and _is_nothing(steps[0].plan):
                self._pass_over()
            step = steps.popleft()
            return self.finish(step.plan, step.handle, step.clock)
        except BaseException:
            self._give_up()
            raise

    def _begin_all(self) -> None:
        """Behind a plan for nobody, nothing is planned: what lets somebody in is a result."""
        steps = self._under_way
        num_busy = sum(not step.plan.is_empty for step in steps)
        while not steps or (num_busy < self.num_in_flight and self.scheduler.has_work):
            steps.append(UnderWay(*self.begin()))
            if steps[-1].plan.is_empty:
                break
            num_busy += 1

    def _pass_over(self) -> None:
        step = self._under_way.popleft()
        self.scheduler.update_from_output(step.plan, step.handle.wait())


def _is_nothing(plan: SchedulerOutput) -> bool:
    return plan.is_empty and not plan.preempted_requests
