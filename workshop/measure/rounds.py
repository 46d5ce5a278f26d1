"""Settings measured in turn, and the numbers that a table shows of their runs.

Each round runs every setting once and starts with a different one, so a machine that becomes slower
or busier does so for all of them. The first round warms up. A table shows the median of the runs
and their extremes, and compares settings within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Case:
    """One work in several settings, in a row or column of the table `part`. Each setting's function
    does the work and returns what is counted."""

    part: str
    name: str
    settings: Mapping[str, Callable[[], Any]]
    round_factor: int = 1  # short work is done more often

    def run(self, num_rounds: int, num_warm_ups: int = 1) -> dict[str, list[Any]]:
        num_rounds *= self.round_factor
        return run_in_turn(self.settings, lambda n: self.settings[n](), num_rounds, num_warm_ups)


def time_in_turn(
    calls: Mapping[K, Callable[[], object]],
    num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, list[float]]:
    """Return the milliseconds of each call, by name, without those of the round that warms up.
    `time.process_time` is the clock that other programs disturb less; it adds up all threads."""

    def run(name: K) -> float:
        start = clock()
        calls[name]()
        return round(1e3 * (clock() - start), 4)

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
