"""Overlapped scheduling: step n + 1 is planned, and begun, while step n is under way.

    device   |      step n       |     step n + 1      |     step n + 2 ...
    host      plan n+1, begin n+1   read n, update n, outputs, plan n+2, begin n+2   read n+1 ...

The loop of chapter 1, which runs in an engine by default, makes the device wait while the host
plans, lays out and writes down, and the host while the device computes. This one runs instead where
`overlap_scheduling` says so: the same three lines, one step apart. What that asks of the scheduler
is in `01_batching/beyond/overlap_plugin.py`: it plans on from a token that it does not know. The
runner knows where that token lies (`BatchState.fill_in`).

What it costs: a newcomer is planned for one step later; so is the end at EOS or a stop string seen,
and one token computed for nobody.

On a GPU kernels are queued, so a step that has begun runs by itself. On a CPU a thread computes it
(`ThreadedRunner`), beside a host that holds Python's interpreter lock whenever it works, so there
is less to gain, or nothing: a table of `common/README.md` has the times.

Invariants: steps end in the order in which they were planned; every plan is executed once, and its
output is taken once; no block is written from the host before each step that may still write to
it is over (`wait_for_steps`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Protocol

from engine_core import EngineCore
from scheduler_interface import (
    EngineCoreOutput,
    ModelRunner,
    RunnerInput,
    SchedulerInterface,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)
from worker_thread import ThreadJob, WorkerThread


class InFlightPlans(Protocol):
    """Who keeps the books of plans whose results nobody has seen."""

    num_discarded_tokens: int  # computed for requests that had ended

    @property
    def has_work(self) -> bool: ...  # somebody could be planned now

    def discard_plans(self) -> None: ...  # they have failed


class OverlappedEngineCore(EngineCore):
    """A step returns what one plan brought, the oldest, as in the plain loop."""

    def __init__(
        self, scheduler: SchedulerInterface, runner: QueuedRunner, in_flight_plans: InFlightPlans
    ) -> None:
        self.scheduler, self.runner, self.in_flight_plans = scheduler, runner, in_flight_plans
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    def step(self) -> Sequence[EngineCoreOutput]:
        """If it raises, so have all steps that were under way."""
        steps = self._in_flight
        try:
            if not steps:
                self._begin()
            # An empty step is one of waiting, and what comes of it shows in the next.
            if not steps[0][0].is_empty and self.in_flight_plans.has_work:
                self._begin()
            return self._finish()
        except BaseException:
            self.give_up()
            raise

    def _begin(self) -> None:
        plan = self.scheduler.schedule()
        self._in_flight.append((plan, self.runner.execute(plan)))

    def _finish(self) -> Sequence[EngineCoreOutput]:
        plan, handle = self._in_flight.popleft()
        return self.scheduler.update_from_output(plan, handle.wait())

    def give_up(self) -> None:
        """What has begun comes to its end, and is nobody's. May be interrupted, and done again."""
        self.runner.give_up()
        self._in_flight.clear()
        self.in_flight_plans.discard_plans()

    def close(self) -> None:
        """When nobody is unfinished: what is under way is nobody's, its errors too."""
        with closing(self.runner), suppress(Exception):
            while self._in_flight:
                self._finish()
        self.give_up()


class QueuedRunner:
    """A `ModelRunner` whose `execute` returns when a step has begun, as that of `runner` does. It
    knows which steps are under way."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._in_flight: list[QueuedStep] = []

    def execute(self, plan: RunnerInput) -> QueuedStep:
        step = QueuedStep(self.begin(plan), self._in_flight)
        self._in_flight.append(step)
        return step

    def begin(self, plan: RunnerInput) -> StepHandle:
        return self.runner.execute(plan)

    def wait_for_steps(self) -> None:
        """Until what has begun is over. What it brought is taken in its turn."""
        for step in self._in_flight:
            step.end()

    def give_up(self) -> None:
        """Wait for what has begun. Of several errors the first one counts, and that was raised. An
        interrupt is no step's error: it goes on, and who waits for the rest calls again."""
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.pop(0).end()

    def close(self) -> None:
        """When nothing is under way. What queued the steps is another's."""


@dataclass(slots=True, eq=False)
class QueuedStep:
    handle: StepHandle
    in_flight: list[QueuedStep]
    output: StepOutput | None = None

    def end(self) -> StepOutput:
        if self.output is None:
            self.output = self.handle.wait()
        return self.output

    def wait(self) -> StepOutput:
        try:
            return self.end()
        finally:
            self.in_flight.remove(self)


class ThreadedRunner(QueuedRunner):
    """For a CPU: `runner` computes one step after another in a thread."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._thread = WorkerThread("step")

    def begin(self, plan: RunnerInput) -> ThreadedStep:
        return ThreadedStep(self._thread.submit(self.runner.execute, plan))

    def give_up(self) -> None:
        """A step of which nobody here knows may be in the thread: its caller was interrupted."""
        super().give_up()
        with suppress(RuntimeError):  # closed
            self._thread.submit(int).result()

    def close(self) -> None:
        self._thread.close()


@dataclass(frozen=True, slots=True)
class ThreadedStep:
    job: ThreadJob[StepHandle]

    def wait(self) -> StepOutput:
        return self.job.result().wait()
