"""The engine loop. Everything else in this book is a better version of one of its lines.

    plan    = scheduler.schedule()                        which requests compute how many tokens
    handle  = runner.execute(plan)                        lay out, forward, sample: started
    results = scheduler.update_from_output(plan, handle.wait())     final tokens

Chapter 1 uses `FCFSScheduler` and `HFModelRunner`, the engine in `common` uses others, and this
file stays unchanged. (nano-vllm's loop has the same three lines, vLLM's `EngineCore.step` too.)

See 01_batching/README.md#the-loop"""

from __future__ import annotations

from collections.abc import Sequence

from request import Request
from scheduler_interface import EngineCoreOutput, ModelRunner, SchedulerInterface


class EngineCore:
    """Runs requests until they finish, one step at a time."""

    def __init__(self, scheduler: SchedulerInterface, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def step(self) -> Sequence[EngineCoreOutput]:
        """Run one step for all running requests. Returns the new tokens of each scheduled request,
        which are final."""
        plan = self.scheduler.schedule()
        handle = self.runner.execute(plan)
        return self.scheduler.update_from_output(plan, handle.wait())

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
