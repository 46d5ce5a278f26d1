"""What has to change in a model on a CPU, so that a row's bits do not depend on the other rows.

Attention apart (`invariant_attention.py`), these are the operations of a step, and what they do
with a row when the batch around it changes; measured on PyTorch 2.13 and oneDNN 3.12:

    operation                          bits of a row
    packed product                     of one row: another kernel than of many. In whole tiles of
                                       rows: the same at every place in every number of tiles
    `F.linear`                         depend on the number of rows; not used
    RMSNorm, rotary, softmax, argmax   a row is summed by one thread, in one order
    `F.silu`, `F.gelu`                 depend on the place: PyTorch computes whole vectors with one
                                       exp, and what is left at a thread's end with another
    `torch.exp`                        the same at every place

So products are computed in whole tiles, and SiLU and GELU by `torch.exp`. What was measured here
may be otherwise on another processor: `make_batch_invariant` looks, and refuses where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from invariant_attention import KEY_TILE, PIECE_ROWS, ROW_TILE, wide_dtype

ROW_TILES = (8, 16, 32)  # the smallest that keeps the promise: a lonely row pays for all of it
CHECKED_TILES = (2, 3, 5, 8, 17)  # in one product


class Matrix(Protocol):
    """A packed matrix, as in `common/linear.py`."""

    shape: torch.Size  # out, in
    row_tile: int  # the rows of a product are made a multiple of it

    def __call__(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, the same for an element wherever it stands."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(y / 2)) / 2, which is x / (1 + exp(-y)), in the same way."""
    wide = x.float()
    y = wide * (1 + 0.044715 * wide * wide) * math.sqrt(8 / math.pi)
    return (wide / y.neg_().exp_().add_(1)).to(x.dtype)


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}


def make_batch_invariant(
    matrices: Iterable[Matrix],
    mlps: Iterable[Any],
    activation: str,  # of the MLPs: one of `ACTIVATIONS`
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    """Change the matrices, and the activation of the MLPs, for good. Raises `ValueError` if they
    have other bits in other company all the same."""
    for mlp in mlps:
        mlp.activation = ACTIVATIONS[activation]
    tiles: dict[torch.Size, int] = {}
    for matrix in matrices:
        if matrix.shape not in tiles:
            tiles[matrix.shape] = find_tile(matrix, dtype)
        matrix.row_tile = tiles[matrix.shape]
    check_attention(dtype, head_dim)


def find_tile(matrix: Matrix, dtype: torch.dtype) -> int:
    """The first of `ROW_TILES` in whose multiples rows have the bits that they have in one tile, in
    whatever place."""
    for tile in ROW_TILES:
        x = _random(max(CHECKED_TILES) * tile, matrix.shape[1]).to(dtype)
        matrix.row_tile = tile
        alone = torch.cat([matrix(rows) for rows in x.split(tile)])
        found = [matrix(x[: n * tile]) for n in CHECKED_TILES]
        is_same = all(torch.equal(rows, alone[: len(rows)]) for rows in found)
        if is_same and torch.equal(matrix(x.roll(5, 0)), alone.roll(5, 0)):
            return tile
    raise ValueError(
        "batch_invariant is True: on this processor a row of a product with a matrix of "
        f"{tuple(matrix.shape)} in {dtype} has other bits in another place"
    )


def check_attention(dtype: torch.dtype, head_dim: int) -> None:
    """The products of a span: many rows against one tile of them."""
    wide = wide_dtype(dtype)
    for inner, outer in ((head_dim, KEY_TILE), (KEY_TILE, head_dim)):
        rows, other = _random(2, PIECE_ROWS, inner).to(wide), _random(2, inner, outer).to(wide)
        many = rows @ other
        for batch in (rows, rows[:1]):
            for tile, found in zip(batch.split(ROW_TILE, 1), many.split(ROW_TILE, 1)):
                if not torch.equal(tile @ other[: len(tile)], found[: len(tile)]):
                    raise ValueError(
                        f"batch_invariant is True: on this processor a row of {inner} numbers of "
                        "attention has other bits in other company"
                    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
