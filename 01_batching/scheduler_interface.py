"""The messages between scheduler and runner, in every engine of this book.

A `SchedulerOutput` is a plan for one step: which requests compute how many tokens. It is also a
*delta*: a prompt is sent once (`NewRequestData`), afterwards only changes (`CachedRequestData`),
since the runner, which may be another process, keeps its own copy of every request. A `StepOutput`
is the answer: the sampled tokens.

Invariants: a request is new at most once; every scheduled request has at least one token; the batch
order is new requests first, then known ones; `finished_req_ids` has each finished request once, in
the first plan after it finished. (vLLM sends the same classes to its workers.)

See 01_batching/README.md#the-plan-and-the-answer"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from request import Request, SamplingParams

PENDING = -1  # a token to be sampled by a step in flight (`beyond/overlap_plugin.py`)


@dataclass(slots=True)
class NewRequestData:
    """All data of a request, sent once, when it is admitted."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    num_computed_tokens: int = 0
    block_ids: tuple[list[int], ...] = ()  # chapter 2: its whole block tables
    features: dict[str, Any] = field(default_factory=dict)  # for the runner's plugins, by name


@dataclass(slots=True)
class CachedRequestData:
    """Changes of requests that the runner knows. All lists are parallel to `req_ids`."""

    req_ids: list[str] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)  # since last sent: mostly 1
    num_computed_tokens: list[int] = field(default_factory=list)  # before this step
    num_output_tokens: list[int] = field(default_factory=list)
    # Chapter 2; (): no new blocks.
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)  # chapter 4: sent in full
    # Requests whose last new token is `PENDING`: the runner sampled it itself.
    pending_req_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Chapter 3: entry `block_index` of a request's block table is now `block_id`."""

    req_id: str
    block_index: int
    block_id: int
    group: int = 0  # which of its block tables


@dataclass(slots=True)
class RunnerInput:
    """A plan as the runner gets it: the message, which can cross process boundaries."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    block_moves: list[BlockTableUpdate] = field(default_factory=list)  # chapter 3
    scheduled_draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # chapter 5
    num_spec_tokens: int = 0  # chapter 5: draft tokens to propose for each request
    reset: bool = False  # a step failed: forget every request before anything else

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def starts(self) -> dict[str, int]:
        """The first position that each request computes, from the message alone; new requests
        first."""
        cached = self.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in self.scheduled_new_reqs}
        return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether no request is scheduled. There may still be finished requests to remove."""
        return not self.num_scheduled_tokens


@dataclass(slots=True)
class SchedulerOutput(RunnerInput):
    """A plan with the fields that only its scheduler uses. The lists are parallel to
    `num_scheduled_tokens`."""

    scheduled_requests: list[Request] = field(default_factory=list)
    # First position that each request computes.
    start_positions: list[int] = field(default_factory=list)
    num_kv_blocks_in_use: int = 0  # chapter 2
    # Chapter 4. Why admission stopped, and the id of the request at which it did (`""`: no
    # particular one).
    preempted_requests: list[Request] = field(default_factory=list)
    num_recomputed_tokens: int = 0
    admission_stop: tuple[str, str] | None = None


@dataclass(slots=True)
class StepOutput:
    """The results of a step, by request id. A request whose last known token was not computed
    (chapter 6) has no tokens; neither has a request in `errors`, which holds the reason why it
    cannot continue."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list] = field(default_factory=dict)  # if they were requested
    errors: dict[str, str] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # chapter 5
    times: dict[str, float] = field(default_factory=dict)  # `{part}_ms` of each part of the step
    # For the prompt positions that this step computed.
    prompt_logprobs: dict[str, list] = field(default_factory=dict)


NO_FINITE_LOGITS = (
    "its logits have no finite maximum: they hold NaN or infinity, or every token is ruled out"
)


class StepHandle(Protocol):
    """A step in flight. `wait`, called once, returns its results when it has finished."""

    def wait(self) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The `StepHandle` of a runner that returns only when the step has finished."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class ModelRunner(Protocol):
    """Owns the model, keys and values, and a copy of every running request. `execute` is called
    once for every plan, empty ones included: it applies the changes, lays out the batch, computes,
    samples."""

    def execute(self, plan: RunnerInput) -> StepHandle: ...


class StepTimer:
    """A stopwatch: each lap is the time since the last one, in milliseconds."""

    def __init__(self) -> None:
        self.start_time = self._last = time.monotonic()
        self.ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.ms[name] = (now - self._last) * 1e3
        self._last = now


@dataclass(slots=True)
class EngineCoreOutput:
    """The results of one step for one request."""

    request_id: str
    new_token_ids: list[int]  # final: never rolled back
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list | None = None
    finish_detail: str | None = None  # the cause: a limit other than its own, or an error
