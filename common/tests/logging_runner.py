"""A runner that computes nothing, for loops with several plans under way: what was begun, and what
was waited for, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from request import Request
from scheduler_interface import SchedulerOutput, StepOutput


class LoggingRunner:
    """Says how often a request was asked. Writes ("begun", ...) and ("ended", ...) into `log`, each
    with what `label` says of the number of a step and its plan."""

    def __init__(self, log: list, label: Callable[[int, SchedulerOutput], tuple]) -> None:
        self.log = log
        self.label = label
        self.said = Counter[str]()
        self.num_steps = 0
        self.fails_at = -1
        self.fails_when_waited_for = False

    def execute(self, plan: SchedulerOutput):
        self.num_steps += 1
        step = self.num_steps
        log = self.log
        fails = self.num_steps == self.fails_at
        label = self.label(step, plan)
        log.append(("begun", *label))
        if fails and not self.fails_when_waited_for:
            raise OSError(f"step {step}")
        self.said.update(plan.num_scheduled_tokens.keys())
        output = StepOutput({r: [self.said[r]] for r in plan.num_scheduled_tokens})

        class Handle:
            def wait(self) -> StepOutput:
                log.append(("ended", *label))
                if fails:
                    raise OSError(f"step {step}")
                return output

        return Handle()


def request(name: str, max_tokens: int = 3) -> Request:
    return Request.from_tokens(name, [1, 2], max_tokens)
