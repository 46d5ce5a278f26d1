"""Adapters in an engine: in any company, each request gets what PEFT gives it alone, in float64."""

from __future__ import annotations

import itertools
import random
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bounded_loops import as_long_as
from common.engine import EngineConfig, LLMEngine
from common.features.adapters.adapter_files import CONFIG, WEIGHTS
from common.features.adapters.adapter_slots import AdapterSlots, Ordered
from common.models.linear import reason_not_packed
from common.models.loader import load_model
from common.tests.adapter_cases import KINDS, edited
from common.tests.claims import ADAPTED, INDICES, NUM_ADAPTED, cases_of
from common.tests.engine_oracle import checked_engine, greedy_params
from common.tests.every_kind import must_be_as_likely
from common.tests.grammar_cases import CASES, EOS, small_tokenizer
from common.tests.small_models import subject
from request import SamplingParams
from tiered_cache import KVTierConfig

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
NUM_TOKENS = NUM_ADAPTED
PARAMS = greedy_params(NUM_TOKENS)
NAMES = (None, *KINDS)


@pytest.fixture(scope="module")
def directories() -> dict[str, Path]:
    return subject("family").adapters


@pytest.fixture(scope="module")
def prompts(family_oracle) -> list[list[int]]:
    return [family_oracle.prompts[i] for i in INDICES]


@pytest.fixture(scope="module")
def right() -> Callable[..., list[int]]:
    """Return the tokens with an adapter, a grammar and a prompt's place, by `peft`."""
    return lambda kind, grammar, i: subject("family").within(kind, grammar, INDICES[i], NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(right, prompts) -> dict[str | None, list[list[int]]]:
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


@cases_of(ADAPTED)
def test_a_mixed_batch_is_what_peft_says_of_each_alone(claim, model, number) -> None:
    claim.hold(model, number)


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


@pytest.mark.skipif(reason_not_packed(torch.float32, CPU) is not None, reason="it packs nothing")
def test_packed_matrices_have_the_same_additions(family_oracle, directories, prompts) -> None:
    """In their own order of sums; one adapter changes the numbers a thousand times as much."""
    asked, adapters = mixed(prompts)
    wanted = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    found = []
    for packs in (True, False):
        model = load_model(family_oracle.path, torch.float32, CPU)
        config = EngineConfig(num_blocks=400, adapters=directories, pack_weights=packs)
        engine = LLMEngine(config, loaded=model)
        assert model.model.layers[0].mlp.down.is_packed == packs
        outputs = engine.generate_batch(asked, wanted, adapter=adapters).values()
        tops = [output.outputs[0].logprobs[0].top for output in outputs]
        found.append(torch.tensor([[top[i] for i in range(len(top))] for top in tops]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)
    by_prompt = found[0].unflatten(0, (len(prompts), len(NAMES)))
    assert (by_prompt - by_prompt.roll(1, dims=1)).abs().amax(-1).min() > 1


def test_two_engines_over_one_model_do_not_see_each_other(
    model, directories, prompts, expected
) -> None:
    """Names too: each has its own."""
    one = checked_engine(model, adapters={"x": directories["attention"]}, num_blocks=99)
    other = checked_engine(model, adapters={"x": directories["everything"]}, num_blocks=99)
    none = checked_engine(model, num_blocks=99)
    for _ in range(2):
        assert serve(one, prompts[:1], "x") == [expected["attention"][:1]]
        assert serve(other, prompts[:1], "x") == [expected["everything"][:1]]
        assert serve(none, prompts[:1], None) == [expected[None][:1]]


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


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_uses_an_adapter_that_is_unloaded_ends_with_it(
    model, directories, prompts, expected, overlaps
) -> None:
    engine = checked_engine(
        model, adapters=directories, overlap_scheduling=overlaps, num_blocks=200
    )
    slots = engine.parts.runner_handle.adapters
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy_params(NUM_TOKENS), adapter="everything")
    engine.step()
    engine.unload_adapter("everything")
    with pytest.raises(ValueError, match=r"'attention', 'one layer'\), got 'everything'"):
        engine.add_request("late", prompts[0], adapter="everything")
    assert len(slots.taken) == 3
    found = {}
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=100):
        found |= {int(o.request_id): o for o in engine.step() if o.finished}
    tokens = [found[i].outputs[0].token_ids for i in range(len(prompts))]
    assert tokens == expected["everything"]
    assert len(slots.taken) == 2, "nobody needs it any more"
    engine.load_adapter("everything", directories["everything"])
    assert serve(engine, prompts, "everything") == [[t] for t in expected["everything"]]


TOGETHER = {
    "ahead": dict(overlap_scheduling=True, preempt_every=3, chunked_prefill=3, block_size=3),
    "draft": dict(speculative={"method": "draft", "num_spec_tokens": 3}, num_blocks=60),
    "graphs": dict(emulate_graphs=True, overlap_scheduling=True, max_model_len=100),
    "tree": dict(prefix_cache="radix", block_size=1, scheduler="prefill_first", shuffle_batch=True),
}


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "way", [w if w == "ahead" else pytest.param(w, marks=pytest.mark.slow) for w in TOGETHER]
)
def test_names_change_their_content_while_requests_with_grammars_run(
    way, seed, model, draft, directories, prompts, right
) -> None:
    """Adapters come and go under three names, some read while steps go on; requests that have one,
    and a grammar, and up to three samples, are aborted by chance."""
    config = {"num_blocks": 400, "check_invariants": True, "max_num_seqs": 5, **TOGETHER[way]}
    config = EngineConfig(**config, adapters={}, max_loras=1 + seed % 3)
    loaded, tokenizer = replace(model, generation_eos_token_ids=(EOS,)), small_tokenizer()
    own_draft = draft if config.speculation is not None else None
    engine = LLMEngine(config, loaded=loaded, draft=own_draft, tokenizer=tokenizer)
    rng, names, loading = random.Random(f"{way} {seed}"), engine.named_adapters(), {}
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
        grammar = rng.choice([None, *CASES])
        params = SamplingParams(
            rng.choice([1, 1, 3]),
            0,
            max_tokens=NUM_TOKENS,
            ignore_eos=grammar is None,
            grammar=None if grammar is None else CASES[grammar][0],
        )
        request_id = str(len(asked))
        engine.add_request(request_id, prompts[i], params, adapter=name)
        asked[request_id] = kind_of.get(name), grammar, i

    to_do = rng.choices([change, ask, int], k=120)
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


def test_whom_an_abort_ends_holds_no_adapter(model, directories, prompts) -> None:
    engine = checked_engine(model, adapters=directories, overlap_scheduling=True, num_blocks=200)
    engine.add_request("a", prompts[0], greedy_params(50), adapter="attention")
    engine.add_request("b", prompts[1], greedy_params(50))
    engine.step()
    engine.abort_request("a")
    engine.unload_adapter("attention")
    assert len(engine.parts.runner_handle.adapters.taken) == 2
    for _ in as_long_as(engine.has_unfinished_requests, max_rounds=100):
        engine.step()


def test_nobody_is_passed_over_for_ever(model, directories, prompts) -> None:
    """One slot, and a stream of requests for the adapter that has it, which never pauses."""
    engine = checked_engine(
        model, adapters=directories, max_loras=1, max_num_seqs=2, num_blocks=200
    )
    engine.scheduler.waiting.max_overtakes = 5
    names = itertools.count()

    def add_own(num_tokens: int) -> None:
        name, params = f"own {next(names)}", greedy_params(num_tokens)
        engine.add_request(name, prompts[0], params, adapter="everything")

    add_own(2)
    add_own(5)
    engine.step()
    engine.add_request("other", prompts[0], greedy_params(3), adapter="attention")
    stats = engine.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (["everything"], ["attention"])
    for step in range(60):
        ended = [output.request_id for output in engine.step() if output.finished]
        if "other" in ended:
            assert step > 10 and next(names) > 5, "nobody has overtaken it"
            return
        for _ in ended:
            add_own(4)
    raise AssertionError("it starves")


def test_a_step_without_adapters_stages_nothing(model, directories, prompts) -> None:
    engine = checked_engine(model, adapters=directories, num_blocks=200)
    runner, seen = engine.core.runner, []
    forward = runner.forward
    runner.forward = lambda batch: seen.append((batch.staged, batch.step)) or forward(batch)
    serve(engine, prompts, None)
    assert seen and all(step == ({}, None) for step in seen)


# -- slots


def test_a_digest_is_of_all_that_computes(model, directories, tmp_path) -> None:
    slots, plain = AdapterSlots(model.model, 1, 8), directories["attention"]
    changes = {
        "same": {},
        "number": {"tensors": put(0.125, "lora_B")},
        "scale": {"config": {"lora_alpha": 9}},
    }
    found = {
        name: slots.read(edited(plain, tmp_path / name, **change)).digest
        for name, change in changes.items()
    }
    assert found["same"] == slots.read(plain).digest
    assert len(set(found.values())) == 3


def test_a_slot_keeps_nothing_of_who_was_in_it(model, directories) -> None:
    """A graph reads all ranks of a slot. What is dropped leaves its slot to others."""
    slots = AdapterSlots(model.model, 2, 8)
    everything, attention, one_layer = (slots.read(directories[name]) for name in KINDS)
    for adapter in (everything, attention, one_layer):
        slots.take(adapter)
    slots.bring_in([everything.digest, attention.digest])
    slots.drop(everything.digest)
    assert set(slots.bring_in([one_layer.digest])) == {one_layer.digest}
    assert set(slots.slot_of) == {attention.digest, one_layer.digest}
    slot, n = slots.slot_of[one_layer.digest], 5
    step = slots.in_graph(torch.full((n,), slot), torch.arange(n))
    for addition in slots.additions:
        x = torch.randn(n, addition.a.shape[-1], dtype=torch.float64)
        y = x.new_zeros(n, sum(addition.sizes))
        found, right = (
            addition.add(rows, x, y.clone())
            for rows in (step.tokens, Ordered(None, [(slot, 0, n)]))
        )
        torch.testing.assert_close(found, right, atol=1e-12, rtol=0)


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


YEARS = r"((\w+)\.?)+!"
FOR_YEARS = {
    "target_modules": YEARS,
    "exclude_modules": YEARS,
    "rank_pattern": {"q_proj": 4, YEARS: 4},
    "alpha_pattern": {YEARS: 8},
}


@pytest.mark.parametrize("field", FOR_YEARS)
def test_an_expression_that_would_take_years_is_refused(
    field, model, directories, tmp_path, monkeypatch
) -> None:
    """Trap 87. And the interpreter is free meanwhile: other threads run, signals are handled."""
    wrong = edited(directories["attention"], tmp_path / "adapter", {field: FOR_YEARS[field]}, None)
    run, ticks, is_over = subprocess.run, [], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(1)

    def seen_run(*arguments, **options):
        threading.Thread(target=tick).start()
        try:
            return run(*arguments, **options)
        finally:
            is_over.set()

    monkeypatch.setattr(subprocess, "run", seen_run)
    engine = checked_engine(model, adapters={}, num_blocks=99)
    with pytest.raises(ValueError, match=f"{field} must match .*within 1 s"):
        engine.load_adapter("wrong", wrong)
    assert len(ticks) > 10 and engine.adapters == []


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_directory_that_is_none(missing, model, directories, tmp_path) -> None:
    half = edited(directories["attention"], tmp_path / "half")
    (half / missing).unlink()
    engine = checked_engine(model, adapters={}, num_blocks=99)
    for path in (half, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="LoRA adapter's directory"):
            engine.load_adapter("x", path)
    for content in (b"", b"{", b"[]", b"\xff"):
        (half / CONFIG).write_bytes(content)
        (half / WEIGHTS).write_bytes(content)
        with pytest.raises(ValueError, match=CONFIG):
            engine.load_adapter("x", half)
    (half / CONFIG).write_bytes((directories["attention"] / CONFIG).read_bytes())
    with pytest.raises(ValueError, match="corrupt or incomplete"):
        engine.load_adapter("x", half)


def test_a_closed_engine_neither_loads_nor_unloads(model, directories) -> None:
    engine = checked_engine(model, adapters=directories, num_blocks=99)
    engine.close()
    for name in ("attention", "nobody"):  # whether it is there or not
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.unload_adapter(name)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            engine.load_adapter(name, directories["everything"])
    assert engine.adapters == list(directories)


def test_names_that_are_none(model, directories, prompts) -> None:
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
    assert not engine.has_unfinished_requests() and engine.adapters == list(directories)
