"""The small operations between the matrices, in machine code on a CPU (`compiled_regions.cpp`).

`F.rms_norm` is 13 operations there, and each reads and writes the whole tensor; so it is with
rotary embedding. Here each of these is one loop, for any number of tokens:

    rms_norm             before attention, before the MLP and at the end
    rotate_and_write     heads are normed and turned; keys and values go into the cache at once
    silu_and_multiply    the MLP's gate

In float32 and bfloat16 intermediate results are not rounded, so last bits differ from those of the
plain functions; in float64 norms are computed in float32 here as there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from common.kernels.regions import Regions
from cpp_library import SCALARS, load_library

if TYPE_CHECKING:
    from common.model import DecoderModel
    from paged_attention import AttentionPlan

logger = logging.getLogger(__name__)


class CompiledRegions(Regions):
    """Every method computes what the one of `Regions` does, for tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, norm_dtype: torch.dtype, head_dim: int) -> None:
        """Raises `RuntimeError` where nothing can be compiled."""
        constants = dict(SCALAR=SCALARS[dtype], NORM=SCALARS[norm_dtype], HEAD_DIM=head_dim)
        library = load_library(Path(__file__).with_suffix(".cpp"), constants)
        end = c_int64, c_int64, c_int
        self._norm = _function(library.rms_norm, c_void_p, c_void_p, c_double, c_void_p, *end)
        self._silu = _function(library.silu_and_multiply, c_void_p, c_void_p, *end)
        self._rotate = _function(
            library.rotate_and_write, c_void_p, c_void_p, c_double, *[c_void_p] * 5,
            *[c_int64] * 4, c_void_p, c_int64, *end,
        )  # fmt: skip

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, output = x.contiguous(), torch.empty_like(x)
        num_rows, size = x.shape
        where = x.data_ptr(), weight.data_ptr(), eps, output.data_ptr()
        self._norm(*where, num_rows, size, torch.get_num_threads())
        return output

    def rotary(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The function looks up its own rows."""
        return table, positions

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
        """Writes by itself: `plan.write_kv` is not called."""
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

    def activate_and_multiply(
        self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """SiLU is compiled; another one is not."""
        if activation is not F.silu:
            return super().activate_and_multiply(gate_up, activation)
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        where = gate_up.data_ptr(), output.data_ptr()
        self._silu(*where, num_tokens, size, torch.get_num_threads())
        return output


def _function(function: Callable, *types: type) -> Callable[..., None]:
    function.argtypes, function.restype = types, None
    return function


def compile_regions(model: DecoderModel) -> Regions:
    """Machine code for a model like this one. Without a C++ compiler: the plain functions, and a
    warning."""
    start = time.perf_counter()
    head_dim = model.layers[0].attention.head_dim
    try:
        compiled = CompiledRegions(model.embed_weight.dtype, model.norm_weight.dtype, head_dim)
    except (OSError, RuntimeError) as error:
        logger.warning("norms and rotary embedding are not compiled: %s", error)
        return Regions()
    logger.info("norms and rotary embedding compiled in %.1f s", time.perf_counter() - start)
    return compiled
