"""Norms and rotary embedding: what is compiled against the plain form, and compiled once."""

from __future__ import annotations

import pytest
import torch

from common.kernels import compiled_regions
from common.kernels.chosen_regions import set_regions
from common.kernels.compiled_regions import (
    compile_regions,
    norm_and_rotate_region,
    rms_norm_region,
)
from common.kernels.regions import Regions
from common.loader import LoadedModel
from common.model import DecoderModel
from common.model_config import ModelConfig
from common.rotary import RopeParameters, rotary_factors
from test_decode_attention import needs_compiler

# Of the largest value. bfloat16: the plain functions round in between, several times.
TOLERANCE = {torch.float64: 5e-7, torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
EPS = 1e-6


def make_model(dtype: torch.dtype, has_qk_norm: bool = True, head_dim: int = 16) -> DecoderModel:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM" if has_qk_norm else "LlamaForCausalLM",
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=90, rms_norm_eps=EPS, rope=RopeParameters(),
        tie_word_embeddings=True, has_qk_norm=has_qk_norm, dtype="float32", eos_token_ids=(),
    )  # fmt: skip
    model = DecoderModel(config, dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(1.0, 0.5, generator=generator)
    return model


@torch.inference_mode()
def check(model: DecoderModel, found: Regions, num_tokens: int) -> None:
    layer, dtype, plain = model.layers[0].attention, model.norm_weight.dtype, Regions()
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 48, generator=generator).to(dtype)
    heads = torch.randn(num_tokens, 8, layer.head_dim, generator=generator).to(dtype)
    qk = heads.split((6, 2), dim=1)[0]
    positions = torch.randint(0, 90, (num_tokens,), generator=generator)
    rotary = rotary_factors(model.rotary_table, positions)
    before = heads.clone()
    for name, arguments in (
        ("rms_norm", (hidden, layer.input_norm_weight, EPS)),
        ("norm_and_rotate", (qk, layer.qk_norm_weight, EPS, rotary)),
    ):
        expected = getattr(plain, name)(*arguments)
        output = getattr(found, name)(*arguments)
        assert output.dtype == dtype and output.shape == expected.shape and output.is_contiguous()
        error = (output.double() - expected.double()).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[dtype], (name, num_tokens, float(error))
    assert torch.equal(heads, before), "queries and keys of the input are left as they were"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("has_qk_norm", [True, False])
def test_what_is_compiled_computes_the_same(has_qk_norm: bool, dtype: torch.dtype) -> None:
    uncompiled = Regions(rms_norm_region, norm_and_rotate_region)
    for num_tokens in (1, 2, 5, 64):
        check(make_model(dtype, has_qk_norm), uncompiled, num_tokens)


@needs_compiler
@pytest.mark.sample(dtype=1)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_compiled_once_for_any_number_of_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_regions, "FROM_TOKENS", (2, 2))
    model = make_model(dtype)
    compiled = compile_regions(model)
    assert compiled.rms_norm is not Regions().rms_norm
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (3, 1, 64, 2, 700):
            check(model, compiled, num_tokens)


def test_few_tokens_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "FROM_TOKENS", (5, 3))
    monkeypatch.setattr(torch, "compile", lambda region, **options: lambda x, *rest: region)
    monkeypatch.setattr(compiled_regions, "_first_call", lambda *arguments: None)
    model = make_model(torch.float32)
    compiled, layer = compile_regions(model), model.layers[0].attention
    for num_tokens in (1, 2, 3, 4, 5, 6):
        hidden = torch.ones(num_tokens, 48)
        found = compiled.rms_norm(hidden, layer.input_norm_weight, EPS)
        assert (found is rms_norm_region) == (num_tokens >= 5)
        rotary = rotary_factors(model.rotary_table, torch.zeros(num_tokens, dtype=torch.int64))
        heads = torch.ones(num_tokens, 6, 16)
        found = compiled.norm_and_rotate(heads, layer.qk_norm_weight, EPS, rotary)
        assert (found is norm_and_rotate_region) == (num_tokens >= 3)


@needs_compiler
def test_two_models_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has functions of its own kind; the second one does not spoil the first."""
    monkeypatch.setattr(compiled_regions, "FROM_TOKENS", (2, 2))
    models = [make_model(torch.float32), make_model(torch.float32, has_qk_norm=False, head_dim=8)]
    compiled = [compile_regions(model) for model in models]
    for model, regions in zip(models * 2, compiled * 2, strict=True):
        check(model, regions, 33)


def test_a_model_has_what_it_was_told_last(
    random_loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Regions(rms_norm_region, norm_and_rotate_region)
    monkeypatch.setattr(compiled_regions, "compile_regions", lambda model: own)
    model = random_loaded.model
    for is_compiled, expected in ((True, own), (False, Regions())):
        set_regions(model, is_compiled)
        assert model.regions == expected
