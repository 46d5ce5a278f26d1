"""Adapters in an engine: in any company, each request gets what PEFT gives it alone, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.engine import EngineConfig, LLMEngine
from common.features.adapters.adapter_files import WEIGHTS
from common.models.loader import load_model
from common.tests.adapter_cases import KINDS, edited
from common.tests.engine_oracle import checked_engine, finish, greedy_params
from common.tests.every_kind import must_be_as_likely
from common.tests.small_models import CPU, subject
from request import SamplingParams
from tiered_cache import KVTierConfig

pytestmark = pytest.mark.usefixtures("one_thread")
INDICES = (0, 1, 8, 15)
NUM_TOKENS = 8
PARAMS = greedy_params(NUM_TOKENS)
NAMES = (None, *KINDS)


@pytest.fixture(scope="module")
def directories() -> dict[str, Path]:
    return subject("family").adapters


@pytest.fixture(scope="module")
def prompts(family_oracle) -> list[list[int]]:
    return [family_oracle.prompts[i] for i in INDICES]


def right(kind: str | None, i: int) -> list[int]:
    """The tokens with an adapter and a prompt's place, by `peft`."""
    return subject("family").within(kind, None, INDICES[i], NUM_TOKENS)


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


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_mixed_batch_is_what_peft_says_of_each_alone(
    max_loras, model, directories, prompts
) -> None:
    """And again from the cache, and as two samples. Other settings: `equivalence_axes.py`."""
    engine = checked_engine(model, num_blocks=400, max_loras=max_loras, adapters=directories)
    asked, names = mixed(prompts)
    wanted = [[right(n, prompts.index(p))] for p, n in zip(asked, names, strict=True)]
    assert len({*map(str, wanted)}) == len(wanted), "an adapter changes nothing"
    for _ in range(2):
        assert serve(engine, asked, names) == wanted
    assert serve(engine, asked[:4], names[:4], n=2) == [tokens * 2 for tokens in wanted[:4]]


def test_a_prompt_is_scored_by_its_own_adapter(model, directories, prompts) -> None:
    """As likely as when it was said. Some have adapters and are not scored; others neither."""
    sizes = dict(num_blocks=400, max_num_batched_tokens=40, shuffle_batch=True)
    engine = checked_engine(model, adapters=directories, **sizes)
    asked, adapters = mixed(prompts)
    said = engine.generate_batch(asked, replace(PARAMS, logprobs=2), adapter=adapters).values()
    whole = [prompt + output.outputs[0].token_ids for prompt, output in zip(asked, said)]
    params = [replace(PARAMS, prompt_logprobs=2 if i % 3 else None) for i in range(len(whole))]
    scored = engine.generate_batch(whole, params, adapter=adapters).values()
    for output, before in zip(scored, said, strict=True):
        if output.prompt_logprobs is not None:
            must_be_as_likely(output.prompt_logprobs[-NUM_TOKENS:], before.outputs[0].logprobs)


@pytest.mark.parametrize("has_tier", [False, True])
def test_cached_kv_is_an_adapters_by_its_content_and_not_by_its_name(
    has_tier, model, directories, prompts
) -> None:
    """Trap 64. With a tier the pool holds one request, so the others come back from there."""
    how = dict(num_blocks=26, kv_tiers=KVTierConfig(200)) if has_tier else dict(num_blocks=200)
    engine = checked_engine(model, max_loras=1, block_size=4, **how)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))

    def num_cached(name: str | None, kind: str | None) -> int:
        before = engine.stats().cached_tokens
        assert serve(engine, [prompts[longest]], name) == [[right(kind, longest)]]
        return engine.stats().cached_tokens - before

    engine.load_adapter("first", directories["attention"])
    assert num_cached(None, None) == 0 and num_cached("first", "attention") == 0
    assert num_cached("first", "attention") > 0
    engine.load_adapter("same", directories["attention"])
    assert num_cached("same", "attention") > 0
    engine.add_request("begun", prompts[0], PARAMS, adapter="first")
    engine.step()
    engine.unload_adapter("first")
    engine.load_adapter("first", directories["everything"])
    assert finish(engine)["begun"].outputs[0].token_ids == right("attention", 0)
    assert num_cached("first", "everything") == 0
    assert num_cached("same", "attention") > 0 and num_cached(None, None) > 0
    assert not has_tier or engine.parts.connector.host.num_read > 0
    engine.unload_adapter("same")
    assert len(engine.parts.runner.adapters.taken) == 1, "who used the other one has ended"
    engine.close()


# -- what is refused


def change(part: str, how: Callable) -> Callable[[dict], None]:
    """`how` makes other tensors of the first of that name."""

    def changed(tensors: dict) -> None:
        name = next(name for name in tensors if part in name)
        tensors |= how(name, tensors.pop(name))

    return changed


def put(value: float) -> Callable:
    return change("lora_B", lambda name, t: {name: t.index_fill(0, torch.tensor([3]), value)})


YEARS = r"((.)|(..))*[A-Z]"  # trap 87
REFUSED: list[tuple[dict | Callable, str]] = [  # fields, or what is done to the tensors
    (dict(r=32), "r must be <= max_lora_rank 16, got 32"),
    (dict(r=0), "r must .* got 0"),
    (dict(lora_alpha="much"), "lora_alpha must .* 'much'"),
    (dict(lora_alpha=10**400), "cannot read an adapter"),
    (dict(peft_type="IA3"), "peft_type must"),
    (dict(use_dora=True), "use_dora"),
    (dict(bias="all"), "bias must"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    (dict(layers_pattern="layers"), "layers_pattern .*got 'layers'"),
    (dict(layer_replication=[[0, 1]]), "layer_replication"),
    (dict(init_lora_weights="pissa"), "init_lora_weights must"),
    (dict(target_modules=["lm_head"]), "target_modules must match"),
    (change("", lambda n, t: {n: t, "lm_head.lora_A.weight": t.clone()}), "not name: lm_head"),
    (dict(target_modules=["fc1"]), "target_modules must"),
    (dict(target_modules=None), "target_modules must"),
    (dict(target_modules=["v_proj"]), "does not name: .*q_proj"),
    (dict(target_modules="*proj"), "cannot read an adapter"),
    (dict(target_modules=YEARS), "target_modules must match .*within 1 s"),
    (dict(rank_pattern={"q_proj": 4}), "rank_pattern is not supported"),
    (dict(exclude_modules=["q_proj"]), "exclude_modules is not supported"),
    (change("v_proj.lora_B", lambda *_: {}), "lacks .*v_proj.lora_B"),
    (change("", lambda n, t: {n: t, n.replace("s.0", "s.7"): t.clone()}), "not name: .*layers.7"),
    (change("q_proj.lora_A", lambda n, t: {n: t[:, :-1].contiguous()}), "must have shape .*, got"),
    (put(float("nan")), "must be finite"),
    (put(float("inf")), "must be finite"),
]


def test_what_can_not_be_computed_exactly_is_refused(model, directories, prompts, tmp_path) -> None:
    engine = checked_engine(model, adapters={}, num_blocks=99)
    good = directories["attention"]
    for i, (wrong, why) in enumerate(REFUSED):
        how = {"config": wrong} if isinstance(wrong, dict) else {"tensors": wrong}
        path = edited(good, tmp_path / str(i), **how)
        with pytest.raises(ValueError, match=why):
            engine.load_adapter("wrong", path)
        assert engine.adapters == [] and not engine.parts.runner.adapters.taken
    with pytest.raises(ValueError, match=why):
        LLMEngine(EngineConfig(num_blocks=99, adapters={"wrong": path}), loaded=model)
    engine.load_adapter("wrong", good)
    assert serve(engine, prompts[:1], "wrong") == [[right("attention", 0)]]


def test_names_and_directories_that_are_none(model, directories, prompts, tmp_path) -> None:
    half = edited(directories["attention"], tmp_path / "half")
    (half / WEIGHTS).write_bytes(b"{")
    engine = checked_engine(model, adapters=directories, num_blocks=99)
    plain = checked_engine(model, num_blocks=99)
    two = prompts[:2]

    def generate(adapter) -> None:
        engine.generate_batch(two, SamplingParams(), adapter=adapter)

    same = dict(batch_invariant=True, dtype="float32")
    refused: dict[Callable, str] = {
        lambda: engine.add_request("a", two[0], adapter="z"): "adapter must .*'attention', .*'z'",
        lambda: engine.add_request("a", two[0], adapter=["y"]): r"adapter must .*, got \['y'\]",
        lambda: generate([None, "z"]): "adapter must .*, got 'z'",
        lambda: generate([None]): "adapter must .* 2 prompts, got 1",
        lambda: generate(5): "adapter must be a str.*, got 5",
        lambda: generate(""): "adapter must .*'attention', .*, got ''",
        lambda: engine.load_adapter("attention", "x"): "name must be unused, got 'attention'",
        lambda: engine.load_adapter("", "x"): "name must be a non-empty str, got ''",
        lambda: engine.load_adapter("new", None): "directory must be a path, got None",
        lambda: engine.unload_adapter("z"): "adapter must .*'attention', .*, got 'z'",
        lambda: plain.load_adapter("x", "y"): "cannot use adapters",
        lambda: plain.add_request("a", two[0], adapter="attention"): "cannot use adapters",
        lambda: engine.load_adapter("new", half): "cannot read an adapter",
        lambda: EngineConfig(adapters=["x"]): "adapters",
        lambda: EngineConfig(adapters={"x": 5}): "adapters",
        lambda: EngineConfig(max_loras=0): "max_loras",
        lambda: EngineConfig(adapters={}, **same): "adapters must .*batch_invariant",
        lambda: EngineConfig(max_loras=2, **same): "max_loras must .*batch_invariant",
    }
    for call, message in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    (half / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="LoRA adapter's directory"):
        engine.load_adapter("new", half)
    assert not engine.has_unfinished_requests() and engine.adapters == list(directories)
