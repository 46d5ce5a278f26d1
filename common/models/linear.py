"""A matrix of the model: `F.linear`, or the same with weights packed for this processor.

A matrix multiplication on a CPU reads its weights in tiles that suit the vector registers.
`F.linear` reorders them into such tiles on every call; here that is done once, at start-up:

    plain     [out, in], row by row, as the checkpoint has it
    packed    the same numbers in an order that only one product reads, a `Packing`: oneDNN's, or
              panels for `regions/compiled_linear.cpp`, for large models in float32

Measured on the matrices of a 0.6B model (`make bench`): the fewer rows a step has, the
more of its time was the reordering. The sums are added in another order, so results differ from the
plain ones in their last bits.

oneDNN's packing needs an x86 processor, and float32 or bfloat16; float64, in which this book
compares tokens one by one, stays plain. The plain copy is freed, unless it is shared (an embedding
that is tied to the output).

See common/README.md"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)


class Packing(Protocol):
    """Packs weights and multiplies with packed weights. `shape` is the weight's shape."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor: ...

    def memory(self, packed: torch.Tensor) -> tuple[int, int]: ...

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size
    ) -> torch.Tensor: ...

    def sum(
        self,
        residual: torch.Tensor,  # may be overwritten
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor: ...


class OneDnnPacking:
    """Packs weights in oneDNN's order."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return packed.to_dense()

    def memory(self, packed: torch.Tensor) -> tuple[int, int]:
        return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def sum(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")


ONEDNN = OneDnnPacking()
# Of oneDNN's bfloat16 product on AMX: these numbers of rows take longer than the next one (133 ms
# and 85 ms for all matrices of a 0.6B model), so a step computes rows of zeros with them.
SLOW_ROWS = range(17, 33)


class Linear(nn.Module):
    """`x @ weight.T + bias`. `pack` frees `weight`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self.shape = weight.shape
        # A packed product is computed for a multiple of `row_tile` rows, or in calls of exactly
        # `row_tile` rows; None: for the actual rows. Set once, by `make_batch_invariant`.
        self.row_tile: int | None = None
        self.one_tile_a_call = False
        # Gets `x` and the product, and adds to the product in place before it is returned.
        self.addition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._packed: torch.Tensor | None = None
        self.packing: Packing = ONEDNN
        self.has_slow_rows = False  # oneDNN's bfloat16 product on AMX: `SLOW_ROWS` are slow

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def packed_memory(self) -> tuple[int, int]:
        """The address of the packed weight, and its size in bytes."""
        assert self._packed is not None
        return self.packing.memory(self._packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, in] -> [rows, out]
        return self.summed(self.product(x))

    def write(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # out: [rows, out]
        """Write `self(x)` to `out`."""
        if self._packed is None and self.bias is None and self.addition is None:
            assert self.weight is not None
            return torch.mm(x, self.weight.t(), out=out)
        return out.copy_(self(x))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The product with this process's part of the matrix."""
        product = self._multiply(x)
        return product if self.addition is None else self.addition(x, product)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """The sum of the partial products of all processes."""
        return product

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        return self._in_tiles(self._packed_product, x)

    def _packed_product(self, x: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None
        return self.packing.product(x, self._packed, self.bias, self.shape)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [rows, out]. `residual` may be overwritten."""
        total = self._multiply_onto(residual, x)
        return total if self.addition is None else self.addition(x, total)

    def _multiply_onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._in_tiles(self._packed_sum, residual, x)
        if self.bias is None and residual.is_cuda:  # one launch; a CPU keeps its bits
            assert self.weight is not None
            return residual.addmm_(x, self.weight.t())
        return residual.add_(self._multiply(x))

    def _packed_sum(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None
        return self.packing.sum(residual, x, self._packed, self.bias)

    def _in_tiles(self, product: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """Compute `product(*rows)` in tiles of rows. Each of `rows` is [num_rows, ...]."""
        num_rows = len(rows[0])
        tile = self.row_tile
        if tile is None and self.has_slow_rows and num_rows in SLOW_ROWS:
            tile = SLOW_ROWS.stop
        if tile is not None and num_rows % tile:
            num_missing = -num_rows % tile
            rows = tuple(F.pad(each, (0, 0, 0, num_missing)) for each in rows)
        if tile is None or not self.one_tile_a_call:
            result = product(*rows)
        else:
            calls = zip(*(each.split(tile) for each in rows), strict=True)
            result = torch.cat([product(*call) for call in calls])
        return result if len(result) == num_rows else result[:num_rows]

    @torch.no_grad()
    def pack(self, keep_weight: bool = False, packing: Packing = ONEDNN) -> None:
        """Pack the weight. With `keep_weight` the plain one is kept for its other users."""
        if self._packed is None and self.weight is not None:
            self.packing = packing
            self._packed = packing.pack(self.weight.detach())
            is_onednn_bfloat16 = packing is ONEDNN and self.weight.dtype is torch.bfloat16
            self.has_slow_rows = is_onednn_bfloat16 and torch.cpu._is_amx_tile_supported()
            if not keep_weight:
                self.weight = None

    def plain_weight(self) -> torch.Tensor:
        """The plain weight [out_features, in_features]. An unpacked copy, if it was freed."""
        if self.weight is not None:
            return self.weight
        assert self._packed is not None
        return self.packing.unpack(self._packed, self.shape)


def reason_not_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why matrices of this dtype cannot be packed here. None: they can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the processor is {platform.machine()}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if dtype is torch.float32:
        return None
    if dtype is torch.bfloat16:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return None if supported else "the processor has no AVX-512 for bfloat16"
    return f"the dtype is {dtype}"


def overlap_plain_weights(matrices: Sequence[Linear]) -> dict[int, Linear]:
    """Move the plain weights of all matrices into one buffer that is little larger than the largest
    of them. They overlap there, so each must be filled and packed before the next one is filled. In
    return, the system commits that memory once instead of once per matrix. Returns the matrices by
    the start address of their weight, which is different for each."""
    if not matrices:
        return {}
    gap = 64  # elements between the beginnings of two matrices
    largest = max(matrix.shape.numel() for matrix in matrices)
    buffer = matrices[0].plain_weight().new_empty(largest + gap * len(matrices))
    for i, matrix in enumerate(matrices):
        weight = buffer[i * gap :][: matrix.shape.numel()].view(matrix.shape)
        matrix.weight = nn.Parameter(weight, requires_grad=False)
    return {matrix.plain_weight().data_ptr(): matrix for matrix in matrices}


def linear_layers(module: nn.Module) -> Iterator[Linear]:
    return (part for part in module.modules() if isinstance(part, Linear))
