"""A record of each step, and how long its parts took: a scheduler with a clock around it.

    EngineCore(RecordedScheduler(scheduler, observers), runner)

The loop sees a scheduler like any other. After every step each observer is called with a
`StepRecord`. The demo's trace, the benchmarks, the pictures of this book, and chapter 6's chunks,
which learn from the clock, use only these records. (A runner reports the times of its own parts in
its output, because it may compute while other steps are planned.)

See 01_batching/beyond/README.md"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from request import Request, RequestStatus
from scheduler_interface import (
    EngineCoreOutput,
    SchedulerInterface,
    SchedulerOutput,
    StepOutput,
    StepTimer,
)


@dataclass(slots=True)
class StepRecord:
    """One step. Times in milliseconds."""

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
    num_recomputed_tokens: int = 0  # for admitted requests: the cost of preemptions (chapter 4)
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # verified, accepted
    schedule_ms: float = 0.0
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    propose_ms: float = 0.0
    update_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self) if f.name.endswith("_ms"))


Observer = Callable[[StepRecord], None]


def preemptions_of(plan: SchedulerOutput) -> tuple[list[Request], int]:
    """The requests preempted for this plan, and how many tokens it recomputes (chapter 4's
    plans)."""
    return getattr(plan, "preempted_requests", []), getattr(plan, "num_recomputed_tokens", 0)


class RecordedScheduler:
    """Wraps `scheduler`, and calls each of `observers` after every step; without any, no record is
    made. `check_invariants=True` checks the scheduler before that: slow, meant for tests.

    If a loop has several plans in flight, each has its own clock. They end in the order in which
    they were made; the plan of a failed step never ends. An empty plan that ends while others are
    in flight is not a step, unless a request was preempted for it.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        observers: Sequence[Observer] = (),
        check_invariants: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.requests = scheduler.requests
        self.running = scheduler.running
        self.waiting = scheduler.waiting
        self.observers = tuple(observers)
        self.checks_itself = check_invariants
        self.num_steps = 0
        self.plan: SchedulerOutput  # of the last step, as the next three attributes
        self._clock: StepTimer
        self.output: StepOutput
        self._results: Sequence[EngineCoreOutput]
        self._in_flight: deque[tuple[SchedulerOutput, StepTimer]] = deque()

    def schedule(self) -> SchedulerOutput:
        clock = StepTimer()
        plan = self.scheduler.schedule()
        clock.lap("schedule_ms")
        self._in_flight.append((plan, clock))
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        clock = self._take_clock(plan)
        clock.lap("execute_ms")
        results = self.scheduler.update_from_output(plan, output)
        clock.lap("update_ms")
        if self.checks_itself:
            self.scheduler.check_invariants()
        if plan.is_empty and self._in_flight and not preemptions_of(plan)[0]:
            return results
        self.plan = plan
        self._clock = clock
        self.output = output
        self._results = results
        self.num_steps += 1
        if self.observers:
            record = self.record()
            for observer in self.observers:
                observer(record)
        return results

    def discard_plans(self) -> None:
        """Drop the plans in flight, whose steps have failed. (Without this call, that is detected
        when a later one ends.)"""
        self._in_flight.clear()

    @property
    def in_flight_plans(self) -> list[SchedulerOutput]:
        """Plans in flight, the oldest first."""
        return [plan for plan, _ in self._in_flight]

    def _take_clock(self, plan: SchedulerOutput) -> StepTimer:
        made, clock = self._in_flight.popleft()
        while made is not plan:  # its step failed
            made, clock = self._in_flight.popleft()
        return clock

    @property
    def start_time(self) -> float:
        """When the last step was planned, in seconds of `time.monotonic()`."""
        return self._clock.start_time

    def record(self) -> StepRecord:
        """The record of the last step. O(its requests), so it is only made on access."""
        plan = self.plan
        output = self.output
        results = self._results
        clock = self._clock
        num_tokens = plan.num_scheduled_tokens
        starts = dict(zip(num_tokens, plan.start_positions, strict=True))
        num_running, num_waiting = self.scheduler.get_request_counts()
        drafts = plan.scheduled_draft_token_ids.items()
        preempted, num_recomputed_tokens = preemptions_of(plan)
        return StepRecord(
            step=self.num_steps - 1,
            start_time=clock.start_time,
            num_scheduled_tokens=dict(num_tokens),
            start_positions=starts,
            admitted=[new.req_id for new in plan.scheduled_new_reqs],
            preempted=[request.request_id for request in preempted],
            finished={r.request_id: r.finish_reason for r in results if r.finish_reason},
            new_token_ids={r.request_id: r.new_token_ids for r in results},
            num_running=num_running,
            num_waiting=num_waiting,
            kv_blocks_in_use=plan.num_kv_blocks_in_use,
            kv_tokens_written=sum(plan.start_positions) + sum(num_tokens.values()),
            num_recomputed_tokens=num_recomputed_tokens,
            drafts={r: (len(d), max(0, len(output.token_ids.get(r, ())) - 1)) for r, d in drafts},
            schedule_ms=clock.ms["schedule_ms"],
            update_ms=clock.ms["update_ms"],
            **output.times,
        )

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        self.scheduler.finish_requests(request_ids, status)

    def abort_request(self, request_id: str) -> None:
        self.scheduler.abort_request(request_id)

    def clear(self) -> None:
        self.scheduler.clear()

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.scheduler.get_num_unfinished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return self.scheduler.get_request_counts()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
