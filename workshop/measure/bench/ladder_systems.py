"""The configurations of the ladder: the same engine, with one more chapter in each.

All have the same weights and the same KV memory, `Limits.num_positions` of it. Without pages (the
second and the third configuration) it holds as many requests as it holds of the longest; with pages
it holds as many as fit. A token counts for its user when its step has ended. An answer ends when it
has as many tokens as its user wanted. The engine does not know this number in advance: the request
is stopped from outside, as an end of text would stop it. (The static and the continuous
configuration know it, and still reserve the longest.)

    one at a time          one request in flight
    static batch           chapter 1's baseline: arrived requests join the next batch
    continuous batching    chapter 1: joins the next step; caches stacked and padded
    paged KV               chapter 2: more requests, because none reserves the longest
    prefix cache           chapter 3: the system prompt is computed once
    preempting scheduler   chapter 4: memory is filled, and taken back when it runs out
    speculative decoding   chapter 5: n-grams propose as many draft tokens as pay
    chunked prefill        chapter 6: long prompts in chunks
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from common.engine import LLMEngine
from hf_model_runner import HFModelRunner
from request import Request
from static_batching import generate_static
from step_record import StepRecord
from workshop.measure.bench.bench_latency import arrivals_of, describe_latency
from workshop.measure.bench.bench_models import BenchModels
from workshop.measure.bench.bench_systems import padded_core
from workshop.measure.bench.bench_work import Limits, greedy
from workshop.measure.bench.ladder_workload import MAX_TOKENS, LadderRequest

CHUNK = 128  # tokens: about the knee of the curve in chapter 6


@dataclass(slots=True)
class LadderOutcome:
    """The tokens of each request, with seconds after the start; and the system's own counts."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    token_times: dict[int, list[float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def take(self, index: int, new_token_ids: Sequence[int], now: float) -> None:
        self.token_ids.setdefault(index, []).extend(new_token_ids)
        self.token_times.setdefault(index, []).extend([now] * len(new_token_ids))


Run = Callable[[BenchModels, Limits, Sequence[LadderRequest]], LadderOutcome]


def run_engine(
    models: BenchModels, limits: Limits, requests: Sequence[LadderRequest], **options: Any
) -> LadderOutcome:
    steps: list[StepRecord] = []
    config = limits.engine_config(**options)
    engine = LLMEngine(config, loaded=models.loaded, on_step=steps.append)
    _warm_up(engine)
    steps.clear()

    def add(index: int, request: LadderRequest) -> None:
        engine.add_request(str(index), request.prompt_token_ids, greedy(MAX_TOKENS))

    def step() -> None:
        for output in engine.step():
            if len(output.outputs[0].token_ids) >= requests[int(output.request_id)].num_outputs:
                engine.abort_request(output.request_id)

    outcome = _drive(requests, add, step, engine.has_unfinished_requests, steps)
    stats = engine.stats()
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    shares = [n for record in steps for n in record.num_scheduled_tokens.values()]
    outcome.details |= {
        "kv_waste": stats.kv_waste,
        "preemptions": stats.num_preemptions,
        "most_tokens_of_one": max(shares),
    }
    if config.prefix_cache is not None:
        outcome.details["prefix_hits"] = stats.cached_tokens / num_prompt_tokens
    if config.speculative is not None:
        outcome.details |= {
            "tokens_per_pass": stats.tokens_per_pass,
            "acceptance": stats.num_accepted_tokens / max(1, stats.num_drafted_tokens),
            "drafted": stats.num_drafted_tokens,
        }
    return outcome


def run_padded(
    models: BenchModels, limits: Limits, requests: Sequence[LadderRequest]
) -> LadderOutcome:
    steps: list[StepRecord] = []
    runner = HFModelRunner(models.hf, batched=True)
    core = padded_core(runner, limits.num_contiguous, limits.max_num_batched_tokens, steps)

    def add(index: int, request: LadderRequest) -> None:
        params = greedy(request.num_outputs)
        core.add_request(Request(str(index), request.prompt_token_ids, params))

    outcome = _drive(requests, add, core.step, core.has_unfinished_requests, steps)
    held = [len(step.num_scheduled_tokens) * limits.longest for step in steps]
    written = [step.kv_tokens_written for step in steps]
    outcome.details["kv_waste"] = 1 - fmean(w / h for w, h in zip(written, held) if h)
    return outcome


def run_static(
    models: BenchModels, limits: Limits, requests: Sequence[LadderRequest]
) -> LadderOutcome:
    """Serve in static batches. Requests that arrive during a batch join the next one."""
    outcome, num_steps, wastes = LadderOutcome(), 0, []
    waiting = deque(enumerate(requests))
    start = time.monotonic()
    while waiting:
        time.sleep(max(0.0, start + waiting[0][1].arrival_time - time.monotonic()))
        now = time.monotonic() - start
        batch = []
        while waiting and waiting[0][1].arrival_time <= now and len(batch) < limits.num_contiguous:
            batch.append(waiting.popleft())
        own = [
            Request(str(i), r.prompt_token_ids, greedy(r.num_outputs), arrival_time=0.0)
            for i, r in batch
        ]
        ends: list[float] = []  # of the forward passes
        with models.hf.register_forward_hook(lambda *_, ends=ends: ends.append(time.monotonic())):
            generate_static(models.hf, own, len(batch))
        for (index, _), request in zip(batch, own, strict=True):
            outcome.token_ids[index] = request.output_token_ids
            outcome.token_times[index] = [t - start for t in ends[: request.num_output_tokens]]
        num_steps += len(ends)
        for step in range(len(ends)):
            written = sum(r.num_prompt_tokens + min(step, r.num_output_tokens) for r in own)
            wastes.append(1 - written / (len(own) * limits.longest))
    outcome.details |= {"num_steps": num_steps, "kv_waste": fmean(wastes)}
    return outcome


_PREEMPTING = {"scheduler": "two_phase", "prefix_cache": "hash"}
_GUESSING = _PREEMPTING | {"speculative": {"method": "ngram"}}
RUNGS: dict[str, tuple[str, Run]] = {
    "one-at-a-time": ("one at a time", partial(run_engine, max_num_seqs=1)),
    "static": ("static batch", run_static),
    "continuous": ("1 continuous batching", run_padded),
    "paged": ("2 paged KV", run_engine),
    "prefix-cache": ("3 prefix cache", partial(run_engine, prefix_cache="hash")),
    "preempting": ("4 preempting scheduler", partial(run_engine, **_PREEMPTING)),
    "speculative": ("5 speculative decoding", partial(run_engine, **_GUESSING)),
    "chunked": ("6 chunked prefill", partial(run_engine, **_GUESSING, chunked_prefill=CHUNK)),
}


def configs_of(name: str) -> list[str]:
    """All configurations for a regime; for a chapter's question its own and the one before."""
    configs = list(RUNGS)
    return configs[configs.index(name) - 1 :][:2] if name in RUNGS else configs


def describe(outcome: LadderOutcome, requests: Sequence[LadderRequest]) -> dict[str, Any]:
    """Return the numbers that a table shows for one run. Times are in milliseconds."""
    times = [outcome.token_times[index] for index in range(len(requests))]
    num_tokens = sum(map(len, times))
    seconds = max(t[-1] for t in times) - requests[0].arrival_time
    waits = [[at - r.arrival_time for at in t] for t, r in zip(times, requests, strict=True)]
    latencies = {
        f"{name}_{p}": value
        for name, percentiles in describe_latency(waits).items()
        for p, value in percentiles.items()
    }
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in outcome.details.items()}
    return {"output_tokens_per_s": round(num_tokens / seconds, 2)} | latencies | shown


def _drive(
    requests: Sequence[LadderRequest],
    add: Callable[[int, LadderRequest], None],
    step: Callable[[], Any],
    has_unfinished: Callable[[], bool],
    steps: list[StepRecord],
) -> LadderOutcome:
    """Add each request at its arrival time, and step while requests are unfinished."""
    outcome = LadderOutcome()
    pending = deque(enumerate(requests))
    start = time.monotonic()
    while pending or has_unfinished():
        now = time.monotonic() - start
        while pending and pending[0][1].arrival_time <= now:
            add(*pending.popleft())
        if has_unfinished():
            step()
        else:
            time.sleep(max(0.0, pending[0][1].arrival_time - now))
    for request_id, token_ids, end in arrivals_of(steps, start):
        index = int(request_id)
        num_wanted = requests[index].num_outputs - len(outcome.token_ids.get(index, ()))
        outcome.take(index, token_ids[:num_wanted], end)
    outcome.details["num_steps"] = len(steps)
    return outcome


def _warm_up(engine: LLMEngine) -> None:
    """Serve tokens that no workload has, so that the cache holds none of its prompts."""
    engine.generate_batch([[7] * 20, [9] * 40], greedy(4))
    engine.reset_prefix_cache()
    engine.reset_stats()
