"""Latencies of a run: when tokens came out, and how long a decode step takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from step_record import StepRecord
from workshop.measure.bench.bench_record import percentile


def describe_latency(token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return p50 and p99 in milliseconds, None if there are none, of the waits for a first token
    and between two. `token_times` are those of each request, in seconds after its arrival."""
    first = [1e3 * times[0] for times in token_times if times]
    gaps = [1e3 * (b - a) for times in token_times for a, b in pairwise(times)]
    return {"ttft_ms": p50_p99(first), "inter_token_ms": p50_p99(gaps)}


def p50_p99(values: Sequence[float]) -> dict[str, float | None]:
    found = {f"p{p}": percentile(values, p) for p in (50, 99)}
    return {name: None if value is None else round(value, 3) for name, value in found.items()}


def describe_decode(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return `{"decode": ...}`, the pure decode steps of the fullest batch, or {} without any."""
    decodes = [step for step in steps if _is_decode(step)]
    if not decodes:
        return {}
    num_rows = max(len(step.num_scheduled_tokens) for step in decodes)
    full = [step for step in decodes if len(step.num_scheduled_tokens) == num_rows]
    return {
        "decode": {
            "num_rows": num_rows,
            "num_steps": len(full),
            "step_ms": round(median(step.step_ms for step in full), 4),
            "kv_tokens": round(fmean(step.kv_tokens_written for step in full)),
        }
    }


def _is_decode(step: StepRecord) -> bool:
    """Whether each request computes one token and draft tokens, and none a prompt chunk."""
    scheduled = step.num_scheduled_tokens
    num_drafts = {name: drafted for name, (drafted, _) in step.drafts.items()}
    is_single = all(n == 1 + num_drafts.get(name, 0) for name, n in scheduled.items())
    return bool(scheduled) and not step.admitted and is_single
