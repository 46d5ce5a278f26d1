"""The blocks of OLMo 3: a block's input is not normed, but what it adds is.

    hidden --+-- qkv, norm of queries and of keys, rotary, KV cache, attention, o, norm --(+)
    hidden --+-- gate and up, silu, product, down, norm ----------------------------------(+)

Queries are normed as one vector of all heads, and keys as another one, while other families norm
each head separately. Several ranks would need each other's sums for that: refused with an error.

Source: 2 OLMo 2 Furious, arXiv 2501.00656, which moved the norms after the blocks.

See common/README.md#which-models"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from common.models.blocks import AttentionBlock, CheckpointTensor, MLPBlock, whole
from common.models.model_config import ModelConfig
from common.models.regions.regions import Regions


class PostNormAttention(AttentionBlock):
    def make_norms(self, config: ModelConfig, norm: Callable[..., nn.Parameter]) -> None:
        q_size, k_size, _ = (n * self.head_dim for n in self.head_counts)
        self.q_norm_weight = norm(q_size)
        self.k_norm_weight = norm(k_size)

    def project(self, hidden: torch.Tensor, regions: Regions) -> torch.Tensor:
        sizes = [n * self.head_dim for n in self.head_counts]
        query, key, value = self.qkv(hidden).split(sizes, dim=-1)
        query = regions.rms_norm(query.contiguous(), self.q_norm_weight, self.eps)
        key = regions.rms_norm(key.contiguous(), self.k_norm_weight, self.eps)
        qkv = torch.cat((query, key, value), dim=-1)
        return qkv.view(len(hidden), -1, self.head_dim)

    def own_norms(self) -> dict[str, CheckpointTensor]:
        norms = {"self_attn.q_norm.weight": self.q_norm_weight}
        return whole(norms | {"self_attn.k_norm.weight": self.k_norm_weight})


class PostNormMLP(MLPBlock):
    has_input_norm = False

    def own_norms(self) -> dict[str, CheckpointTensor]:
        assert self.post_norm_weight is not None
        return whole({"post_feedforward_layernorm.weight": self.post_norm_weight})
