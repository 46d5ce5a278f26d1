"""The small operations between the matrices of a model, as the kernels of `layer_kernels.py`.

For models with Triton attention. A decoder layer then launches, besides its four matrices and its
attention:

    rms_norm            PyTorch's, which is one launch on a GPU
    rotate_and_write    norms and rotates heads; writes keys and values to the cache
    add_rms_norm        adds to the residual and norms it
    silu_and_multiply   the MLP's gate

The MLP's last matrix product includes the addition to the residual (`Linear.add_to`). With a bias,
or split over several GPUs, whose products are summed first, the addition is one launch more.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.models.regions import layer_kernels
from common.models.regions.regions import FusedRegions

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
        """Norm, rotate and write to the cache directly: `plan.write_kv` is not called."""
        table, positions = rotary
        return layer_kernels.rotate_and_write(
            qkv,
            norm_weight,
            rotary_table=table,
            positions=positions,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=plan.slot_mapping,
            eps=eps,
        )

    def add_and_norm(
        self,
        matrix: Linear,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight is None:
            return super().add_and_norm(matrix, hidden, x, weight, eps, post_weight)
        delta = matrix(x)
        if post_weight is not None:
            delta = self.rms_norm(delta, post_weight, eps)
        return hidden, layer_kernels.add_rms_norm(hidden, delta, weight, eps)

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        return layer_kernels.silu_and_multiply(gate_up)
