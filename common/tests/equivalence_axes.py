"""The array of engine runs: a `Combination` is one setting of every axis, and `covering_array` is
some 40 of them in which every two settings meet that can meet, those with most new pairs first:
nine in ten pairs meet in the first 20.

Some combinations are refused by the engine; `why_not` knows which, and says why.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from sglang_policies import POLICIES

Value = str | int | float | bool | None

SPECULATIVE: dict[str | None, dict | None] = {
    None: None,
    "ngram": {"method": "ngram", "min_ngram": 1, "adaptive": False},
    "ngram-adaptive": {"method": "ngram", "min_ngram": 1},
    "draft": {"method": "draft", "num_spec_tokens": 3, "adaptive": False},
}
AXES: dict[str, tuple[Value, ...]] = {
    "model": ("random", "experts", "gemma3", "olmo3", "turns", "windows", "shipped"),
    "scheduler": ("two_phase", "prefill_first", "fcfs"),
    "policy": tuple(POLICIES),
    "prefix_cache": (None, "hash", "radix"),
    "chunked_prefill": (False, True, 1, 3, 16),
    "max_num_batched_tokens": (128, 24),
    "max_num_seqs": (4, 2),
    "max_long_partial_prefills": (None, 1),
    "mixing": (False, True),
    "target_step_ms": (None, 0.001, 4.0),  # shorter than any step; about as long as one
    "speculative": tuple(SPECULATIVE),
    "block_size": (1, 3, 16, 33),
    "preempt_every": (None, 1, 2, 5),
    "watermark": (0.0, 0.2),
    "pool": ("ample", "just"),  # "just": the largest request and one block
    "kv_tiers": (None, "host"),
    "pipeline_parallel_size": (1, 2),  # stages, in threads
    "overlap_scheduling": (False, True),
    "emulate_graphs": (False, True),
    "adapters": (None, "mixed"),  # a prompt has one of three, or none
    "grammars": (None, "mixed"),  # one of four, or none
    "compile": (False, True),
}
# Of the covering array; the full product has the others, too.
FEWER: dict[str, tuple[Value, ...]] = {
    "model": ("random", "experts", "olmo3", "turns", "windows"),
    "chunked_prefill": (False, True, 1, 16),
    "block_size": (1, 3, 33),
    "preempt_every": (None, 1, 5),
}
ARRAY = AXES | FEWER
WINDOWED = ("olmo3", "turns", "windows")  # prompts are longer than the window

# With stages these need processes: common/parallel/test_remote.py.
OF_PROCESSES = ("kv_tiers", "adapters", "grammars", "compile")
IN_THREADS = "stages are threads here"


@dataclass(frozen=True)
class Combination:
    """A setting of every axis, and the seed of arrivals, priorities and lengths."""

    settings: tuple[Value, ...]
    seed: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Value], seed: int = 0) -> Combination:
        return cls(tuple(settings[axis] for axis in AXES), seed)

    def as_dict(self) -> dict[str, Value]:
        return dict(zip(AXES, self.settings, strict=True))

    @property
    def arguments(self) -> list[str]:
        return [f"{axis}={value}" for axis, value in self.as_dict().items()] + [f"seed={self.seed}"]

    @classmethod
    def parse(cls, arguments: list[str]) -> Combination:
        """The inverse of `arguments`; an axis that is not named has its first value. Raises
        `ValueError` that names the argument."""
        settings: dict[str, Value] = {axis: values[0] for axis, values in AXES.items()}
        seed = 0
        for argument in arguments:
            name, equals, text = argument.partition("=")
            known = {str(value): value for value in AXES.get(name, ())}
            if name == "seed" and text.isdecimal():
                seed = int(text)
            elif equals and text in known:
                settings[name] = known[text]
            else:
                allowed = ", ".join(known) if known else f"{', '.join(AXES)} or seed"
                raise ValueError(f"argument must be {allowed}, got {argument!r}")
        return cls.of(settings, seed)

    @property
    def command(self) -> str:
        return f'make matrix ARGS="{" ".join(self.arguments)}"'

    def __str__(self) -> str:
        return "-".join(map(str, self.settings))


def why_not(settings: Mapping[str, Value]) -> str | None:
    """Why the engine refuses these settings, or None. Axes may be missing: nothing is refused for
    what is not said yet."""
    scheduler = settings.get("scheduler")
    chunks = settings.get("chunked_prefill")
    is_fcfs = scheduler == "fcfs"
    if is_fcfs:
        for axis in ("policy", "target_step_ms", "speculative", "preempt_every"):
            if settings.get(axis) not in (None, "fcfs"):
                return f"fcfs has no {axis}"
        if "chunked_prefill" in settings and not isinstance(chunks, bool):
            return "fcfs computes prompts whole"
    if settings.get("model") in WINDOWED:
        if scheduler not in (None, "two_phase") or settings.get("mixing"):
            return "its layers have tables of their own"
        if settings.get("prefix_cache") == "radix":
            return "a window leaves parents in front of their children"
        if settings.get("kv_tiers") is not None:
            return "tiers keep whole blocks"
    if settings.get("model") == "windows" and settings.get("speculative") == "draft":
        return "no layer sees all that the draft model does"
    has_no_cache = "prefix_cache" in settings and settings["prefix_cache"] is None
    if settings.get("kv_tiers") is not None and has_no_cache:
        return "tiers are below a cache"
    if settings.get("pipeline_parallel_size") == 2:
        if settings.get("target_step_ms") is not None:
            return "a stage's time is not a step's"
        if any(settings.get(axis) for axis in OF_PROCESSES):
            return IN_THREADS
    if settings.get("mixing") and scheduler not in (None, "prefill_first"):
        return "there is nothing to mix"
    if settings.get("target_step_ms") is not None and chunks is False:
        return "whole prompts do not fit a time"
    if settings.get("max_long_partial_prefills") is not None:
        if scheduler not in (None, "two_phase") or settings.get("mixing"):
            return "it has one long prompt under way at a time, or computes them whole"
        if "chunked_prefill" in settings and isinstance(chunks, bool):
            return "nothing says what is long"
    if settings.get("max_num_batched_tokens") == 24 and (is_fcfs or chunks is False):
        return "a prompt is longer than a step"
    return None


# -- which are run

Pair = tuple[str, str]  # two settings, each as "axis=value": True and 1 are not the same here


def pairs_of(settings: Mapping[str, Value]) -> list[Pair]:
    return list(itertools.combinations((f"{a}={settings[a]}" for a in AXES if a in settings), 2))


def pairs_that_can_meet() -> dict[Pair, dict[str, Value]]:
    found = {}
    for axis, other in itertools.combinations(ARRAY, 2):
        for value, other_value in itertools.product(ARRAY[axis], ARRAY[other]):
            if why_not(settings := {axis: value, other: other_value}) is None:
                found[pairs_of(settings)[0]] = settings
    return found


@cache
def covering_array() -> list[Combination]:
    """Combinations in which every two settings meet that can meet. Each is begun with a pair that
    is missing and grown axis by axis with what adds most missing pairs. Deterministic. The first
    has most pairs, the next most that were not in it, and so on."""
    rng = random.Random(1)
    missing = pairs_that_can_meet()
    rows = list[Combination]()
    while missing:
        row = _grow(next(iter(missing.values())), missing, rng)
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append(Combination.of(row, seed=len(rows)))
    pairs = {row: {*pairs_of(row.as_dict())} for row in rows}
    ordered = list[Combination]()
    while pairs:
        ordered.append(max(pairs, key=lambda row: len(pairs[row])))
        met = pairs.pop(ordered[-1])
        pairs = {row: left - met for row, left in pairs.items()}
    return ordered


def _grow(
    start: Mapping[str, Value], missing: Mapping[Pair, object], rng: random.Random
) -> dict[str, Value]:
    settings = dict(start)
    axes = [axis for axis in ARRAY if axis not in settings]
    rng.shuffle(axes)
    for axis in axes:
        grown = [{**settings, axis: value} for value in ARRAY[axis]]
        grown = [more for more in grown if why_not(more) is None]
        added = [sum(map(missing.__contains__, pairs_of(more))) for more in grown]
        best = [more for more, most in zip(grown, added) if most == max(added)]
        # Of equals any; but PEFT takes longer, and runs where it is needed.
        settings = best[0] if axis in ("model", "adapters", "grammars") else rng.choice(best)
    return settings


def shuffled_product(seed: int = 0) -> Iterator[Combination]:
    """Every valid combination once, in an order that `seed` chooses: in strides around the circle
    of all, so that nothing has to be remembered, and settings of the first axes take turns."""
    size = math.prod(map(len, AXES.values()))
    rng = random.Random(seed)
    start = rng.randrange(size)
    stride = next(s for s in iter(lambda: rng.randrange(size), None) if math.gcd(s, size) == 1)
    for i in range(size):
        index = (start + i * stride) % size
        settings = {}
        rest = index
        for axis, values in AXES.items():
            rest, i = divmod(rest, len(values))
            settings[axis] = values[i]
        if why_not(settings) is None:
            yield Combination.of(settings, seed=index)
