"""A pipeline on a clock that nobody has to wait for: how busy is each stage?

The loop and the schedulers are the engine's own. What computes is a cost model: a step takes each
of P stages `(step_ms + token_ms * tokens) / P` milliseconds, one step after another, a stage after
the one before it; the host takes `host_ms` for each plan. So what is counted here is the order of
things and nothing of any machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bounded_loops import as_long_as
from common.parallel.pipeline import PipelinedEngineCore
from common.runner.overlap import QueuedRunner
from pipeline_plugin import PipelinePlugin
from request import Request
from scheduler import Scheduler
from scheduler_base import make_kv_memory
from scheduler_interface import SchedulerOutput, StepOutput
from whole_prompts import CutPrompts


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds."""

    step_ms: float = 8.0  # of the whole model: its weights are read
    token_ms: float = 0.02
    host_ms: float = 0.2


@dataclass(frozen=True, slots=True)
class Interval:
    """A stage at work."""

    stage: int
    step: int
    start_ms: float
    end_ms: float
    num_tokens: int


@dataclass(slots=True)
class SimulatedStages:
    """A `ModelRunner`. `intervals` are all that was computed, in order of the steps."""

    num_stages: int
    costs: Costs
    now_ms: float = 0.0
    num_steps: int = 0
    intervals: list[Interval] = field(default_factory=list)
    _free_ms: list[float] = field(default_factory=list)  # when each stage is
    _num_prompt: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free_ms = [0.0] * self.num_stages

    def execute(self, plan: SchedulerOutput) -> SimulatedStep:
        self.now_ms += self.costs.host_ms
        step, self.num_steps = self.num_steps, self.num_steps + 1
        num_tokens, ready_ms = plan.total_num_scheduled_tokens, self.now_ms
        took_ms = (self.costs.step_ms + self.costs.token_ms * num_tokens) / self.num_stages
        for stage in range(self.num_stages if num_tokens else 0):
            start_ms = max(ready_ms, self._free_ms[stage])
            ready_ms = self._free_ms[stage] = start_ms + took_ms
            self.intervals.append(Interval(stage, step, start_ms, ready_ms, num_tokens))
        return SimulatedStep(self, ready_ms, StepOutput(self._sample(plan)))

    def _sample(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        self._num_prompt |= {r.req_id: len(r.prompt_token_ids) for r in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        num_outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        return {
            r: [1]
            for r, start in plan.starts().items()
            if start + plan.num_scheduled_tokens[r] == self._num_prompt[r] + num_outputs.get(r, 0)
        }


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    runner: SimulatedStages
    end_ms: float
    output: StepOutput

    def wait(self) -> StepOutput:
        self.runner.now_ms = max(self.runner.now_ms, self.end_ms)
        return self.output


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ms: float
    num_prompt: int
    num_outputs: int


def all_at_once(num_requests: int, num_prompt: int, num_outputs: int) -> list[Arrival]:
    return [Arrival(0.0, num_prompt, num_outputs)] * num_requests


def trickling(num_requests: int, gap_ms: float, seed: int = 0) -> list[Arrival]:
    """Exponential gaps, prompts and outputs of all sizes."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(1 / gap_ms)
        found.append(Arrival(now, rng.randint(16, 300), rng.randint(20, 120)))
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    duration_ms: float
    busy: list[float]  # the share of the time that each stage computes
    num_steps: int
    num_outputs: int
    ttft_ms: list[float]
    itl_ms: list[float]  # between two tokens of a request
    intervals: list[Interval]

    @property
    def outputs_per_s(self) -> float:
        return self.num_outputs / self.duration_ms * 1e3


def simulate(
    arrivals: Sequence[Arrival],
    num_stages: int,
    num_micro_batches: int | None = None,
    num_in_flight: int | None = None,
    costs: Costs | None = None,
    kind: type = Scheduler,
    **options: Any,
) -> Outcome:
    """By itself: as many micro-batches as stages, as many plans under way, chunks of 512 tokens."""
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 512} | options
    options |= {"chunk_policy": CutPrompts(), "kv_memory": make_kv_memory(20_000)}
    pipeline = PipelinePlugin(num_micro_batches or num_stages)
    scheduler = kind(plugins=[pipeline], **options)
    stages: Any = SimulatedStages(num_stages, costs or Costs())
    runner = QueuedRunner(stages)
    core = PipelinedEngineCore(scheduler, runner, pipeline, num_in_flight or num_stages)
    to_come = sorted(enumerate(arrivals), key=lambda pair: -pair[1].at_ms)
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    ttft_ms, itl_ms = [], []
    for _ in as_long_as(lambda: to_come or core.has_unfinished_requests(), most=100_000):
        if not core.has_unfinished_requests():
            stages.now_ms = max(stages.now_ms, to_come[-1][1].at_ms)
        while to_come and to_come[-1][1].at_ms <= stages.now_ms:
            i, arrival = to_come.pop()
            arrived[str(i)] = arrival.at_ms
            prompt = [i + 2] * arrival.num_prompt  # nobody's prefix
            core.add_request(Request.from_tokens(str(i), prompt, arrival.num_outputs))
        for result in core.step():
            if result.new_token_ids:
                name, now = result.request_id, stages.now_ms
                (itl_ms if name in last else ttft_ms).append(now - last.get(name, arrived[name]))
                last[name] = now
    busy_ms = [0.0] * num_stages
    for interval in stages.intervals:
        busy_ms[interval.stage] += interval.end_ms - interval.start_ms
    duration_ms = stages.now_ms
    return Outcome(
        duration_ms,
        [ms / duration_ms for ms in busy_ms],
        stages.num_steps,
        sum(arrival.num_outputs for arrival in arrivals),
        ttft_ms,
        itl_ms,
        stages.intervals,
    )
