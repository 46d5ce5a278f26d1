"""A record of a step, and how long its parts took.

    core.step()
    record = make_record(core, number)

The demo's trace, the benchmarks, the pictures of this book, and chapter 6's chunks, which learn
from the clock, use only these records. The loop's clock times the scheduler; a runner reports the
times of its own parts in its output, because it may compute while other steps are planned.

See 01_batching/beyond/README.md"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from engine_core import EngineCore


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


def make_record(core: EngineCore, number: int) -> StepRecord:
    """The record of the loop's last step, which is step `number`. O(its requests)."""
    step = core.last_step
    plan = step.plan
    num_tokens = plan.num_scheduled_tokens
    num_running, num_waiting = core.get_request_counts()
    sampled = step.output.token_ids
    drafts = plan.scheduled_draft_token_ids.items()
    return StepRecord(
        step=number,
        start_time=step.clock.start_time,
        num_scheduled_tokens=dict(num_tokens),
        start_positions=dict(zip(num_tokens, plan.start_positions, strict=True)),
        admitted=[new.req_id for new in plan.scheduled_new_reqs],
        preempted=[request.request_id for request in plan.preempted_requests],
        finished={r.request_id: r.finish_reason for r in step.results if r.finish_reason},
        new_token_ids={r.request_id: r.new_token_ids for r in step.results},
        num_running=num_running,
        num_waiting=num_waiting,
        kv_blocks_in_use=plan.num_kv_blocks_in_use,
        kv_tokens_written=sum(plan.start_positions) + sum(num_tokens.values()),
        num_recomputed_tokens=plan.num_recomputed_tokens,
        drafts={name: (len(ids), max(0, len(sampled.get(name, ())) - 1)) for name, ids in drafts},
        schedule_ms=step.clock.ms["schedule_ms"],
        update_ms=step.clock.ms["update_ms"],
        **step.output.times,
    )
