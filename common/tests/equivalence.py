"""The equivalence matrix: with any settings of these axes, greedy tokens are `transformers`'.

A `Combination` is one setting of every axis below. `serve_combination` serves a small batch with it
in float64 and compares every token. Some combinations are refused by the engine; `why_not` knows
which, and says why.

    every pair      `covering_array`: some 40 runs in which every two settings meet that can meet
    as many as fit  `run_matrix`: the full product in shuffled order, until the time is up
    one             `make matrix ARGS="model=random scheduler=two_phase ..."`

A failure ends with the command that runs its combination alone. What chunks depend on a clock
(`target_step_ms`) may differ from run to run; everything else is repeated exactly."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT
from common.loader import LoadedModel, load_model
from common.tests.engine_oracle import Oracle, greedy_params, make_oracle, save_random_model
from policies import POLICIES
from step_record import StepRecord

Value = str | int | float | bool | None

SPECULATIVE: dict[str | None, dict | None] = {
    None: None,
    "ngram": {"method": "ngram", "min_ngram": 1, "adaptive": False},
    "ngram-adaptive": {"method": "ngram", "min_ngram": 1},
    "draft": {"method": "draft", "num_spec_tokens": 3, "adaptive": False},
}
AXES: dict[str, tuple[Value, ...]] = {
    "model": ("random", "shipped"),
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
}
FREE_AXES = ("model", "prefix_cache", "block_size", "pool")  # no setting of these is ever refused

# Of two prompts the shorter is a prefix of the longer, or they part at the place given.
PROMPT_LENGTHS = {"random": (1, 2, 16, 33, 48, 49, 64, 97), "shipped": (1, 5, 16, 33, 34, 40)}
PARTS_AT = {"random": (0, 0, 0, 0, 16, 33, 48, 40), "shipped": (0, 0, 0, 0, 16, 20)}
MAX_NUM_SEQS = 4
NUM_POSITIONS = 1000  # of the ample pool


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
                raise ValueError(f"argument is {argument!r}: it must be {allowed}")
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


# -- the model and what is right


@dataclass(frozen=True)
class Subject:
    """A model, its draft model, prompts that share beginnings, and what follows them."""

    oracle: Oracle
    loaded: LoadedModel
    draft: LoadedModel


@cache
def subject(name: str) -> Subject:
    """`"random"` or `"shipped"`, in float64. Made once in a process; takes seconds."""
    device = torch.device("cpu")
    if name == "shipped":
        path = SHIPPED_CHECKPOINT
        draft = load_model(SHIPPED_DRAFT, torch.float64, device)
    else:
        path = Path(_folder().name) / "model"
        save_random_model(path, seed=3)
        draft = _with_noise(load_model(path, torch.float64, device))
    loaded = load_model(path, torch.float64, device)
    prompts = _prompts(name, loaded.config.vocab_size)
    return Subject(make_oracle(path, prompts), loaded, draft)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="equivalence-")


def _with_noise(model: LoadedModel) -> LoadedModel:
    """A draft model that is right about two times in three."""
    weight = model.model.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    weight.data += 0.35 * weight.std() * noise
    return model


def _prompts(name: str, vocab_size: int) -> list[list[int]]:
    """Half of the tokens are a phrase that returns, so that a look-up finds something."""
    rng = random.Random(7)
    phrase = [rng.randrange(2, vocab_size) for _ in range(5)]

    def tokens(n: int) -> list[int]:
        text: list[int] = []
        while len(text) < n:
            text += [*phrase, *(rng.randrange(2, vocab_size) for _ in range(5))]
        return text[:n]

    trunk = tokens(max(PROMPT_LENGTHS[name]))
    prompts = []
    for length, parts_at in zip(PROMPT_LENGTHS[name], PARTS_AT[name], strict=True):
        common = parts_at or length
        prompts.append(trunk[:common] + tokens(length - common))
    return prompts


# -- one run


@dataclass(frozen=True)
class Summary:
    """What happened in a run, to see that its settings had an effect."""

    num_steps: int
    num_preemptions: int
    num_cut: int  # scheduled pieces that ended before the known tokens did
    num_drafted_tokens: int
    num_cached_tokens: int


def max_tokens_of(prompt_len: int) -> int:
    """Long prompts are continued shortly: it is their chunks that are of interest."""
    return 12 if prompt_len <= 16 else 6 if prompt_len <= 48 else 4


def make_config(combination: Combination) -> EngineConfig:
    """Raises `ValueError` if the engine has no such configuration."""
    settings = combination.as_dict()
    size = settings["block_size"]
    lengths = PROMPT_LENGTHS[settings.pop("model")]
    largest = max(n + max_tokens_of(n) - 1 for n in lengths)  # the last token needs no slot
    num_positions = NUM_POSITIONS if settings.pop("pool") == "ample" else largest + size
    settings["speculative"] = SPECULATIVE[settings["speculative"]]
    return EngineConfig(
        **settings,
        num_blocks=1 + -(-num_positions // size),
        max_num_seqs=MAX_NUM_SEQS,
        attention_backend="torch",
        check_invariants=True,
        shuffle_batch=True,
        seed=combination.seed,
    )


def make_engine(combination: Combination) -> LLMEngine:
    which = subject(combination.as_dict()["model"])
    return LLMEngine(make_config(combination), loaded=which.loaded, draft=which.draft)


def serve_combination(combination: Combination, engine: LLMEngine | None = None) -> Summary:
    """Serve every prompt, one of them twice at once, arriving over some steps. Raises
    `AssertionError` with the command to repeat it if a token is wrong, the engine raises, or it
    does not end."""
    try:
        return _serve(combination, engine or make_engine(combination))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{what}\nrepeat it with\n{combination.command}") from error


def _serve(combination: Combination, engine: LLMEngine) -> Summary:
    oracle = subject(combination.as_dict()["model"]).oracle
    rng = random.Random(combination.seed)
    records: list[StepRecord] = []
    engine.on_step = records.append
    order = list(range(len(oracle.prompts)))
    rng.shuffle(order)
    arrivals = [(rng.randrange(0, 12), i) for i in order]
    twice = rng.choice(order)
    patience = 100 + 3 * sum(map(len, oracle.prompts))  # steps without any token
    finished, num_idle, step = {}, 0, 0
    while len(finished) < len(order):
        for when, i in arrivals:
            if when == step:
                prompt = oracle.prompts[i]
                params = greedy_params(max_tokens_of(len(prompt)), n=2 if i == twice else 1)
                engine.add_request(str(i), prompt, params, priority=rng.randint(0, 2))
        finished |= {int(o.request_id): o for o in engine.step() if o.finished}
        num_idle = 0 if any(records[-1].new_token_ids.values()) else num_idle + 1
        assert num_idle < patience, f"the engine hangs: no token in {num_idle} steps"
        step += 1
    for i, output in sorted(finished.items()):
        expected = oracle.expected(i, max_tokens_of(len(oracle.prompts[i])))
        assert len(output.outputs) == (2 if i == twice else 1)
        for completion in output.outputs:
            assert completion.token_ids == expected, f"prompt {i}: {completion.token_ids}"
    stats = engine.stats()
    assert stats.kv_blocks_in_use == 0, "blocks leaked"
    return Summary(
        step,
        stats.num_preemptions,
        sum(not tokens for record in records for tokens in record.new_token_ids.values()),
        stats.num_drafted_tokens,
        stats.cached_tokens,
    )


# -- which runs

Pair = tuple[str, str]  # two settings, each as "axis=value": True and 1 are not the same here
NUM_CANDIDATES = 12


def pairs_of(settings: Mapping[str, Value]) -> list[Pair]:
    return list(itertools.combinations((f"{a}={settings[a]}" for a in AXES if a in settings), 2))


def setting(text: str) -> tuple[str, Value]:
    """The axis and the value of `"axis=value"`."""
    axis, _, name = text.partition("=")
    return axis, next(value for value in AXES[axis] if str(value) == name)


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
    return sum(pair in missing for pair in pairs_of(settings))


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


def run_matrix(seconds: float, seed: int = 0) -> int:
    """Runs of the full product until the time is up, or one fails. How many there were."""
    total, done = num_valid(), 0
    print(f"{total} combinations, in the order of seed {seed}, for {seconds:g} s", flush=True)
    began = shown = time.monotonic()
    try:
        for combination in shuffled_product(seed):
            now = time.monotonic()
            if now - began > seconds:
                break
            if now - shown > 60:
                shown = now
                print(f"  {now - began:5.0f} s: {done} right", flush=True)
            serve_combination(combination)
            done += 1
    finally:
        took = time.monotonic() - began
        print(f"{done} of {total} combinations in {took:.0f} s had every token right", flush=True)
    return done


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m common.tests.equivalence")
    parser.add_argument("combination", nargs="*", metavar="AXIS=VALUE", help="run only this one")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the full product")
    parser.add_argument("--seed", type=int, default=0, help="the order of the full product")
    args = parser.parse_args(arguments)
    if args.combination:
        print(serve_combination(Combination.parse(args.combination)))
    else:
        run_matrix(args.seconds, args.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
