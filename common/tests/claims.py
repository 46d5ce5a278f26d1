"""The table of claims: engine settings, models and workloads, and what each run must show.

A claim is one row: with these settings, over this model, every token is the oracle's, and what the
settings are there for has happened. `hold` runs one case of a row. The equivalence matrix
(`equivalence.py`) generates combinations of single settings; a row says what the matrix cannot:
settings that are drawn, memory that is scarce, models and workloads of its own.

Values of settings: `any_of(...)` is drawn for each case, `in_turn(...)` goes round. These keys are
no settings:

    also      further settings, which go before the others
    spare     blocks of KV memory beyond those of the largest request (a float: as many requests)
    dtype     of the model; float64 without it
    has_ends  two tokens that are said are the model's EOS
    script    a `ScriptedProposer` drafts
    is_exact  the draft model is the target
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import STEP_SIZES
from common.models.loader import load_model
from common.models.regions.compiled_regions import CompiledRegions
from common.requests.output_processor import RequestOutput
from common.requests.tokenizer import Tokenizer
from common.runner.overlap import OverlappedEngineCore
from common.runner.pipeline import PipelinedEngineCore
from common.tests.engine_oracle import (
    MAX_TOKENS,
    checked_engine,
    full_of_nan,
    greedy_params,
    num_replays,
    paged_runner,
    serve,
    serve_a_crowd,
)
from common.tests.every_kind import everything_said, must_say_the_same
from common.tests.grammar_cases import CASES, LIMITS, texts_of
from common.tests.local_stages import pipelined_engine
from common.tests.scripted_proposer import SCRIPTS, ScriptedProposer
from common.tests.small_models import CPU, OF_TWO_KINDS, WINDOWED, Subject, subject
from compiled_attention import HeadMajorKVCache
from grouped_kv_memory import max_blocks
from paged_attention_triton import TritonAttentionBackend
from request import SamplingParams
from sglang_policies import POLICIES
from tiered_cache import KVTierConfig

Values = dict[str, Any]


# -- values that differ from case to case


@dataclass(frozen=True)
class OneOf:
    values: Sequence[Any]
    is_drawn: bool

    def pick(self, rng: random.Random, number: int) -> Any:
        if self.is_drawn:
            return rng.choice(self.values)
        return self.values[number % len(self.values)]


def any_of(*values: Any) -> OneOf:
    return OneOf(values, True)


def in_turn(*values: Any) -> OneOf:
    return OneOf(values, False)


def draw(value: Any, rng: random.Random, number: int) -> Any:
    """`value` with one value of each choice in it, those of nested dicts too."""
    while isinstance(value, OneOf):
        value = value.pick(rng, number)
    if isinstance(value, dict):
        drawn = {key: draw(each, rng, number) for key, each in value.items()}
        return drawn | drawn.pop("also", {})
    return value


# -- a row, and one case of it


@dataclass(frozen=True)
class Case:
    """An engine with drawn settings, before its requests come."""

    which: Subject
    settings: Values
    number: int
    rng: random.Random
    engine: LLMEngine
    ends: Sequence[int]


@dataclass(frozen=True, eq=False)
class Claim:
    what: str
    models: Sequence[str]
    settings: Values
    asks: Callable[[Case], Any]  # brings the requests and compares every token with the oracle
    num_cases: tuple[int, int] = (1, 1)  # in the normal run, and with the slow ones
    happens: Mapping[str, int] = field(default_factory=dict)  # of `COUNTS`: more than so often

    def cases(self) -> Iterator[Any]:
        quick, most = self.num_cases
        needs = [pytest.mark.needs("C++ compiler")] if self.settings.get("compile") else []
        for number in range(most):
            model = self.models[number % len(self.models)]
            marks = needs if number < quick else [*needs, pytest.mark.slow]
            name = self.what if most == 1 else f"{self.what}-{model}-{number}"
            yield pytest.param(self, model, number, marks=marks, id=name)

    def hold(self, model: str, number: int) -> None:
        which, rng = subject(model), random.Random(f"{self.what} {model} {number}")
        settings, ends = drawn(self.settings, rng, number, which) | {"seed": number}, []
        if settings.pop("has_ends", False):
            ends = rng.sample([t for said in which.oracle.continuations for t in said], 2)
        tokenizer = which.tokenizer if self.asks in (kinds, grammars) else None
        with engine_of(which, settings, ends, tokenizer) as engine:
            self.asks(Case(which, settings, number, rng, engine, ends))
            check_effects(settings, engine)
            for name, num in self.happens.items():
                assert COUNTS[name](engine) > num, f"too few {name} with {settings}"
            assert engine.stats().kv_blocks_in_use == 0, "blocks leaked"
            assert engine.reset_prefix_cache() and engine.stats().kv_blocks_cached == 0


def cases_of(claims: Sequence[Claim]) -> pytest.MarkDecorator:
    names = ("claim", "model", "number")
    return pytest.mark.parametrize(names, [case for claim in claims for case in claim.cases()])


def drawn(settings: Values, rng: random.Random, number: int, which: Subject) -> Values:
    """The settings of a case, with `num_blocks` in place of `spare`."""
    settings = draw(settings, rng, number)
    if (spare := settings.pop("spare", None)) is None:
        return settings
    known = {field.name for field in fields(EngineConfig)} - {"kv_tiers", "dtype", "adapters"}
    config = EngineConfig(**{name: value for name, value in settings.items() if name in known})
    model = which.loaded.model
    model.group_layers(config.max_model_len or 256)
    longest = max(map(len, which.oracle.prompts)) + MAX_TOKENS - 1  # the last token needs no slot
    step = config.num_in_flight_tokens(CPU)
    largest = max_blocks(longest, config.block_size, model.groups.windows, step)
    more = int(spare * largest) if isinstance(spare, float) else spare
    return settings | {"num_blocks": 1 + largest + more}


@contextmanager
def engine_of(
    which: Subject, settings: Values, ends: Sequence[int] = (), tokenizer: Tokenizer | None = None
) -> Iterator[LLMEngine]:
    """An engine that checks itself, over memory full of NaN, so that a read of a slot that was not
    written changes tokens."""
    settings = dict(settings)
    loaded = which.ending if settings.pop("dtype", None) is None else which.in_float32
    loaded = replace(loaded, generation_eos_token_ids=tuple(ends)) if ends else loaded
    drafts, script = settings.get("speculative") or {}, settings.pop("script", None)
    draft = which.draft if drafts.get("method") == "draft" else None
    draft = which.loaded if settings.pop("is_exact", False) else draft
    if settings.get("adapters"):
        settings["adapters"] = which.adapters
        # Adapters change their model for good.
        loaded = replace(loaded, model=load_model(which.oracle.path, torch.float64, CPU).model)
    make, num_stages = partial(checked_engine, loaded), settings.get("pipeline_parallel_size", 1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if num_stages > 1:
            settings["pipeline_parallel_size"] = min(num_stages, loaded.config.num_hidden_layers)
            make = partial(pipelined_engine, patch, which.oracle.path)
        if tiers := settings.get("kv_tiers"):
            settings["kv_tiers"] = KVTierConfig(**tiers, disk_path=Path(folder) / "kv")
        engine = make(draft, tokenizer, **settings)
        if script is not None:
            engine.speculation.proposer = ScriptedProposer(which.oracle, SCRIPTS[script])
        try:
            yield full_of_nan(engine)
        finally:
            engine.close()


COUNTS: dict[str, Callable[[LLMEngine], int]] = {
    "preemptions": lambda engine: engine.stats().num_preemptions,
    "drafts": lambda engine: engine.stats().num_drafted_tokens,
    "discarded tokens": lambda engine: engine.stats().discarded_tokens,
    "replays": num_replays,
    "adapter replays": lambda engine: paged_runner(engine).graphs.beside["adapter"].num_replays,
}


def check_effects(settings: Values, engine: LLMEngine) -> None:
    """Without an effect, a setting would prove nothing."""
    drafts, stats = settings.get("speculative"), engine.stats()
    num_stages = settings.get("pipeline_parallel_size", 1)
    is_ahead = settings.get("overlap_scheduling", False) and drafts is None
    assert isinstance(engine.core, OverlappedEngineCore) == (is_ahead or num_stages > 1)
    assert isinstance(engine.core, PipelinedEngineCore) == (num_stages > 1)
    assert drafts is not None or stats.num_drafted_tokens == 0
    if num_stages == 1:
        runner, is_compiled = paged_runner(engine), bool(settings.get("compile"))
        assert isinstance(runner.model.regions, CompiledRegions) == is_compiled
        assert isinstance(engine.kv_cache, HeadMajorKVCache) == is_compiled
        uses_kernels = settings.get("attention_backend") == "triton"
        assert isinstance(runner.backend, TritonAttentionBackend) == uses_kernels
        assert settings.get("emulate_graphs") or num_replays(engine) == 0


# -- what is asked, and the oracle


def crowd(case: Case, times: int = 1, **how: Any) -> list[RequestOutput]:
    """Requests that arrive over some steps, some aborted, some with three samples."""
    how, outputs = draw(how, case.rng, case.number) | {"eos": case.ends}, []
    for _ in range(times):
        outputs = serve_a_crowd(case.engine, case.which.oracle, case.rng, case.number, **how)
    return outputs


def counted_crowd(case: Case, **how: Any) -> None:
    """And unless one was aborted, the computed tokens are as many as were fed and not cached."""
    completions = [(o, c) for o in crowd(case, **how) for c in o.outputs]
    if any(completion.finish_reason == "abort" for _, completion in completions):
        return
    # The last token of each is never fed back.
    num_fed = sum(len(o.prompt_token_ids) + len(c.token_ids) - 1 for o, c in completions)
    stats = case.engine.stats()
    num_computed = num_fed - stats.cached_tokens + stats.recomputed_tokens
    assert stats.scheduled_tokens == num_computed
    low, high = (
        sum(limit * num for limit, num in zip(limits, stats.steps_by_tokens, strict=True))
        for limits in ((0, *STEP_SIZES), (*STEP_SIZES, num_computed))
    )
    assert low <= num_computed <= high and sum(stats.steps_by_tokens) == stats.num_steps


def batch(case: Case, indices: Sequence[int], max_tokens: int, times: int = 1) -> None:
    """These prompts at once."""
    for _ in range(times):
        serve(case.engine, case.which.oracle, list(indices), max_tokens)


def warm(case: Case, num_longest: int | None = None, max_tokens: int = MAX_TOKENS) -> None:
    """Each prompt, then each again: all but the block of its last token is in the cache."""
    engine, oracle = case.engine, case.which.oracle
    lengths = list(map(len, oracle.prompts))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:num_longest]
    serve(engine, oracle, sorted(order), max_tokens)
    engine.reset_stats()
    size = case.settings["block_size"]
    for output in serve(engine, oracle, sorted(order)[::-1], max_tokens):
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // size * size
    possible = sum((lengths[i] - 1) // size * size for i in order)
    assert engine.stats().cached_tokens == possible > 0


def kinds(case: Case) -> None:
    """Requests of every kind get what an engine gives them step by step, without graphs: tokens,
    text, reasons and log-probabilities."""
    plain = case.settings | {"overlap_scheduling": False, "emulate_graphs": False}
    tokenizer = case.which.tokenizer
    with engine_of(case.which, plain, tokenizer=tokenizer) as other:
        expected = everything_said(other, case.number)
    must_say_the_same(everything_said(case.engine, case.number), expected)


INDICES = (0, 1, 8, 15)  # of the prompts that have each adapter, or each grammar
NUM_ADAPTED, NUM_BOUND = 8, 10  # tokens


def adapters(case: Case) -> None:
    """A mixed batch: each prompt with each adapter and with none, again from the cache, and as two
    samples. By PEFT, one request at a time."""
    which, engine = case.which, case.engine
    names = (None, *which.adapters)
    pairs = [(i, n) for k, i in enumerate(INDICES) for n in names[k:] + names[:k]]
    right = [[which.within(name, None, i, NUM_ADAPTED)] for i, name in pairs]

    def said(pairs: list[tuple[int, str | None]], n: int = 1) -> list[list[list[int]]]:
        prompts = [which.oracle.prompts[i] for i, _ in pairs]
        params = greedy_params(NUM_ADAPTED, n)
        found = engine.generate_batch(prompts, params, adapter=[name for _, name in pairs])
        return [[c.token_ids for c in output.outputs] for output in found.values()]

    assert said(pairs) == right
    assert said(pairs) == right, "from the cache"
    assert said(pairs[:4], n=2) == [tokens * 2 for tokens in right[:4]]
    if not case.settings.get("emulate_graphs"):
        return
    assert (with_adapters := COUNTS["adapter replays"](engine)) > 20
    before, plain = num_replays(engine), [(i, None) for i in INDICES]
    assert said(plain) == [[which.within(None, None, i, NUM_ADAPTED)] for i in INDICES]
    assert num_replays(engine) > before, "without adapters another graph is replayed"
    assert COUNTS["adapter replays"](engine) == with_adapters


def grammars(case: Case) -> None:
    """A mixed batch: each prompt with each grammar and with none, again from the cache, with other
    limits, and as two samples. By `transformers`, the highest of the tokens that may follow."""
    which, engine, names = case.which, case.engine, (None, *CASES)
    pairs = [(i, n) for k, i in enumerate(INDICES) for n in names[k:] + names[:k]]
    right = [which.within(None, name, i, NUM_BOUND) for i, name in pairs]
    prompts = [which.oracle.prompts[i] for i, _ in pairs]
    for _ in range(2):
        found = engine.generate_batch(prompts, [bound_params(n) for _, n in pairs]).values()
        assert [output.outputs[0].token_ids for output in found] == right
    for output, (_, name) in zip(found, pairs, strict=True):
        if name is not None and output.outputs[0].finish_reason == "stop":
            assert output.outputs[0].text.encode() in texts_of(name)
    pairs = [(i, name) for i, name in pairs if name is not None]
    prompts = [which.oracle.prompts[i] for i, _ in pairs]
    for limits, kwargs in LIMITS.items():
        params = [bound_params(name, n=2, **kwargs) for _, name in pairs]
        twice = [[which.within(None, name, i, NUM_BOUND, limits)] * 2 for i, name in pairs]
        found = engine.generate_batch(prompts, params).values()
        assert [[c.token_ids for c in output.outputs] for output in found] == twice, limits


def bound_params(name: str | None, **how: Any) -> SamplingParams:
    """Greedy, within a grammar."""
    how = {"temperature": 0, "max_tokens": NUM_BOUND, "ignore_eos": name is None} | how
    return SamplingParams(grammar=None if name is None else CASES[name][0], **how)


# -- the table


FAMILY, TEXTS = ("family",), ("draft's texts",)
# Hardly more memory than the largest request needs, or less.
SCARCE = dict(
    block_size=any_of(1, 3, 4, 16, 33),
    spare=any_of(-1, 0, 1, 2, 1.0, 3.0),
    max_num_seqs=any_of(1, 2, 5, 64),
    max_num_batched_tokens=any_of(90, 150, 2048),
    policy=any_of(*sorted(POLICIES)),
    watermark=any_of(0.0, 0.01, 0.2),
    preempt_every=any_of(None, None, 1, 2, 3, 4, 5),
    shuffle_waiting=any_of(False, False, True),
    shuffle_batch=True,
)
# The largest request, up to 64 times.
ROOMY = dict(
    block_size=any_of(1, 4, 16, 33),
    spare=any_of(0, 1, 2.0, 63.0),
    max_num_seqs=any_of(1, 3, 64),
    max_num_batched_tokens=any_of(40, 41, 80, 4096),  # the longest prompt has 40
    shuffle_batch=any_of(False, True),
    prefix_cache=any_of(None, "hash", "radix"),
    has_ends=True,
)
# For layers with windows.
STEPS = [dict(max_num_batched_tokens=n) for n in (8, 64, 200)]
STEPS_OR_WHOLE = any_of(*STEPS, dict(max_num_batched_tokens=200, chunked_prefill=False))
LOOKUP = {"method": "ngram", "min_ngram": 1, "adaptive": False}
LOOKUP_3 = {"method": "ngram", "num_spec_tokens": 3}
DRAFT_3 = {"method": "draft", "num_spec_tokens": 3}
NARROW = dict(
    also=STEPS_OR_WHOLE,
    block_size=any_of(1, 3, 4, 16),
    spare=any_of(0, 1, 1.0, 19.0),
    max_num_seqs=any_of(1, 3, 16),
    speculative=any_of(None, None, LOOKUP_3),
    overlap_scheduling=any_of(False, False, True),
    policy=any_of("fcfs", "priority", "lof", "lpm", "dfs-weight"),
    watermark=any_of(0.0, 0.1),
    preempt_every=any_of(None, 2, 5),
    shuffle_batch=any_of(False, True),
    prefix_cache=any_of(None, "hash"),
)

ORDERS, CACHES = in_turn("two_phase", "prefill_first"), in_turn(None, "hash", "radix")
CACHED = dict(prefix_cache=in_turn("hash", "radix"))
ORDERED = dict(scheduler=ORDERS, prefix_cache=CACHES)
OVERLAP, COMPILED = dict(overlap_scheduling=True), dict(compile=True)
TIERS = OVERLAP | dict(kv_tiers=dict(host_blocks=40, disk_blocks=500), prefix_cache="hash")
GRAPHS = dict(emulate_graphs=True, max_model_len=100)
BUCKETS = dict(max_num_seqs=in_turn(2, 5, 20, 1), overlap_scheduling=in_turn(True, False))
DRAWN = dict(num_spec_tokens=any_of(1, 2, 3, 4, 7), adaptive=any_of(False, False, True))
BY_LOOKUP, BY_DRAFT = (dict(speculative=DRAWN | {"method": m}) for m in ("ngram", "draft"))
BY_SCRIPT = BY_LOOKUP | dict(script=any_of(*SCRIPTS))
BY_TARGET = BY_DRAFT | dict(is_exact=True)
DRAFTS = dict(also=any_of(BY_SCRIPT, BY_SCRIPT, BY_LOOKUP, BY_DRAFT, BY_TARGET))
# FCFS reserves memory, preempts no request and has one order.
FCFS = dict(scheduler="fcfs", policy="fcfs", preempt_every=None, spare=any_of(1, 2, 3, 1.0, 3.0))
CHUNKED = [dict(scheduler=kind, chunked_prefill=any_of(True, 7, 16)) for kind in ORDERS.values]
STAGES = dict(pipeline_parallel_size=2, block_size=any_of(1, 4, 16), also=in_turn(*CHUNKED, FCFS))
STAGES |= dict(prefix_cache=any_of(None, "hash", "radix"))
LAST_DRAFTS = dict(pipeline_parallel_size=2, block_size=4, scheduler=ORDERS)
LAST_DRAFTS |= dict(speculative=in_turn(DRAFT_3, LOOKUP_3))
# Memory for one request, chunks of which are in several stages at the same time.
JUST = dict(block_size=any_of(1, 2, 4), max_num_batched_tokens=12, spare=0, preempt_every=1)
JUST |= dict(prefix_cache="hash", chunked_prefill=True)
NARROW_STAGES = dict(pipeline_parallel_size=any_of(2, 3), also=in_turn(JUST, STEPS_OR_WHOLE))
NARROW_STAGES |= dict(speculative=None, overlap_scheduling=False)
KERNELS = dict(dtype="float32", attention_backend="triton", max_num_seqs=3)
# Chapter 2's kernels compute whole prompts, and chapter 6's compute chunks.
PLANS = dict(also=in_turn(dict(chunked_prefill=False), OVERLAP | dict(chunked_prefill=16)))
GRAPHS_OR_NOT = [
    dict(emulate_graphs=has_graphs, chunked_prefill=n)
    for has_graphs in (True, False)
    for n in (False, 16)
]
LONG_RUN = dict(max_model_len=150, block_size=4, also=in_turn(*GRAPHS_OR_NOT))
FEW = dict(num_blocks=400, block_size=4, max_num_seqs=3, shuffle_batch=True)
LOOKED_UP = dict(speculative=LOOKUP_3, block_size=3)
REPLAYS_OF_3 = dict(emulate_graphs=True, max_model_len=150, block_size=3)
WHOLE = dict(chunked_prefill=False, prefix_cache=None, block_size=16)
LATE_GRAPHS = dict(emulate_graphs=True, max_model_len=160)
CHUNKS = dict(max_num_batched_tokens=24, preempt_every=5, prefix_cache="hash")
ANY_ORDER = dict(scheduler=in_turn(*ORDERS.values, "fcfs"))
FOUR = dict(max_num_seqs=4, shuffle_batch=True, block_size=4, num_blocks=400)
ROOM_FOR_ALL = dict(num_blocks=2000, block_size=2, max_num_seqs=4)
ROOM_FOR_ALL |= dict(max_num_batched_tokens=in_turn(5, 100))

salted = partial(crowd, salts=(None, None, "x", "y"))
twice = partial(crowd, times=2)
to_10 = partial(crowd, num_requests=any_of(*range(2, 11)))
to_8 = partial(crowd, num_requests=any_of(*range(2, 9)))
to_12 = partial(counted_crowd, num_requests=any_of(*range(1, 13)), abort_share=any_of(0, 0.15))
four = partial(batch, indices=range(4), max_tokens=MAX_TOKENS, times=2)
three = partial(batch, indices=range(3), max_tokens=5)
longest = partial(warm, num_longest=3, max_tokens=6)
eight = partial(crowd, num_requests=8)

CLAIMS = [
    # row, models, settings, what is asked, cases in the normal run and in all, what must happen
    # requests that come and go, in memory that is scarce
    Claim("scarce", FAMILY, SCARCE | ORDERED, crowd, (3, 96)),
    Claim("scarce-salts", FAMILY, SCARCE | CACHED, salted, (3, 60)),
    Claim("scarce-drafts", FAMILY, SCARCE | ORDERED | DRAFTS, crowd, (3, 72)),
    Claim("scarce-overlap", FAMILY, SCARCE | ORDERED | OVERLAP, crowd, (2, 4)),
    Claim("scarce-tiers", FAMILY, SCARCE | ORDERED | TIERS, twice, (1, 2)),
    Claim("scarce-graphs", FAMILY, SCARCE | GRAPHS | BUCKETS, crowd, (2, 4), {"replays": 0}),
    Claim("scarce-stages", FAMILY, SCARCE | STAGES, crowd, (3, 36)),
    Claim("scarce-last-drafts", FAMILY, SCARCE | LAST_DRAFTS, crowd, (2, 10), {"drafts": 0}),
    # a few requests
    Claim("random", ("unrelated",), ROOMY, to_12, (8, 200)),
    Claim("random-shipped", TEXTS, ROOMY, to_12, (3, 24)),
    # layers with windows; a stage may lack all layers of a group
    Claim("windows", WINDOWED, NARROW, to_10, (3, 90)),
    Claim("windows-graphs", WINDOWED, NARROW | dict(emulate_graphs=True), to_10, (2, 45)),
    Claim("windows-compiled", WINDOWED, NARROW | COMPILED, to_10, (2, 45)),
    Claim("windows-stages", WINDOWED, NARROW | NARROW_STAGES, to_8, (3, 24)),
    Claim("windows-batch", WINDOWED, FEW | REPLAYS_OF_3, four, (3, 3), {"replays": MAX_TOKENS}),
    Claim("windows-kernels", WINDOWED, KERNELS | LONG_RUN, three, (3, 12)),
    Claim("windows-warm", WINDOWED, ROOM_FOR_ALL, longest, (6, 6)),
    # layers of two kinds, prompts far longer than the window
    Claim("kinds-whole", OF_TWO_KINDS, FEW | WHOLE, eight, (3, 3)),
    Claim("kinds-chunks", OF_TWO_KINDS, FEW | CHUNKS, eight, (3, 3), {"preemptions": 0}),
    Claim("kinds-drafts", OF_TWO_KINDS, FEW | LOOKED_UP, eight, (3, 3)),
    Claim("kinds-overlap", OF_TWO_KINDS, FEW | OVERLAP | dict(prefix_cache="hash"), eight, (3, 3)),
    Claim("kinds-compiled", OF_TWO_KINDS, FEW | COMPILED, eight, (3, 3)),
    Claim("kinds-graphs", OF_TWO_KINDS, FEW | LATE_GRAPHS, eight, (3, 3), {"replays": 0}),
    # kernels, step by step and a step ahead
    Claim("kernels", ("unrelated",), KERNELS | GRAPHS | PLANS, three, (0, 2), {"replays": 0}),
    # requests of every kind: penalties count tokens that the host has not seen, seeds draw for
    # them, and they are sampled from logits that the next replay overwrites
    Claim("all-overlap", TEXTS, FOUR | OVERLAP | ANY_ORDER, kinds, (3, 6), {"discarded tokens": 0}),
    Claim("all-graphs", TEXTS, FOUR | OVERLAP | GRAPHS, kinds, (1, 1), {"replays": 20}),
]

# -- batches in which requests have adapters, or grammars

CHUNKS_OF_3 = dict(chunked_prefill=3, preempt_every=3, block_size=3)
TREE = dict(prefix_cache="radix", block_size=1, shuffle_batch=True, shuffle_waiting=True)
AHEAD = OVERLAP | dict(shuffle_batch=True)
ROWS_OF_PROMPTS = dict(max_num_seqs=4, chunked_prefill=1)  # from these no token is sampled
# In the normal run, with the slow ones (the matrix has these settings, too), or not at all.
NOW, SLOW, NOT = (1, 1), (0, 1), (0, 0)
WAYS = [
    # settings, with adapters, with grammars
    ("as it is", {}, NOW, NOW),
    ("one slot", dict(max_loras=1), NOW, NOT),
    ("chunks, preempted", CHUNKS_OF_3, NOW, NOW),
    ("tree", TREE, SLOW, SLOW),
    ("ahead", AHEAD, SLOW, SLOW),
    ("ahead, preempted", OVERLAP | dict(preempt_every=2), NOT, NOW),
    ("prefill-first", dict(scheduler="prefill_first", mixing=True), SLOW, SLOW),
    ("reserved", dict(scheduler="fcfs", max_num_seqs=3), SLOW, SLOW),
    ("look-up", dict(speculative=LOOKUP), SLOW, SLOW),
    ("draft", dict(speculative=DRAFT_3, block_size=3), NOW, SLOW),
    ("draft, preempted", dict(speculative={"method": "draft"}, preempt_every=2), NOT, NOW),
    ("graphs", GRAPHS | dict(max_num_seqs=7, shuffle_batch=True), NOW, SLOW),
    ("graphs, ahead", GRAPHS | OVERLAP | dict(max_num_seqs=20), NOT, NOW),
    ("graphs, ahead, token by token", GRAPHS | AHEAD | ROWS_OF_PROMPTS, SLOW, NOT),
]


EFFECTS = dict(speculative="drafts", emulate_graphs="replays", preempt_every="preemptions")


def beside(name: str, settings: Values, asks: Callable[[Case], None], cases: tuple) -> Claim:
    happens = {effect: 0 for key, effect in EFFECTS.items() if key in settings}
    return Claim(name, FAMILY, dict(num_blocks=400) | settings, asks, cases, happens)


SLOTS = dict(adapters=True, max_loras=2)
ADAPTED = [beside(n, (SLOTS if s else {"adapters": True}) | s, adapters, c) for n, s, c, _ in WAYS]
BOUND = [beside(name, settings, grammars, cases) for name, settings, _, cases in WAYS]
