"""A request with a grammar waits until the grammar is compiled, without blocking other requests.

    arrives     its grammar is compiled in a thread, once for all requests with an equal one
    waits       WAITING_FOR_GRAMMAR: skipped, like a request whose KV is being loaded, even when it
                has aged: if others waited too, its grammar would not be compiled sooner
    starts      the compiled grammar goes to the runner with the prompt
    cannot      its grammar is wrong, or takes too long: it ends with an error, others do not

Compiling takes milliseconds for most grammars and seconds for a few, which is not known in advance.
So it does not happen inside a step. vLLM and SGLang keep such requests apart, too
(`WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR`, `grammar_queue`).

See 04_scheduler/beyond/GRAMMARS.md#who-does-what-and-when"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from base_scheduler import SchedulerPlugin
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput


class GrammarsCompiled(SchedulerPlugin):
    """Delays requests until their grammars are compiled. `compile` starts to compile, or finds a
    compiled grammar; equal sources may get one job. A request has its source in
    `features["grammar"]`."""

    name = "grammar"

    def __init__(self, compile: Callable[[str], Future[str]]) -> None:
        self._compile = compile
        self._jobs: dict[str, Future[str]] = {}  # by id of an unfinished request
        # Requests whose grammar was not compiled when the step began.
        self._waits: dict[str, Request] = {}

    def arrived(self, request: Request) -> None:
        """Called when the scheduler gets a new request. Does nothing without a grammar."""
        source = request.features.get(self.name)
        if source is not None:
            self._jobs[request.request_id] = self._compile(source)
            self._waits[request.request_id] = request
            request.status = RequestStatus.WAITING_FOR_GRAMMAR

    def begin_step(self) -> None:
        """Release requests whose grammar is compiled by now; later ones wait for the next step."""
        for name, request in list(self._waits.items()):
            job = self._jobs[name]
            if job.done() and _error_of(job) is None:
                request.status = RequestStatus.WAITING
                # Last: if it is interrupted before, the next step does it again.
                del self._waits[name]

    def can_start(self, request: Request) -> bool:
        if self.name in request.features and request.request_id not in self._jobs:
            self.arrived(request)  # `arrived` was interrupted
        return request.request_id not in self._waits

    def on_plan(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            if (job := self._jobs.get(new.req_id)) is not None:
                new.features = new.features | {self.name: job.result()}

    def on_finish(self, request: Request) -> None:
        self._waits.pop(request.request_id, None)
        job = self._jobs.pop(request.request_id, None)
        if job is not None and job not in self._jobs.values():
            job.cancel()  # no other request needs it

    def failed(self) -> dict[str, str]:
        """Requests that can never start, with the reason: `grammar: ...`, so that a server can tell
        whose fault it is."""
        done = [name for name in self._waits if self._jobs[name].done()]
        errors = {name: _error_of(self._jobs[name]) for name in done}
        return {name: f"{self.name}: {error}" for name, error in errors.items() if error}

    def wait(self, seconds: float) -> bool:
        """Wait until a grammar is compiled, or for `seconds`. Returns False if no request waits for
        one."""
        jobs = [self._jobs[name] for name in self._waits]
        if jobs:
            wait(jobs, seconds, FIRST_COMPLETED)
        return bool(jobs)

    def check(self) -> None:
        assert self._waits.keys() <= self._jobs.keys(), "a request waits without a compile job"


def _error_of(job: Future[str]) -> str | None:
    """Why a job that has ended has no grammar."""
    if job.cancelled():
        return "the compilation was given up"
    error = job.exception()
    return None if error is None else str(error) or repr(error)
