"""The loop with an observer around it: what each step did, and how long its parts took.

`RecordingEngineCore` is chapter 1's loop; after every step it calls each of its observers with a
`StepRecord`. The demo's trace, the benchmarks, the pictures of this book, and chapter 6's chunks,
which learn from the clock, read nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from engine_core import EngineCore
from scheduler_interface import (
    EngineCoreOutput,
    Laps,
    ModelRunner,
    SchedulerInterface,
    SchedulerOutput,
    StepHandle,
    StepOutput,
)


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
    num_recomputed_tokens: int = 0  # of those admitted: what a preemption had cost (chapter 4)
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


class RecordingEngineCore(EngineCore):
    """Calls each of `observers` after every step; without any, no record is made.
    `check_invariants=True` makes the scheduler check itself before that: slow, meant for tests."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        runner: ModelRunner,
        observers: Sequence[Observer] = (),
        check_invariants: bool = False,
    ) -> None:
        super().__init__(scheduler, runner)
        self.observers = tuple(observers)
        self.check_invariants = check_invariants
        self.num_steps = 0
        self.plan: SchedulerOutput  # of the last step, as the next three
        self._clock: Laps
        self._output: StepOutput
        self._results: Sequence[EngineCoreOutput]

    def step(self) -> Sequence[EngineCoreOutput]:
        return self.finish(*self.begin())

    def drain(self) -> None:
        """Between two steps nothing is under way."""

    def wait_for_steps(self) -> None:
        """Nor is there anything to wait for."""

    def begin(self) -> tuple[SchedulerOutput, StepHandle, Laps]:
        clock = Laps()
        plan = self.scheduler.schedule()
        clock.lap("schedule_ms")
        return plan, self.runner.execute(plan), clock

    def finish(
        self, plan: SchedulerOutput, handle: StepHandle, clock: Laps
    ) -> Sequence[EngineCoreOutput]:
        self.plan, self._clock = plan, clock
        output = self._output = handle.wait()
        clock.lap("execute_ms")
        results = self._results = self.scheduler.update_from_output(plan, output)
        clock.lap("update_ms")
        if self.check_invariants:
            self.scheduler.check_invariants()
        self.num_steps += 1
        if self.observers:
            record = self.record()
            for observer in self.observers:
                observer(record)
        return results

    @property
    def start_time(self) -> float:
        """Of the last step's planning, in seconds of `time.monotonic()`."""
        return self._clock.start_time

    def record(self) -> StepRecord:
        """Of the last step. O(its requests), so nothing of it is done before somebody asks."""
        plan, output, results, clock = self.plan, self._output, self._results, self._clock
        num_tokens = plan.num_scheduled_tokens
        starts = dict(zip(num_tokens, plan.start_positions, strict=True))
        num_running, num_waiting = self.scheduler.get_request_counts()
        drafts = plan.scheduled_draft_token_ids.items()
        return StepRecord(
            step=self.num_steps - 1,
            start_time=clock.start_time,
            num_scheduled_tokens=dict(num_tokens),
            start_positions=starts,
            admitted=[new.req_id for new in plan.scheduled_new_reqs],
            preempted=[request.request_id for request in plan.preempted_requests],
            finished={r.request_id: r.finish_reason for r in results if r.finish_reason},
            new_token_ids={r.request_id: r.new_token_ids for r in results},
            num_running=num_running,
            num_waiting=num_waiting,
            kv_blocks_in_use=plan.num_kv_blocks_in_use,
            kv_tokens_written=sum(plan.start_positions) + sum(num_tokens.values()),
            num_recomputed_tokens=plan.num_recomputed_tokens,
            drafts={r: (len(d), max(0, len(output.token_ids.get(r, ())) - 1)) for r, d in drafts},
            schedule_ms=clock.ms["schedule_ms"],
            update_ms=clock.ms["update_ms"],
            **output.times,
        )
