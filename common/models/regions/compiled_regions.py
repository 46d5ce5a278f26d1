"""The small operations between the matrices, in machine code on a CPU (`compiled_regions.cpp`).

On a CPU, `F.rms_norm` is 13 operations, and each reads and writes the whole tensor; rotary
embedding is similar. Here each of these is one loop, for any number of tokens:

    rms_norm             before attention, before the MLP and at the end
    rotate_and_write     norms and rotates heads; writes keys and values to the cache
    silu_and_multiply    the MLP's gate

In float32 and bfloat16, intermediate results are not rounded, so last bits differ from those of the
plain functions. In float64, norms are computed in float32, as in the plain functions.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from ctypes import c_double, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch

from common.models.model import DecoderModel
from common.models.regions.regions import FusedRegions, Regions
from cpp_library import SCALARS, load_library, try_to_compile
from paged_attention import AttentionPlan


class CompiledRegions(FusedRegions):
    """Compiled versions of the methods of `Regions`, for tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, norm_dtype: torch.dtype, head_dim: int) -> None:
        """Compile the loops. Raises `RuntimeError` if nothing can be compiled here."""
        constants = dict(SCALAR=SCALARS[dtype], NORM=SCALARS[norm_dtype], HEAD_DIM=head_dim)
        library = load_library(Path(__file__).with_suffix(".cpp"), constants)
        self._norm = library.rms_norm
        self._norm.argtypes = (c_void_p, c_void_p, c_double, c_void_p, c_int64, c_int64, c_int)
        self._silu = library.silu_and_multiply
        self._silu.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int)
        self._rotate = library.rotate_and_write
        places = *[c_void_p] * 5, *[c_int64] * 4  # table, positions, slots and caches
        tokens = c_void_p, *[c_int64] * 3, c_int
        self._rotate.argtypes = (c_void_p, c_void_p, c_double, *places, *tokens)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        assert weight is not None
        x = x.contiguous()
        output = torch.empty_like(x)
        num_threads = torch.get_num_threads()
        self._norm(x.data_ptr(), weight.data_ptr(), eps, output.data_ptr(), *x.shape, num_threads)
        return output

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Norm, rotate and write to the cache directly: `plan.write_kv` is not called."""
        table, positions = rotary
        num_tokens, num_all, head_dim = qkv.shape
        block_size, num_kv_heads = key_cache.shape[1:3]
        num_heads = num_all - 2 * num_kv_heads
        query = qkv.new_empty(num_tokens, num_heads, head_dim)
        weight = 0 if norm_weight is None else norm_weight.data_ptr()
        self._rotate(
            qkv.data_ptr(), weight, eps, table.data_ptr(), positions.data_ptr(),
            plan.slot_mapping.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            *key_cache.stride()[:3], block_size, query.data_ptr(),
            num_tokens, num_heads, num_kv_heads, torch.get_num_threads(),
        )  # fmt: skip
        return query

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens = gate_up.shape[0]
        size = gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        num_threads = torch.get_num_threads()
        self._silu(gate_up.data_ptr(), output.data_ptr(), num_tokens, size, num_threads)
        return output


def compile_regions(model: DecoderModel) -> Regions:
    """Return compiled regions for a model like this one. Without a C++ compiler: the plain
    functions, and a warning."""
    config = model.config
    dtype = model.embed_weight.dtype
    make = partial(CompiledRegions, dtype, config.norm_dtype(dtype), config.head_dim)
    operations = "norms and rotary embedding"
    return try_to_compile(make, f"{operations} are not compiled") or Regions()
