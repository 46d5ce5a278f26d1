"""`batch_invariant=True`: every token and every bit of its log-probabilities is that of the request
alone, in float32 and bfloat16, whatever the settings: those of the equivalence matrix's rows."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from common.demo import parse_args
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.llm import LLM, SamplingParams
from common.models.linear import Linear, linear_layers, reason_not_packed
from common.models.loader import load_model
from common.tests import batch_invariant_case as case
from common.tests.batch_invariant_case import alone, config_of, make_engine, serve
from common.tests.engine_oracle import paged_runner
from common.tests.equivalence_axes import Combination
from common.tests.equivalence_rows import covering_array
from invariant_attention import InvariantAttentionBackend
from tiered_cache import KVTierConfig
from workshop.measure.bench.random_weights import random_model

CPU = torch.device("cpu")
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for dtype in (torch.float32, torch.bfloat16)
    for reason in [reason_not_packed(dtype, CPU)]
]
ROWS = covering_array()
# One token of a prompt in a step takes long.
SAMPLE = [row for row in ROWS if str(row.as_dict()["chunked_prefill"]) != "1"][::15]
PLAIN = Combination.parse(["chunked_prefill=True", "block_size=16", "prefix_cache=hash"])


@pytest.mark.parametrize(
    "combination",
    [row if row in SAMPLE else pytest.param(row, marks=pytest.mark.slow) for row in ROWS],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_that_of_the_request_alone(dtype, combination):
    found = serve(dtype, config_of(combination, True), combination.seed)
    for i, (wanted, own) in enumerate(zip(alone(dtype, True), found, strict=True)):
        assert own == wanted, f"request {i} of {combination.command}"


@pytest.fixture
def with_amx(monkeypatch) -> None:
    """A processor whose products depend on the number of rows in a call, whichever it is (Trap 88).
    Emulated: float32, one bit more or less."""

    def depends_on_rows(product):
        return lambda *rows: product(*rows) * (1 + 2**-20 * (len(rows[-1]).bit_count() % 2))

    for name in ("_packed_product", "_packed_sum"):
        monkeypatch.setattr(Linear, name, depends_on_rows(getattr(Linear, name)))
    for name in ("models", "alone"):  # those of this processor stay as they are
        monkeypatch.setattr(case, name, cache(getattr(case, name).__wrapped__))


@pytest.mark.usefixtures("with_amx")
def test_where_bits_depend_on_the_rows_of_a_call_every_call_has_one_tile():
    combination = Combination.parse(["chunked_prefill=16", "block_size=16", "speculative=draft"])
    only = (1, 4, 5)
    found = serve(torch.float32, config_of(combination, True), 5, only)
    assert found == [case.alone(torch.float32, True)[i] for i in only]
    model = case.models(torch.float32, True).loaded.model
    assert all(matrix.one_tile_a_call for matrix in linear_layers(model))
    # Without it other bits are found, or this would prove nothing.
    found = serve(torch.float32, config_of(combination, False), 5, only)
    assert found != [case.alone(torch.float32, False)[i] for i in only]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype):
    config = replace(config_of(PLAIN, True), num_threads=2)
    before = torch.get_num_threads()
    try:
        found = serve(dtype, config, 3, only=(3, 7))
        assert found == [alone(dtype, True)[i] for i in (3, 7)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [None, {"method": "draft"}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_in_steps_of_every_kind(dtype, speculative):
    """Many spans of keys and many pieces, chunks against decodes."""
    rng = random.Random(4)
    trunk = [rng.randrange(2, 4000) for _ in range(1500)]
    prompts = [trunk[: rng.randrange(1, 1500)] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True)

    def run(prompts: list[list[int]], **options) -> list:
        config = EngineConfig(num_blocks=700, batch_invariant=True, **options)
        outputs = make_engine(dtype, config).generate_batch(prompts, params).values()
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    one_by_one = [run([prompt], prefix_cache=None)[0] for prompt in prompts]
    options = {"speculative": speculative, "shuffle_batch": True}
    for chunk in (True, 7, 100):
        assert run(prompts, chunked_prefill=chunk, **options) == one_by_one
    assert run(prompts, chunked_prefill=64, preempt_every=9, **options) == one_by_one


def test_keys_and_values_in_a_block_are_the_same_however_they_were_computed():
    """So the prefix cache may hand them to anybody."""
    prompt = [random.Random(i).randrange(2, 4000) for i in range(150)]

    def keys(**options) -> torch.Tensor:
        config = EngineConfig(num_blocks=40, batch_invariant=True, **options)
        engine = make_engine(torch.float32, config)
        engine.generate_batch([prompt[:30], prompt], SamplingParams(temperature=0, max_tokens=2))
        tensors = [*engine.kv_cache.key_cache, *engine.kv_cache.value_cache]
        # By content: in which block a position lies is of no interest.
        found = torch.stack(tensors).view(len(tensors), -1, *tensors[0].shape[2:])
        written = found.flatten(2).abs().sum((0, 2)) > 0
        rows = found[:, written].transpose(0, 1).flatten(1)
        return torch.unique(rows, dim=0)

    whole = keys(chunked_prefill=False)
    assert torch.equal(keys(chunked_prefill=3), whole)
    assert torch.equal(keys(chunked_prefill=64, preempt_every=3), whole)


@pytest.mark.parametrize("window", [20, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_attend_to_a_window_keep_their_bits(dtype, window):
    """Beside layers that see everything, and with a cache for both."""
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = load_model(SHIPPED_CHECKPOINT, dtype, CPU).config
    config = replace(config, **sizes, layer_windows=(None, window, window))
    loaded = random_model(config, dtype=dtype)
    for layer in loaded.model.layers:  # or every token says the same
        layer.attention.qkv.weight.mul_(10)
        layer.attention.o.weight.mul_(10)
    trunk = [random.Random(5).randrange(500) for _ in range(140)]
    prompts = [trunk[:n] for n in (1, 30, 131, 140)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)

    def run(batches: list[list[list[int]]], **options) -> list:
        settings = EngineConfig(num_blocks=120, block_size=8, batch_invariant=True, **options)
        engine = LLMEngine(settings, loaded=loaded)
        outputs = [
            o for prompts in batches for o in engine.generate_batch(prompts, params).values()
        ]
        engine.close()
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    one_by_one = run([[prompt] for prompt in prompts], prefix_cache=None)
    assert run([prompts], chunked_prefill=37, preempt_every=5, shuffle_batch=True) == one_by_one
    speculative = {"method": "ngram", "num_spec_tokens": 3}
    assert run([prompts], chunked_prefill=False, speculative=speculative) == one_by_one


# -- what it is made of, and where it is refused


def test_it_reaches_every_part_that_computes():
    llm = LLM(batch_invariant=True, dtype="float32", num_blocks=20)
    runner = paged_runner(llm.engine)
    assert isinstance(runner.backend, InvariantAttentionBackend)
    assert None not in {matrix.row_tile for matrix in linear_layers(runner.model)}
    assert parse_args(["--batch-invariant"]).batch_invariant
    assert not parse_args([]).batch_invariant
    assert not EngineConfig().batch_invariant


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"pack_weights": False}, "pack_weights must .*batch_invariant.*, got False"),
        ({"compile": True}, "compile must .*batch_invariant.*, got True"),
        (
            {"attention_backend": "triton"},
            "attention_backend must .*batch_invariant.*, got 'triton'",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must .*batch_invariant.*, got 2"),
        ({"batch_invariant": 1}, "batch_invariant must .*False, True, got 1"),
    ],
)
def test_settings_that_contradict_it_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**{"batch_invariant": True, **options})
    EngineConfig(**{**options, "batch_invariant": False})


@pytest.mark.parametrize("reason", ["the dtype is torch.float64", "the device is cuda"])
def test_where_nothing_is_packed_it_is_refused(reason, monkeypatch):
    dtype = torch.float64 if "float64" in reason else torch.float32
    loaded = load_model(SHIPPED_CHECKPOINT, dtype, CPU)
    if dtype == torch.float32:
        monkeypatch.setattr("common.assembly.assembly.reason_not_packed", lambda *where: reason)
    with pytest.raises(ValueError, match=f"batch_invariant must .*{reason}"):
        LLMEngine(EngineConfig(num_blocks=20, batch_invariant=True), loaded=loaded)


def test_shared_keys_and_values_are_kept_apart_from_those_with_other_bits(tmp_path):
    """Engines over one disk, with it and without: neither loads what the other computed."""
    prompt, cached = list(range(2, 100)), []
    for batch_invariant in (False, True, True):
        tiers = KVTierConfig(0, 500, tmp_path / "kv", write_policy="write_through")
        config = EngineConfig(num_blocks=20, batch_invariant=batch_invariant, kv_tiers=tiers)
        engine = make_engine(torch.float32, config)
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = engine.generate_batch([prompt], params).values()
        cached.append(output.num_cached_tokens)
        engine.close()
    assert cached == [0, 0, 96]


def test_large_models_are_not_compiled_by_themselves() -> None:
    """What a compiled region computes, and from how many rows on, depends on the step."""
    cpu, many = torch.device("cpu"), 10**12
    assert EngineConfig().wants_compiled(many, cpu)
    assert not EngineConfig(batch_invariant=True).wants_compiled(many, cpu)
