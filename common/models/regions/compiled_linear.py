"""Products with float32 matrices on a CPU, by `compiled_linear.cpp`.

oneDNN's packed product is made for many rows; a decode step has few. Weights that bfloat16 can hold
exactly, as in nearly all checkpoints, are kept in bfloat16: half the memory to read, and the same
numbers, because they are widened before they are multiplied.

Invariant: a row's result depends neither on the other rows nor on the number of threads.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch

from cpp_library import load_library, try_to_compile


class CompiledPacking:
    """A `Packing` of `common/models/linear.py`. Packed weights are `[panels, in_features, columns]`
    in float32 or bfloat16."""

    def __init__(self) -> None:
        """Compile the product. Raises `RuntimeError` if nothing can be compiled here."""
        library = load_library(Path(__file__).with_suffix(".cpp"), {})
        library.num_columns.restype = c_int64
        self.num_columns: int = library.num_columns()
        self._are_bfloat16 = library.are_bfloat16
        self._are_bfloat16.argtypes = c_void_p, c_int64, c_int
        self._pack = {}
        self._multiply = {}
        for dtype, name in ((torch.float32, "float"), (torch.bfloat16, "bfloat16")):
            self._pack[dtype] = pack = library[f"pack_{name}"]
            pack.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int)
            pack.restype = None
            self._multiply[dtype] = multiply = library[f"multiply_{name}"]
            multiply.argtypes = *[c_void_p] * 5, *[c_int64] * 3, c_int
            multiply.restype = None

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        weight, num_threads = weight.contiguous(), torch.get_num_threads()
        is_half = self._are_bfloat16(weight.data_ptr(), weight.numel(), num_threads)
        dtype = torch.bfloat16 if is_half else torch.float32
        out_features, depth = weight.shape
        num_panels = -(-out_features // self.num_columns)
        packed = torch.empty(num_panels, depth, self.num_columns, dtype=dtype)
        pack = self._pack[dtype]
        pack(weight.data_ptr(), packed.data_ptr(), out_features, depth, num_threads)
        return packed

    def unpack(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return packed.transpose(1, 2).reshape(-1, shape[1])[: shape[0]].float()

    def memory(self, packed: torch.Tensor) -> tuple[int, int]:
        return packed.data_ptr(), packed.nbytes

    def product(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: torch.Size
    ) -> torch.Tensor:
        output = x.new_empty(len(x), shape[0])
        self._compute(x, packed, bias, 0, output)
        return output

    def sum(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the product to `residual` and return it."""
        residual = residual.contiguous()
        self._compute(x, packed, bias, residual.data_ptr(), residual)
        return residual

    def _compute(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        residual: int,  # its address, 0: none
        output: torch.Tensor,
    ) -> None:
        x = x.contiguous()
        (num_rows, out_features) = output.shape
        self._multiply[packed.dtype](
            x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), residual,
            output.data_ptr(), num_rows, out_features, x.shape[1], torch.get_num_threads(),
        )  # fmt: skip


def compile_packing() -> CompiledPacking | None:
    otherwise = "products are not compiled, they are oneDNN's"
    return try_to_compile(CompiledPacking, "products", otherwise)
