"""Latencies from the steps of a run: when tokens came out, and how long a decode step takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from step_record import StepRecord
from workshop.measure.bench.bench_record import percentile

STAGES = ("schedule_ms", "prepare_ms", "forward_ms", "sample_ms", "update_ms")


def describe_latency(token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Summarise the times of each request's tokens, in seconds from the start."""
    first = [1e3 * times[0] for times in token_times if times]
    gaps = [1e3 * (b - a) for times in token_times for a, b in pairwise(times)]
    return {"ttft_ms": p50_p99(first), "inter_token_ms": p50_p99(gaps)}


def arrivals_of(
    steps: Sequence[StepRecord], start: float
) -> Iterator[tuple[str, list[int], float]]:
    """Yield request id, its tokens of a step, and the step's end in seconds after `start`."""
    for step in steps:
        end = step.start_time + step.step_ms / 1e3 - start
        for request_id, token_ids in step.new_token_ids.items():
            yield request_id, token_ids, end


def describe_steps(steps: Sequence[StepRecord], start: float) -> dict[str, Any]:
    """Latencies, number of steps, and the time of a pure decode step of the fullest batch.

    `start` is the moment of arrival, in seconds of `time.monotonic()`."""
    times: dict[str, list[float]] = {}
    for request_id, token_ids, end in arrivals_of(steps, start):
        times.setdefault(request_id, []).extend([end] * len(token_ids))
    described = {"num_steps": len(steps)} | describe_latency(list(times.values()))
    decodes = [step for step in steps if _is_decode(step)]
    if decodes:
        num_rows = max(len(step.num_scheduled_tokens) for step in decodes)
        full = [step for step in decodes if len(step.num_scheduled_tokens) == num_rows]
        described["decode"] = {
            "num_rows": num_rows,
            "num_steps": len(full),
            "step_ms": round(median(step.step_ms for step in full), 4),
            "stages": {s: round(median(getattr(step, s) for step in full), 4) for s in STAGES},
            "kv_tokens": round(fmean(step.kv_tokens_written for step in full)),
        }
    return described


def _is_decode(step: StepRecord) -> bool:
    """Whether each request computes one token and draft tokens, and none a prompt chunk."""
    scheduled = step.num_scheduled_tokens
    num_drafts = {name: drafted for name, (drafted, _) in step.drafts.items()}
    is_single = all(n == 1 + num_drafts.get(name, 0) for name, n in scheduled.items())
    return bool(scheduled) and not step.admitted and is_single


def p50_p99(values: Sequence[float]) -> dict[str, float | None]:
    """Return both percentiles, rounded to three digits; None for an empty sequence."""
    found = {f"p{p}": percentile(values, p) for p in (50, 99)}
    return {name: None if value is None else round(value, 3) for name, value in found.items()}
