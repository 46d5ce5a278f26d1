"""Changes to a model on a CPU that make a row's bits independent of the other rows of the batch.

Attention apart (`invariant_attention.py`), these are the operations of a step, and what they do
with a row when the batch around it changes; measured on PyTorch 2.13 and oneDNN 3.12:

    operation                          bits of a row
    packed product                     of one row: another kernel than of many. In whole tiles of
                                       rows: the same at every place in every number of tiles.
                                       In bfloat16 with AMX: only in calls of exactly one tile
    `F.linear`                         depend on the number of rows; not used
    RMSNorm, rotary, softmax, argmax   a row is summed by one thread, in one order
    `F.silu`, `F.gelu`                 depend on the place: PyTorch computes whole vectors with one
                                       exp, and what is left at a thread's end with another
    `torch.exp`                        the same at every place

So products are computed in whole tiles, and SiLU and GELU by `torch.exp`. Other processors can
differ: `make_batch_invariant` compares the bits at load, chooses one way for each shape of matrix,
and raises where none keeps them. The choice depends on bits alone and never on a measured time, so
every start on one machine makes the same one.

A small tile reads the weights too often, a large one computes padding. `BATCH_INVARIANCE.md` has
the cost of each for 1, 32 and 512 rows, as a multiple of the plain product. `CALL_TILES` is in the
order of the geometric mean of these three: in float32 from that record, in bfloat16 from times on a
processor with AMX, where a call takes 85 ms for 1 to 16 rows, 133 for 32, 110 for 64 and 157 for
128 (all layers of Qwen3-0.6B).

See 06_chunked_prefill/beyond/BATCH_INVARIANCE.md"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from invariant_attention import CHUNK_ROWS, KEY_TILE, ROW_TILE, wide_dtype

ROW_TILES = (8, 16, 32)  # the smallest that is invariant: a single row pays for all of it
CALL_TILES = {torch.bfloat16: (64, 128, 32, 16, 8, 1), torch.float32: (32, 16, 8, 64, 128, 1)}
CHECKED_TILES = (2, 3, 5, 8, 17)  # in one product
CHECKED_CALLS = (3,)  # each computes one tile: more would repeat the same product


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, bitwise the same for an element at every position."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(y / 2)) / 2, which is x / (1 + exp(-y)), in the same way."""
    wide = x.float()
    y = wide * (1 + 0.044715 * wide * wide) * math.sqrt(8 / math.pi)
    return (wide / y.neg_().exp_().add_(1)).to(x.dtype)


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}


def make_batch_invariant(
    matrices: Iterable[Any],  # packed `Linear`s (`common/models/linear.py`)
    mlps: Iterable[Any],
    activation: str,  # of the MLPs: one of `ACTIVATIONS`
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    """Change the matrices, and the activation of the MLPs, permanently. Raises `ValueError` if
    results still depend on the batch."""
    for mlp in mlps:
        mlp.activation = ACTIVATIONS[activation]
    chosen: dict[torch.Size, tuple[int, bool]] = {}
    for matrix in matrices:
        if matrix.shape not in chosen:
            chosen[matrix.shape] = choose_tile(matrix, dtype)
        tile, one_tile_a_call = chosen[matrix.shape]
        matrix.compute_in_tiles(tile, one_tile_a_call)
    check_attention(dtype, head_dim)


def choose_tile(matrix: Any, dtype: torch.dtype) -> tuple[int, bool]:
    """Return the tile of rows that the matrix computes in from now on, and whether in calls of one
    tile: the first of `ROW_TILES` in whose multiples a row is bitwise the same, else the first of
    `CALL_TILES`. Raises `ValueError`."""
    ways = [(tile, False) for tile in ROW_TILES]
    ways += [(tile, True) for tile in CALL_TILES[dtype]]
    for tile, one_tile_a_call in ways:
        matrix.compute_in_tiles(tile, one_tile_a_call)
        if keeps_bits(matrix, tile, CHECKED_CALLS if one_tile_a_call else CHECKED_TILES, dtype):
            return tile, one_tile_a_call
    raise ValueError(
        f"batch_invariant=True is not supported on this CPU: a {dtype} product with a matrix of "
        f"{tuple(matrix.shape)} depends on the row's position in the batch. Set "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (float32: AVX2) in the environment before Python "
        "starts, or batch_invariant=False"
    )


def keeps_bits(matrix: Any, tile: int, counts: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows are bitwise the same as in one tile and one thread, at every checked position,
    in each of `counts` tiles, with the threads of this process: as products, and added to a
    residual."""
    x = _random(max(counts) * tile, matrix.shape[1]).to(dtype)
    residual = _random(len(x), matrix.shape[0]).to(dtype)

    def compute(rows: Tensor, onto: Tensor) -> Tensor:
        return torch.cat([matrix(rows), matrix.add_to(onto.clone(), rows)], dim=1)

    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tiles = zip(x.split(tile), residual.split(tile), strict=True)
        alone = torch.cat([compute(rows, onto) for rows, onto in tiles])
    finally:
        torch.set_num_threads(num_threads)
    for num_rows in [n * tile for n in counts]:
        if not torch.equal(compute(x[:num_rows], residual[:num_rows]), alone[:num_rows]):
            return False
    return torch.equal(compute(x.roll(5, 0), residual.roll(5, 0)), alone.roll(5, 0))


def check_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Check the products of a span: many rows against one tile of them."""
    wide = wide_dtype(dtype)
    for inner, outer in ((head_dim, KEY_TILE), (KEY_TILE, head_dim)):
        rows, other = _random(2, CHUNK_ROWS, inner).to(wide), _random(2, inner, outer).to(wide)
        many = rows @ other
        for batch in (rows, rows[:1]):
            for tile, found in zip(batch.split(ROW_TILE, 1), many.split(ROW_TILE, 1)):
                if not torch.equal(tile @ other[: len(tile)], found[: len(tile)]):
                    raise ValueError(
                        "batch_invariant=True is not supported on this CPU: attention over "
                        f"{inner} numbers depends on the other rows of the batch"
                    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
