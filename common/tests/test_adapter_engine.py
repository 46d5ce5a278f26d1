"""Adapters in an engine: in any company, each request gets what PEFT gives it alone, in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.features.adapters.adapter_files import CONFIG, WEIGHTS
from common.models.loader import load_model
from common.tests.adapter_cases import KINDS, edited
from common.tests.engine_oracle import (
    checked_engine,
    greedy_params,
)
from common.tests.every_kind import must_be_as_likely
from common.tests.grammar_cases import CASES, EOS, small_tokenizer
from common.tests.small_models import CPU, subject
from request import SamplingParams
from tiered_cache import KVTierConfig

pytestmark = pytest.mark.usefixtures("one_thread")
INDICES, NUM_TOKENS = (0, 1, 8, 15), 8
PARAMS, NAMES = greedy_params(NUM_TOKENS), (None, *KINDS)


@pytest.fixture(scope="module")
def directories() -> dict[str, Path]:
    return subject("family").adapters


@pytest.fixture(scope="module")
def prompts(family_oracle) -> list[list[int]]:
    return [family_oracle.prompts[i] for i in INDICES]


def right(kind: str | None, grammar: str | None, i: int) -> list[int]:
    """The tokens with an adapter, a grammar and a prompt's place, by `peft`."""
    return subject("family").within(kind, grammar, INDICES[i], NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(prompts) -> dict[str | None, list[list[int]]]:
    found = {name: [right(name, None, i) for i in range(len(prompts))] for name in NAMES}
    for a, b in itertools.combinations(NAMES, 2):
        assert all(x != y for x, y in zip(found[a], found[b], strict=True)), "it changes nothing"
    return found


@pytest.fixture
def model(family_oracle):
    return load_model(family_oracle.path, torch.float64, CPU)


def mixed(prompts: list[list[int]]) -> tuple[list[list[int]], list[str | None]]:
    """Each prompt with each adapter, and with none, in a batch."""
    pairs = [(p, name) for i, p in enumerate(prompts) for name in NAMES[i % 4 :] + NAMES[: i % 4]]
    return [p for p, _ in pairs], [name for _, name in pairs]


def serve(engine: LLMEngine, prompts, adapters, n: int = 1) -> list[list[list[int]]]:
    params = greedy_params(NUM_TOKENS, n)
    outputs = engine.generate_batch(prompts, params, adapter=adapters).values()
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("way", [{}, dict(max_loras=1)], ids=["as it is", "one slot"])
def test_a_mixed_batch_is_what_peft_says_of_each_alone(way, model, prompts, expected) -> None:
    """And again from the cache, and as two samples. Other settings: `equivalence_axes.py`."""
    engine = checked_engine(
        model, **{"num_blocks": 400, "max_loras": 2, "adapters": subject("family").adapters, **way}
    )
    asked, names = mixed(prompts)
    wanted = [[expected[name][prompts.index(p)]] for p, name in zip(asked, names, strict=True)]
    for _ in range(2):
        assert serve(engine, asked, names) == wanted
    assert serve(engine, asked[:4], names[:4], n=2) == [tokens * 2 for tokens in wanted[:4]]


def test_a_prompt_is_scored_by_its_own_adapter(model, directories, prompts) -> None:
    """As likely as when it was said. Some have adapters and are not scored; others neither."""
    engine = checked_engine(
        model, num_blocks=400, adapters=directories, max_num_batched_tokens=40, shuffle_batch=True
    )
    asked, adapters = mixed(prompts)
    said = engine.generate_batch(asked, replace(PARAMS, logprobs=2), adapter=adapters).values()
    tokens = [output.outputs[0].token_ids for output in said]
    whole = [prompt + more for prompt, more in zip(asked, tokens, strict=True)]
    params = [replace(PARAMS, prompt_logprobs=2 if i % 3 else None) for i in range(len(whole))]
    scored = engine.generate_batch(whole, params, adapter=adapters).values()
    for output, before in zip(scored, said, strict=True):
        if output.prompt_logprobs is not None:
            must_be_as_likely(output.prompt_logprobs[-NUM_TOKENS:], before.outputs[0].logprobs)


@pytest.mark.parametrize("has_tier", [False, True])
def test_cached_kv_is_an_adapters_by_its_content_and_not_by_its_name(
    has_tier, model, directories, prompts, expected
) -> None:
    """Trap 64. With a tier the pool holds one request, so the others come back from there."""
    how = dict(num_blocks=26, kv_tiers=KVTierConfig(200)) if has_tier else dict(num_blocks=200)
    engine = checked_engine(model, max_loras=1, block_size=4, **how)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))

    def num_cached(name: str | None, kind: str | None) -> int:
        before = engine.stats().cached_tokens
        assert serve(engine, [prompts[longest]], name) == [[expected[kind][longest]]]
        return engine.stats().cached_tokens - before

    engine.load_adapter("first", directories["attention"])
    assert num_cached(None, None) == 0 and num_cached("first", "attention") == 0
    assert num_cached("first", "attention") > 0
    engine.load_adapter("same", directories["attention"])
    assert num_cached("same", "attention") > 0
    engine.unload_adapter("first")
    engine.load_adapter("first", directories["everything"])
    assert num_cached("first", "everything") == 0
    assert num_cached("same", "attention") > 0 and num_cached(None, None) > 0
    assert not has_tier or engine.parts.connector.stats.num_host_hits > 0
    engine.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_names_change_their_content_while_requests_with_grammars_run(
    seed, model, directories, prompts
) -> None:
    """Adapters come and go under three names, some read while steps go on; requests that have one,
    and a grammar, and up to three samples, are aborted by chance."""
    config = dict(overlap_scheduling=True, preempt_every=3, chunked_prefill=3, block_size=3)
    config |= dict(num_blocks=400, max_num_seqs=5, adapters={}, max_loras=1 + seed % 3)
    loaded, tokenizer = replace(model, generation_eos_token_ids=(EOS,)), small_tokenizer()
    engine = checked_engine(loaded, tokenizer=tokenizer, **config)
    rng, names, loading = random.Random(seed), engine.named_adapters(), {}
    kind_of: dict[str, str] = {}  # by name: what is loaded
    asked: dict[str, tuple] = {}
    done: dict[str, list[tuple[list[int], str | None]]] = {}

    def change() -> None:
        name, kind = rng.choice("xyz"), rng.choice([*KINDS])
        if name in loading:
            kind_of[name], begun = loading.pop(name)
            names.end_load(name, begun)
        elif name in kind_of:
            engine.unload_adapter(name)
            del kind_of[name]
        else:
            loading[name] = kind, names.begin_load(name, directories[kind])

    def ask() -> None:
        name, i = rng.choice([None, *kind_of]), rng.randrange(len(prompts))
        grammar, request_id = rng.choice([None, *CASES]), str(len(asked))
        params = replace(greedy_params(NUM_TOKENS, rng.choice([1, 1, 3])), ignore_eos=not grammar)
        params = replace(params, grammar=None if grammar is None else CASES[grammar][0])
        engine.add_request(request_id, prompts[i], params, adapter=name)
        asked[request_id] = kind_of.get(name), grammar, i

    to_do = rng.choices([change, ask, int], k=100)
    for _ in as_long_as(lambda: to_do or engine.has_unfinished_requests(), max_rounds=3000):
        for do in to_do[-2:]:
            do()
        del to_do[-2:]
        if asked and rng.random() < 0.1:
            engine.abort_request(rng.choice([*asked]))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = [(c.token_ids, c.finish_reason) for c in output.outputs]
    assert len(asked) > 20 and asked.keys() == done.keys()
    for request_id, case in asked.items():
        for tokens, reason in done[request_id]:
            whole = right(*case)
            assert tokens == (whole[: len(tokens)] if reason == "abort" else whole), case
    for name in kind_of:
        engine.unload_adapter(name)
    assert not engine.parts.runner_handle.adapters.taken and engine.stats().kv_blocks_in_use == 0


# -- what is refused


def without(*parts: str) -> Callable[[dict], None]:
    def remove(tensors: dict) -> None:
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return remove


def put(value: float, part: str) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        next(t for name, t in tensors.items() if part in name).view(-1)[3] = value

    return change


def extra(tensors: dict) -> None:
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()


def narrower(tensors: dict) -> None:
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()


YEARS = r"((\w+)\.?)+!"  # trap 87
REFUSED = {
    "rank": (dict(r=32), None, "must have rank"),
    "rank 0": (dict(r=0), None, "rank of .* got 0"),
    "alpha": (dict(lora_alpha="much"), None, "lora_alpha of .* 'much'"),
    "kind": (dict(peft_type="IA3"), None, "peft_type must"),
    "dora": (dict(use_dora=True), None, "use_dora"),
    "bias": (dict(bias="all"), None, "bias must"),
    "modules": (dict(modules_to_save=["lm_head"]), None, "modules_to_save"),
    "activated": (dict(alora_invocation_tokens=[1]), None, "alora_invocation_tokens"),
    "a named list": (dict(layers_pattern="layers"), None, "layers_pattern .*got 'layers'"),
    "replicated": (dict(layer_replication=[[0, 1]]), None, "layer_replication"),
    "embedding": (dict(target_modules=["q_proj", "embed_tokens"]), None, "'embed_tokens'"),
    "head": (dict(target_modules=["lm_head"]), None, "'lm_head'"),
    "nothing": (dict(target_modules=["fc1"]), None, "target_modules must"),
    "no targets": (dict(target_modules=None), None, "target_modules must"),
    "half": (
        None,
        without("layers.1", "v_proj.lora_B"),
        "lacks .*layers.1.self_attn.v_proj.lora_B",
    ),
    "too much": (None, extra, "does not name: model.layers.7"),
    "less is meant": (dict(target_modules=["v_proj"]), None, "does not name: .*q_proj"),
    "pattern": (dict(rank_pattern={"(": 2}), None, "cannot read an adapter"),
    "expression": (dict(target_modules="*proj"), None, "cannot read an adapter"),
    "excluded": (dict(exclude_modules=5), None, "cannot read an adapter"),
    "too large": (dict(lora_alpha=10**400), None, "cannot read an adapter"),
    "another beginning": (dict(init_lora_weights="pissa"), None, "init_lora_weights must"),
    "another base": (None, narrower, r"lora_A.weight must have shape \(4, \d+\), got \(4, \d+\)"),
    "NaN": (None, put(float("nan"), "lora_A"), "must be finite"),
    "years": (dict(rank_pattern={"q_proj": 4, YEARS: 4}), None, "rank_pattern must match .*1 s"),
    "more years": (dict(target_modules=YEARS), None, "target_modules must match .*within 1 s"),
    "infinity": (None, put(float("inf"), "lora_B"), "must be finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_computed_exactly_is_refused(
    name, model, directories, prompts, expected, tmp_path
) -> None:
    config, tensors, why = REFUSED[name]
    wrong = edited(directories["attention"], tmp_path / "adapter", config, tensors)
    engine = checked_engine(model, adapters={}, num_blocks=99)
    with pytest.raises(ValueError, match=why):
        engine.load_adapter("wrong", wrong)
    assert engine.adapters == [] and not engine.parts.runner_handle.adapters.taken
    engine.load_adapter("wrong", directories["attention"])
    assert serve(engine, prompts[:1], "wrong") == [expected["attention"][:1]]
    with pytest.raises(ValueError, match=why):
        LLMEngine(EngineConfig(num_blocks=99, adapters={"wrong": wrong}), loaded=model)


def test_names_and_directories_that_are_none(model, directories, prompts, tmp_path) -> None:
    half = edited(directories["attention"], tmp_path / "half")
    (half / WEIGHTS).write_bytes(b"{")
    engine = checked_engine(model, adapters=directories, num_blocks=99)
    plain, (one, two) = checked_engine(model, num_blocks=99), prompts[:2]
    add, generate, params = engine.add_request, engine.generate_batch, SamplingParams()
    refused: dict[Callable, str] = {
        lambda: add("a", one, adapter="z"): "adapter must .*'attention', .*, got 'z'",
        lambda: add("a", one, adapter=""): "adapter must .*, got ''",
        lambda: add("a", one, adapter=["attention"]): r"adapter must .*, got \['attention'\]",
        lambda: generate([one, two], params, adapter=[None, "z"]): "adapter must .*, got 'z'",
        lambda: generate([one, two], params, adapter=[None]): "adapter must .* 2 prompts, got 1",
        lambda: generate([one], params, adapter=5): "adapter must be a str.*, got 5",
        lambda: generate([one], params, adapter=""): "adapter must .*'attention', .*, got ''",
        lambda: engine.add_requests([("a", one, PARAMS), ("b", two, PARAMS)], [None]): "shorter",
        lambda: engine.load_adapter("attention", "x"): "name must be unused, got 'attention'",
        lambda: engine.load_adapter("", "x"): "name must be a non-empty str, got ''",
        lambda: engine.load_adapter("new", None): "directory must be a path, got None",
        lambda: engine.unload_adapter("z"): "adapter must .*'attention', .*, got 'z'",
        lambda: plain.load_adapter("x", "y"): "cannot use adapters",
        lambda: plain.unload_adapter("x"): "cannot use adapters",
        lambda: plain.add_request("a", one, adapter="attention"): "cannot use adapters",
        lambda: engine.load_adapter("new", half): f"{CONFIG}|corrupt or incomplete",
        lambda: EngineConfig(adapters=["x"]): "adapters",
        lambda: EngineConfig(adapters={"x": 5}): "adapters",
        lambda: EngineConfig(max_loras=0): "max_loras",
    }
    same = dict(batch_invariant=True, dtype="float32")
    refused[lambda: EngineConfig(adapters={}, **same)] = "adapters must .*batch_invariant"
    refused[lambda: EngineConfig(max_loras=2, **same)] = "max_loras must .*batch_invariant"
    for call, message in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    (half / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="LoRA adapter's directory"):
        engine.load_adapter("new", half)
    assert not engine.has_unfinished_requests() and engine.adapters == list(directories)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.load_adapter("new", half)
