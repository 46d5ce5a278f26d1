"""The blocks of a decoder layer: an attention block and an MLP block.

    hidden --+-- norm, qkv, norm by head, rotary, KV cache, attention --- o ---(+)--> hidden
    hidden --+-- norm, gate and up, silu, product --------------------- down --(+)--> hidden

Each has a norm, matrices and `checkpoint_tensors`. Where one block adds to the residual stream, the
next one norms the sum. A layer does both in one call (`model.py`), so an attention block returns
the input of `o`, and an MLP block takes an input normed with `mlp_norm_weight`. Some families also
norm the output of `o` and `down` before it is added (`post_norm_weight`).

OLMo 3 norms only these outputs, and no input (2 OLMo 2 Furious, arXiv 2501.00656). It norms the
queries of all heads as one vector, and the keys as another one. Several ranks would need each
other's sums for that: refused with an error.

See common/README.md#which-models"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from common.models.linear import Linear
from common.models.model_config import ModelConfig
from common.models.regions.regions import Regions
from common.models.rotary import Rotary
from paged_attention import AttentionPlan, PagedKVCache


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Where a checkpoint tensor goes. `part` of the tensor (by default all) is broadcast to
    `target`, a view of a parameter. The tensor must have exactly `shape`. `target` is None where
    another process has the tensor."""

    target: torch.Tensor | None
    shape: tuple[int, ...]
    part: tuple[slice, ...] = (slice(None),)


def allocator(dtype: torch.dtype, device: torch.device | str) -> Callable[..., nn.Parameter]:
    def empty(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    return empty


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
MakeLinear = Callable[[nn.Parameter, nn.Parameter | None], Linear]  # of weight and bias


def linear(
    empty: Callable[..., nn.Parameter],
    shape: tuple[int, int],  # out, in
    has_bias: bool,
    make: MakeLinear = Linear,
) -> Linear:
    num_out, num_in = shape
    return make(empty(num_out, num_in), empty(num_out) if has_bias else None)


def whole(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, CheckpointTensor]:
    """The places of tensors that are filled as they are stored. None: there is no such tensor."""
    places = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            places[name] = CheckpointTensor(tensor, tuple(tensor.shape))
    return places


def parts_of(
    prefix: str,
    names: Sequence[str],
    matrix: Linear,
    sizes: list[int] | None = None,  # of the parts; None: they are equal
) -> dict[str, CheckpointTensor]:
    """The views of one stacked matrix that belong to separate checkpoint tensors, by name."""
    found = {}
    for kind, tensor in (("weight", matrix.plain_weight()), ("bias", matrix.bias)):
        if tensor is not None:
            parts = tensor.split(sizes or len(tensor) // len(names))
            for name, part in zip(names, parts, strict=True):
                found[f"{prefix}.{name}.{kind}"] = part
    return whole(found)


class AttentionBlock(nn.Module):
    """Attention without the final `o`, which the layer applies to the output. `into_stream` makes
    the matrix whose product is added to the residual stream."""

    group = 0  # of layers that have block tables, and a plan, in common
    rotary = 0  # of the model's rotary tables

    def __init__(
        self,
        config: ModelConfig,
        index: int,  # of its KV in the cache
        dtype: torch.dtype,
        device: torch.device | str,
        into_stream: MakeLinear = Linear,
    ) -> None:
        super().__init__()
        empty = allocator(dtype, device)
        self.eps = config.rms_norm_eps
        norm = allocator(config.norm_dtype(dtype), device)
        self.index = index
        self.head_dim = config.head_dim
        self.rotary = config.rotary_of(index)
        self.scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        num_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads
        self.head_counts = (num_heads, num_kv_heads, num_kv_heads)
        self.sizes = [n * self.head_dim for n in self.head_counts]  # of queries, keys and values
        hidden = config.hidden_size
        q_size, k_size, _ = self.sizes
        self.input_norm_weight = norm(hidden) if config.has_input_norms else None
        # Of each head: q_norm's weight for each query head, k_norm's for each key head.
        self.qk_norm_weight = None
        if config.has_qk_norm:
            self.qk_norm_weight = norm(num_heads + num_kv_heads, self.head_dim)
        # Of all heads as one vector.
        self.q_norm_weight = norm(q_size) if config.has_whole_qk_norm else None
        self.k_norm_weight = norm(k_size) if config.has_whole_qk_norm else None
        self.qkv = linear(empty, (sum(self.sizes), hidden), config.qkv_bias)
        self.o = linear(empty, (hidden, q_size), config.o_bias, into_stream)
        self.post_norm_weight = norm(hidden) if config.has_post_norms else None

    def attend(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        rotaries: tuple[Rotary, ...],
        plans: tuple[AttentionPlan, ...],
        kv_cache: PagedKVCache,
        regions: Regions,
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
        num_tokens = hidden.shape[0]
        plan = plans[self.group]
        qkv = self.project(hidden, regions)
        keys, values = kv_cache.key_cache[self.index], kv_cache.value_cache[self.index]
        query = regions.rotate_and_write(
            qkv,
            norm_weight=self.qk_norm_weight,
            eps=self.eps,
            rotary=rotaries[self.rotary],
            key_cache=keys,
            value_cache=values,
            plan=plan,
        )
        return plan.attend(query, keys, values, self.scale).reshape(num_tokens, -1)

    def project(
        self, hidden: torch.Tensor, regions: Regions
    ) -> torch.Tensor:  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        x = hidden
        if self.input_norm_weight is not None:
            x = regions.rms_norm(hidden, self.input_norm_weight, self.eps)
        qkv = self.qkv(x)
        if self.q_norm_weight is not None and self.k_norm_weight is not None:
            query, key, value = qkv.split(self.sizes, dim=-1)
            query = regions.rms_norm(query.contiguous(), self.q_norm_weight, self.eps)
            key = regions.rms_norm(key.contiguous(), self.k_norm_weight, self.eps)
            qkv = torch.cat((query, key, value), dim=-1)
        return qkv.view(len(hidden), -1, self.head_dim)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The block's tensors, by the checkpoint's names without the layer's prefix."""
        norms = {
            "input_layernorm.weight": self.input_norm_weight,
            "post_attention_layernorm.weight": self.post_norm_weight,
            "self_attn.q_norm.weight": self.q_norm_weight,
            "self_attn.k_norm.weight": self.k_norm_weight,
        }
        found = whole(norms)
        if self.qk_norm_weight is not None:
            of_heads = self.qk_norm_weight.split(self.head_counts[:2])
            for name, rows in zip(("q_norm", "k_norm"), of_heads, strict=True):
                found[f"self_attn.{name}.weight"] = CheckpointTensor(rows, (self.head_dim,))
        found |= parts_of("self_attn", ["q_proj", "k_proj", "v_proj"], self.qkv, self.sizes)
        return found | parts_of("self_attn", ["o_proj"], self.o)


class MLPBlock(nn.Module):
    """The MLP, from its normed input (the layer computes the norm) to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        into_stream: MakeLinear = Linear,
    ) -> None:
        super().__init__()
        empty = allocator(dtype, device)
        self.eps = config.rms_norm_eps
        hidden = config.hidden_size
        inner = config.intermediate_size
        norm = allocator(config.norm_dtype(dtype), device)
        self.activation = ACTIVATIONS[config.activation]
        self.mlp_norm_weight = norm(hidden) if config.has_input_norms else None
        self.gate_up = linear(empty, (2 * inner, hidden), config.mlp_bias)
        self.down = linear(empty, (hidden, inner), config.mlp_bias, into_stream)
        self.post_norm_weight = norm(hidden) if config.has_post_norms else None

    def add_to(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        x: torch.Tensor,  # the same, normed
        regions: Regions,
    ) -> torch.Tensor:  # like hidden
        inner = regions.activate_and_multiply(self.gate_up(x), self.activation)
        hidden, _ = regions.add_and_norm(
            self.down, hidden, inner, weight=None, eps=self.eps, post_weight=self.post_norm_weight
        )
        return hidden

    def prepare(self, is_captured: bool) -> None:
        """Prepare for captured steps, in which the host reads no tensor. Here it never does."""

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The block's tensors, by the checkpoint's names without the layer's prefix."""
        has_post_norm = self.post_norm_weight is not None
        input_norm = "pre_feedforward" if has_post_norm else "post_attention"
        norms = {
            f"{input_norm}_layernorm.weight": self.mlp_norm_weight,
            "post_feedforward_layernorm.weight": self.post_norm_weight,
        }
        found = whole(norms) | parts_of("mlp", ["gate_proj", "up_proj"], self.gate_up)
        return found | parts_of("mlp", ["down_proj"], self.down)
