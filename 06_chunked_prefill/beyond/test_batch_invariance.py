"""Bits of a row among random neighbours, at every place and in every number of rows, against the
bits it has alone, in one thread: of each operation that a batch-invariant model consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from batch_invariance import (
    CALL_TILES,
    ROW_TILES,
    check_attention,
    choose_tile,
    gelu_tanh,
    silu,
)
from common.models.linear import Linear, PackedProduct, reason_not_packed
from common.models.regions.regions import Regions
from common.models.rotary import rotate

Rows = Callable[..., torch.Tensor]
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for dtype in (torch.float32, torch.bfloat16)
    for reason in [reason_not_packed(dtype, torch.device("cpu"))]
]
# Shapes of the shipped checkpoint and its draft, then two unrelated ones: [out, in].
SHAPES = [(256, 768), (4096, 256), (67, 45), (1, 7)]
SHAPES += [(1024, 2048)]  # of Qwen3-0.6B: here a single row has a kernel of its own


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool = False) -> Linear:
    """Packed, in whole tiles."""
    weight = normal(*shape, dtype=dtype) / shape[1] ** 0.5
    bias = nn.Parameter(normal(shape[0], dtype=dtype, seed=1), False) if has_bias else None
    linear = Linear(nn.Parameter(weight, requires_grad=False), bias)
    linear.pack()
    choose_tile(linear, dtype)
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
    return sum(int((some != expected).flatten(1).any(1).sum()) for some, expected in found)


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    "shape, has_bias", [*((shape, False) for shape in SHAPES), ((512, 256), True)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_matrix_product(dtype, shape, has_bias):
    linear = matrix(shape, dtype, has_bias)
    x = normal(130, shape[1], dtype=dtype, seed=2)
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


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(1, 33), (11, 32), (1, 1000), (3, 10), (24, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_every_other_operation(dtype, num_heads, head_dim):
    """Up to 224 rows: PyTorch divides the larger widths between threads."""
    heads = (num_heads, head_dim)
    width = num_heads * head_dim
    x = normal(224, 2 * width, dtype=dtype, seed=4) * 3
    weight = normal(*heads, dtype=dtype, seed=5)
    factors = normal(224, 2, 1, head_dim, dtype=dtype, seed=1)
    gate, up = x.chunk(2, dim=-1)  # views, as in the model
    norm = Regions().rms_norm
    operations: dict[str, Rows] = {
        "silu": lambda x, up, _: silu(x.chunk(2, dim=-1)[0]).mul_(up),
        "gelu": lambda x, up, _: gelu_tanh(x.chunk(2, dim=-1)[0]).mul_(up),
        "norm": lambda x, up, _: norm(up, weight.flatten(), 1e-6),
        "softmax": lambda x, up, _: up.float().softmax(-1),
        "log_softmax": lambda x, up, _: up.float().log_softmax(-1),
        "rotary, of normed heads": lambda x, up, factors: rotate(
            norm(up.view(-1, *heads), None, 1e-6).mul_(weight), (factors[:, 0], factors[:, 1])
        ),
    }
    for name, operation in operations.items():
        if head_dim % 2 == 0 or "rotary" not in name:
            assert num_different(operation, x, up.contiguous(), factors) == 0, name
    for ours, theirs in ((silu, F.silu), (gelu_tanh, partial(F.gelu, approximate="tanh"))):
        exact = theirs(gate.double()).to(dtype)  # of more digits than the model's format has
        torch.testing.assert_close(ours(gate), exact, rtol=2**-7, atol=1e-6)
        assert ours(torch.tensor([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.0, 1e4]


# -- a processor that rounds otherwise, emulated: what the checks and the tests have to see


class Faulty:
    """A packed product whose rows are other ones where `is_other` (number of rows in the call)
    says. `faults` are those of the plain product, of the sum, or of both."""

    def __init__(self, product: PackedProduct, is_other: Callable[[int], slice], faults: str):
        self.product = product
        self.is_other = is_other
        self.faults = faults
        self.calls = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._other(self.product(x), "product")

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._other(self.product.add_to(residual, x), "sum")

    def _other(self, found: torch.Tensor, kind: str) -> torch.Tensor:
        self.calls.add(len(found))
        if kind in self.faults:
            found[self.is_other(len(found))] *= 1 + 2**-20
        return found


def faulty_matrix(is_other: Callable[[int], slice], faults: str = "product sum") -> Linear:
    linear = Linear(nn.Parameter(normal(64, 32) / 32**0.5, requires_grad=False))
    linear.pack(keep_weight=True)
    linear.packed = Faulty(linear.packed, is_other, faults)
    return linear


ALL = slice(None)
NONE = slice(0)


def with_amx(num_rows: int) -> slice:
    """A row's bits depend on the number of rows in the call, and on nothing else (Trap 88)."""
    return slice(None) if num_rows.bit_count() % 2 else NONE


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("faults", ["product", "sum"])
def test_where_no_multiple_keeps_the_bits_calls_of_one_tile_do(faults):
    """With AMX (Trap 88), seen in the plain product or with the residual added."""
    linear = faulty_matrix(with_amx, faults)
    tile = CALL_TILES[torch.float32][0]
    assert choose_tile(linear, torch.float32) == (tile, True)
    x, residual = normal(160, 32, seed=2), normal(160, 64, seed=3)
    linear.packed.calls.clear()
    assert num_different(linear, x) == 0
    assert num_different(lambda residual, x: linear.add_to(residual.clone(), x), residual, x) == 0
    assert linear.packed.calls == {tile}
    assert linear(x[:0]).shape == (0, 64)
    torch.testing.assert_close(linear(x), x @ linear.plain_weight().T)


def first_row(sizes: Sequence[int]) -> Callable[[int], slice]:
    """With AMX, and the first row of a call of these sizes, and of any larger one, is another."""
    largest = max(CALL_TILES[torch.float32])
    return lambda n: slice(0, 1) if n in sizes or n > largest else with_amx(n)


@pytest.mark.parametrize(
    ("is_other", "tile", "is_call"),
    [
        # Where products of fewer rows, and what is left of them, have a kernel of their own.
        *((lambda n, tile=tile: slice(n - n % tile, None), tile, False) for tile in ROW_TILES),
        *(
            (first_row(CALL_TILES[torch.float32][:i]), tile, True)
            for i, tile in enumerate(CALL_TILES[torch.float32])
        ),
    ],
)
def test_the_smallest_tile_and_the_cheapest_call_that_keep_the_bits_are_taken(
    is_other, tile, is_call
):
    assert choose_tile(faulty_matrix(is_other), torch.float32) == (tile, is_call)


# -- looking, when an engine is made


calls = count()
VARIANT = [
    # Rows that are other ones in one place of a tile; a tile of one row has no other place, so
    # there the place of the call decides.
    lambda n: slice(n // 2, None, 8) if n > 1 else (ALL, NONE)[next(calls) % 2],
    lambda n: ALL if torch.get_num_threads() > 1 else NONE,
]


@pytest.mark.parametrize("is_other", VARIANT)
def test_a_processor_with_variant_products_is_refused(is_other):
    """And it is said what to do."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match=r"batch_invariant=True .*\(64, 32\).*ONEDNN_MAX_CPU"):
            choose_tile(faulty_matrix(is_other), torch.float32)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_processor_with_variant_attention_is_refused(monkeypatch):
    check_attention(torch.bfloat16, 64)
    real = torch.Tensor.__matmul__

    def faulty(rows, other):
        return real(rows, other) * (1 + 2**-20 * (rows.shape[1] > 8))

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    with pytest.raises(ValueError, match=r"batch_invariant=True .*attention"):
        check_attention(torch.bfloat16, 64)
