"""A matrix of the model: `F.linear`, or the same with weights packed for this processor.

A matrix multiplication on a CPU reads its weights in tiles that suit the vector registers.
`F.linear` reorders them into such tiles on every call; here that is done once, at start-up:

    plain     [out, in], row by row, as the checkpoint has it
    packed    the same numbers in an order that only one product reads, a `PackedProduct`:
              oneDNN's, or panels for `regions/compiled_linear.cpp`, for large models in float32

A `Linear` has a `product`, which computes it; packing and tiles of rows (`batch_invariance.py`) put
another one in its place when the model is loaded. An adapter adds to the result.

Measured on the matrices of a 0.6B model (`make bench`): the fewer rows a step has, the
more of its time was the reordering. The sums are added in another order, so results differ from the
plain ones in their last bits.

oneDNN's packing needs an x86 processor, and float32 or bfloat16; float64, in which this book
compares tokens one by one, stays plain. The plain copy is freed, unless it is shared (an embedding
that is tied to the output).

See common/README.md"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F


class Product(Protocol):
    """What a matrix computes."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [rows, in] -> [rows, out]
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `residual` [rows, out] plus the product with `x`. May overwrite `residual`."""
        ...


class PlainProduct:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and residual.is_cuda:  # one launch; a CPU keeps its bits
            return residual.addmm_(x, self.weight.t())
        return residual.add_(self(x))


class PackedProduct(Product, Protocol):
    def plain_weight(self) -> torch.Tensor:
        """Return an unpacked copy of the weight, [out_features, in_features]."""
        ...


Packing = Callable[[torch.Tensor, torch.Tensor | None], PackedProduct]  # of weight and bias


# Of oneDNN's bfloat16 product on AMX: these numbers of rows take longer than the next one (133 ms
# and 85 ms for all matrices of a 0.6B model), so a step computes rows of zeros with them.
SLOW_ROWS = range(17, 33)


class OneDnnProduct:
    """The product with a weight in oneDNN's order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        is_half = weight.dtype is torch.bfloat16
        self.slow_rows = SLOW_ROWS if is_half and torch.cpu._is_amx_tile_supported() else ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) in self.slow_rows:
            return self(padded(x, SLOW_ROWS.stop))[: len(x)]
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if len(x) in self.slow_rows:
            num_rows = SLOW_ROWS.stop
            return self.add_to(padded(residual, num_rows), padded(x, num_rows))[: len(x)]
        binary = torch.ops.mkldnn._linear_pointwise.binary
        return binary(x, residual, self.packed, self.bias, "add")

    def plain_weight(self) -> torch.Tensor:
        return self.packed.to_dense()


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`rows`, and rows of zeros."""
    num_missing = num_rows - len(rows)
    return F.pad(rows, (0, 0, 0, num_missing)) if num_missing else rows


class InTiles:
    """A packed product of a multiple of `tile` rows, or in calls of exactly `tile` rows."""

    def __init__(self, product: Product, tile: int, one_tile_a_call: bool) -> None:
        self.product = product
        self.tile = tile
        self.one_tile_a_call = one_tile_a_call

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(self.product, x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._compute(self.product.add_to, residual, x)

    def _compute(self, product: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """Compute `product(*rows)` in tiles of rows. Each of `rows` is [num_rows, ...]."""
        num_rows = len(rows[0])
        num_missing = -num_rows % self.tile
        rows = tuple(padded(each, num_rows + num_missing) for each in rows)
        if self.one_tile_a_call:
            calls = zip(*(each.split(self.tile) for each in rows), strict=True)
            result = torch.cat([product(*call) for call in calls])
        else:
            result = product(*rows)
        return result[:num_rows]


class Linear(nn.Module):
    """`x @ weight.T + bias`. `pack` frees `weight`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]
        self.shape = weight.shape
        self.packed: PackedProduct | None = None
        self.product: Product = PlainProduct(weight, bias)
        self.adapter: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows, in] -> [rows, out]
        return self._adapted(x, self.product(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(x)`, [rows, out]. `residual` may be overwritten."""
        return self._adapted(x, self.product.add_to(residual, x))

    def _adapted(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add what adapters compute of `x` to the product."""
        return y if self.adapter is None else self.adapter(x, y)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """The sum of the partial products of all processes."""
        return product

    @torch.no_grad()
    def pack(self, packing: Packing = OneDnnProduct, keep_weight: bool = False) -> None:
        """Pack the weight. With `keep_weight` the plain one is kept for its other users."""
        if self.packed is not None or self.weight is None:
            return
        self.packed = packing(self.weight.detach(), self.bias)
        self.product = self.packed
        if not keep_weight:
            self.weight = None

    def compute_in_tiles(self, tile: int, one_tile_a_call: bool) -> None:
        """Compute the packed product for a multiple of `tile` rows, or in calls of exactly that
        many."""
        assert self.packed is not None
        self.product = InTiles(self.packed, tile, one_tile_a_call)

    def plain_weight(self) -> torch.Tensor:
        """The plain weight [out_features, in_features]. An unpacked copy, if it was freed."""
        if self.weight is not None:
            return self.weight
        assert self.packed is not None
        return self.packed.plain_weight()


def reason_not_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why matrices of this dtype cannot be packed here. None: they can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the processor is {platform.machine()}"
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "the processor has no AVX-512 for bfloat16"
    return None if dtype in (torch.float32, torch.bfloat16) else f"the dtype is {dtype}"


def linear_layers(module: nn.Module) -> Iterator[Linear]:
    return (part for part in module.modules() if isinstance(part, Linear))
