"""Overlapped scheduling: the engine plans and starts step n + 1 while step n is in flight.

    device   |      step n       |     step n + 1      |     step n + 2 ...
    host      plan n+1, begin n+1   read n, update n, outputs, plan n+2, begin n+2   read n+1 ...

In chapter 1's loop, the engine's default, the device waits while the host plans, lays out and
records a step, and the host waits while the device computes. With `overlap_scheduling` this loop
runs instead: the same three lines, one step apart. The scheduler then has to schedule a request
before its last token is known (`01_batching/beyond/overlap_plugin.py`). The runner knows where that
token is stored (`BatchState.fill_in`).

A pipeline (`pipeline_parallel_size`) runs the same loop with a plan in each stage, and
`04_scheduler/beyond/pipeline_plugin.py` in the scheduler:

    stage 0   | A | B | A' | B' | A''        A, A', A''   plans for half of the decodes
    stage 1       | A | B  | A' | B' | A''   B, B'        plans for the other half
    host              ^plan A' when A has come out, before waiting for B

There a request is not scheduled again while its token is in flight, because the first stage needs
the id; so `PENDING` is not used. A pipeline of P stages is full with P plans.

The cost: a new request is scheduled one step later. The end of a request at EOS or a stop string is
also seen one step later, after one more token was computed and discarded.

On a GPU kernels are queued, so a started step runs without the host. On a CPU a thread computes the
step (`ThreadedRunner`). The host holds Python's interpreter lock whenever it works, so the gain on
a CPU is small or zero: a table in `common/README.md` has the times.

Invariants: steps end in the order in which they were planned; every plan is executed once, and its
output is read once; the host writes no block before every step that can still write to that block
has finished (`wait_for_steps`). An empty plan is executed too, because it has other contents. It
counts as a step only if it is the only plan in flight or a request was preempted for it.

See common/README.md#a-step-ahead"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from base_scheduler import BaseScheduler
from engine_core import EngineCore, Step
from scheduler_interface import (
    EngineCoreOutput,
    ModelRunner,
    RunnerInput,
    StepHandle,
    StepOutput,
)

if TYPE_CHECKING:
    from overlap_plugin import OverlapPlugin
    from pipeline_plugin import PipelinePlugin


class OverlappedEngineCore(EngineCore):
    """An `EngineCore` with up to `num_in_flight` plans in flight. A step returns the outputs of the
    oldest one."""

    runner: QueuedRunner

    def __init__(
        self,
        scheduler: BaseScheduler,
        runner: QueuedRunner,
        in_flight_plans: OverlapPlugin | PipelinePlugin,
        num_in_flight: int = 2,
    ) -> None:
        super().__init__(scheduler, runner)
        self.in_flight: deque[Step] = deque()
        self.in_flight_plans = in_flight_plans
        self.num_in_flight = num_in_flight

    def step(self) -> Sequence[EngineCoreOutput]:
        """Run one engine step. If it raises, all steps in flight have failed."""
        steps = self.in_flight
        try:
            self._begin_all()
            while True:
                plan = steps[0].plan
                results = self.finish(steps.popleft())
                if not plan.is_empty or plan.preempted_requests or not steps:
                    return results
        except BaseException:
            self.give_up()
            raise

    def _begin_all(self) -> None:
        """Start plans until enough are in flight. An empty plan ends the loop, because a request
        can only be scheduled after the next result."""
        steps = self.in_flight
        num_busy = sum(not step.plan.is_empty for step in steps)
        while not steps or (num_busy < self.num_in_flight and self.in_flight_plans.has_work):
            steps.append(self.begin())
            if steps[-1].plan.is_empty:
                break
            num_busy += 1

    def give_up(self) -> None:
        """Wait for the started steps and discard their outputs. Safe to interrupt and repeat."""
        self.runner.give_up()
        self.in_flight.clear()
        self.in_flight_plans.discard_plans()

    def close(self) -> None:
        """Wait for the steps in flight and close the runner, once all requests have finished.
        Outputs and errors of these steps are ignored."""
        with closing(self.runner), suppress(Exception):
            while self.in_flight:
                self.finish(self.in_flight.popleft())
        self.give_up()


class QueuedRunner:
    """A `ModelRunner` whose `execute` returns when a step has started, as `runner.execute` does.
    Keeps a list of the steps in flight."""

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
        """Wait until all started steps have finished. Their outputs are still read in order."""
        for step in self._in_flight:
            step.end()

    def give_up(self) -> None:
        """Wait for the started steps and ignore their errors, because the first error was already
        raised. An interrupt is raised; call again to wait for the remaining steps."""
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.pop(0).end()

    def close(self) -> None:
        """Close the runner when no step is in flight. Does nothing: `runner` has another owner."""


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
    """A `QueuedRunner` for a CPU: `runner` computes one step after another in a thread."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._thread = _started_thread()

    def begin(self, plan: RunnerInput) -> ThreadedStep:
        return ThreadedStep(self._thread.submit(self.runner.execute, plan))

    def give_up(self) -> None:
        """Also end the thread, which can run a step not listed here if `execute` was interrupted.
        The next step starts another one."""
        super().give_up()
        self._thread.shutdown()
        self._thread = _started_thread()

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class ThreadedStep:
    job: Future[StepHandle]

    def wait(self) -> StepOutput:
        return self.job.result().wait()


def _started_thread() -> ThreadPoolExecutor:
    """Return an executor whose thread runs: an interrupt while `submit` starts one would leave a
    thread that `shutdown` does not wait for."""
    executor = ThreadPoolExecutor(1, "step")
    executor.submit(int).result()
    return executor
