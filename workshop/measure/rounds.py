"""Settings measured in turn, and the numbers that a table shows of their runs.

Each round runs every setting once and starts with a different one, so a machine that becomes slower
or busier does so for all of them. The first round warms up. A table shows the median of the runs
and their extremes, and compares settings within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from workshop.measure.bench.bench_record import percentiles

K = TypeVar("K")
T = TypeVar("T")


def rotated(names: Iterable[K], round_number: int) -> list[K]:
    """Return the order of a round: each name is first once in as many rounds as there are names."""
    names = list(names)
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def run_in_turn(
    names: Iterable[K], run: Callable[[K], T], num_rounds: int, num_warm_ups: int = 1
) -> dict[K, list[T]]:
    """Return what `run(name)` returned in each of `num_rounds`, by name. The rounds that warm up
    are additional."""
    names = list(names)
    found: dict[K, list[T]] = {name: [] for name in names}
    for round_number in range(num_warm_ups + num_rounds):
        for name in rotated(names, round_number):
            found[name].append(run(name))
    return {name: runs[num_warm_ups:] for name, runs in found.items()}


def time_in_turn(calls: Mapping[K, Callable[[], object]], num_rounds: int) -> dict[K, list[float]]:
    """Return the milliseconds of each call, by name, without those of the round that warms up."""

    def run(name: K) -> float:
        start = time.perf_counter()
        calls[name]()
        return round(1e3 * (time.perf_counter() - start), 4)

    return run_in_turn(calls, run, num_rounds)


def median_of(runs: Iterable[Mapping[str, Any]], field: str) -> float:
    return statistics.median(run[field] for run in runs)


def spread(values: Sequence[float], digits: int = 2, low: float = 0, high: float = 100) -> str:
    """Return `median (lowest-highest)`, or two percentiles instead of the extremes."""
    shown = [f"{value:,.{digits}f}" for value in percentiles(values, [50, low, high])]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"


def ratios(values: Iterable[float], base: Iterable[float]) -> str:
    """Return the `spread` of the ratios within each round."""
    return spread([value / other for value, other in zip(values, base, strict=True)])
