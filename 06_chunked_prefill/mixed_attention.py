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
`mixed_attention_triton.py`. Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from mixed_batch import MixedMetadata
from paged_attention import (
    SHORT_QUERIES,
    AttentionMetadata,
    DecodeGroup,
    attend_group,
    check_lengths,
    make_decode_group,
    max_group_slots,
    split_by_length,
    write_kv,
)

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


@dataclass(slots=True, eq=False)
class MixedPlan:
    """What all layers of a step share."""

    groups: list[DecodeGroup]
    chunks: list[SpannedChunk]
    dtype: torch.dtype
    num_heads: int
    key_buffer: torch.Tensor  # [most blocks gathered at once, block_size, num_kv_heads, head_dim]
    value_buffer: torch.Tensor

    def fits(self, query: torch.Tensor, key_cache: torch.Tensor) -> bool:
        is_same_query = self.dtype == query.dtype and self.num_heads == query.shape[1]
        return is_same_query and self.key_buffer.shape[1:] == key_cache.shape[1:]

    def gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, block_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [num_slots, num_kv_heads, head_dim], in the buffers
        n = len(block_ids)
        keys = torch.index_select(key_cache, 0, block_ids, out=self.key_buffer[:n])
        values = torch.index_select(value_cache, 0, block_ids, out=self.value_buffer[:n])
        return keys.flatten(0, 1), values.flatten(0, 1)


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
    plan = metadata._plan
    if not isinstance(plan, MixedPlan) or not plan.fits(query, key_cache):
        plan = metadata._plan = _plan_step(metadata, query, key_cache)
    output = torch.zeros_like(query)
    for group in plan.groups:
        keys, values = plan.gather(key_cache, value_cache, group.block_ids)
        output[group.tokens] = attend_group(query[group.tokens], keys, values, group, scale)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        _attend_spans(output[rows], query[rows], key_cache, value_cache, chunk, plan, scale)
    return output


class MixedAttentionBackend:
    """An `AttentionBackend` in PyTorch, for any device."""

    write_kv = staticmethod(write_kv)
    attend = staticmethod(mixed_attention)


# -- planning a step, on the host


def _plan_step(
    metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor
) -> MixedPlan:
    block_size, max_slots = key_cache.shape[1], max_group_slots(key_cache)
    starts, seq_lens, is_short = _host_view(metadata)
    chunks = []
    short_rows: dict[int, list[int]] = {}  # by the number of query tokens, rounded up
    for row, seq_len in enumerate(seq_lens):
        query_len = starts[row + 1] - starts[row]
        if query_len == 0:
            continue
        check_lengths(row, query_len, seq_len, metadata.block_tables, block_size)
        if is_short[row] and seq_len <= max_slots:
            rounded = next((n for n in SHORT_QUERIES if query_len <= n), query_len)
            short_rows.setdefault(rounded, []).append(row)
        else:
            spans = list(_spans(metadata.block_tables[row], query_len, seq_len, block_size))
            chunks.append(SpannedChunk(starts[row], starts[row + 1], spans))
    groups = [
        make_decode_group(rows, starts, seq_lens, metadata.block_tables, query, key_cache)
        for short in short_rows.values()
        for rows in split_by_length(short, seq_lens, max_slots)
    ]
    gathered = [*groups, *(span for chunk in chunks for span in chunk.spans)]
    most_blocks = max((len(part.block_ids) for part in gathered), default=0)
    buffers = key_cache.new_empty(2, most_blocks, *key_cache.shape[1:])
    return MixedPlan(groups, chunks, query.dtype, query.shape[1], *buffers)


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
