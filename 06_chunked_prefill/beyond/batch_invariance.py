"""What has to change in a model on a CPU, so that a row's bits do not depend on the other rows.

Attention apart (`invariant_attention.py`), these are the operations of a step, and what they do
with a row when the batch around it changes; measured on PyTorch 2.13 and oneDNN 3.12:

    operation                          bits of a row
    packed product                     of one row: another kernel than of many. In whole tiles of
                                       rows: the same at every place in every number of tiles
    `F.linear`                         depend on the number of rows; not used
    RMSNorm, rotary, softmax, argmax   a row is summed by one thread, in one order
    `F.silu`                           depend on the place: PyTorch computes whole vectors with one
                                       exp, and what is left at a thread's end with another
    `torch.exp`                        the same at every place

So products are computed in whole tiles, and SiLU by `torch.exp`. What was measured here may be
otherwise on another processor: `make_batch_invariant` looks, and refuses where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from invariant_attention import KEY_TILE, PIECE_ROWS, wide_dtype
from invariant_attention import ROW_TILE as ATTENTION_TILE

ROW_TILE = 32
CHECKED_TILES = 4


class Matrix(Protocol):
    """A packed matrix, as in `common/linear.py`."""

    shape: torch.Size  # out, in
    row_tile: int  # the rows of a product are made a multiple of it

    def __call__(self, x: Tensor) -> Tensor: ...  # [rows, in] -> [rows, out]


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, the same for an element wherever it stands."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def make_batch_invariant(
    matrices: Iterable[Matrix], layers: Iterable[Any], dtype: torch.dtype, head_dim: int
) -> None:
    """Change the matrices, and the `silu` of the layers, for good. Raises `ValueError` if they have
    other bits in other company all the same."""
    for layer in layers:
        layer.silu = silu
    checked = set()
    for matrix in matrices:
        matrix.row_tile = ROW_TILE
        if matrix.shape not in checked:
            checked.add(matrix.shape)
            check_rows(matrix, dtype)
    check_attention(dtype, head_dim)


def check_rows(matrix: Matrix, dtype: torch.dtype) -> None:
    """Rows in every tile of a product, and elsewhere in a tile, against the same rows in a tile."""
    x = _random(CHECKED_TILES * ROW_TILE, matrix.shape[1]).to(dtype)
    alone = torch.cat([matrix(tile) for tile in x.split(ROW_TILE)])
    for shift in (0, 5):
        if not torch.equal(matrix(x.roll(shift, 0)), alone.roll(shift, 0)):
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
            for tile, found in zip(batch.split(ATTENTION_TILE, 1), many.split(ATTENTION_TILE, 1)):
                if not torch.equal(tile @ other[: len(tile)], found[: len(tile)]):
                    raise ValueError(
                        f"batch_invariant is True: on this processor a row of {inner} numbers of "
                        "attention has other bits in other company"
                    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
