"""The engine loop. Everything else in this book is a better version of one of its lines.

    plan    = scheduler.schedule()                        which requests compute how many tokens
    handle  = runner.execute(plan)                        lay out, forward, sample: started
    results = scheduler.update_from_output(plan, handle.wait())     final tokens

`begin` is the first two lines, `finish` the third. A clock between them says how long each took
(`beyond/step_record.py`). Chapter 1 uses `FCFSScheduler` and `HFModelRunner`, the engine in
`common` uses others, and this file stays unchanged. (nano-vllm's loop has the same three lines,
vLLM's `EngineCore.step` too.)

See 01_batching/README.md#the-loop"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from base_scheduler import BaseScheduler
from request import Request
from scheduler_interface import (
    EngineCoreOutput,
    ModelRunner,
    SchedulerOutput,
    StepHandle,
    StepOutput,
    StepTimer,
)


@dataclass(slots=True)
class Step:
    """A step that was started. `output` and `results` are there when it has finished."""

    plan: SchedulerOutput
    handle: StepHandle
    clock: StepTimer
    output: StepOutput = field(default_factory=StepOutput)
    results: Sequence[EngineCoreOutput] = ()


class EngineCore:
    """Runs requests until they finish, one step at a time."""

    last_step: Step  # the one that finished last

    def __init__(self, scheduler: BaseScheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def step(self) -> Sequence[EngineCoreOutput]:
        """Run one step for all running requests. Returns the new tokens of each scheduled request,
        which are final."""
        return self.finish(self.begin())

    def begin(self) -> Step:
        """Plan a step and start it."""
        clock = StepTimer()
        plan = self.scheduler.schedule()
        clock.lap("schedule_ms")
        return Step(plan, self.runner.execute(plan), clock)

    def finish(self, step: Step) -> Sequence[EngineCoreOutput]:
        """Wait for a step, and give its tokens to the scheduler."""
        step.output = step.handle.wait()
        step.clock.lap("execute_ms")
        step.results = self.scheduler.update_from_output(step.plan, step.output)
        step.clock.lap("update_ms")
        self.last_step = step
        return step.results

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError` if it can never be served."""
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> None:
        self.scheduler.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""
        return self.scheduler.get_request_counts()
