"""A block of experts, which replaces an MLP: each token uses a few of many small MLPs.

    x        [rows, hidden]            normed
    router   [rows, num_experts]       softmax in float32; a row's `num_active` highest
    pairs    rows * num_active         a row, and one of its experts

    experts of rows 0 1 2     5 2 | 2 7 | 5 2
    pairs ordered by expert   0 1 2 | 0 2 | 1      rows of experts 2, 5 and 7: a segment each
    segment                   down(silu(gate(x)) * up(x)), with the matrices of its expert
    back                      by pair: each row's products, times its weights, are added

So a step reads an expert's weights once, however many rows it has, and not at all without rows.

There are two ways to multiply, with the same order and the same result. On a CPU the host knows the
segments, and each is a product with an ordinary `Linear`, packed if the other matrices are. On a
GPU, and in any graph, the sizes stay on the device: PyTorch's grouped product takes the ends of all
segments as a tensor. For float64, which has no grouped kernel, every expert multiplies all rows and
each row keeps the result of its expert.

With several ranks, each has a part of every expert's matrices, and all have the router: they choose
the same experts, and their partial sums are reduced once.

Invariants: a row's result does not depend on another row's choice; no pair is lost.

The order of operations is that of `transformers`. vLLM and SGLang have a kernel that reads rows
through the order instead of copying them. Shazeer et al. (arXiv 1701.06538); Jiang et al., Mixtral
(arXiv 2401.04088).

See common/models/experts/README.md#how-does-a-token-choose"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from common.models.blocks import (
    ACTIVATIONS,
    CheckpointTensor,
    MakeLinear,
    allocator,
    linear,
    parts_of,
    whole,
)
from common.models.linear import Linear
from common.models.model_config import ModelConfig
from common.models.regions.regions import Regions


class ExpertsBlock(nn.Module):
    """A block of experts with the interface of an `MLPBlock`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        into_stream: MakeLinear = Linear,
    ) -> None:
        super().__init__()
        assert config.experts is not None
        self.experts = config.experts
        self.eps = config.rms_norm_eps
        empty = allocator(dtype, device)
        hidden = config.hidden_size
        number = self.experts.num_experts
        inner = self.experts.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.mlp_norm_weight = empty(hidden)
        self.router = linear(empty, (number, hidden), False)
        # All experts' weights in one tensor, [num_experts, out, in]; the matrices are views.
        gate_up = empty(number, 2 * inner, hidden)
        down = empty(number, hidden, inner)
        self.gate_up = each(gate_up, Linear)
        self.down = each(down, into_stream)
        self.stacks = (gate_up, down) if gate_up.device.type != "cpu" else None

    def prepare(self, is_captured: bool) -> None:
        """Prepare for captured steps, in which no segment size reaches the host."""
        if self.mlp_norm_weight.device.type == "cpu":
            self.stacks = (stack(self.gate_up), stack(self.down)) if is_captured else None

    def add_to(
        self,
        hidden: torch.Tensor,  # [num_rows, hidden_size], overwritten
        x: torch.Tensor,  # the same, normed
        regions: Regions,
    ) -> torch.Tensor:  # like hidden
        weights, chosen = self.route(x)
        experts, order = chosen.flatten().sort(stable=True)  # of all pairs, by expert
        rows = x.index_select(0, order // chosen.shape[1])
        compute = self.by_segment if self.stacks is None else self.grouped
        products = torch.empty_like(rows).index_copy_(0, order, compute(rows, experts, regions))
        weighted = products.unflatten(0, chosen.shape) * weights[:, :, None]
        return hidden.add_(self.down[0].summed(weighted.sum(1).to(x.dtype)))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of each row, [num_rows, num_active], highest weight first."""
        scores = self.router(x).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.experts.num_active, dim=-1)
        if self.experts.is_renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype) if self.experts.is_rounded else weights, chosen

    def by_segment(
        self,
        rows: torch.Tensor,  # [num_pairs, hidden_size], by expert
        experts: torch.Tensor,  # [num_pairs] int64, ascending
        regions: Regions,
    ) -> torch.Tensor:  # like rows
        """Multiply one segment after another."""
        segments = rows.split(experts.bincount(minlength=len(self.gate_up)).tolist())
        products = [rows[:0]]
        for segment, gate_up, down in zip(segments, self.gate_up, self.down, strict=True):
            if len(segment):
                inner = regions.activate_and_multiply(gate_up(segment), self.activation)
                products.append(down.product(inner))
        return torch.cat(products)

    def grouped(self, rows: torch.Tensor, experts: torch.Tensor, regions: Regions) -> torch.Tensor:
        """The same with grouped products; the host reads nothing."""
        assert self.stacks is not None
        gate_up, down = self.stacks
        numbers = torch.arange(len(gate_up), device=rows.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        gates = multiply(rows, gate_up, experts, ends)
        inner = regions.activate_and_multiply(gates, self.activation)
        return multiply(inner, down, experts, ends)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The block's tensors, by the checkpoint's names without the layer's prefix."""
        block = self.experts.block
        *gate_and_up, down_name = self.experts.matrices
        found = whole({"post_attention_layernorm.weight": self.mlp_norm_weight})
        found |= parts_of(block, ["gate"], self.router)
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            found |= parts_of(f"{block}.experts.{i}", gate_and_up, gate_up)
            found |= parts_of(f"{block}.experts.{i}", [down_name], down)
        return found


def each(weights: nn.Parameter, make: MakeLinear) -> list[Linear]:
    """Return a matrix for each expert of `weights`, [num_experts, out, in], sharing its memory."""
    parameters = (nn.Parameter(weight, requires_grad=False) for weight in weights.detach())
    return cast("list[Linear]", nn.ModuleList(make(weight, None) for weight in parameters))


def stack(matrices: list[Linear]) -> torch.Tensor:
    return torch.stack([matrix.plain_weight() for matrix in matrices])


def multiply(
    rows: torch.Tensor,  # [num_pairs, in], by expert
    weights: torch.Tensor,  # [num_experts, out, in]
    experts: torch.Tensor,  # [num_pairs] int64, ascending
    ends: torch.Tensor,  # [num_experts] int32, where the segment of each ends
) -> torch.Tensor:  # [num_pairs, out]
    if rows.dtype != torch.float64:
        return F.grouped_mm(rows, weights.mT, offs=ends)
    return (rows @ weights.mT)[experts, torch.arange(len(rows), device=rows.device)]
