"""The small operations between the matrices of a model, as the kernels of `layer_kernels.py`.

For models with Triton attention. A decoder layer then launches, besides its four matrices and its
attention:

    rms_norm            PyTorch's, which is one launch on a GPU
    rotate_and_write    norms and rotates heads; writes keys and values to the cache
    add_and_norm        adds to the residual and norms it
    silu_and_multiply   the MLP's gate

The MLP's last matrix product includes the addition to the residual (`Linear.add_to`). With a bias,
or split over several GPUs, whose products are summed first, the addition is one launch more.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.models.regions.layer_kernels import (
    CHANNELS_AT_ONCE,
    HEADS_AT_ONCE,
    add_rms_norm_launch,
    rotate_and_write_launch,
    silu_and_multiply_launch,
)
from common.models.regions.regions import FusedRegions
from kernel_launch import AttentionShape
from paged_attention_triton import check_caches

if TYPE_CHECKING:
    from common.models.linear import Linear
    from paged_attention import AttentionPlan


class KernelRegions(FusedRegions):
    """Versions of the methods of `Regions` that launch Triton kernels."""

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
        """Norm, rotate and write to the cache directly: `plan.write_kv` is not called. The caches
        can have either memory order."""
        check_caches(key_cache, value_cache)
        table, positions = rotary
        num_tokens, num_all_heads, head_dim = qkv.shape
        block_size, num_kv_heads = key_cache.shape[1:3]
        block_stride, slot_stride, head_stride, _ = key_cache.stride()
        shape = AttentionShape(
            num_heads=num_all_heads - 2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            cache_strides=(block_stride, slot_stride, head_stride),
            dtype=qkv.dtype,
        )
        query = qkv.new_empty(num_tokens, shape.num_heads, head_dim)
        has_norm = norm_weight is not None
        launch = rotate_and_write_launch(shape, norm_weight.dtype if has_norm else None)
        if num_tokens:
            launch(
                (num_tokens, -(-num_all_heads // HEADS_AT_ONCE)),
                query,
                qkv.contiguous(),
                norm_weight if has_norm else qkv,
                table,
                positions,
                key_cache,
                value_cache,
                plan.slot_mapping,
                eps,
            )
        return query

    def add_and_norm(
        self,
        matrix: Linear,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, and norm the stored, rounded sum. `hidden` must be contiguous: it is written."""
        if weight is None:
            return super().add_and_norm(matrix, hidden, x, weight, eps, post_weight)
        delta = matrix(x)
        if post_weight is not None:
            delta = self.rms_norm(delta, post_weight, eps)
        normed = torch.empty_like(hidden)
        num_tokens, hidden_size = hidden.shape
        if num_tokens:
            launch = add_rms_norm_launch(hidden_size, hidden.dtype, weight.dtype)
            launch((num_tokens,), normed, hidden, delta.contiguous(), weight, eps)
        return hidden, normed

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens = gate_up.shape[0]
        inner_size = gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, inner_size)
        if num_tokens:
            grid = num_tokens, -(-inner_size // CHANNELS_AT_ONCE)
            silu_and_multiply_launch(inner_size, gate_up.dtype)(grid, output, gate_up.contiguous())
        return output
