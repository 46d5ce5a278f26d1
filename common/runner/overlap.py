"""Overlapped scheduling: step n + 1 is planned, and begun, while step n is under way.

    device   |      step n       |     step n + 1      |     step n + 2 ...
    host      plan n+1, begin n+1   read n, update n, outputs, plan n+2, begin n+2   read n+1 ...

The loop of chapter 1 makes the device wait while the host plans, lays out and writes down, and the
host while the device computes. Here the same three lines run, one step apart. What that asks of the
scheduler is in `01_batching/beyond/overlapped_books.py`: it plans on from a token that it does not
know. The runner knows where that token lies (`BatchState.fill_in`).

What it costs: a newcomer is planned for one step later; so is the end at EOS or a stop string seen,
and one token computed for nobody.

On a GPU kernels are queued, so a step that has begun runs by itself. On a CPU a thread computes it
(`ThreadedRunner`), beside a host that holds Python's interpreter lock whenever it works, so there
is less to gain, or nothing: `common/bench/records/overlap.json`.

Invariants: steps end in the order in which they were planned; every plan is executed once, and its
output is taken once; no block is written from the host before each step that may still write to
it is over (`wait_for_steps`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from overlapped_books import OverlappedBooks
from scheduler_interface import (
    EngineCoreOutput,
    FinishedStep,
    Laps,
    ModelRunner,
    PlanMessage,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)
from step_record import RecordingEngineCore


@dataclass(slots=True)
class UnderWay:
    plan: SchedulerOutput
    handle: StepHandle
    clock: Laps


class OverlappedEngineCore(RecordingEngineCore):
    """A step returns what one plan brought, the oldest, as in the plain loop. `scheduler` is an
    `overlapped` one."""

    scheduler: OverlappedBooks

    def __init__(self, *arguments, **keywords) -> None:
        super().__init__(*arguments, **keywords)
        self._under_way: deque[UnderWay] = deque()

    def step(self) -> Sequence[EngineCoreOutput]:
        """If it raises, so have all steps that were under way."""
        steps = self._under_way
        try:
            if not steps:
                steps.append(UnderWay(*self.begin()))
            # An empty step is one of waiting, and what comes of it shows in the next.
            if not steps[0].plan.is_empty and self.scheduler.has_unfinished_requests():
                steps.append(UnderWay(*self.begin()))
            step = steps.popleft()
            results = self.finish(step.plan, step.handle, step.clock)
            if steps and steps[0].plan.is_empty and not self.scheduler.has_unfinished_requests():
                step = steps.popleft()  # the last tokens were pending when it was planned
                self.scheduler.update_from_output(step.plan, step.handle.wait())
            return results
        except BaseException:
            self._give_up()
            raise

    def drain(self) -> None:
        """End what is under way. When nobody is unfinished, that is of nobody."""
        while self._under_way:
            step = self._under_way.popleft()
            self.finish(step.plan, step.handle, step.clock)

    def wait_for_steps(self) -> None:
        """Until what has begun is over. What it brought is taken in its turn."""
        for step in self._under_way:
            step.handle = FinishedStep(step.handle.wait())

    def _give_up(self) -> None:
        while self._under_way:
            with suppress(BaseException):  # of several errors the first one counts
                self._under_way.popleft().handle.wait()
        self.scheduler.forget_plans()


class ThreadedRunner:
    """A `ModelRunner` for a CPU: `runner` computes one step after another in a thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step")

    def execute(self, plan: PlanMessage) -> ThreadedStep:
        return ThreadedStep(self._thread.submit(self.runner.execute, plan))


@dataclass(frozen=True, slots=True)
class ThreadedStep:
    future: Future[StepHandle]

    def wait(self) -> StepOutput:
        return self.future.result().wait()
