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
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from transformers import (
    Gemma3TextConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.tests.adapter_cases import KINDS, OF_ATTENTION, by_peft, save_adapter, with_peft
from common.tests.engine_oracle import (
    MAX_TOKENS,
    Oracle,
    greedy_params,
    make_oracle,
    num_replays,
    save_random_model,
    with_noise,
)
from common.tests.equivalence_axes import SPECULATIVE, Combination, Value
from common.tests.equivalence_rows import num_valid, shuffled_product
from common.tests.grammar_cases import CASES, greedy_within, small_tokenizer
from grouped_kv_memory import max_blocks
from step_record import StepRecord

# Of two prompts the shorter is a prefix of the longer, or they part at the place given.
PROMPT_LENGTHS = {"random": (1, 2, 16, 33, 48, 49, 64, 97), "shipped": (1, 5, 16, 33, 34, 40)}
PARTS_AT = {"random": (0, 0, 0, 0, 16, 33, 48, 40), "shipped": (0, 0, 0, 0, 16, 20)}
for _name in ("experts", "gemma3", "olmo3"):
    PROMPT_LENGTHS[_name], PARTS_AT[_name] = PROMPT_LENGTHS["shipped"], PARTS_AT["shipped"]
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
# No sequence is longer than this window: what is refused beside windows is not refused. OLMo 3 has
# one that hides most of a prompt.
TWO_KINDS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=256)
KINDS_OF_MODELS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "random": (Qwen3Config, {}),
    "experts": (Qwen3MoeConfig, EXPERTS),
    "gemma3": (Gemma3TextConfig, dict(query_pre_attn_scalar=9, **TWO_KINDS)),
    "olmo3": (Olmo3Config, TWO_KINDS | dict(sliding_window=10)),
}
WINDOWS = {"olmo3": (None, 10)}  # of groups of layers
MAX_NUM_SEQS = 4
SCORED = 3  # of this prompt, too, is said how likely it is
NUM_POSITIONS = 1000  # of the ample pool


# -- the model and what is right


@dataclass(frozen=True)
class Subject:
    """A model, its draft model, prompts that share beginnings, and what follows them: without
    adapters, and with the prompt's own of `adapters`."""

    oracle: Oracle
    loaded: LoadedModel
    draft: LoadedModel
    tokenizer: Tokenizer  # for grammars

    @cached_property
    def adapters(self) -> dict[str, Path]:
        folder = Path(_folder().name) / self.oracle.path.name
        kinds = KINDS if self.loaded.config.experts is None else OF_ATTENTION
        return {n: save_adapter(self.oracle.path, folder / n, **kind) for n, kind in kinds.items()}

    def grammar_of(self, index: int) -> str | None:
        return (None, *CASES)[index % (1 + len(CASES))]

    def adapter_of(self, index: int) -> str | None:
        return (None, *self.adapters)[index % (1 + len(self.adapters))]

    @cached_property
    def adapted(self) -> Oracle:
        prompts, found = self.oracle.prompts, list(self.oracle.continuations)
        for name, path in self.adapters.items():
            own = [i for i in range(len(prompts)) if self.adapter_of(i) == name]
            tokens = by_peft(self.oracle.path, path, [prompts[i] for i in own], MAX_TOKENS)
            for i, continuation in zip(own, tokens, strict=True):
                found[i] = continuation
        return Oracle(self.oracle.path, prompts, found)


@cache
def subject(name: str) -> Subject:
    """`"shipped"`, or of `KINDS_OF_MODELS`; float64. Made once in a process; takes seconds."""
    device = torch.device("cpu")
    if name == "shipped":
        path = SHIPPED_CHECKPOINT
        draft = load_model(SHIPPED_DRAFT, torch.float64, device)
    else:
        path = Path(_folder().name) / name
        kind, fields = KINDS_OF_MODELS[name]
        save_random_model(path, 3, kind, **fields)
        draft = with_noise(load_model(path, torch.float64, device))
    tokenizer = load_tokenizer(path) if name == "shipped" else small_tokenizer()
    eos = (tokenizer.eos_token_id,)
    loaded = replace(load_model(path, torch.float64, device), generation_eos_token_ids=eos)
    prompts = _prompts(name, loaded.config.vocab_size)
    return Subject(make_oracle(path, prompts), loaded, draft, tokenizer)


@cache
def bound(name: str, is_adapted: bool) -> Oracle:
    """With each prompt's own grammar, up to the end of its text."""
    which, found = subject(name), []
    adapters = which.adapters if is_adapted else {}
    models = {None: with_peft(which.oracle.path, None)}
    models |= {name: with_peft(which.oracle.path, path) for name, path in adapters.items()}
    for i, prompt in enumerate(which.oracle.prompts):
        model = models[which.adapter_of(i) if is_adapted else None]
        grammar, most = which.grammar_of(i), max_tokens_of(len(prompt))
        found.append(greedy_within(model, which.tokenizer, prompt, grammar, most))
    return Oracle(which.oracle.path, which.oracle.prompts, found)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="equivalence-")


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
    num_overlapped: int  # steps that ended while the next one was under way
    num_replays: int  # steps that were replayed from a graph


def lengths_of(settings: Mapping[str, Value]) -> tuple[int, ...]:
    """Token by token, the longest prompts say nothing more, and take half of the time."""
    lengths = PROMPT_LENGTHS[str(settings["model"])]
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
    return LLMEngine(config, loaded=which.loaded, draft=which.draft, tokenizer=tokenizer)


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
