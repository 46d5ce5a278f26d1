"""Bits of a row among random neighbours, at every place and in every number of rows, against the
bits it has alone, in one thread: of each operation that a batch-invariant model consists of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batch_invariance as module
from batch_invariance import (
    ROW_TILES,
    check_attention,
    find_tile,
    gelu_tanh,
    make_batch_invariant,
    silu,
)
from common.kernels.regions import rms_norm
from common.linear import Linear, why_not_packed
from common.rotary import rotate

Rows = Callable[..., torch.Tensor]
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for dtype in (torch.float32, torch.bfloat16)
    for reason in [why_not_packed(dtype, torch.device("cpu"))]
]
# Of the shipped checkpoint and its draft, then of nobody: [out, in].
SHAPES = [(512, 256), (256, 768), (4096, 256), (704, 128), (67, 45), (1, 7)]
SHAPES += [(1024, 2048)]  # of Qwen3-0.6B: here a single row has a kernel of its own
WITH_BIAS = [(256, 256), (67, 45)]


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool = False) -> Linear:
    """Packed, in whole tiles."""
    weight = normal(*shape, dtype=dtype) / shape[1] ** 0.5
    bias = nn.Parameter(normal(shape[0], dtype=dtype, seed=1), False) if has_bias else None
    linear = Linear(nn.Parameter(weight, requires_grad=False), bias)
    linear.pack()
    linear.row_tile = find_tile(linear, dtype)
    return linear


def num_different(function: Rows, *rows: torch.Tensor) -> int:
    """Rows with other bits than alone in one thread: among the first 1 to 70 and in all; and the
    first ones at every place among 32. With more threads, samples of these."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([function(*(x[i : i + 1] for x in rows)) for i in range(len(rows[0]))])
    torch.set_num_threads(num_threads)
    is_full = num_threads == 1
    counts, places = (range(1, 71), range(1, 32)) if is_full else ((1, 33, 70), (5, 31))
    found = [(function(*(x[:n].clone() for x in rows)), alone[:n]) for n in (*counts, len(alone))]
    for place in places:
        moved = function(*(x[:32].roll(place, 0) for x in rows))
        found.append((moved, alone[:32].roll(place, 0)))
    return sum(int((some != wanted).flatten(1).any(1).sum()) for some, wanted in found)


@pytest.mark.sample
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    "shape, has_bias", [*((s, False) for s in SHAPES), *((s, True) for s in WITH_BIAS)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_matrix_product(dtype, shape, has_bias):
    linear = matrix(shape, dtype, has_bias)
    x = normal(160, shape[1], dtype=dtype, seed=2)
    residual = normal(len(x), shape[0], dtype=dtype, seed=3)
    exact = x.double() @ linear.plain_weight().double().T
    exact = exact if linear.bias is None else exact + linear.bias.double()
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {}
    for n in (1, 33):
        torch.testing.assert_close(linear(x[:n]), exact[:n].to(dtype), **tolerance)
        added = linear.add_to(residual[:n].clone(), x[:n])
        torch.testing.assert_close(added, (residual[:n] + exact[:n]).to(dtype), **tolerance)
    assert num_different(linear, x) == 0
    assert num_different(lambda residual, x: linear.add_to(residual.clone(), x), residual, x) == 0


WIDTHS = [33, 40, 352, 768, 1000]


@pytest.mark.sample
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_every_other_operation(dtype, width):
    """Of 224 rows at most: PyTorch divides the larger widths between threads."""
    x = normal(224, 2 * width, dtype=dtype, seed=4) * 3
    weight = normal(width, dtype=dtype, seed=5)
    gate, up = x.chunk(2, dim=-1)  # views, as in the model
    operations: dict[str, Rows] = {
        "silu": lambda x, up: silu(x.chunk(2, dim=-1)[0]).mul_(up),
        "gelu": lambda x, up: gelu_tanh(x.chunk(2, dim=-1)[0]).mul_(up),
        "norm": lambda x, up: rms_norm(up, weight, 1e-6),
        "softmax": lambda x, up: up.float().softmax(-1),
        "log_softmax": lambda x, up: up.float().log_softmax(-1),
    }
    for name, operation in operations.items():
        assert num_different(operation, x, up.contiguous()) == 0, name
    for ours, theirs in ((silu, F.silu), (gelu_tanh, partial(F.gelu, approximate="tanh"))):
        wanted = theirs(gate.double())
        torch.testing.assert_close(ours(gate).double(), wanted, rtol=2**-7, atol=1e-6)
        assert ours(torch.tensor([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.0, 1e4]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("heads", [(3, 10), (6, 64), (24, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_of_rotary_embedding_and_of_the_norm_of_heads(dtype, heads):
    x = normal(224, *heads, dtype=dtype)
    factors = normal(224, 2, 1, heads[1], dtype=dtype, seed=1)
    weight = normal(*heads, dtype=dtype, seed=2)

    def turn(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return rotate(rms_norm(x, None, 1e-6).mul_(weight), (factors[:, 0], factors[:, 1]))

    assert num_different(turn, x, factors) == 0


# -- what would not pass


def test_products_that_are_not_packed_would_not_pass():
    linear = matrix((512, 256), torch.float32)
    weight, x = linear.plain_weight(), normal(96, 256, seed=2)
    assert num_different(lambda x: F.linear(x, weight), x) > 0


@pytest.mark.parametrize("width", [40, 1000])
def test_the_silu_of_pytorch_would_not_pass(width):
    x = normal(224, width, seed=4) * 3
    assert num_different(F.silu, x) > 0
    assert num_different(silu, x) == 0


# -- looking, when an engine is made


class MLP:
    activation = staticmethod(F.silu)


def test_matrices_and_mlps_are_changed_and_looked_at_once_for_each_shape(monkeypatch):
    looked_at: list = []
    monkeypatch.setattr(module, "check_attention", lambda *asked: looked_at.append(asked))
    monkeypatch.setattr(module, "find_tile", lambda linear, dtype: looked_at.append(linear) or 16)
    matrices = [matrix(shape, torch.float32) for shape in [(64, 32), (32, 64), (64, 32)]]
    looked_at.clear()
    mlps = [MLP(), MLP()]
    make_batch_invariant(matrices, mlps, "silu", torch.float32, 16)
    assert [m.row_tile for m in matrices] == [16] * 3
    assert all(mlp.activation is silu for mlp in mlps)
    make_batch_invariant([], mlps, "gelu_pytorch_tanh", torch.float32, 16)
    assert all(mlp.activation is gelu_tanh for mlp in mlps)
    assert looked_at == [*matrices[:2], *[(torch.float32, 16)] * 2]


class Faulty:
    """A product whose rows are other ones where `is_other` (number of rows) says."""

    row_tile = 1

    def __init__(self, is_other: Callable[[int], slice]) -> None:
        self.linear, self.is_other = matrix((64, 32), torch.float32), is_other
        self.shape = self.linear.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y[self.is_other(len(x))] *= 1 + 2**-20
        return y


ALL, NONE = slice(None), slice(0)


def test_a_processor_whose_products_do_not_keep_it_is_refused():
    """Rows that are other ones in many tiles; in one place of a tile; or in a last, odd tile."""
    faults = [lambda n: ALL if n > 32 else NONE, lambda n: slice(3, None, 8)]
    for is_other in faults:
        with pytest.raises(ValueError, match=r"batch_invariant is True: .*\(64, 32\)"):
            find_tile(Faulty(is_other), torch.float32)


@pytest.mark.parametrize("smallest", ROW_TILES)
def test_the_smallest_tile_that_keeps_it_is_taken(smallest):
    """Where products of fewer rows, and what is left of them, have a kernel of their own."""
    faulty = Faulty(lambda n: slice(n - n % smallest, None))
    assert find_tile(faulty, torch.float32) == smallest
    assert find_tile(matrix((64, 32), torch.float32), torch.float32) in ROW_TILES


def test_a_processor_whose_attention_does_not_keep_it_is_refused(monkeypatch):
    check_attention(torch.bfloat16, 64)
    real = torch.Tensor.__matmul__

    def faulty(rows, other):
        return real(rows, other) * (1 + 2**-20 * (rows.shape[1] > 8))

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    with pytest.raises(ValueError, match=r"batch_invariant is True: .*attention"):
        check_attention(torch.bfloat16, 64)
