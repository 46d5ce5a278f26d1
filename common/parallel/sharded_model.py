"""One rank's part of a model: the layers of its stage, and its part of each of their matrices.

    checkpoint's tensor       on the ranks of a stage                     how
    q, k, v                   [some heads, hidden_size]                   column-parallel
    o                         [hidden_size, those heads]                  row-parallel, all-reduce
    gate, up                  [a part of intermediate_size, hidden_size]  column-parallel
    down                      [hidden_size, that part]                    row-parallel, all-reduce
    embedding, head           [some tokens, hidden_size]                  vocabulary-parallel
    experts                   each as gate, up and down; what all add is reduced once
    router, norms             whole

Up to its row-parallel matrices, a rank's layer is a layer of a narrower model: with fewer heads and
a smaller `intermediate_size` (`rank_config`). Its KV cache holds its own heads only.

The first stage takes token ids and has the embedding. The last one gives logits and has the last
norm and the head, and the tied matrix too. The residual stream passes between stages; the sending
is not done here.

All ranks of the last stage get bitwise identical logits: they are gathered, not computed twice. So
all of them sample the same tokens, and none has to be sent.

See common/parallel/README.md#tensor-parallel"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from batch_layout import ComposedBatch
from common.models.blocks import CheckpointTensor, allocator
from common.models.collectives import Collectives
from common.models.linear import Linear
from common.models.model import DecoderLayer, DecoderModel
from common.models.model_config import ModelConfig
from common.models.ranks import Ranks
from common.parallel.sharded_layers import (
    RowParallelLinear,
    VocabParallelHead,
    rows_per_rank,
    vocab_parallel_embedding,
)
from paged_attention import PagedKVCache


def rank_config(config: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The configuration of the narrower model that this rank computes. Raises `ValueError` if the
    model cannot be divided like this. Also called before any process starts."""
    layers = ranks.layers(config.num_hidden_layers)
    _check_divisible(config, ranks.tensor_parallel_size)
    size = ranks.tensor_parallel_size
    vocab = range(config.vocab_size)
    return replace(
        config,
        vocab_size=len(vocab[_part_of_vocab(config, ranks)]),
        intermediate_size=config.intermediate_size // size,
        num_hidden_layers=len(layers),
        layer_windows=config.layer_windows[layers.start : layers.stop],
        experts=None if config.experts is None else config.experts.part(layers, size),
        num_attention_heads=config.num_attention_heads // size,
        # Ranks outnumber the KV heads: several have the same one.
        num_key_value_heads=max(1, config.num_key_value_heads // size),
    )


def _check_divisible(config: ModelConfig, size: int) -> None:
    if size > 1 and config.has_whole_qk_norm:
        raise ValueError(
            f"tensor_parallel_size must be 1 for {config.architecture}, which normalizes the "
            f"queries of all heads as one vector, got {size}"
        )
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    inner = math.gcd(*config.mlp_sizes)
    vocab = config.vocab_size
    possible = [
        str(n)
        for n in range(1, heads + 1)
        if heads % n == 0
        and inner % n == 0
        and (kv_heads % n == 0 or n % kv_heads == 0)
        and (n - 1) * rows_per_rank(vocab, n) < vocab  # the last one has tokens
    ]
    if str(size) not in possible:
        raise ValueError(
            f"tensor_parallel_size must be {', '.join(possible)}, so that each rank has the same "
            f"part of {heads} attention heads, {kv_heads} KV heads, an intermediate_size of "
            f"{inner} and {vocab} tokens, got {size}"
        )


def _part_of_vocab(config: ModelConfig, ranks: Ranks) -> slice:
    num_rows = rows_per_rank(config.vocab_size, ranks.tensor_parallel_size)
    first = ranks.tp_rank * num_rows
    return slice(first, min(first + num_rows, config.vocab_size))


# The dimension of a checkpoint's matrix that the ranks divide; all have other tensors whole.
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
_ROWS += ("embed_tokens", "lm_head")
_DIVIDED = {**{kind: 0 for kind in _ROWS}, "o_proj": 1, "down_proj": 1, "w2": 1}


class ShardedModel(DecoderModel):
    """`config` is the whole model's, `num_heads`, `num_kv_heads` and `num_layers` are this rank's.

    A stage without the embedding has an `embed_weight` of no rows."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        collectives: Collectives,
    ) -> None:
        nn.Module.__init__(self)
        self.ranks = ranks = collectives.ranks
        self.layer_range = ranks.layers(config.num_hidden_layers)
        narrow = rank_config(config, ranks)
        empty = allocator(dtype, device)
        into_stream, make_head = Linear, Linear
        if ranks.tensor_parallel_size > 1:
            into_stream = partial(RowParallelLinear, collectives=collectives)
            make_head = partial(VocabParallelHead, config.vocab_size, collectives)
        self._first_id = _part_of_vocab(config, ranks).start
        num_embedded = narrow.vocab_size if ranks.is_first_stage else 0
        self.embed_weight = empty(num_embedded, config.hidden_size)
        if ranks.is_last_stage:
            head_weight = self.embed_weight
            if not (config.tie_word_embeddings and ranks.is_first_stage):
                head_weight = empty(narrow.vocab_size, config.hidden_size)
            self.lm_head = make_head(head_weight)
            self.norm_weight = allocator(config.norm_dtype(dtype), device)(config.hidden_size)
        layers = range(narrow.num_hidden_layers)
        made = [DecoderLayer(narrow, i, dtype, device, into_stream) for i in layers]
        self._complete(config, made, collectives)
        if ranks.world_size > 1:
            sizes = f"{ranks.tensor_parallel_size} x {ranks.pipeline_parallel_size}"
            part = f"rank {ranks.rank} of {sizes}, {self.layer_range} of the layers"
            self.namespace = (("part of the model", part),)

    @torch.inference_mode()
    def forward(
        self, batch: ComposedBatch, kv_cache: PagedKVCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [num_logit_rows, vocab_size] on the last stage, and on the others hidden
        states [num_tokens, hidden_size] for the next stage. `batch.hidden` is overwritten."""
        hidden = batch.hidden if batch.hidden is not None else self.embed(batch.input_ids)
        if self.ranks.is_last_stage:
            return self.through_head(hidden, batch, kv_cache, out)
        return self.through_layers(hidden, batch, kv_cache, None)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_embedding(
            input_ids, self.embed_weight, self._first_id, self.collectives
        )

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Every tensor of the whole checkpoint, and the part of each that this rank has."""
        whole = DecoderModel(self.config, device="meta").checkpoint_tensors()  # takes no memory
        targets = self._targets()
        found = {}
        for name, tensor in whole.items():
            target = targets.get(name)
            part = tensor.part if target is None else self._part(name, target)
            found[name] = replace(tensor, target=target, part=part)
        return found

    def _targets(self) -> dict[str, torch.Tensor | None]:
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        targets: dict[str, torch.Tensor | None] = {}
        if self.ranks.is_last_stage:
            is_tied = self.config.tie_word_embeddings
            targets["model.norm.weight"] = self.norm_weight
            targets[embedding if is_tied else head] = self.lm_head.plain_weight()
        if self.ranks.is_first_stage:
            targets[embedding] = self.embed_weight
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            for name, tensor in layer.checkpoint_tensors().items():
                targets[f"model.layers.{index}.{name}"] = tensor.target
        return targets

    def _part(self, name: str, target: torch.Tensor) -> tuple[slice, ...]:
        """The part of the checkpoint's tensor that `target` is filled with."""
        kind = name.split(".")[-2]
        dim = _DIVIDED.get(kind)
        if dim is None or dim >= target.ndim:  # whole: norms, and the biases of o and down
            return (slice(None),)
        length = target.shape[dim]
        ranks = self.ranks
        config = self.config
        first = ranks.tp_rank * length
        if kind in ("k_proj", "v_proj"):
            head = ranks.tp_rank * config.num_key_value_heads // ranks.tensor_parallel_size
            first = head * config.head_dim
        elif kind in ("embed_tokens", "lm_head"):
            first = self._first_id  # the last rank's part may be shorter
        return (*(slice(None),) * dim, slice(first, first + length))
