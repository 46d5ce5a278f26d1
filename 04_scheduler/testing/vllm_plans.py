"""Recorded plans of vLLM's own scheduler, step by step, to compare with chapter 4's plans.

`records/vllm_plans/` holds seventeen random workloads and the plans that vLLM 0.32.0 made for them:
`vllm.v1.core.sched.scheduler.Scheduler` of its CPU build, with prefix caching and chunked prefill,
FCFS, no threshold, nothing asynchronous. No model ran: every sampled token was `TOKEN`, and only
`max_tokens` ended a request. So a plan is a fact about the scheduler alone.

    tokens       request -> tokens scheduled in this step
    cached       request -> computed tokens at its first admission
    preempted    in this step

The pool's size there leaves out the null block. Eviction and preemption are vLLM's of this
configuration: no watermark, no bound on preemptions, no pinned requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepOutput
from step_plan import PreemptiveSchedulerOutput
from unchunked import ChunkToBudget

FOLDER = Path(__file__).parent / "records" / "vllm_plans"
TOKEN = 7


@dataclass(frozen=True, slots=True)
class PlannedStep:
    tokens: dict[str, int]
    cached: dict[str, int]
    preempted: list[str]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One workload, and vLLM's plans for it."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_usable_blocks: int
    requests: list[dict[str, Any]]  # id, arrival_step, prompt, max_tokens
    plans: list[PlannedStep]

    @classmethod
    def read(cls, name: str) -> RecordedRun:
        record = json.loads((FOLDER / f"workload_{name}.json").read_text(encoding="utf-8"))
        assert record.pop("vllm") == "0.32.0"
        plans = [PlannedStep(**plan) for plan in record.pop("plans")]
        return cls(**record, plans=plans)

    def scheduler(self, **options: Any) -> Scheduler:
        """Chapter 4's scheduler, with this run's limits. `options` are its other arguments."""
        return Scheduler(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.num_usable_blocks + 1,
            block_size=self.block_size,
            chunk_policy=ChunkToBudget(),
            watermark=0.0,
            max_preemptions=10**9,
            max_overtakes=None,
            **options,
        )


def recorded_names() -> list[str]:
    return sorted(path.stem.removeprefix("workload_") for path in FOLDER.glob("*.json"))


def replay(run: RecordedRun, scheduler: Scheduler) -> Iterator[PlannedStep]:
    """Yield the plans of `scheduler`, for as many steps as vLLM needed."""
    for step in range(len(run.plans)):
        for r in run.requests:
            if r["arrival_step"] == step:
                params = SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True)
                scheduler.add_request(Request(r["id"], r["prompt"], params))
        plan = scheduler.schedule()
        yield _facts_of(plan)
        scheduler.update_from_output(plan, _sampled(plan))


def _facts_of(plan: PreemptiveSchedulerOutput) -> PlannedStep:
    cached = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    preempted = [request.request_id for request in plan.preempted_requests]
    return PlannedStep(dict(plan.num_scheduled_tokens), cached, preempted)


def _sampled(plan: SchedulerOutput) -> StepOutput:
    return StepOutput(
        {
            r.request_id: [TOKEN]
            for r in plan.scheduled_requests
            if r.num_computed_tokens == r.num_tokens
        }
    )


def first_difference(run: RecordedRun, scheduler: Scheduler) -> int | None:
    """The first step in which the plan differs from vLLM's."""
    for step, (ours, theirs) in enumerate(zip(replay(run, scheduler), run.plans, strict=True)):
        if ours != theirs:
            return step
    return None


def table_of_steps(name: str, first: int, last: int) -> str:
    """These steps of a workload, planned in each of three ways, as Markdown."""
    run = RecordedRun.read(name)
    ways = {
        "vLLM": run.plans,
        "ours, waits": list(replay(run, run.scheduler())),
        "ours, computes again": list(replay(run, run.scheduler(defer_on_shared_prefix=False))),
    }
    lines = ["| step | " + " | ".join(ways) + " |", "| --- " * (1 + len(ways)) + "|"]
    for step in range(first, last + 1):
        cells = [_words(plans[step]) for plans in ways.values()]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _words(plan: PlannedStep) -> str:
    """`r5 50, r6 13 (40 cached)`."""
    cached = {name: f" ({num} cached)" for name, num in plan.cached.items() if num}
    return ", ".join(f"{name} {num}{cached.get(name, '')}" for name, num in plan.tokens.items())
