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
end are replaced by its last one, with the weight 0 (0 * NaN would be NaN).

Invariant: the output of a token is a function of its query and of the keys and values up to it. It
holds where `batch_invariance.py` finds that matrix products preserve it. Sources: FlashAttention-2,
arXiv 2307.08691; Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025).

See 06_chunked_prefill/beyond/BATCH_INVARIANCE.md"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    first_span: int  # start of the first span that is seen, possibly before the table

    @property
    def num_spans(self) -> int:
        """Spans up to the key of its own last token."""
        return -(-(self.first_position + self.num_tokens - self.first_span) // KEY_TILE)


class Span(NamedTuple):
    """The work of a group for one span of keys. Chunks with few spans come last."""

    first_row: int  # rows before it see none of these keys
    slots: Tensor  # [num_chunks, KEY_TILE] int64
    hidden: Tensor | None  # [num_chunks, 1, rows from first_row, KEY_TILE] bool; None: all are seen


class Group:
    """Chunks that are attended together: query rows `[num_chunks, num_kv_heads, num_rows,
    head_dim]`. Computed once per step, for all layers."""

    def __init__(
        self,
        chunks: list[Chunk],
        num_rows: int,
        tables: Tensor,
        num_kv_heads: int,
        num_shared: int,
        block_size: int,
        window: int | None,
    ) -> None:
        """Most spans first. `num_shared` query heads share a KV head."""
        columns = torch.tensor(chunks)[:, :, None]  # [num_chunks, 6, 1]
        sequence, first_token, num_tokens, first_position, seq_len, span = columns.unbind(1)
        # Rows without a token repeat the last one, which gives the same result again.
        row = torch.arange(num_rows)
        row_token = (row // num_shared).minimum(num_tokens - 1)
        positions = first_position + row_token  # [num_chunks, num_rows]
        heads = torch.arange(num_kv_heads)[:, None] * num_shared + row % num_shared
        # Index of tokens and heads: of `[num_tokens, num_heads, head_dim]` it selects rows.
        self.rows = (first_token + row_token)[:, None], heads
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
            keys = keys.clamp(min=0).minimum(seq_len[:n] - 1)  # the others are hidden
            slots = tables[sequence[:n], keys // block_size] * block_size + keys % block_size
            mask = hidden[:, None] if hidden.any() else None
            self.spans.append(Span(first, slots.long(), mask))


class InvariantPlan(PagedPlan):
    """All queries, long and short, in groups of chunks."""

    def make_groups(self, short: np.ndarray, key_cache: Tensor) -> list[DecodeGroup]:
        """Set `chunk_groups`, and leave no group to chapter 2's plan."""
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        self.wide = wide_dtype(key_cache.dtype)
        num_shared = self.num_heads // num_kv_heads
        by_rows: dict[int, list[Chunk]] = {}
        for row in short.tolist():
            for chunk in self.chunks_of(row, max_tokens=max(1, CHUNK_ROWS // num_shared)):
                num_rows = -(-chunk.num_tokens * num_shared // ROW_TILE) * ROW_TILE
                by_rows.setdefault(num_rows, []).append(chunk)
        span_bytes = KEY_TILE * num_kv_heads * head_dim * self.wide.itemsize
        self.chunk_groups: list[Group] = []
        for num_rows, chunks in by_rows.items():
            chunks.sort(key=lambda chunk: -chunk.num_spans)
            max_chunks = max(1, min(GROUP_KEY_BYTES // span_bytes, CHUNK_ROWS // num_rows))
            for i in range(0, len(chunks), max_chunks):
                group = Group(
                    chunks[i : i + max_chunks],
                    num_rows=num_rows,
                    tables=self.metadata.block_tables,
                    num_kv_heads=num_kv_heads,
                    num_shared=num_shared,
                    block_size=block_size,
                    window=self.window,
                )
                self.chunk_groups.append(group)
        return []

    def chunks_of(self, row: int, max_tokens: int) -> Iterator[Chunk]:
        """Split the queries of one sequence into chunks. With a window there may be positions
        before the table; spans are still counted from 0."""
        first_token, stop_token = self.starts[row : row + 2].tolist()
        seq_len = int(self.seq_lens[row])
        skipped = self.metadata.skipped[row] if self.metadata.skipped else 0
        for token in range(first_token, stop_token, max_tokens):
            position = seq_len - stop_token + token
            seen = 0 if self.window is None else max(position - self.window + 1, 0)
            yield Chunk(
                sequence=row,
                first_token=token,
                num_tokens=min(max_tokens, stop_token - token),
                first_position=position,
                seq_len=seq_len,
                first_span=(seen + skipped) // KEY_TILE * KEY_TILE - skipped,
            )

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        output = torch.zeros_like(query)
        caches = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        for group in self.chunk_groups:
            rows = query[group.rows].to(self.wide).mul_(scale)
            attended = torch.zeros_like(rows)
            # Not -inf, because -inf - -inf is NaN: a window's first span may be masked as a whole.
            highest = torch.full_like(rows[..., :1], torch.finfo(rows.dtype).min)
            total = torch.zeros_like(highest)
            for span in group.spans:
                keys, values = (
                    cache[span.slots].transpose(1, 2).to(self.wide).contiguous() for cache in caches
                )
                seeing = slice(len(span.slots)), slice(None), slice(span.first_row, None)
                add_span(
                    span,
                    rows[seeing],
                    keys,
                    values,
                    output=attended[seeing],
                    highest=highest[seeing],
                    total=total[seeing],
                )
            output[group.rows] = attended.div_(total).to(output.dtype)
        return output


def add_span(
    span: Span,
    rows: Tensor,  # [num_chunks, num_kv_heads, num_rows, head_dim], scaled
    keys: Tensor,  # [num_chunks, num_kv_heads, KEY_TILE, head_dim]
    values: Tensor,  # the same
    output: Tensor,  # like rows: the values so far, each weighted with exp(score - highest)
    highest: Tensor,  # [num_chunks, num_kv_heads, num_rows, 1], score so far
    total: Tensor,  # the same: the sum of the weights so far
) -> None:
    """Online softmax: add a span of keys to the last three, in place."""
    scores = rows @ keys.mT
    if span.hidden is not None:
        scores.masked_fill_(span.hidden, -math.inf)
    now = scores.amax(-1, keepdim=True).maximum(highest)
    weights = scores.sub_(now).exp_()
    shrink = highest.sub(now).exp_()
    total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
    output.mul_(shrink).add_(weights @ values)
    highest.copy_(now)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class InvariantAttentionBackend(TorchAttentionBackend):
    """An `AttentionBackend` for a CPU, for batches of any layout."""

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> InvariantPlan:
        return InvariantPlan(metadata, num_heads, key_cache, self)

    def is_short(self, plan: PagedPlan) -> np.ndarray:
        return np.ones(len(plan.seq_lens), dtype=bool)
