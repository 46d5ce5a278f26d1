"""A runner whose stages compute at different times, as a pipeline does, for tests without one.

The first stage computes a plan immediately. Stage s computes it when s more plans have begun, or
when a caller waits for the output, which is as late as possible. Each stage is a whole model with
its own KV memory and copies of the requests. So a block that is reused, or a message that arrives,
while a stage still has to compute an older plan causes a wrong token there. All stages must return
the same tokens; the last one's output counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from scheduler_interface import PENDING, SchedulerOutput, StepOutput


class StagedRunner:
    """A `ModelRunner` of `num_stages` runners, each made by `make`."""

    def __init__(self, make: Callable[[], Any], num_stages: int) -> None:
        self.stages = [make() for _ in range(num_stages)]
        self._in_flight: deque[StagedStep] = deque()

    @property
    def state(self) -> Any:
        """The first stage's state, which has seen every plan."""
        return self.stages[0].state

    def execute(self, plan: SchedulerOutput) -> StagedStep:
        tokens = plan.scheduled_cached_reqs.new_token_ids
        assert not any(PENDING in new for new in tokens), "the first stage needs the token id"
        step = StagedStep(self, plan)
        self._in_flight.append(step)
        num_younger = len(self._in_flight)
        for step_before in list(self._in_flight):
            num_younger -= 1
            step_before.go_through(num_younger + 1)
        return step

    def end(self, step: StagedStep) -> StepOutput:
        assert self._in_flight.popleft() is step, "steps must end in order"
        step.go_through(len(self.stages))
        return step.output


class StagedStep:
    def __init__(self, runner: StagedRunner, plan: SchedulerOutput) -> None:
        self.runner, self.plan = runner, plan
        self.num_stages = 0  # stages that it has passed
        self.output: StepOutput

    def go_through(self, num_stages: int) -> None:
        """Compute in the first `num_stages` stages; earlier steps have progressed further."""
        for stage in self.runner.stages[self.num_stages : num_stages]:
            output = stage.execute(self.plan).wait()
            assert self.num_stages == 0 or output.token_ids == self.output.token_ids
            self.output = output
            self.num_stages += 1

    def wait(self) -> StepOutput:
        return self.runner.end(self)
