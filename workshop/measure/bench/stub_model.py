"""A model that returns the same token immediately: the rest of a step is the host's work."""

from __future__ import annotations

import torch

from batch_layout import ComposedBatch
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from common.models.rotary import RopeParameters
from paged_attention import PagedKVCache

VOCAB_SIZE, TOKEN = 64, 7
STUB_CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    rope=RopeParameters(theta=1e4),
    tie_word_embeddings=True,
)


class StubModel(DecoderModel):
    """`TOKEN` has the highest logit in each of up to `max_rows` rows."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(STUB_CONFIG)
        self._logits = torch.zeros(max_rows, VOCAB_SIZE)
        self._logits[:, TOKEN] = 1.0

    def forward(self, batch: ComposedBatch, kv_cache: PagedKVCache) -> torch.Tensor:
        return self._logits[: len(batch.logit_indices)]


def stub_model(max_rows: int) -> LoadedModel:
    return LoadedModel(StubModel(max_rows), STUB_CONFIG)
