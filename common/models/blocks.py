"""The blocks of a decoder layer: an attention block and an MLP block.

    hidden --+-- norm, qkv, norm by head, rotary, KV cache, attention --- o ---(+)--> hidden
    hidden --+-- norm, gate and up, silu, product --------------------- down --(+)--> hidden

Each has a norm, matrices and `checkpoint_tensors`. Where one block adds to the residual stream, the
next one norms the sum. A layer does both in one call (`model.py`), so an attention block returns
the input of `o`, and an MLP block takes an input normed with `mlp_norm_weight`. Some families also
norm the output of `o` and `down` before it is added (`post_norm_weight`).

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


def parts_of(
    prefix: str,
    names: Sequence[str],
    matrix: Linear,
    sizes: Sequence[int] = (),  # of the parts; (): they are equal
) -> dict[str, torch.Tensor]:
    """The views of one stacked matrix that belong to separate checkpoint tensors, by name."""
    sizes = list(sizes) or [matrix.shape[0] // len(names)] * len(names)
    found = {}
    for kind, tensor in (("weight", matrix.plain_weight()), ("bias", matrix.bias)):
        if tensor is not None:
            parts = zip(names, tensor.split(sizes), strict=True)
            found |= {f"{prefix}.{name}.{kind}": part for name, part in parts}
    return found


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, CheckpointTensor]:
    return {name: CheckpointTensor(t, tuple(t.shape)) for name, t in tensors.items()}


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
        self.num_kv_heads = config.num_key_value_heads
        # Heads of queries and keys: rotary embedding and their norm take them together.
        self.num_qk_heads = num_heads + self.num_kv_heads
        self.head_counts = (num_heads, self.num_kv_heads, self.num_kv_heads)
        hidden = config.hidden_size
        q_size = num_heads * self.head_dim
        qkv_size = sum(self.head_counts) * self.head_dim
        self.qk_norm_weight = None
        self.make_norms(config, norm)
        self.qkv = linear(empty, (qkv_size, hidden), config.qkv_bias)
        self.o = linear(empty, (hidden, q_size), config.o_bias, into_stream)
        self.post_norm_weight = norm(hidden) if config.has_post_norms else None

    def make_norms(self, config: ModelConfig, norm: Callable[..., nn.Parameter]) -> None:
        self.input_norm_weight = norm(config.hidden_size)
        if config.has_qk_norm:
            # One row a head: q_norm's weight for each query head, k_norm's for each key head.
            self.qk_norm_weight = norm(self.num_qk_heads, self.head_dim)

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
        x = regions.rms_norm(hidden, self.input_norm_weight, self.eps)
        return self.qkv(x).view(len(hidden), -1, self.head_dim)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The block's tensors, by the checkpoint's names without the layer's prefix."""
        sizes = [n * self.head_dim for n in self.head_counts]
        found = {}
        if self.post_norm_weight is not None:
            found["post_attention_layernorm.weight"] = self.post_norm_weight
        found |= parts_of("self_attn", ["q_proj", "k_proj", "v_proj"], self.qkv, sizes)
        found |= parts_of("self_attn", ["o_proj"], self.o)
        return whole(found) | self.own_norms()

    def own_norms(self) -> dict[str, CheckpointTensor]:
        parts = whole({"input_layernorm.weight": self.input_norm_weight})
        if self.qk_norm_weight is not None:
            norms = self.qk_norm_weight.split(self.head_counts[:2])
            for name, rows in zip(("q_norm", "k_norm"), norms, strict=True):
                parts[f"self_attn.{name}.weight"] = CheckpointTensor(rows, (self.head_dim,))
        return parts


class MLPBlock(nn.Module):
    """The MLP, from its normed input (the layer computes the norm) to the residual stream."""

    has_input_norm = True

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
        self.mlp_norm_weight = norm(hidden) if self.has_input_norm else None
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
        return regions.add(self.down, hidden, inner, self.eps, self.post_norm_weight)

    def prepare(self, is_captured: bool) -> None:
        """Prepare for captured steps, in which the host reads no tensor. Here it never does."""

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The block's tensors, by the checkpoint's names without the layer's prefix."""
        found = parts_of("mlp", ["gate_proj", "up_proj"], self.gate_up)
        found |= parts_of("mlp", ["down_proj"], self.down)
        return whole(found) | self.own_norms()

    def own_norms(self) -> dict[str, CheckpointTensor]:
        assert self.mlp_norm_weight is not None
        if self.post_norm_weight is None:
            return whole({"post_attention_layernorm.weight": self.mlp_norm_weight})
        found = {"pre_feedforward_layernorm.weight": self.mlp_norm_weight}
        return whole(found | {"post_feedforward_layernorm.weight": self.post_norm_weight})
