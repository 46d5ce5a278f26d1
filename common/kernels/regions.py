"""The small operations between the matrices of a model, plain. `compiled_regions.py` has them fast
for a CPU, `kernel_regions.py` for a GPU.

In every dtype the numbers follow `transformers`: norms are computed in float32. That holds in
float64 too, where tests compare tokens one by one. In bfloat16 a fused norm rounds once where
`transformers` rounds twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from common.rotary import rotary_factors, rotate

if TYPE_CHECKING:
    from common.linear import Linear
    from paged_attention import AttentionPlan


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor | None,  # [size]
    eps: float,
) -> torch.Tensor:  # like x
    """Over the last dimension, in float32 or below."""
    if x.dtype != torch.float64:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    single = x.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return single.to(x.dtype) if weight is None else single.to(x.dtype) * weight


def norm_and_rotate(
    qk: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    weight: torch.Tensor | None,  # [num_heads, head_dim], None: there is no norm
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],  # `rotary_factors` of the tokens
) -> torch.Tensor:  # like qk
    """Norm of each head, and rotary embedding."""
    return rotate(qk if weight is None else rms_norm(qk, None, eps).mul_(weight), rotary)


@dataclass(frozen=True, slots=True)
class Regions:
    """What a model calls between its matrices: the two functions above, or what they were compiled
    to, and what is put together from them."""

    rms_norm: Callable[..., torch.Tensor] = rms_norm
    norm_and_rotate: Callable[..., torch.Tensor] = norm_and_rotate

    def rotary(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Once a step, for all layers: what `rotate_and_write` turns with."""
        return rotary_factors(table, positions)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        norm_weight: torch.Tensor | None,  # [num_heads + num_kv_heads, head_dim]
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
        value_cache: torch.Tensor,  # the same
        plan: AttentionPlan,  # knows the slots
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], the queries
        """Queries and keys are normed and turned; keys and values go into the cache."""
        num_kv_heads = key_cache.shape[2]
        qk, value = qkv.split((qkv.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        qk = self.norm_and_rotate(qk, norm_weight, eps, rotary)
        query, key = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        plan.write_kv(key, value, key_cache, value_cache)
        return query

    def add_and_norm(
        self,
        matrix: Linear,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], may be overwritten
        x: torch.Tensor,
        weight: torch.Tensor,  # [hidden_size]
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # like hidden
        """`hidden + matrix(x)`, as it is and normed."""
        hidden = matrix.add_to(hidden, x)
        return hidden, self.rms_norm(hidden, weight, eps)

    def silu_and_multiply(
        self, gate_up: torch.Tensor, silu: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:  # [num_tokens, intermediate_size]
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
