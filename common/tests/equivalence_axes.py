"""The axes of the equivalence matrix: a `Combination` is one setting of every one.

Some combinations are refused by the engine; `why_not` knows which, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_policies import POLICIES

Value = str | int | float | bool | None

SPECULATIVE: dict[str | None, dict | None] = {
    None: None,
    "ngram": {"method": "ngram", "min_ngram": 1, "adaptive": False},
    "ngram-adaptive": {"method": "ngram", "min_ngram": 1},
    "draft": {"method": "draft", "num_spec_tokens": 3, "adaptive": False},
}
AXES: dict[str, tuple[Value, ...]] = {
    "model": ("random", "experts", "gemma3", "olmo3", "shipped"),
    "scheduler": ("two_phase", "prefill_first", "fcfs"),
    "policy": tuple(POLICIES),
    "prefix_cache": (None, "hash", "radix"),
    "chunked_prefill": (False, True, 1, 3, 16, 1000),
    "max_num_batched_tokens": (128, 24),
    "max_long_partial_prefills": (None, 1),
    "mixing": (False, True),
    "target_step_ms": (None, 0.001, 4.0),  # shorter than any step; about as long as one
    "speculative": tuple(SPECULATIVE),
    "block_size": (1, 3, 16, 33),
    "preempt_every": (None, 1, 2, 3, 5),
    "pool": ("ample", "just"),  # "just": the largest request and one block
    "overlap_scheduling": (False, True),
    "emulate_graphs": (False, True),
    "adapters": (None, "mixed"),  # a prompt has one of three, or none
    "grammars": (None, "mixed"),  # one of four, or none
    "compile": (False, True),
}
# No setting of these is ever refused.
FREE_AXES = ("block_size", "pool", "overlap_scheduling", "emulate_graphs")
FREE_AXES += ("adapters", "grammars", "compile")


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
    if settings.get("model") == "olmo3":
        if scheduler not in (None, "two_phase") or settings.get("mixing"):
            return "its layers have tables of their own"
        if settings.get("prefix_cache") == "radix":
            return "a window leaves parents in front of their children"
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
