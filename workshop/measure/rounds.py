"""Settings measured in turn.

Each round runs every setting once and starts with a different one, so a machine that becomes slower
or busier does so for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tqdm import tqdm

K = TypeVar("K")
T = TypeVar("T")


def rotated(names: Iterable[K], round_number: int) -> list[K]:
    """Return the order of a round: each name is first once in as many rounds as there are names."""
    names = list(names)
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def run_in_turn(names: Iterable[K], run: Callable[[K], T], num_rounds: int) -> dict[K, list[T]]:
    """Return what `run(name)` returned in each of `num_rounds`, by name. One more round, before
    them, warms up."""
    names = list(names)
    found: dict[K, list[T]] = {name: [] for name in names}
    for round_number in range(1 + num_rounds):
        for name in rotated(names, round_number):
            found[name].append(run(name))
    return {name: runs[1:] for name, runs in found.items()}


class Measured(NamedTuple):
    """What one workload measures: `run(name, round, place)` measures one of `names` once."""

    title: str
    names: Sequence[str]
    run: Callable[[str, int, int], None]


def measure_in_turn(
    work: Sequence[Measured],
    num_rounds: int,
    save: Callable[[], None],
    deadline: float | None = None,
) -> None:
    """Run all the work in each round, and save after each run. No run is started after `deadline`,
    in seconds of `time.monotonic()`."""
    total = num_rounds * sum(len(one.names) for one in work)
    with tqdm(total=total, unit="run", dynamic_ncols=True, disable=None) as bar:
        for round_number in range(num_rounds):
            for title, names, run in work:
                for place, name in enumerate(rotated(names, round_number)):
                    if deadline is not None and time.monotonic() > deadline:
                        return
                    bar.set_description(f"{title}: {name}")
                    run(name, round_number, place)
                    save()
                    bar.update()


def time_in_turn(calls: Mapping[K, Callable[[], object]], num_rounds: int) -> dict[K, list[float]]:
    """Return the milliseconds of each call, by name, without those of the round that warms up."""

    def run(name: K) -> float:
        start = time.perf_counter()
        calls[name]()
        return round(1e3 * (time.perf_counter() - start), 4)

    return run_in_turn(calls, run, num_rounds)
