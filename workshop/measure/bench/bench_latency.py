"""Latencies of a run: when tokens came out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

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
