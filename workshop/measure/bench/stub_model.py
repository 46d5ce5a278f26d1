"""A model that returns the same token immediately: the rest of a step is the host's work."""

from __future__ import annotations

import torch

from batch_layout import ComposedBatch
from common.models.loader import LoadedModel
from common.models.model import DecoderModel
from paged_attention import PagedKVCache
from workshop.measure.bench.random_weights import shape_of

VOCAB_SIZE, TOKEN = 64, 7
STUB_CONFIG = shape_of(1, 4, 4, 1, 1, 2, VOCAB_SIZE, max_position_embeddings=1024)


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
