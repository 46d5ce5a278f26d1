"""The decoder that serves tokens: Qwen3, Qwen2, Llama 3.x and Mistral in one class.

It computes one step for any mix of requests, whose tokens lie end to end in one row:

    input_ids, positions    [num_tokens]
    hidden                  [num_tokens, hidden_size]      the residual stream
    queries, keys, values   [num_tokens, heads, head_dim]  written to and read from the paged cache
    logits                  [num_logit_rows, vocab_size]   only of the rows somebody samples from

Weights are read once a step, whatever the batch. Projections that read the same input are one
matrix: queries, keys and values; gate and up. In the last layer, only rows that need logits go on
after attention.

In every dtype the numbers follow `transformers`: norms and rotary angles are computed in float32.
Norms and rotary embedding are in `common/kernels/regions.py`.

Nothing in `forward` waits for a GPU. Parameters are uninitialised memory until `common.loader` has
filled them; `checkpoint_tensors` tells it what goes where.

One process has all of it here. A part of each matrix, or some of the layers, is
`common/parallel/sharded_model.py`, which puts the same pieces together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from common.kernels.regions import Regions
from common.linear import Linear, linear_layers, why_not_packed
from common.model_config import ModelConfig
from common.parallel.collectives import Alone, Collectives
from common.rotary import rotary_factors, rotary_table
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Where a tensor of a checkpoint goes: `part` of it, by itself all, to `target`, a view of a
    parameter, to which it is broadcast. It must have exactly `shape`. `target` is None where
    another process has the tensor."""

    target: torch.Tensor | None
    shape: tuple[int, ...]
    part: tuple[slice, ...] = (slice(None),)


def allocator(dtype: torch.dtype, device: torch.device | str) -> Callable[..., nn.Parameter]:
    def empty(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    return empty


MakeLinear = Callable[[nn.Parameter, nn.Parameter | None], Linear]  # of weight and bias


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream. `into_stream` makes the two matrices
    whose products are added."""

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

        def linear(num_out: int, num_in: int, has_bias: bool, make: MakeLinear = Linear) -> Linear:
            return make(empty(num_out, num_in), empty(num_out) if has_bias else None)

        hidden, inner = config.hidden_size, config.intermediate_size
        self.index, self.regions = index, Regions()
        self.eps = config.rms_norm_eps
        self.silu: Callable[[torch.Tensor], torch.Tensor] = F.silu
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.num_kv_heads = config.num_key_value_heads
        # Heads of queries and keys: rotary embedding and their norm take them together.
        self.num_qk_heads = config.num_attention_heads + config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_key_value_heads * config.head_dim
        self.head_counts = (config.num_attention_heads, self.num_kv_heads, self.num_kv_heads)

        self.input_norm_weight = empty(hidden)
        self.qkv = linear(qkv_size, hidden, config.qkv_bias)
        # One row a head: q_norm's weight for each query head, k_norm's for each key head.
        self.qk_norm_weight = (
            empty(self.num_qk_heads, self.head_dim) if config.has_qk_norm else None
        )
        self.o = linear(hidden, q_size, config.o_bias, into_stream)
        self.mlp_norm_weight = empty(hidden)
        self.gate_up = linear(2 * inner, hidden, config.mlp_bias)
        self.down = linear(hidden, inner, config.mlp_bias, into_stream)

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        rows: torch.Tensor | None = None,  # [num_rows] int64, the rows that are still needed
    ) -> torch.Tensor:  # [num_tokens or num_rows, hidden_size]
        attended = self._attend(hidden, rotary, kv_cache, metadata, backend)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        hidden = self.o.add_to(hidden, attended)
        x = self.regions.rms_norm(hidden, self.mlp_norm_weight, self.eps)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.add_to(hidden, self.silu(gate).mul_(up))

    def _attend(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_dim]
        num_tokens = hidden.shape[0]
        x = self.regions.rms_norm(hidden, self.input_norm_weight, self.eps)
        qkv = self.qkv(x).view(num_tokens, -1, self.head_dim)
        qk, value = qkv.split((self.num_qk_heads, self.num_kv_heads), dim=1)
        qk = self.regions.norm_and_rotate(qk, self.qk_norm_weight, self.eps, rotary)
        query, key = qk.split(self.head_counts[:2], dim=1)
        keys, values = kv_cache.key_cache[self.index], kv_cache.value_cache[self.index]
        backend.write_kv(key, value, keys, values, metadata.slot_mapping)
        attended = backend.attend(query, keys, values, metadata, self.scale)
        return attended.reshape(num_tokens, -1)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """By the checkpoint's names without the layer's prefix."""
        head_dim, parts = self.head_dim, {}

        def put(name: str, target: torch.Tensor | None, shape: tuple[int, ...] = ()) -> None:
            if target is not None:
                parts[name] = CheckpointTensor(target, shape or tuple(target.shape))

        put("input_layernorm.weight", self.input_norm_weight)
        put("post_attention_layernorm.weight", self.mlp_norm_weight)
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        qkv_sizes = [n * head_dim for n in self.head_counts]
        gate_up_sizes = [len(self.gate_up.plain_weight()) // 2] * 2
        for block, names, sizes, matrix in (
            ("self_attn", qkv, qkv_sizes, self.qkv),
            ("mlp", gate_up, gate_up_sizes, self.gate_up),
        ):
            weights, bias = matrix.plain_weight().split(sizes), matrix.bias
            biases = [None] * len(names) if bias is None else bias.split(sizes)
            for name, part, bias_part in zip(names, weights, biases, strict=True):
                put(f"{block}.{name}.weight", part)
                put(f"{block}.{name}.bias", bias_part)
        if self.qk_norm_weight is not None:
            q_norm, k_norm = self.qk_norm_weight.split(self.head_counts[:2])
            put("self_attn.q_norm.weight", q_norm, (head_dim,))
            put("self_attn.k_norm.weight", k_norm, (head_dim,))
        put("self_attn.o_proj.weight", self.o.plain_weight())
        put("self_attn.o_proj.bias", self.o.bias)
        put("mlp.down_proj.weight", self.down.plain_weight())
        put("mlp.down_proj.bias", self.down.bias)
        return parts


class DecoderModel(nn.Module):
    """Token ids in, logits out, keys and values in a paged cache."""

    rotary_table: torch.Tensor
    namespace: tuple[tuple[str, str], ...] = ()  # of its KV, if that is not the whole model's

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        empty = allocator(dtype, device)
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_weight = empty(*vocab)
        is_tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embed_weight if is_tied else empty(*vocab))
        self.norm_weight = empty(config.hidden_size)
        layers = [DecoderLayer(config, i, dtype, device) for i in range(config.num_hidden_layers)]
        self._complete(config, layers, Alone())

    def _complete(
        self, config: ModelConfig, layers: list[DecoderLayer], collectives: Collectives
    ) -> None:
        """What every process has, whatever its part is."""
        self.config, self.regions, self.collectives = config, Regions(), collectives
        self.layers = cast("list[DecoderLayer]", nn.ModuleList(layers))
        dtype, device = self.embed_weight.dtype, self.embed_weight.device
        table = rotary_table(config.rope, config.head_dim, config.max_position_embeddings, dtype)
        self.register_buffer("rotary_table", table.to(device), persistent=False)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.rank_config = config  # the shapes that this process computes with
        self.num_layers = len(layers)
        self.num_heads, self.num_kv_heads, _ = layers[0].head_counts

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64, below max_position_embeddings
        kv_cache: PagedKVCache,  # this step's keys and values are written into it
        metadata: AttentionMetadata,
        logit_indices: torch.Tensor,  # [num_logit_rows] int64, rows of input_ids
        backend: AttentionBackend,
    ) -> torch.Tensor:  # [num_logit_rows, vocab_size]
        """One step: row r of the result are the logits of the token after `logit_indices[r]`."""
        hidden = F.embedding(input_ids, self.embed_weight)
        hidden = self.through_layers(hidden, positions, kv_cache, metadata, backend, logit_indices)
        return self.to_logits(hidden)

    def through_layers(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        positions: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        rows: torch.Tensor | None,  # [num_rows], those that are needed afterwards; None: all
    ) -> torch.Tensor:  # [num_tokens or num_rows, hidden_size]
        rotary = rotary_factors(self.rotary_table, positions)
        last = self.num_layers - 1
        for i, layer in enumerate(self.layers):
            needed = rows if i == last else None
            hidden = layer(hidden, rotary, kv_cache, metadata, backend, needed)
        return hidden

    def to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.regions.rms_norm(hidden, self.norm_weight, self.config.rms_norm_eps)
        return self.lm_head(hidden)

    def blank_input(self, num_tokens: int) -> torch.Tensor:
        """Something that `forward` takes instead of a prompt, to warm up."""
        device = self.embed_weight.device
        return torch.zeros(num_tokens, dtype=torch.int64, device=device)

    def pack_weights(self) -> str | None:
        """Reorder every matrix for this processor, once (`common/linear.py`). None, or the reason
        why they stay plain."""
        reason = why_not_packed(self.embed_weight.dtype, self.embed_weight.device)
        if reason is None:
            for matrix in linear_layers(self):
                matrix.pack(keep_weight=matrix.weight is self.embed_weight)
        return reason

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything the model computes with, by name: the same before and after packing. A packed
        matrix is unpacked when its turn comes."""
        yield from self.named_buffers()
        for name, module in self.named_modules():
            if isinstance(module, Linear) and module.weight is None:
                yield f"{name}.weight", module.plain_weight()
            for part, parameter in module.named_parameters(name, recurse=False):
                if parameter is not self.embed_weight or module is self:
                    yield part, parameter

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Every tensor a checkpoint of this configuration holds, and where it goes. Together they
        fill every parameter exactly once."""
        singles: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embed_weight,
            "model.norm.weight": self.norm_weight,
        }
        if not self.config.tie_word_embeddings:
            singles["lm_head.weight"] = self.lm_head.plain_weight()
        parts = {name: CheckpointTensor(p, tuple(p.shape)) for name, p in singles.items()}
        for i, layer in enumerate(self.layers):
            for name, part in layer.checkpoint_tensors().items():
                parts[f"model.layers.{i}.{name}"] = part
        return parts
