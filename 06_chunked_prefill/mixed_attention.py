"""Attention for decodes and chunks in one batch: each side its own way, and no row twice.

A decode is one query against a long history: it is bound by reading keys, and many are attended
together as in chapter 2. A chunk is many queries against one history: it is bound by arithmetic,
and needs a mask only where it meets itself. Its keys are read in spans, each of them once:

    tokens 10-15 of a sequence   | history, spans of KEY_TILE | own keys, spans of QUERY_TILE |
                         queries |   0-3   |   4-7   |  8-9   |   10-11  |   12-13  |  14-15  |
                          10-11  |    x    |    x    |   x    | diagonal |          |         |
                          12-13  |    x    |    x    |   x    |    x     | diagonal |         |
                          14-15  |    x    |    x    |   x    |    x     |    x     | diagonal|

Only the diagonal is masked; what is empty here is neither gathered nor multiplied. Each span yields
a *partial* result: attention to its own keys alone, and the log of the sum of exp(score). Two of
them merge into that of both spans, each with the weight exp(its log-sum-exp). Span after span this
is the online softmax of FlashAttention-2, whose running maximum and sum are here one number; with
the spans on several workers it is FlashDecoding. A decode whose keys exceed the budget of a group
goes the same way.

Invariants: those of chapter 2, NaN in unused slots included; what is gathered at once is bounded by
a span or a group, never by the history; with `MixedMetadata` nobody waits for the device.

vLLM's FlashInfer and MLA backends treat the two sides with two kernels, in the order of
`mixed_batch.py`; its Triton and FlashAttention backends have one kernel for both, see
`beyond/mixed_attention_triton.py`. Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from attention_plan import AttentionPlan, group_short_queries, max_group_slots
from mixed_batch import MixedMetadata
from paged_attention import AttentionMetadata, write_kv

KEY_TILE = 4096  # keys of the history that are gathered at a time
QUERY_TILE = 1024  # queries that are attended at a time, and keys of the diagonal
# PyTorch's fused attention says the log-sum-exp only behind its public functions, and on a CPU.
# None: without it.
FUSED_ATTENTION = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys `[start, stop)` of a sequence, and which of its query tokens see them."""

    block_ids: torch.Tensor  # [blocks that the span touches] int
    offset: int  # of its first key in the first block
    num_keys: int
    query_tiles: list[slice]  # that see any of it
    is_diagonal: bool  # the first of these tiles sees it causally, the others all of it


@dataclass(frozen=True, slots=True)
class SpannedChunk:
    """A sequence whose queries are rows `[start, stop)`; not only chunks, long decodes too."""

    start: int
    stop: int
    spans: list[KeySpan]


class MixedPlan(AttentionPlan):
    """Chapter 2's groups of short queries, and spans of keys for the others."""

    def __init__(
        self, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor
    ) -> None:
        block_size, tables = key_cache.shape[1], metadata.block_tables
        starts, seq_lens, is_short = _host_view(metadata)
        max_slots = max_group_slots(key_cache)
        is_short = [short and n <= max_slots for short, n in zip(is_short, seq_lens, strict=True)]
        groups, rows = group_short_queries(starts, seq_lens, is_short, tables, query, key_cache)
        self.chunks: list[SpannedChunk] = []
        for row in rows:
            start, stop = starts[row], starts[row + 1]
            spans = list(_spans(tables[row], stop - start, seq_lens[row], block_size))
            self.chunks.append(SpannedChunk(start, stop, spans))
        block_ids = (span.block_ids for chunk in self.chunks for span in chunk.spans)
        super().__init__(groups, block_ids, query, key_cache)


def mixed_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """What `paged_attention` computes, of which this is a faster form for mixed batches.

    Raises `ValueError` if the metadata contradicts itself.
    """
    plan = metadata.plan
    if not isinstance(plan, MixedPlan) or not plan.fits(query, key_cache):
        plan = metadata.plan = MixedPlan(metadata, query, key_cache)
    output = torch.zeros_like(query)
    plan.attend_groups(output, query, key_cache, value_cache, scale)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        _attend_spans(output[rows], query[rows], key_cache, value_cache, chunk, plan, scale)
    return output


class MixedAttentionBackend:
    """An `AttentionBackend` in PyTorch, for any device."""

    write_kv = staticmethod(write_kv)
    attend = staticmethod(mixed_attention)


# -- planning a step, on the host


def _host_view(metadata: AttentionMetadata) -> tuple[list[int], list[int], list[bool]]:
    """query_start_loc, seq_lens and who is short. Plain metadata is read from the device."""
    num_seqs = len(metadata.seq_lens)
    if not isinstance(metadata, MixedMetadata):
        starts = metadata.query_start_loc.tolist()
        is_short = [stop - start == 1 for start, stop in pairwise(starts)]
        return starts, metadata.seq_lens.tolist(), is_short
    starts, seq_lens = list(metadata.query_starts), list(metadata.host_seq_lens)
    if (len(starts), len(seq_lens)) != (num_seqs + 1, num_seqs):
        raise ValueError(
            f"seq_lens has {num_seqs} sequences, host_seq_lens {len(seq_lens)} and query_starts "
            f"{len(starts)} borders: they contradict each other"
        )
    return starts, seq_lens, [row < metadata.num_short for row in range(num_seqs)]


def _spans(
    block_ids: torch.Tensor, query_len: int, seq_len: int, block_size: int
) -> Iterator[KeySpan]:
    """The history in spans of `KEY_TILE`, then the query's own keys in spans of `QUERY_TILE`."""
    history = seq_len - query_len
    borders = [*range(0, history, KEY_TILE), *range(history, seq_len, QUERY_TILE), seq_len]
    tiles = [slice(i, min(i + QUERY_TILE, query_len)) for i in range(0, query_len, QUERY_TILE)]
    for start, stop in pairwise(borders):
        yield KeySpan(
            block_ids=block_ids[start // block_size : -(-stop // block_size)],
            offset=start % block_size,
            num_keys=stop - start,
            query_tiles=[tile for tile in tiles if history + tile.stop > start],
            is_diagonal=start >= history,
        )


# -- attention over spans of keys


def _attend_spans(
    output: torch.Tensor,  # [query_len, num_heads, head_dim], written
    query: torch.Tensor,  # the same
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    chunk: SpannedChunk,
    plan: MixedPlan,
    scale: float,
) -> None:
    query_len, _, head_dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    # [query_len, num_kv_heads, heads that share keys, head_dim]
    output = output.view(query_len, key_cache.shape[2], -1, head_dim)
    query = query.view(output.shape).to(wide)
    result = None
    for span in chunk.spans:
        keys, values = plan.gather(key_cache, value_cache, span.block_ids)
        own = slice(span.offset, span.offset + span.num_keys)
        keys, values = keys[own].to(wide), values[own].to(wide)
        for i, tile in enumerate(span.query_tiles):
            is_causal = span.is_diagonal and i == 0
            part = _attend_tile(query[tile], keys, values, scale, is_causal)
            if result is not None:
                result.merge(tile, part)
            elif len(part.output) == query_len:
                result = part
            else:
                result = Partial.of_nothing(query)
                result.merge(tile, part)
    assert result is not None, "a chunk attends to itself at least"
    output.copy_(result.output)


@dataclass(slots=True, eq=False)
class Partial:
    """Attention to some of the keys, in float32 or float64."""

    output: torch.Tensor  # [query_len, num_kv_heads, heads that share keys, head_dim]
    lse: torch.Tensor  # [query_len, num_kv_heads, the same, 1], log of the sum of exp(score)

    @classmethod
    def of_nothing(cls, query: torch.Tensor) -> Partial:
        return cls(torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -math.inf))

    def merge(self, tile: slice, other: Partial) -> None:
        """Put the keys of `other` to those that a tile of queries has seen so far.

        Each side weighs exp(its lse); its share of both is a sigmoid of the difference.
        """
        output, lse = self.output[tile], self.lse[tile]
        output.lerp_(other.output, torch.sigmoid(other.lse - lse))
        torch.logaddexp(lse, other.lse, out=lse)


def _attend_tile(
    query: torch.Tensor,  # [query_len, num_kv_heads, heads that share keys, head_dim]
    keys: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    values: torch.Tensor,  # the same
    scale: float,
    is_causal: bool,  # query token i sees keys 0 to i; there are as many of both
) -> Partial:
    query = query.permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1)
    # [num_kv_heads, heads that share keys, query_len or num_keys, head_dim]
    if FUSED_ATTENTION is not None and query.device.type == "cpu":
        output, lse = FUSED_ATTENTION(query, keys, values, 0.0, is_causal, scale=scale)
    else:
        scores = (query @ keys.mT).mul_(scale)
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
            scores.masked_fill_(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        output = scores.sub_(lse[..., None]).exp_() @ values
    return Partial(output.permute(2, 0, 1, 3), lse.permute(2, 0, 1)[..., None])
