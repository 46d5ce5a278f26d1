"""The equivalence matrix: with any settings of its axes, greedy tokens are `transformers`'.

`serve_combination` serves a small batch with one setting of every axis (`equivalence_axes.py`), in
float64, and compares every token. Which are run (`equivalence_rows.py`):

    every pair      `covering_array`: some 40 runs in which every two settings meet that can meet
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from common.engine import EngineConfig, LLMEngine
from common.tests.engine_oracle import Oracle, greedy_params, num_replays
from common.tests.equivalence_axes import SPECULATIVE, Combination, Value
from common.tests.equivalence_rows import num_valid, shuffled_product
from common.tests.grammar_cases import CASES
from common.tests.small_models import FEWER, LENGTHS, subject
from compiled_attention import HeadMajorKVCache
from grouped_kv_memory import max_blocks
from step_record import StepRecord

WINDOWS = {"olmo3": (None, 10)}  # of groups of layers
MAX_NUM_SEQS = 4
SCORED = 3  # this prompt is scored, too
NUM_POSITIONS = 1000  # of the ample pool


@cache
def bound(name: str, is_adapted: bool) -> Oracle:
    """With each prompt's own grammar, up to the end of its text."""
    which, found = subject(name), []
    for i, prompt in enumerate(which.oracle.prompts):
        adapter = which.adapter_of(i) if is_adapted else None
        found.append(which.within(adapter, which.grammar_of(i), i, max_tokens_of(len(prompt))))
    return Oracle(which.oracle.path, which.oracle.prompts, found)


# -- one run


@dataclass(frozen=True)
class Summary:
    """What happened in a run, to see that its settings had an effect."""

    num_steps: int
    num_preemptions: int
    num_cut: int  # scheduled pieces that ended before the known tokens did
    num_drafted_tokens: int
    num_cached_tokens: int
    num_overlapped: int  # steps that ended while the next one was under way
    num_replays: int  # steps that were replayed from a graph
    is_compiled: bool  # attention of decodes, norms and rotary embedding


def lengths_of(settings: Mapping[str, Value]) -> tuple[int, ...]:
    """Token by token, the longest prompts say nothing more, and take half of the time."""
    lengths, _ = LENGTHS if settings["model"] == "random" else FEWER
    return lengths[:-2] if str(settings["chunked_prefill"]) == "1" else lengths


def max_tokens_of(prompt_len: int) -> int:
    """Long prompts are continued shortly: it is their chunks that are of interest."""
    return 12 if prompt_len <= 16 else 6 if prompt_len <= 48 else 4


def make_config(combination: Combination) -> EngineConfig:
    """Raises `ValueError` if the engine has no such configuration."""
    settings = combination.as_dict()
    size = settings["block_size"]
    lengths, name = lengths_of(settings), settings.pop("model")
    del settings["grammars"]
    if settings["adapters"] is not None:
        settings |= {"adapters": subject(name).adapters, "max_loras": 2}
    largest = max(n + max_tokens_of(n) - 1 for n in lengths)  # the last token needs no slot
    # Replays are as wide as the longest request that there could be.
    max_model_len = largest + 1 if settings["emulate_graphs"] else None
    is_ample, windows = settings.pop("pool") == "ample", WINDOWS.get(str(name), (None,))
    settings["speculative"] = SPECULATIVE[settings["speculative"]]
    config = EngineConfig(
        **settings,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max_model_len,
        attention_backend="torch",
        check_invariants=True,
        shuffle_batch=True,
        seed=combination.seed,
    )
    step = config.num_in_flight_tokens(torch.device("cpu"))
    just = 1 + max_blocks(largest, size, windows, step)
    return replace(config, num_blocks=1 + (-(-NUM_POSITIONS // size) if is_ample else just))


def make_engine(combination: Combination) -> LLMEngine:
    settings = combination.as_dict()
    which = subject(settings["model"])
    tokenizer = None if settings["grammars"] is None else which.tokenizer
    config = make_config(combination)
    return LLMEngine(config, loaded=which.ending, draft=which.draft, tokenizer=tokenizer)


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
    which = subject(combination.as_dict()["model"])
    is_adapted = combination.as_dict()["adapters"] is not None
    is_bound = combination.as_dict()["grammars"] is not None
    oracle = which.adapted if is_adapted else which.oracle
    if is_bound:
        oracle = bound(combination.as_dict()["model"], is_adapted)
    rng = random.Random(combination.seed)
    records: list[StepRecord] = []
    engine.on_step = records.append
    order = list(range(len(lengths_of(combination.as_dict()))))
    rng.shuffle(order)
    arrivals = [(rng.randrange(0, 12), i) for i in order]
    twice = rng.choice(order)
    patience = 100 + 3 * sum(map(len, oracle.prompts))  # steps without any token
    finished, num_idle, step, num_overlapped = {}, 0, 0, 0
    while len(finished) < len(order):
        for when, i in arrivals:
            if when == step:
                prompt = oracle.prompts[i]
                params = greedy_params(max_tokens_of(len(prompt)), n=2 if i == twice else 1)
                params = replace(params, **rules_kept_by(oracle.continuations[i]) if i % 3 else {})
                params = replace(params, prompt_logprobs=0 if i == SCORED else None)
                if is_bound and (name := which.grammar_of(i)) is not None:
                    params = replace(params, ignore_eos=False, grammar=CASES[name][0])
                adapter = which.adapter_of(i) if is_adapted else None
                priority = rng.randint(0, 2)
                engine.add_request(str(i), prompt, params, priority=priority, adapter=adapter)
        finished |= {int(o.request_id): o for o in engine.step() if o.finished}
        num_overlapped += bool(getattr(engine.core, "_in_flight", ()))
        num_idle = 0 if any(records[-1].new_token_ids.values()) else num_idle + 1
        assert num_idle < patience, f"the engine hangs: no token in {num_idle} steps"
        step += 1
    scored = finished[SCORED].prompt_logprobs or []
    assert [entry.token_id for entry in scored[1:]] == oracle.prompts[SCORED][1:]
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
        num_overlapped,
        num_replays(engine),
        isinstance(engine.kv_cache, HeadMajorKVCache),
    )


def rules_kept_by(tokens: list[int]) -> dict[str, list]:
    """Who applies them to the tokens of another place or request, will say something else."""
    pairs = {(a, b) for a in tokens for b in tokens} - set(itertools.pairwise(tokens))
    return {"allowed_token_ids": tokens, "bad_words": [list(pair) for pair in sorted(pairs)]}


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
