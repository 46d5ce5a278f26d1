"""The array of engine runs: with any settings of its axes, greedy tokens are `transformers`'.

`serve_combination` serves a small batch with one setting of every axis (`equivalence_axes.py`), in
float64, over memory full of NaN. Requests arrive over some steps, with rules, grammars, samples,
stop tokens and salts; one may be aborted. Which are run:

    every pair      `covering_array`: some 40 runs in which every two settings meet that can meet,
                    the first 20 of them in `make test`
    as many as fit  `run_matrix`: the full product in shuffled order, until the time is up
    one             `make matrix ARGS="model=random scheduler=two_phase ..."`

A failure ends with the command that runs its combination alone. What chunks depend on a clock
(`target_step_ms`) may differ from run to run; everything else is repeated exactly."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache

import pytest

from common.engine import EngineConfig, LLMEngine
from common.requests.output_processor import RequestOutput
from common.tests.engine_oracle import Oracle, full_of_nan, greedy_params, num_replays
from common.tests.equivalence_axes import (
    SPECULATIVE,
    WINDOWED,
    Combination,
    Value,
    shuffled_product,
)
from common.tests.grammar_cases import CASES, LIMITS
from common.tests.local_stages import pipelined_engine
from common.tests.small_models import CPU, FEWER, LENGTHS, Subject, subject
from compiled_attention import HeadMajorKVCache
from grouped_kv_memory import max_blocks
from pipeline_plugin import PipelinePlugin
from request import SamplingParams
from step_record import StepRecord
from tiered_cache import KVTierConfig

SCORED, STOPPED = 3, 4  # this prompt is scored, too, and this one ends at a stop token
NUM_POSITIONS = 1000  # of the ample pool


@cache
def bound(name: str, is_adapted: bool) -> Oracle:
    """With each prompt's own grammar and limits, up to the end of its text."""
    which = subject(name)
    found = []
    for i, prompt in enumerate(which.oracle.prompts):
        adapter = which.adapter_of(i) if is_adapted else None
        grammar = which.grammar_of(i)
        most = max_tokens_of(len(prompt))
        limits = "none" if grammar is None else limits_of(i)
        found.append(which.within(adapter, grammar, i, most, limits))
    return Oracle(which.oracle.path, which.oracle.prompts, found)


def limits_of(index: int) -> str:
    return list(LIMITS)[index % len(LIMITS)]


def lengths_of(settings: Mapping[str, Value]) -> tuple[int, ...]:
    """Token by token, the longer prompts say nothing more, and take most of the time."""
    lengths, _ = LENGTHS if settings["model"] == "random" else FEWER
    return lengths[:4] if str(settings["chunked_prefill"]) == "1" else lengths


def max_tokens_of(prompt_len: int) -> int:
    """Long prompts are continued shortly: it is their chunks that are of interest."""
    return 9 if prompt_len <= 16 else 6 if prompt_len <= 48 else 3


# -- an engine


def make_config(combination: Combination) -> EngineConfig:
    """Raises `ValueError` if the engine has no such configuration."""
    settings = combination.as_dict()
    size = settings["block_size"]
    model_name = settings.pop("model")
    which = subject(model_name)
    windows = (None,)
    lengths = lengths_of(combination.as_dict())
    del settings["grammars"]
    if settings["adapters"] is not None:
        settings |= {"adapters": which.adapters, "max_loras": 2}
    if settings["kv_tiers"] is not None:
        settings["kv_tiers"] = KVTierConfig(host_blocks=40)
    if model_name in WINDOWED:
        which.loaded.model.group_layers(256)
        windows = which.loaded.model.groups.windows
    largest = max(n + max_tokens_of(n) - 1 for n in lengths)  # the last token needs no slot
    # Replays are as wide as the longest request that there could be.
    max_model_len = largest + 1 if settings["emulate_graphs"] else None
    is_ample = settings.pop("pool") == "ample"
    settings["speculative"] = SPECULATIVE[settings["speculative"]]
    config = EngineConfig(
        **settings,
        max_model_len=max_model_len,
        attention_backend="torch",
        check_invariants=True,
        shuffle_batch=True,
        seed=combination.seed,
    )
    just = 1 + max_blocks(largest, size, windows, config.num_in_flight_tokens(CPU))
    return replace(config, num_blocks=1 + (-(-NUM_POSITIONS // size) if is_ample else just))


@contextmanager
def engine_of(combination: Combination) -> Iterator[LLMEngine]:
    """Each read of a slot that was not written changes tokens."""
    settings = combination.as_dict()
    config = make_config(combination)
    which = subject(settings["model"])
    tokenizer = None if settings["grammars"] is None else which.tokenizer
    draft = which.draft if settings["speculative"] == "draft" else None
    with pytest.MonkeyPatch.context() as patch:
        if settings["pipeline_parallel_size"] == 1:
            engine = LLMEngine(config, loaded=which.ending, draft=draft, tokenizer=tokenizer)
        else:
            options = {each.name: getattr(config, each.name) for each in fields(config)}
            del options["check_invariants"]  # it does anyway
            engine = pipelined_engine(patch, which.oracle.path, draft, tokenizer, **options)
        try:
            yield full_of_nan(engine)
        finally:
            engine.close()


# -- what its settings promise


@dataclass
class Watch:
    """Checks every step, and counts what shows that settings had an effect."""

    settings: Mapping[str, Value]
    num_known: dict[str, int] = field(default_factory=dict)  # tokens, by request or sample
    num_prompt: dict[str, int] = field(default_factory=dict)
    num_cut: int = 0  # pieces that ended before the known tokens did

    def __call__(self, record: StepRecord) -> None:
        settings = self.settings
        sizes = record.num_scheduled_tokens
        chunk = settings["chunked_prefill"]
        assert sum(sizes.values()) <= settings["max_num_batched_tokens"]
        assert len(sizes) <= settings["max_num_seqs"]
        num_long = 0
        for name, start in record.start_positions.items():
            sampled = record.new_token_ids.get(name, [])  # none of who is gone
            self.num_cut += not sampled
            known = self.num_known.setdefault(name, self.num_prompt[name.partition("#")[0]])
            self.num_known[name] += len(sampled)
            if settings["speculative"] is not None or self.is_ahead:
                continue
            left = known - start
            length = sizes[name]
            assert (length == left) == (len(sampled) == 1), "a token from inside a prompt (Trap 31)"
            if chunk not in (True, False) or chunk is not bool(chunk):
                num_long += left > chunk
                is_own = settings["scheduler"] == "two_phase" and settings["target_step_ms"] is None
                assert not is_own or length <= chunk, "more than a chunk"
        assert num_long <= (settings["max_long_partial_prefills"] or num_long)

    @property
    def is_ahead(self) -> bool:
        """A step is planned before the last one is over."""
        return self.settings["overlap_scheduling"] or self.settings["pipeline_parallel_size"] > 1


def params_of(
    settings: Mapping[str, Value], which: Subject, oracle: Oracle, index: int, n: int
) -> SamplingParams:
    prompt, said = oracle.prompts[index], oracle.continuations[index]
    params = greedy_params(max_tokens_of(len(prompt)), n=n)
    params = replace(params, **rules_kept_by(said) if index % 3 else {})
    params = replace(params, prompt_logprobs=0 if index == SCORED else None)
    if settings["grammars"] is not None and (name := which.grammar_of(index)) is not None:
        limits = LIMITS[limits_of(index)]
        return replace(params, ignore_eos=False, grammar=CASES[name][0], **limits)
    return replace(params, stop_token_ids=[said[2]] if index == STOPPED else [])


def rules_kept_by(tokens: list[int]) -> dict[str, list]:
    """Who applies them to the tokens of another place or request, will say something else."""
    pairs = {(a, b) for a in tokens for b in tokens} - set(itertools.pairwise(tokens))
    return {"allowed_token_ids": tokens, "bad_words": [list(pair) for pair in sorted(pairs)]}


@dataclass(frozen=True)
class Summary:
    """What happened in a run, to see that its settings had an effect."""

    num_preemptions: int
    num_cut: int
    num_drafted_tokens: int
    num_cached_tokens: int
    num_overlapped: int  # steps that ended while the next one was under way
    num_replays: int  # steps that were replayed from a graph
    is_compiled: bool  # attention of decodes, norms and rotary embedding
    is_pipelined: bool


# -- one run


def serve_combination(combination: Combination) -> Summary:
    """Serve every prompt. Raises `AssertionError` with the command to repeat it if a token is
    wrong, a promise is broken, the engine raises, or it does not end."""
    try:
        with engine_of(combination) as engine:
            return _serve(combination, engine)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{what}\nrepeat it with\n{combination.command}") from error


def _serve(combination: Combination, engine: LLMEngine) -> Summary:
    settings = combination.as_dict()
    rng = random.Random(combination.seed)
    which = subject(settings["model"])
    is_adapted = settings["adapters"] is not None
    oracle = which.adapted if is_adapted else which.oracle
    if settings["grammars"] is not None:
        oracle = bound(settings["model"], is_adapted)
    engine.on_step = watch = Watch(settings)
    order = list(range(len(lengths_of(settings))))
    rng.shuffle(order)
    arrivals = [(rng.randrange(0, 12), i) for i in order]
    twice, salted = rng.choice(order), rng.choice(order)
    aborted = rng.choice(order) if combination.seed % 2 else None
    when_aborted = rng.randrange(12, 24)
    finished: dict[int, RequestOutput] = {}
    num_overlapped = 0
    for step in range(20_000):
        if len(finished) == len(order):
            break
        for when, i in arrivals:
            if when == step:
                params = params_of(settings, which, oracle, i, 2 if i == twice else 1)
                watch.num_prompt[str(i)] = len(oracle.prompts[i])
                adapter = which.adapter_of(i) if is_adapted else None
                how = {"adapter": adapter, "cache_salt": "own" if i == salted else None}
                how["priority"] = rng.randint(0, 2)
                engine.add_request(str(i), oracle.prompts[i], params, **how)
        if step == when_aborted and aborted is not None and aborted not in finished:
            finished[aborted] = engine.abort_request(str(aborted))
        finished |= {int(o.request_id): o for o in engine.step() if o.finished}
        num_overlapped += bool(getattr(engine.core, "in_flight", ()))
    assert len(finished) == len(order), "the engine hangs"
    for i, output in sorted(finished.items()):
        must_be_right(output, oracle, i, settings, aborted)
        assert len(output.outputs) == (2 if i == twice else 1)
    stats = engine.stats()
    found = Summary(
        stats.num_preemptions,
        watch.num_cut,
        stats.num_drafted_tokens,
        stats.cached_tokens,
        num_overlapped,
        num_replays(engine) if settings["pipeline_parallel_size"] == 1 else 0,
        isinstance(engine.kv_cache, HeadMajorKVCache),
        isinstance(engine.parts.in_flight_plans, PipelinePlugin),
    )
    if aborted is None and settings["speculative"] is None and not watch.is_ahead:
        # The last token of each is never fed back.
        said = [(o, c) for o in finished.values() for c in o.outputs]
        num_fed = sum(len(o.prompt_token_ids) + len(c.token_ids) - 1 for o, c in said)
        assert stats.scheduled_tokens == num_fed - stats.cached_tokens + stats.recomputed_tokens
    assert stats.kv_blocks_in_use == 0, "blocks leaked"
    assert engine.reset_prefix_cache() and engine.stats().kv_blocks_cached == 0
    return found


def must_be_right(
    output: RequestOutput,
    oracle: Oracle,
    index: int,
    settings: Mapping[str, Value],
    aborted: int | None,
) -> None:
    prompt, said = oracle.prompts[index], oracle.continuations[index]
    is_bound = settings["grammars"] is not None
    ends = [said[2]] if index == STOPPED and not is_bound else []
    expected = oracle.expected(index, max_tokens_of(len(prompt)), ends)
    for completion in output.outputs:
        tokens = completion.token_ids
        is_cut = completion.finish_reason == "abort"
        assert not is_cut or index == aborted
        assert tokens == (expected[: len(tokens)] if is_cut else expected), f"prompt {index}"
    if index == SCORED and index != aborted:
        scored = output.prompt_logprobs or []
        assert [entry.token_id for entry in scored[1:]] == prompt[1:]


def run_matrix(seconds: float, seed: int = 0) -> int:
    """Runs of the full product until the time is up, or one fails. How many there were."""
    done = 0
    ends = time.monotonic() + seconds
    print(f"combinations in the order of seed {seed}, for {seconds:g} s", flush=True)
    for combination in shuffled_product(seed):
        if time.monotonic() > ends:
            break
        serve_combination(combination)
        done += 1
    print(f"{done} combinations had every token right", flush=True)
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
