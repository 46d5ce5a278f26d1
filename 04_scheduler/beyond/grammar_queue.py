"""A request with a grammar waits until that is compiled, and holds up nobody.

    arrives     its grammar is compiled elsewhere, once for all that bring the same
    waits       WAITING_FOR_GRAMMAR: passed over, like one whose KV is on its way; when too many
                have left the queue since it came, the line waits for it (`policy_queue.py`)
    starts      what was compiled goes to the runner with the prompt
    can not     its grammar is wrong, or takes too long: it ends with an error, and no other does

Compiling takes milliseconds for most and seconds for a few, which nobody knows before. So it is
not done in a step. vLLM and SGLang keep such requests apart, too
(`WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR`, `grammar_queue`)."""

from __future__ import annotations

from collections.abc import Callable

from base_scheduler import SchedulerPlugin
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput
from worker_thread import ThreadJob


class GrammarsCompiled(SchedulerPlugin):
    """`compile` begins to compile, or finds what it has compiled; equal sources may get one job.
    A request brings its source as `features["grammar"]`."""

    name = "grammar"

    def __init__(self, compile: Callable[[str], ThreadJob[str]]) -> None:
        self._compile = compile
        self._jobs: dict[str, ThreadJob[str]] = {}  # of unfinished requests
        self._waits: dict[str, Request] = {}  # those that were not compiled when the step began

    def arrived(self, request: Request) -> None:
        """It is in the books. Nothing happens if it brings no grammar."""
        source = request.features.get(self.name)
        if source is not None:
            self._jobs[request.request_id] = self._compile(source)
            self._waits[request.request_id] = request
            request.status = RequestStatus.WAITING_FOR_GRAMMAR

    def begin_step(self) -> None:
        """Whatever is compiled from here on counts in the next step."""
        for name in [name for name in self._waits if _is_compiled(self._jobs[name])]:
            self._waits.pop(name).status = RequestStatus.WAITING

    def may_start(self, request: Request) -> bool:
        if self.name in request.features and request.request_id not in self._jobs:
            self.arrived(request)  # its arrival was interrupted
        return request.request_id not in self._waits

    def planned(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            if (job := self._jobs.get(new.req_id)) is not None:
                new.features = new.features | {self.name: job.result()}

    def ended(self, request: Request) -> None:
        self._waits.pop(request.request_id, None)
        job = self._jobs.pop(request.request_id, None)
        if job is None or job.done():
            return
        if all(other is not job for other in self._jobs.values()):
            job.cancel()  # begun or not: no other grammar waits for it

    def failed(self) -> dict[str, str]:
        """Who can never start, and why: `grammar: ...`, so that a server can tell whose fault it
        is."""
        errors = {name: _error_of(self._jobs[name]) for name in self._waits}
        return {
            name: f"{self.name}: {error}" for name, error in errors.items() if error is not None
        }

    def wait(self, seconds: float) -> bool:
        """Until something is compiled, or for so long. False if nobody waits for that."""
        jobs = [self._jobs[name] for name in self._waits]
        if jobs and not any(job.done() for job in jobs):
            jobs[0].wait(seconds)  # it came first, so it is mostly compiled first
        return bool(jobs)

    def check(self) -> None:
        assert self._waits.keys() <= self._jobs.keys(), "a request waits without a compile job"


def _is_compiled(job: ThreadJob[str]) -> bool:
    return job.done() and _error_of(job) is None


def _error_of(job: ThreadJob[str]) -> str | None:
    if not job.done():
        return None
    if job.cancelled():
        return "the compilation was given up"
    error = job.exception()
    return None if error is None else str(error)
