"""The small operations between a model's matrices, in plain PyTorch. `compiled_regions.py` has fast
versions for a CPU, `kernel_regions.py` for a GPU.

In every dtype the numbers follow `transformers`: norms are computed in float32. That holds in
float64 too, where tests compare tokens one by one. In bfloat16 a fused norm rounds once where
`transformers` rounds twice.

See common/README.md#which-models"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from common.models.linear import Linear
from common.models.rotary import rotary_factors, rotate
from paged_attention import AttentionPlan


class Regions:
    """The operations that a model calls between its matrices."""

    def rms_norm(
        self,
        x: torch.Tensor,  # [..., size]
        weight: torch.Tensor | None,  # [size]
        eps: float,
    ) -> torch.Tensor:  # like x
        """RMS norm over the last dimension, in float32 or below. A float32 weight is multiplied
        before the result is rounded to the dtype of `x`, a weight of another dtype after."""
        if weight is not None and weight.dtype != x.dtype:
            return self.rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)
        if x.dtype != torch.float64:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        single = x.float()
        single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
        return single.to(x.dtype) if weight is None else single.to(x.dtype) * weight

    def rotary(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary factors for `rotate_and_write`, once a step for all layers."""
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
        """Norm and rotate queries and keys; write keys and values to the cache."""
        num_kv_heads = key_cache.shape[2]
        qk, value = qkv.split((qkv.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        if norm_weight is not None:
            qk = self.rms_norm(qk.to(norm_weight.dtype), None, eps).mul_(norm_weight).to(qk.dtype)
        qk = rotate(qk, rotary)
        query, key = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        plan.write_kv(key, value, key_cache, value_cache)
        return query

    def add_and_norm(
        self,
        matrix: Linear,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], may be overwritten
        x: torch.Tensor,
        weight: torch.Tensor | None,  # [hidden_size]; None: it is not normed, and given twice
        eps: float,
        post_weight: torch.Tensor | None = None,  # [hidden_size]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # like hidden
        """Return `hidden + matrix(x)`, without and with the norm; with `post_weight`, `matrix(x)`
        is normed first."""
        if post_weight is None:
            hidden = matrix.add_to(hidden, x)
        else:
            hidden.add_(self.rms_norm(matrix(x), post_weight, eps))
        return hidden, hidden if weight is None else self.rms_norm(hidden, weight, eps)

    def activate_and_multiply(
        self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:  # [num_tokens, intermediate_size]
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)


class FusedRegions(Regions):
    """The common base of regions that fuse more than PyTorch does."""

    def rotary(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return table and positions: `rotate_and_write` looks the rows up itself."""
        return table, positions

    def activate_and_multiply(
        self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Apply the activation and multiply. Only SiLU is fused."""
        if activation is F.silu:
            return self.silu_and_multiply(gate_up)
        return super().activate_and_multiply(gate_up, activation)

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
