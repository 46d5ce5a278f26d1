"""Packed matrices against float64, and what the rest of the engine sees of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.models.linear import (
    SLOW_ROWS,
    Linear,
    OneDnnProduct,
    linear_layers,
    reason_not_packed,
)
from common.models.regions.compiled_linear import CompiledPacking, CompiledProduct
from request import SamplingParams
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
CPU = torch.device("cpu")
UNPACKED = {dtype: reason_not_packed(dtype, CPU) for dtype in BOUNDS}  # None: this processor can
COMPILED = pytest.mark.needs("C++ compiler")
KINDS = [  # the packed ones where this processor has them: for bfloat16 most laptops have not
    *((dtype, packing) for dtype in BOUNDS for packing in ("none", "oneDNN")),
    *(pytest.param(torch.float32, kind, marks=COMPILED) for kind in ("compiled", "compiled half")),
]
TINY = replace(QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=2, intermediate_size=40)


def make(dtype: torch.dtype, has_bias: bool, num_out: int = 67, num_in: int = 45) -> Linear:
    torch.manual_seed(3)
    weight = torch.randn(num_out, num_in) / num_in**0.5
    bias = torch.randn(num_out)
    return Linear(
        nn.Parameter(weight.to(dtype)), nn.Parameter(bias.to(dtype)) if has_bias else None
    )


@pytest.mark.net
@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "packing"), KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(67, 45), (96, 300), (1, 1), (31, 257), (33, 1024)]
)
def test_products_are_products(dtype, packing, has_bias, num_out, num_in, monkeypatch):
    """Packed and plain, and the sum as a GPU computes it: shapes that panels divide and do not
    divide, of no row to more than a block. Weights that bfloat16 can represent are stored in it by
    compiled products, with the same results."""
    matrix = make(dtype, has_bias, num_out, num_in)
    if packing == "compiled half":
        matrix.weight.copy_(matrix.weight.bfloat16())
    weight = matrix.plain_weight().clone()
    bias = matrix.bias
    if packing == "oneDNN" and UNPACKED[dtype] is not None:
        with pytest.raises(RuntimeError, match="needs the cpu support"):  # Trap 77
            matrix.pack()
        return
    if packing == "oneDNN":
        matrix.pack()
    elif packing != "none":
        matrix.pack(CompiledPacking())
        stored = torch.bfloat16 if packing == "compiled half" else torch.float32
        assert matrix.packed.packed.dtype == stored
    if packing != "none":
        assert matrix.packed and matrix.weight is None
        assert torch.equal(matrix.plain_weight(), weight), "packing loses nothing"
    near = partial(torch.testing.assert_close, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    for num_rows in (0, 1, 2, 5, 6, 7, 13, 31, 32, 33, 192, 200):
        x, residual = (torch.randn(num_rows, size).to(dtype) for size in (num_in, num_out))
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        near(matrix(x).double(), exact)
        if packing.startswith("compiled"):
            assert torch.equal(matrix(x[1:4]), matrix(x)[1:4]), "a row depends on the others"
        apart = torch.stack((x, x), 2)[..., 0]
        for own, is_gpu in ((x, False), (apart, False), (x, packing == "none")):
            with monkeypatch.context() as patch:
                if is_gpu:
                    patch.setattr(torch.Tensor, "is_cuda", True)
                added = matrix.add_to(residual.clone(), own)
            near(added.double(), residual.double() + exact)


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_matrix_is_given_up_unless_the_embedding_needs_it(tied):
    model = random_model(replace(TINY, tie_word_embeddings=tied)).model
    num_parameters = model.num_parameters
    assert num_parameters == sum(p.numel() for p in model.parameters())
    model.pack_weights()
    assert all(m.weight is None for layer in model.layers for m in linear_layers(layer))
    assert (model.lm_head.weight is model.embed_weight) == tied
    assert (model.lm_head.weight is None) != tied
    model.pack_weights()
    assert model.num_parameters == num_parameters


def run(dtype: torch.dtype, **config) -> tuple[LLMEngine, list[int]]:
    engine = LLMEngine(
        EngineConfig(num_blocks=20, max_model_len=64, **config), loaded=random_model(TINY, 1, dtype)
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = engine.generate_batch([[1, 2, 3, 4]], params).values()
    return engine, output.outputs[0].token_ids


@pytest.mark.parametrize("pack_weights", [True, False])
@pytest.mark.parametrize("dtype", [*BOUNDS, torch.float64])
def test_the_engine_packs_unless_it_cannot_or_packing_is_off(dtype, pack_weights, caplog):
    """And says why, on every processor: also on one without bfloat16 (Trap 77, `.ci/held_down`)."""
    caplog.set_level(logging.INFO)
    engine, tokens = run(dtype, pack_weights=pack_weights)
    reason = reason_not_packed(dtype, CPU)
    model = engine.core.runner.model
    is_packed = pack_weights and reason is None
    assert {matrix.packed is not None for matrix in linear_layers(model)} == {is_packed}
    said = f"weights are not packed: {reason}"
    assert (said in caplog.text) == (pack_weights and reason is not None) and len(tokens) == 5


@pytest.mark.skipif(UNPACKED[torch.float32] is not None, reason="ARM")
def test_row_counts_that_amx_computes_slowly_are_padded(monkeypatch):
    """The result of the rows that were asked for is the same."""
    num_rows = []

    class Counting(OneDnnProduct):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            num_rows.append(len(x))
            return super().__call__(x)

    plain = make(torch.float32, True)
    product = Counting(plain.weight, plain.bias)
    product.slow_rows = SLOW_ROWS
    for given in (16, 17, 32, 33):
        x = torch.randn(given, 45)
        residual = torch.randn(given, 67)
        torch.testing.assert_close(product(x), plain(x))
        torch.testing.assert_close(product.add_to(residual.clone(), x), residual + plain(x))
    assert num_rows == [16, 17, 33, 32, 33, 33]


@COMPILED
def test_a_large_model_in_float32_is_multiplied_by_compiled_products(monkeypatch, caplog) -> None:
    engine, tokens = run(torch.float32, compile=True)
    packings = {type(m.packed) for m in linear_layers(engine.core.runner.model)}
    assert packings == {CompiledProduct}
    assert tokens == run(torch.float32, compile=False)[1]
    monkeypatch.setattr("cpp_library.COMPILERS", ())
    with caplog.at_level(logging.WARNING):
        engine, other = run(torch.float32, compile=True)
    assert "products are not compiled" in caplog.text and other == tokens
