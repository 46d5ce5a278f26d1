"""The decoder model: Qwen3, Qwen2, Llama 3.x, Mistral, Gemma 3, and two with experts.

One call computes one step for any mix of requests. Their tokens are concatenated:

    input_ids, positions    [num_tokens]
    hidden                  [num_tokens, hidden_size]      the residual stream
    queries, keys, values   [num_tokens, heads, head_dim]  written to and read from the paged cache
    logits                  [num_logit_rows, vocab_size]   only the rows to sample from

Weights are read once a step, whatever the batch. Projections that read the same input are one
matrix: queries, keys and values; gate and up. In the last layer, only rows that need logits are
computed after attention.

In every dtype the numbers follow `transformers`: norms and rotary angles are computed in float32.
A layer is two blocks (`blocks.py`). The operations between the matrices are in
`regions/regions.py`. If attention is a Triton kernel, these operations are Triton kernels too
(`kernel_regions.py`).

Nothing in `forward` waits for a GPU. Parameters are uninitialised memory until `loader.py` fills
them; `checkpoint_tensors` lists the place of each tensor.

Here one process has the whole model. `common/parallel/sharded_model.py` builds a part of each
matrix, or some of the layers, from the same blocks.

See common/README.md#which-models"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from batch_layout import ComposedBatch
from common.models.blocks import (
    AttentionBlock,
    CheckpointTensor,
    MakeLinear,
    MLPBlock,
    allocator,
    whole,
)
from common.models.collectives import Collectives
from common.models.layer_groups import deal_layers
from common.models.linear import Linear, OneDnnProduct, Packing, linear_layers
from common.models.model_config import SCORED, ModelConfig
from common.models.regions.regions import Regions
from common.models.rotary import Rotary, rotary_table
from paged_attention import AttentionPlan, PagedKVCache


class DecoderLayer(nn.Module):
    """An attention block and an MLP block, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,  # of its KV in the cache
        dtype: torch.dtype,
        device: torch.device | str,
        into_stream: MakeLinear = Linear,
    ) -> None:
        super().__init__()
        self.attention = AttentionBlock(config, index, dtype, device, into_stream)
        make = MLPBlock
        if config.experts is not None and index in config.experts.layers:
            from common.models.experts.experts_block import ExpertsBlock

            make = ExpertsBlock
        self.mlp = make(config, dtype, device, into_stream)

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        rotaries: tuple[Rotary, ...],
        plans: tuple[AttentionPlan, ...],
        kv_cache: PagedKVCache,
        regions: Regions,
        rows: torch.Tensor | None = None,  # [num_rows] int64, the rows that are still needed
    ) -> torch.Tensor:  # [num_tokens or num_rows, hidden_size]
        attention = self.attention
        mlp = self.mlp
        attended = attention.attend(hidden, rotaries, plans, kv_cache, regions)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        # What one block adds and the other's norm of it: one kernel on a GPU.
        hidden, x = regions.add_and_norm(
            attention.o,
            hidden,
            attended,
            weight=mlp.mlp_norm_weight,
            eps=mlp.eps,
            post_weight=attention.post_norm_weight,
        )
        return mlp.add_to(hidden, x, regions)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """The layer's tensors, by the checkpoint's names without its prefix."""
        return self.attention.checkpoint_tensors() | self.mlp.checkpoint_tensors()


class DecoderModel(nn.Module):
    """Token ids in, logits out, keys and values in a paged cache."""

    rotary_table: torch.Tensor
    window_rotary_table: torch.Tensor | None  # of layers with a window; None: as the others
    namespace: tuple[tuple[str, str], ...] = ()  # of its KV, if that is not the whole model's

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        empty = allocator(dtype, device)
        self.embed_weight = empty(config.vocab_size, config.hidden_size)
        head_weight = self.embed_weight
        if not config.tie_word_embeddings:
            head_weight = empty(config.vocab_size, config.hidden_size)
        self.lm_head = Linear(head_weight)
        self.norm_weight = allocator(config.norm_dtype(dtype), device)(config.hidden_size)
        self.layer_range = range(config.num_hidden_layers)
        layers = [DecoderLayer(config, i, dtype, device) for i in self.layer_range]
        self._complete(config, layers, Collectives())

    def _complete(
        self, config: ModelConfig, layers: list[DecoderLayer], collectives: Collectives
    ) -> None:
        """Set up everything that every process has, whatever its part of the model."""
        self.config = config
        self.regions = Regions()
        self.collectives = collectives
        self.layers = cast("list[DecoderLayer]", nn.ModuleList(layers))
        dtype = self.embed_weight.dtype
        device = self.embed_weight.device
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        for name, rope in (
            ("rotary_table", config.rope),
            ("window_rotary_table", config.window_rope),
        ):
            table = None
            if rope is not None:
                table = rotary_table(rope, config.head_dim, config.max_position_embeddings, dtype)
                table = table.to(device)
            self.register_buffer(name, table, persistent=False)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.num_layers = len(layers)
        self.num_heads, self.num_kv_heads, _ = layers[0].attention.head_counts
        self.group_layers(config.num_unhidden)  # until an engine knows its longest sequence

    def group_layers(self, max_model_len: int) -> None:
        """Choose the layers that share block tables, if no sequence is longer than `max_model_len`.
        Call before the KV cache is made, which has a tensor for each layer of a group."""
        windows = self.config.layer_windows or (None,) * self.config.num_hidden_layers
        self.groups = deal_layers(windows, max_model_len).of_stage(self.layer_range)
        for layer, place in zip(self.layers, self.groups.places, strict=True):
            layer.attention.group, layer.attention.index = place

    @property
    def num_groups(self) -> int:
        """The number of layer groups. Each group has its own block tables and attention plan."""
        return len(self.groups.windows)

    @torch.inference_mode()
    def forward(
        self,
        batch: ComposedBatch,  # whose attention is planned
        kv_cache: PagedKVCache,  # this step's keys and values are written into it
        out: torch.Tensor | None = None,  # where the result is written; None: to new memory
    ) -> torch.Tensor:  # [num_logit_rows, vocab_size]
        """Compute one step. Row r of the result: logits of the token after `logit_indices[r]`."""
        return self.through_head(self.embed(batch.input_ids), batch, kv_cache, out)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Return the embeddings, which start the residual stream."""
        hidden = self.embed_tokens(input_ids)
        return hidden if self.embedding_scale == 1 else hidden.mul_(self.embedding_scale)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.embed_weight)

    def through_head(
        self,
        hidden: torch.Tensor,
        batch: ComposedBatch,
        kv_cache: PagedKVCache,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layers and the head; return logits. A caller that needs more than the sampled
        rows has staged a consumer of all tokens' hidden states."""
        scored = batch.staged.get(SCORED)
        rows = batch.logit_indices if scored is None else None
        hidden = self.through_layers(hidden, batch, kv_cache, rows)
        if scored is not None:
            scored.score(hidden, self.to_logits)
            hidden = hidden.index_select(0, batch.logit_indices)
        return self.to_logits(hidden, out)

    def through_layers(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], overwritten
        batch: ComposedBatch,
        kv_cache: PagedKVCache,
        rows: torch.Tensor | None,  # [num_rows], those that are needed afterwards; None: all
    ) -> torch.Tensor:  # [num_tokens or num_rows, hidden_size]
        regions = self.regions
        tables = self.rotary_table, self.window_rotary_table
        rotaries = tuple(regions.rotary(t, batch.positions) for t in tables if t is not None)
        for i, layer in enumerate(self.layers):
            needed = rows if i == self.num_layers - 1 else None
            hidden = layer(hidden, rotaries, batch.plans, kv_cache, regions, needed)
        return hidden

    def to_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.regions.rms_norm(hidden, self.norm_weight, self.config.rms_norm_eps)
        logits = self.lm_head(hidden)
        return logits if out is None else out.copy_(logits)

    def pack_weights(self, packing: Packing = OneDnnProduct) -> None:
        """Pack every matrix for this processor (`linear.py`), if that is possible here
        (`reason_not_packed`)."""
        for matrix in linear_layers(self):
            matrix.pack(packing, keep_weight=matrix.weight is self.embed_weight)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights by name: the same before and after packing. A packed matrix is unpacked
        when it is reached. KV on disk is keyed by these names."""
        yield from self.named_buffers()
        yield from self.named_parameters()
        for name, module in self.named_modules():
            if isinstance(module, Linear) and module.weight is None:
                yield f"{name}.weight", module.plain_weight()

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Every tensor of a checkpoint of this configuration, with its place. Together they fill
        every parameter exactly once."""
        singles: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embed_weight,
            "model.norm.weight": self.norm_weight,
        }
        if not self.config.tie_word_embeddings:
            singles["lm_head.weight"] = self.lm_head.plain_weight()
        parts = whole(singles)
        for i, layer in enumerate(self.layers):
            for name, part in layer.checkpoint_tensors().items():
                parts[f"model.layers.{i}.{name}"] = part
        return parts
