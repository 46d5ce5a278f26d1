"""Attention whose results are bitwise independent of the batch, and of how a prompt was split.

A sum of floating-point numbers depends on the order of its terms. So here the order depends only on
the sequence. Its keys are divided into spans of `KEY_TILE` from position 0, for every query:

    a sequence of 300       | span 0: 0 - 127 | span 1: 128 - 255 | span 2: 256 - 299, masked |
    its token 200, decoded  |     all keys    |  128 - 200, rest masked                       |
    the same, in a chunk    |     all keys    |  128 - 200, rest masked | masked              |

A span's scores and its weighted values are two matrix products whose rows are (token, query head)
pairs. The span always has `KEY_TILE` keys, and rows come in whole tiles of `ROW_TILE`: then a row
of the product is bitwise the same at every position, next to any other rows. Spans are added from
the first to the last, with the online softmax of FlashAttention-2. A masked key has the weight 0,
and a span that is masked as a whole multiplies the sum so far by 1 and adds 0, which changes
nothing.

    chunk    up to `CHUNK_ROWS` rows of a sequence: a decode, drafts, a prompt chunk or part of one
    group    chunks with equally many tiles, in one product; the grouping changes no bit

A window masks keys at the left as well; spans before it are skipped. Spans before a row's own
window have the weight 0 and change nothing.

Sums are float32 for bfloat16 too. Memory of other sequences is not read: keys after a sequence's
end are replaced by its first one, with the weight 0 (0 * NaN would be NaN).

Invariant: the output of a token is a function of its query and of the keys and values up to it. It
holds where `batch_invariance.py` finds that matrix products preserve it. Sources: FlashAttention-2,
arXiv 2307.08691; Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025).

See 06_chunked_prefill/beyond/BATCH_INVARIANCE.md"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_plan import DecodeGroup
from paged_attention import AttentionMetadata, PagedPlan, TorchAttentionBackend

KEY_TILE = 128
ROW_TILE = 8
CHUNK_ROWS = 512  # a whole number of tiles
# Bytes of keys, in the dtype of the sums, that a group reads at a time: they stay in the
# processor's cache.
GROUP_KEY_BYTES = 2 << 20


class Chunk(NamedTuple):
    """Up to `CHUNK_ROWS` query rows of one sequence. Positions are counted from the first block of
    the table; with a window, that is the first block that a query of the sequence sees."""

    sequence: int
    first_token: int  # in the batch
    num_tokens: int
    first_position: int
    seq_len: int
    first_seen: int  # key of its first token
    first_span: int  # start of the span of that key, possibly before the table

    @property
    def num_spans(self) -> int:
        """Spans up to the key of its own last token."""
        return -(-(self.first_position + self.num_tokens - self.first_span) // KEY_TILE)


class Span(NamedTuple):
    """The work of a group for one span of keys. Chunks with few spans come last."""

    num_chunks: int
    first_row: int  # rows before it see none of these keys
    slots: Tensor  # [num_chunks * KEY_TILE] int64
    hidden: Tensor | None  # [num_chunks, 1, rows from first_row, KEY_TILE] bool; None: all are seen


class Group:
    """Chunks that are attended together: query rows `[num_chunks, num_kv_heads, num_rows,
    head_dim]`. Computed once per step, for all layers."""

    def __init__(
        self,
        chunks: list[Chunk],
        num_rows: int,
        tables: Tensor,
        num_shared: int,
        block_size: int,
        window: int | None,
    ) -> None:
        """Most spans first. `num_shared` query heads share a KV head."""
        self.num_rows = num_rows
        self.num_shared = num_shared
        columns = torch.tensor(chunks)[:, :, None]  # [num_chunks, 7, 1]
        sequence, first_token, num_tokens, first_position, seq_len, seen, span = columns.unbind(1)
        # Missing rows and tokens repeat the last one.
        self.max_tokens = max(chunk.num_tokens for chunk in chunks)
        token = torch.arange(self.max_tokens).minimum(num_tokens - 1)
        self.tokens = (first_token + token).flatten()  # [num_chunks * max_tokens] int64
        row_token = (torch.arange(num_rows) // num_shared).minimum(num_tokens - 1)
        positions = first_position + row_token  # [num_chunks, num_rows]
        self.spans: list[Span] = []
        for start in range(0, chunks[0].num_spans * KEY_TILE, KEY_TILE):
            n = sum(chunk.num_spans * KEY_TILE > start for chunk in chunks)
            keys = span[:n] + torch.arange(start, start + KEY_TILE)  # [n, KEY_TILE]
            first = min(p.first_span + start - p.first_position for p in chunks[:n]) * num_shared
            first = max(first, 0) // ROW_TILE * ROW_TILE
            distance = positions[:n, first:, None] - keys[:, None]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            keys = torch.where((keys >= seen[:n]) & (keys < seq_len[:n]), keys, seen[:n])
            slots = tables[sequence[:n], keys // block_size] * block_size + keys % block_size
            mask = hidden[:, None] if hidden.any() else None
            self.spans.append(Span(n, first, slots.long().flatten(), mask))

    def rows_of(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """[num_chunks, num_kv_heads, num_rows, head_dim] of [num_tokens, num_heads, head_dim]."""
        rows = query[self.tokens].view(
            -1, self.max_tokens, num_kv_heads, self.num_shared, query.shape[2]
        )
        rows = rows.transpose(1, 2).flatten(2, 3)
        num_missing = self.num_rows - rows.shape[2]
        last = rows[:, :, -1:].expand(-1, -1, num_missing, -1)
        return torch.cat([rows, last], dim=2) if num_missing else rows.contiguous()

    def write(self, output: Tensor, rows: Tensor) -> None:
        """Write rows back to tokens, the inverse of `rows_of`. Duplicates are equal."""
        num_real = self.max_tokens * self.num_shared
        real_rows = rows[:, :, :num_real].unflatten(2, (self.max_tokens, self.num_shared))
        real_rows = real_rows.transpose(1, 2).reshape(-1, *output.shape[1:])
        output[self.tokens] = real_rows.to(output.dtype)


class InvariantPlan(PagedPlan):
    """All queries, long and short, in groups of chunks."""

    def make_groups(self, short: np.ndarray, key_cache: Tensor) -> list[DecodeGroup]:
        """Set `chunk_groups`, and leave no group to chapter 2's plan."""
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        self.num_kv_heads = num_kv_heads
        self.wide = wide_dtype(key_cache.dtype)
        num_shared = self.num_heads // num_kv_heads
        num_keys = GROUP_KEY_BYTES // (num_kv_heads * head_dim * self.wide.itemsize)
        self.chunk_groups: list[Group] = []
        metadata = self.metadata
        skipped = metadata.skipped or [0] * len(self.seq_lens)
        by_rows: dict[int, list[Chunk]] = {}
        for row in short.tolist():
            pieces = split_query(
                sequence=row,
                first_token=int(self.starts[row]),
                query_len=int(self.query_lens[row]),
                seq_len=int(self.seq_lens[row]),
                skipped=skipped[row],
                num_shared=num_shared,
                window=self.window,
            )
            for chunk in pieces:
                num_rows = -(-chunk.num_tokens * num_shared // ROW_TILE) * ROW_TILE
                by_rows.setdefault(num_rows, []).append(chunk)
        for num_rows, chunks in by_rows.items():
            chunks.sort(key=lambda chunk: -chunk.num_spans)
            max_chunks = max(1, min(num_keys // KEY_TILE, CHUNK_ROWS // num_rows))
            for i in range(0, len(chunks), max_chunks):
                group = Group(
                    chunks[i : i + max_chunks],
                    num_rows=num_rows,
                    tables=metadata.block_tables,
                    num_shared=num_shared,
                    block_size=block_size,
                    window=self.window,
                )
                self.chunk_groups.append(group)
        max_keys = max((len(g.spans[0].slots) for g in self.chunk_groups), default=0)
        self.gathered = key_cache.new_empty(max_keys, num_kv_heads, head_dim)
        self.buffers = self.gathered.new_empty(2, self.gathered.numel(), dtype=self.wide)
        return []

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        output = torch.zeros_like(query)
        caches = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        for group in self.chunk_groups:
            rows = group.rows_of(query, self.num_kv_heads).to(self.wide).mul_(scale)
            state = Softmax(rows)
            for span in group.spans:
                keys, values = (
                    self.read(cache, span, buffer)
                    for cache, buffer in zip(caches, self.buffers, strict=True)
                )
                state.take_in(span, keys, values)
            group.write(output, state.output.div_(state.total))
        return output

    def read(self, cache: Tensor, span: Span, buffer: Tensor) -> Tensor:
        """[num_chunks, num_kv_heads, KEY_TILE, head_dim] of a cache [num_slots, num_kv_heads,
        head_dim], in `buffer`."""
        found = torch.index_select(cache, 0, span.slots, out=self.gathered[: len(span.slots)])
        found = found.unflatten(0, (span.num_chunks, KEY_TILE)).transpose(1, 2)
        return buffer[: found.numel()].view(found.shape).copy_(found)


@dataclass(slots=True, init=False)
class Softmax:
    """Online softmax of query rows over one span of keys after another."""

    rows: Tensor  # [num_chunks, num_kv_heads, num_rows, head_dim], scaled
    output: Tensor  # the same shape: the values so far, each weighted with exp(score - highest)
    highest: Tensor  # [num_chunks, num_kv_heads, num_rows, 1], score so far
    total: Tensor  # the same: the sum of the weights so far

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.output = torch.zeros_like(rows)
        # Not -inf, because -inf - -inf is NaN: a window's first span may be masked as a whole.
        self.highest = torch.full_like(rows[..., :1], torch.finfo(rows.dtype).min)
        self.total = torch.zeros_like(self.highest)

    def take_in(self, span: Span, keys: Tensor, values: Tensor) -> None:
        rows, output, highest, total = (
            t[: span.num_chunks, :, span.first_row :]
            for t in (self.rows, self.output, self.highest, self.total)
        )
        scores = rows @ keys.mT
        if span.hidden is not None:
            scores.masked_fill_(span.hidden, -math.inf)
        now = scores.amax(-1, keepdim=True).maximum(highest)
        weights = scores.sub_(now).exp_()
        shrink = highest.sub(now).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        output.mul_(shrink).add_(weights @ values)
        highest.copy_(now)


def split_query(
    sequence: int,
    first_token: int,
    query_len: int,
    seq_len: int,
    skipped: int,
    num_shared: int,
    window: int | None,
) -> Iterator[Chunk]:
    """Split the queries of one sequence in a step into chunks. `skipped` positions are before the
    table; spans are still counted from 0."""
    max_tokens = max(1, CHUNK_ROWS // num_shared)
    for start in range(0, query_len, max_tokens):
        num_tokens = min(max_tokens, query_len - start)
        position = seq_len - query_len + start
        seen = 0 if window is None else max(position - window + 1, 0)
        span = (seen + skipped) // KEY_TILE * KEY_TILE - skipped
        yield Chunk(sequence, first_token + start, num_tokens, position, seq_len, seen, span)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class InvariantAttentionBackend(TorchAttentionBackend):
    """An `AttentionBackend` for a CPU, for batches of any layout."""

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> InvariantPlan:
        return InvariantPlan(metadata, num_heads, key_cache, self)

    def is_short(self, plan: PagedPlan) -> np.ndarray:
        return np.ones(len(plan.seq_lens), dtype=bool)
