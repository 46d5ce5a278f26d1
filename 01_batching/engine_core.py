"""The loop. Everything else in this book is a better version of one of its lines.

    output  = scheduler.schedule()                       who computes how many tokens
    batch   = runner.prepare(output)                     token ids, positions, later block tables
    logits  = runner.forward(batch)                      [num_logit_rows, vocab_size]
    sampled = sampler.sample(logits, batch)              {request_id: [token, ...]}
    results = scheduler.update_from_output(output, ...)   what became final
    drafts  = propose(output, ...)                       chapter 5, optional: guesses to verify next

The collaborators are injected. Chapter 1 puts in `FCFSScheduler`, `HFModelRunner` and
`GreedySampler`; the engine in `common` puts in its paged runner and its sampler, and this file
stays as it is.

`on_step` is called after every step with a `StepRecord`: who was scheduled, admitted and finished,
and how long each line took. The demo's trace, the benchmarks and the pictures of this book read
nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from request import Request, RequestStatus
from scheduler_interface import EngineCoreOutput, SchedulerInterface, SchedulerOutput


class Batch(Protocol):
    """What the loop and a sampler need to know of a runner's batch."""

    @property
    def logit_req_ids(self) -> list[str]:
        """The request of each row of logits."""


class ModelRunner(Protocol):
    """Owns the model, the KV tensors and a copy of every running request."""

    def prepare(self, output: SchedulerOutput) -> Batch:
        """Take over the changes of a plan and lay out its tokens. Called once for every plan, empty
        ones too."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits `[num_logit_rows, vocab_size]`; KV of the batch's tokens is written."""


NO_FINITE_LOGITS = (
    "its logits have no finite maximum: they hold NaN or infinity, or every token is ruled out"
)


@dataclass(slots=True)
class SamplerOutput:
    """Sampled tokens of each request, and their log-probabilities where they were asked for.
    `errors`: requests without a token, and a sentence that says why."""

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


# From a plan and what was sampled of it to tokens proposed for the next step: {request_id: drafts}.
Propose = Callable[[SchedulerOutput, dict[str, list[int]]], dict[str, list[int]]]


class SamplerInterface(Protocol):
    def sample(self, logits: torch.Tensor, batch: Batch) -> SamplerOutput: ...


class GreedySampler:
    """The most likely token; of equals, the lowest id."""

    def sample(self, logits: torch.Tensor, batch: Batch) -> SamplerOutput:
        highest, tokens = logits.max(dim=-1)  # NaN is higher than any number
        tokens = torch.where(highest.isfinite(), tokens, -1)
        output = SamplerOutput({})
        # In `tolist`, and nowhere else, the host waits for the device.
        for request_id, token in zip(batch.logit_req_ids, tokens.tolist(), strict=True):
            if token >= 0:
                output.token_ids[request_id] = [token]
            else:
                output.errors[request_id] = NO_FINITE_LOGITS
        return output


@dataclass(slots=True)
class StepRecord:
    """One step, as it happened. Times in milliseconds."""

    step: int
    start_time: float  # seconds of time.monotonic()
    num_scheduled_tokens: dict[str, int]
    start_positions: dict[str, int]  # first position that each request computed
    admitted: list[str]
    preempted: list[str]
    finished: dict[str, str]  # id -> reason
    new_token_ids: dict[str, list[int]]
    num_running: int  # after the step
    num_waiting: int
    kv_blocks_in_use: int = 0  # while the step ran; 0 without paging (chapter 2)
    kv_tokens_written: int = 0  # positions of the step's requests that hold KV after it
    schedule_ms: float = 0.0
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    update_ms: float = 0.0
    propose_ms: float = 0.0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # verified, accepted

    @property
    def step_ms(self) -> float:
        return (
            self.schedule_ms
            + self.prepare_ms
            + self.forward_ms
            + self.sample_ms
            + self.update_ms
            + self.propose_ms
        )


class EngineCore:
    """Runs requests to their end, one step at a time.

    `check_invariants=True` makes the scheduler check itself after every step: slow, and meant for
    tests."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        runner: ModelRunner,
        sampler: SamplerInterface | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        check_invariants: bool = False,
        propose: Propose | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler or GreedySampler()
        self.on_step = on_step
        self.check_invariants = check_invariants
        self.propose = propose
        self.num_steps = 0

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

    def step(self) -> list[EngineCoreOutput]:
        """One iteration for everybody. Returns what became final for each scheduled request."""
        clock = _Laps()
        output = self.scheduler.schedule()
        clock.lap("schedule_ms")
        batch = self.runner.prepare(output)
        clock.lap("prepare_ms")
        sampled = SamplerOutput({})
        if not output.is_empty:
            logits = self.runner.forward(batch)
            clock.lap("forward_ms")
            sampled = self.sampler.sample(logits, batch)
            clock.lap("sample_ms")
        start_positions = {
            r.request_id: r.num_computed_tokens - output.num_scheduled_tokens[r.request_id]
            for r in output.scheduled_requests
        }
        kv_tokens_written = sum(r.num_computed_tokens for r in output.scheduled_requests)
        # Before the update, which publishes what is computed: theirs may be NaN.
        self.scheduler.finish_requests(sampled.errors, RequestStatus.FINISHED_ERROR)
        results = self.scheduler.update_from_output(output, sampled.token_ids)
        for result in results:
            if result.request_id in sampled.logprobs:
                result.logprobs = sampled.logprobs[result.request_id][: len(result.new_token_ids)]
        for request_id, detail in sampled.errors.items():
            results.append(EngineCoreOutput(request_id, [], "error", finish_detail=detail))
        clock.lap("update_ms")
        if self.propose is not None:
            self.scheduler.update_draft_token_ids(self.propose(output, sampled.token_ids))
            clock.lap("propose_ms")
        if self.check_invariants:
            self.scheduler.check_invariants()
        self.num_steps += 1
        if self.on_step is not None:
            record = self._record(output, results, start_positions, clock)
            record.kv_tokens_written = kv_tokens_written
            for req_id, drafts in output.scheduled_draft_token_ids.items():
                num_accepted = max(0, len(sampled.token_ids.get(req_id, ())) - 1)
                record.drafts[req_id] = (len(drafts), num_accepted)
            self.on_step(record)
        return results

    def _record(
        self,
        output: SchedulerOutput,
        results: list[EngineCoreOutput],
        start_positions: dict[str, int],
        clock: _Laps,
    ) -> StepRecord:
        num_running, num_waiting = self.scheduler.get_request_counts()
        return StepRecord(
            step=self.num_steps - 1,
            start_time=clock.start_time,
            num_scheduled_tokens=dict(output.num_scheduled_tokens),
            start_positions=start_positions,
            admitted=[new.req_id for new in output.scheduled_new_reqs],
            preempted=[request.request_id for request in output.preempted_requests],
            finished={r.request_id: r.finish_reason for r in results if r.finish_reason},
            new_token_ids={r.request_id: r.new_token_ids for r in results},
            num_running=num_running,
            num_waiting=num_waiting,
            kv_blocks_in_use=output.num_kv_blocks_in_use,
            **clock.ms,
        )


class _Laps:
    """A stopwatch: each lap is the time since the last one."""

    def __init__(self) -> None:
        self.start_time = self._last = time.monotonic()
        self.ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.ms[name] = (now - self._last) * 1e3
        self._last = now
