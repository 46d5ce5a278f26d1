"""Which combinations the equivalence matrix runs: some 40 in which every two settings meet that can
meet, or the full product in an order that looks random."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from functools import cache

from common.tests.equivalence_axes import AXES, FREE_AXES, Combination, Value, why_not

Pair = tuple[str, str]  # two settings, each as "axis=value": True and 1 are not the same here
NUM_CANDIDATES = 12


def pairs_of(settings: Mapping[str, Value]) -> list[Pair]:
    return list(itertools.combinations((f"{a}={settings[a]}" for a in AXES if a in settings), 2))


def setting(text: str) -> tuple[str, Value]:
    """The axis and the value of `"axis=value"`."""
    axis, _, name = text.partition("=")
    return axis, next(value for value in AXES[axis] if str(value) == name)


@cache
def covering_array(seed: int = 0) -> list[Combination]:
    """Combinations in which every two settings meet that can meet. Each is begun with a pair that
    is missing and grown axis by axis with what adds most missing pairs; of some that were grown in
    different orders the best is kept. Deterministic."""
    rng = random.Random(seed)
    missing: dict[Pair, None] = {}
    for axis, other in itertools.combinations(AXES, 2):
        for value, other_value in itertools.product(AXES[axis], AXES[other]):
            if why_not(settings := {axis: value, other: other_value}) is None:
                missing |= dict.fromkeys(pairs_of(settings))
    rows: list[Combination] = []
    while missing:
        start = next(iter(missing))
        candidates = [_grow(start, missing, rng) for _ in range(NUM_CANDIDATES)]
        best = max(candidates, key=lambda row: _num_missing(row, missing))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        rows.append(Combination.of(best, seed=len(rows)))
    return rows


def _num_missing(settings: Mapping[str, Value], missing: Mapping[Pair, None]) -> int:
    return sum(map(missing.__contains__, pairs_of(settings)))


def _grow(start: Pair, missing: Mapping[Pair, None], rng: random.Random) -> dict[str, Value]:
    settings = dict(map(setting, start))
    axes = [axis for axis in AXES if axis not in settings]
    rng.shuffle(axes)
    for axis in axes:
        grown = [{**settings, axis: value} for value in AXES[axis]]
        grown = [more for more in grown if why_not(more) is None]
        most = max(_num_missing(more, missing) for more in grown)
        best = [more for more in grown if _num_missing(more, missing) == most]
        # Of equals any; but the shipped model takes longer, and runs only where it is needed.
        settings = best[0] if axis == "model" else rng.choice(best)
    return settings


def num_valid() -> int:
    """Combinations in the full product that the engine does not refuse."""
    tied = {axis: values for axis, values in AXES.items() if axis not in FREE_AXES}
    num = sum(
        why_not(dict(zip(tied, values))) is None for values in itertools.product(*tied.values())
    )
    return num * math.prod(len(AXES[axis]) for axis in FREE_AXES)


def shuffled_product(seed: int = 0) -> Iterator[Combination]:
    """Every valid combination once, in an order that `seed` chooses: in strides around the circle
    of all, so that nothing has to be remembered, and settings of the first axes take turns."""
    size = math.prod(map(len, AXES.values()))
    rng = random.Random(seed)
    start = rng.randrange(size)
    stride = next(s for s in iter(lambda: rng.randrange(size), None) if math.gcd(s, size) == 1)
    for i in range(size):
        index = (start + i * stride) % size
        settings, rest = {}, index
        for axis, values in AXES.items():
            rest, i = divmod(rest, len(values))
            settings[axis] = values[i]
        if why_not(settings) is None:
            yield Combination.of(settings, seed=index)
