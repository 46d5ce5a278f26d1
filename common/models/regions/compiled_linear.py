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
    """A `Packing` of `common/models/linear.py`."""

    def __init__(self) -> None:
        """Compile the product. Raises `RuntimeError` if nothing can be compiled here."""
        library = load_library(Path(__file__).with_suffix(".cpp"), {})
        library.num_columns.restype = c_int64
        self.num_columns: int = library.num_columns()
        self.are_bfloat16 = library.are_bfloat16
        self.are_bfloat16.argtypes = c_void_p, c_int64, c_int
        self.pack = {}
        self.multiply = {}
        for dtype, name in ((torch.float32, "float"), (torch.bfloat16, "bfloat16")):
            self.pack[dtype] = pack = library[f"pack_{name}"]
            pack.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int)
            self.multiply[dtype] = multiply = library[f"multiply_{name}"]
            multiply.argtypes = *[c_void_p] * 5, *[c_int64] * 3, c_int

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CompiledProduct:
        return CompiledProduct(self, weight.contiguous(), bias)


class CompiledProduct:
    """A `PackedProduct`. `packed` is `[panels, in_features, columns]` in float32 or bfloat16."""

    def __init__(
        self, library: CompiledPacking, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        num_threads = torch.get_num_threads()
        is_half = library.are_bfloat16(weight.data_ptr(), weight.numel(), num_threads)
        dtype = torch.bfloat16 if is_half else torch.float32
        self.shape = weight.shape
        self.bias = bias
        out_features, depth = weight.shape
        num_panels = -(-out_features // library.num_columns)
        self.packed = torch.empty(num_panels, depth, library.num_columns, dtype=dtype)
        pack = library.pack[dtype]
        pack(weight.data_ptr(), self.packed.data_ptr(), out_features, depth, num_threads)
        self._multiply = library.multiply[dtype]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = x.new_empty(len(x), self.shape[0])
        self._compute(x, 0, output)
        return output

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual = residual.contiguous()
        self._compute(x, residual.data_ptr(), residual)
        return residual

    def plain_weight(self) -> torch.Tensor:
        out_features, depth = self.shape
        return self.packed.transpose(1, 2).reshape(-1, depth)[:out_features].float()

    def _compute(self, x: torch.Tensor, residual: int, output: torch.Tensor) -> None:
        """`residual` is an address, 0: none."""
        x = x.contiguous()
        num_rows, out_features = output.shape
        self._multiply(
            x.data_ptr(),
            self.packed.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            residual,
            output.data_ptr(),
            num_rows,
            out_features,
            x.shape[1],
            torch.get_num_threads(),
        )


def compile_packing() -> CompiledPacking | None:
    otherwise = "products are not compiled, they are oneDNN's"
    return try_to_compile(CompiledPacking, otherwise)
