"""How tests run a model over a paged cache, without an engine."""

from __future__ import annotations

import torch

from batch_layout import ComposedBatch
from common.models.model import DecoderModel
from paged_attention import AttentionBackend, AttentionMetadata, PagedKVCache, TorchAttentionBackend


class PagedHarness:
    """Requests with shuffled block tables in a cache full of NaN."""

    def __init__(
        self,
        model: DecoderModel,
        num_requests: int,
        max_len: int = 64,
        block_size: int = 4,
        seed: int = 0,
        kind: type[PagedKVCache] = PagedKVCache,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.backend = backend or TorchAttentionBackend()
        parameter = model.embed_weight
        self.model = model
        self.block_size = block_size
        self.device = parameter.device
        model.group_layers(model.config.num_unhidden)  # one table: no window hides anything
        blocks_each = -(-max_len // block_size)
        self.kv_cache = kind(
            model.num_layers,
            num_requests * blocks_each + 1,
            block_size,
            model.num_kv_heads,
            model.config.head_dim,
            parameter.dtype,
            self.device,
        )
        for cache in (*self.kv_cache.key_cache, *self.kv_cache.value_cache):
            cache.fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(num_requests * blocks_each, generator=generator) + 1
        self.tables = shuffled.view(num_requests, blocks_each)

    def step(
        self,
        work: list[tuple[int, int, list[int]]],
        logit_indices: list[int] | None = None,
        inputs: torch.Tensor | None = None,
        **staged: object,  # by plugins
    ) -> torch.Tensor:
        """`work`: (request, first position, tokens). Logits of every row, or of those asked for.
        A stage that is not the first gets `inputs`, too."""
        ids = []
        positions = []
        slots = []
        starts = [0]
        seq_lens = []
        for request, first, tokens in work:
            for position, token in enumerate(tokens, start=first):
                block, offset = divmod(position, self.block_size)
                ids.append(token)
                positions.append(position)
                slots.append(int(self.tables[request, block]) * self.block_size + offset)
            starts.append(len(ids))
            seq_lens.append(first + len(tokens))

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        metadata = AttentionMetadata(
            query_start_loc=tensor(starts),
            seq_lens=tensor(seq_lens),
            block_tables=self.tables[[request for request, _, _ in work]].to(self.device),
            slot_mapping=tensor(slots),
            max_query_len=max(len(tokens) for _, _, tokens in work),
            max_seq_len=max(seq_lens),
        )
        indices = list(range(len(ids))) if logit_indices is None else logit_indices
        where = tensor(positions), (metadata,), tensor(indices)
        batch = ComposedBatch(tensor(ids), *where, hidden=inputs, staged=staged)
        batch.plan_attention(self.backend, self.model.num_heads, self.kv_cache)
        return self.model(batch, self.kv_cache)
