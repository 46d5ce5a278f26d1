"""Packed matrices against float64, and what the rest of the engine sees of them."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.models import huge_pages, row_padding
from common.models.linear import Linear, linear_layers, reason_not_packed
from common.models.regions.compiled_linear import CompiledPacking
from request import SamplingParams
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
CPU = torch.device("cpu")
UNPACKED = {dtype: reason_not_packed(dtype, CPU) for dtype in BOUNDS}  # None: this processor can
TINY = replace(QWEN3_0_6B, vocab_size=89, hidden_size=32, num_hidden_layers=2, intermediate_size=40)


def make(dtype: torch.dtype, has_bias: bool, num_out: int = 67, num_in: int = 45) -> Linear:
    generator = torch.Generator().manual_seed(3)

    def parameter(*shape: int) -> nn.Parameter:
        values = torch.randn(shape, generator=generator) / num_in**0.5
        return nn.Parameter(values.to(dtype), requires_grad=False)

    return Linear(parameter(num_out, num_in), parameter(num_out) if has_bias else None)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 31, 32, 33, 200])
def test_packed_and_plain_are_within_rounding_of_float64(dtype, has_bias, num_rows, monkeypatch):
    """The packed one where this processor has it: for bfloat16 most laptops have not. And the sum
    as a GPU computes it."""
    matrix = make(dtype, has_bias)
    x = torch.randn(num_rows, 45, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    residual = torch.randn(num_rows, 67, generator=torch.Generator().manual_seed(9)).to(dtype)
    weight, bias = matrix.plain_weight().double(), matrix.bias
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())

    def check() -> None:
        torch.testing.assert_close(
            matrix(x).double(), exact, rtol=BOUNDS[dtype], atol=BOUNDS[dtype]
        )
        assert torch.equal(matrix.write(x, residual.clone()), matrix(x))
        added = matrix.add_to(residual.clone(), x).double()
        reference = residual.double() + exact
        torch.testing.assert_close(added, reference, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])

    check()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        check()
    if UNPACKED[dtype] is not None:
        with pytest.raises(RuntimeError, match="needs the cpu support"):  # Trap 77
            matrix.pack()
        return
    matrix.pack()
    check()
    assert matrix.is_packed and matrix.weight is None
    assert torch.equal(matrix.plain_weight().double(), weight), "packing loses nothing"


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_matrix_is_given_up_unless_the_embedding_needs_it(tied):
    model = random_model(replace(TINY, tie_word_embeddings=tied)).model
    num_parameters = model.num_parameters
    assert num_parameters == sum(p.numel() for p in model.parameters())
    assert model.pack_weights() is None
    assert all(m.weight is None for layer in model.layers for m in linear_layers(layer))
    assert (model.lm_head.weight is model.embed_weight) == tied
    assert (model.lm_head.weight is None) != tied
    assert model.num_parameters == num_parameters
    assert model.pack_weights() is None, "a second engine packs nothing again"


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
    reason, model = reason_not_packed(dtype, CPU), engine.core.runner.model
    is_packed = pack_weights and reason is None
    assert {matrix.is_packed for matrix in linear_layers(model)} == {is_packed}
    said = f"weights are not packed: {reason}"
    assert (said in caplog.text) == (pack_weights and reason is not None)
    assert engine.num_parameters == random_model(TINY, 1, dtype).model.num_parameters
    assert len(tokens) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_packed_weights_in_huge_pages_compute_the_same(tmp_path, monkeypatch):
    matrix, x = make(torch.float32, False, 3000, 1024), torch.ones(3, 1024)
    matrix.pack()
    flag, expected = tmp_path / "enabled", matrix(x)
    flag.write_text("always [madvise] never")
    monkeypatch.setattr(huge_pages, "ENABLED", flag)
    huge_pages.move_to_huge_pages([matrix.packed_memory])
    assert torch.equal(matrix(x), expected)


def test_slow_numbers_of_rows_are_padded_and_those_that_noise_made_slow_are_not():
    """The shortest time of the repeats is as good."""
    times = {16: [200.0, 85.0], 17: [133.0] * 2, 32: [133.0] * 2, 33: [85.0] * 2, 48: [98.0] * 2}
    assert row_padding.slow_counts(times) == {n: 33 for n in range(17, 33)}
    assert row_padding.slow_counts({n: [float(n)] for n in times}) == {}


@pytest.mark.skipif(UNPACKED[torch.float32] is not None, reason="it packs nothing")
def test_a_padded_product_is_the_same_and_the_measurement_is_cached(tmp_path, monkeypatch):
    matrix, x = make(torch.float32, True), torch.randn(3, 45)
    residual, num_rows = torch.randn(3, 67), []
    matrix.pack()
    expected, total = matrix(x), matrix.add_to(residual.clone(), x)
    multiply = matrix._packed_product
    monkeypatch.setattr(matrix, "_packed_product", lambda x: num_rows.append(len(x)) or multiply(x))
    monkeypatch.setattr(row_padding, "TIMED_BYTES", 1)
    monkeypatch.setattr(row_padding, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(row_padding, "slow_counts", lambda times: {3: 5})
    row_padding.pad_slow_counts([matrix], torch.float32)
    num_rows.clear()
    row_padding.pad_slow_counts([matrix], torch.float32)
    torch.testing.assert_close(matrix(x), expected)
    torch.testing.assert_close(matrix.add_to(residual.clone(), x), total)
    assert matrix(x[:2]).shape == (2, 67) and num_rows == [5, 2]


# -- compiled


@pytest.mark.needs("C++ compiler")
@pytest.mark.parametrize("is_half", [True, False])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(96, 300), (1, 1), (31, 257), (33, 1024), (16, 256)]
)
def test_compiled_products_are_products(out_features, in_features, is_half) -> None:
    """Shapes that panels divide and do not divide, with and without a bias, for one row to more
    than a block; weights that bfloat16 can represent are stored in it, with the same results."""
    torch.manual_seed(out_features)
    weight = torch.randn(out_features, in_features)
    weight = weight.bfloat16().float() if is_half else weight
    for bias in (None, torch.randn(out_features)):
        matrix = Linear(nn.Parameter(weight.clone()), None if bias is None else nn.Parameter(bias))
        matrix.pack(packing=CompiledPacking())
        assert matrix._packed.dtype == (torch.bfloat16 if is_half else torch.float32)
        assert matrix.packed_memory[1] >= weight.nbytes // (2 if is_half else 1)
        assert torch.equal(matrix.plain_weight(), weight)
        for num_rows in (1, 2, 5, 6, 7, 13, 192, 200, 0):
            x, residual = torch.randn(num_rows, in_features), torch.randn(num_rows, out_features)
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            bound = 1e-6 * in_features
            torch.testing.assert_close(matrix(x).double(), exact, atol=bound, rtol=1e-5)
            assert torch.equal(matrix(x[1:4]), matrix(x)[1:4]), "a row depends on the others"
            reference = residual.double() + exact
            apart = torch.stack((x, x), 2)[..., 0], residual.clone()
            for own, onto in ((x, residual.clone()), apart):
                found = matrix.add_to(onto, own).double()
                torch.testing.assert_close(found, reference, atol=bound, rtol=1e-5)


@pytest.mark.needs("C++ compiler")
def test_a_large_model_in_float32_is_multiplied_by_compiled_products(monkeypatch, caplog) -> None:
    engine, tokens = run(torch.float32, compile=True)
    packings = {type(m.packing) for m in linear_layers(engine.core.runner.model)}
    assert packings == {CompiledPacking}
    assert tokens == run(torch.float32, compile=False)[1]
    monkeypatch.setattr("cpp_library.COMPILERS", ())
    with caplog.at_level(logging.WARNING):
        engine, other = run(torch.float32, compile=True)
    assert "products are not compiled" in caplog.text and other == tokens
