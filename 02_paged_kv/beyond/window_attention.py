"""Attention with a window: each query sees its own key and the `window - 1` before it.

    window 4, blocks of 2      keys  | 0 1 | 2 3 | 4 5 | 6 7 |
    query 5 (a decode at 5)            . .   x x   x x            sees 2 to 5
    queries 5 to 7 (a chunk)           . .   x x   x x   x x      the first 2 to 5, the last 4 to 7

Blocks before the first query's window are not read, and the KV memory may have freed them. So a
sequence is laid out as if it began with the first visible block: a shorter table, a shorter
sequence, and a mask at its left end. The cost of attention follows the window, not the length.

There is one layout for all backends, and in PyTorch one rule: decodes in chapter 2's groups, long
queries tile by tile. The Triton kernels have the window as a constant; compiled decodes hide slots
of their first block.

Invariant: no block before the first query's window is read, not even into a product with zero,
because it may hold another request's KV, or NaN. Earlier slots in the first visible block are the
sequence's own, and hidden by a mask.

vLLM and FlashAttention have the window as an argument of the kernel. Sources: Longformer, arXiv
2004.05150; Mistral 7B, arXiv 2310.06825.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_plan import DecodeGroup, group_short_queries, is_short_query, max_group_slots
from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout
from paged_attention import (
    QUERY_TILE,
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    Gather,
    LongQuery,
    PagedPlan,
    repeat_for,
)


@dataclass(slots=True, eq=False)
class WindowMetadata(AttentionMetadata):
    """Metadata of layers with a window. Each sequence begins with the first block that a query
    sees."""

    window: int = 0
    query_starts: Sequence[int] = ()  # query_start_loc, on the host
    host_seq_lens: Sequence[int] = ()  # seq_lens
    skipped: Sequence[int] = ()  # positions of each sequence before its first block


Compose = Callable[[PagedRunnerState, Queries, int], StepLayout]


def compose_windows(
    compose: Compose,
    windows: Sequence[int | None],
    state: PagedRunnerState,
    queries: Queries,
    block_size: int,
) -> StepLayout:
    """Lay out a step as `compose` does, with `WindowMetadata` for the groups of layers that have
    one of `windows`."""
    layout = compose(state, queries, block_size)
    rows, starts, lens, _ = (column[layout.order] for column in queries)
    query_starts = np.append(0, lens.cumsum()).tolist()
    arrays, made = [*layout.arrays], []
    for number, window in enumerate(windows):
        if window is not None:
            first = np.maximum(starts - window + 1, 0) // block_size  # the first visible block
            seq_lens = starts + lens - first * block_size
            columns = first[:, None] + np.arange(-(-seq_lens.max() // block_size))
            tables = state.groups[number].block_tables
            columns = columns.clip(max=tables.shape[1] - 1)
            skipped = (first * block_size).tolist()
            made.append((number, window, len(arrays), seq_lens.tolist(), skipped))
            arrays += [seq_lens, tables[rows[:, None], columns]]

    def compose_both(*tensors: Tensor) -> ComposedBatch:
        batch = layout.compose(*tensors[: len(layout.arrays)])
        attention = list(batch.attention)
        for number, window, at, host_seq_lens, skipped in made:
            whole = attention[number]
            attention[number] = WindowMetadata(
                whole.query_start_loc,
                tensors[at],
                tensors[at + 1],
                whole.slot_mapping,
                whole.max_query_len,
                max(host_seq_lens),
                window,
                query_starts,
                host_seq_lens,
                skipped,
            )
        return replace(batch, attention=tuple(attention))

    return StepLayout(layout.order, arrays, compose_both)


def window_of_decodes(metadata: AttentionMetadata, window: int, block_size: int) -> WindowMetadata:
    """The window of a step of decodes, by tensors alone: it is part of a graph, and reads nothing
    on the host. `metadata` has whole tables and lengths."""
    first = (metadata.seq_lens - window).clamp(min=0) // block_size  # the first visible block
    tables, longest = metadata.block_tables, min(metadata.max_seq_len, window + block_size - 1)
    columns = torch.arange(-(-longest // block_size), device=tables.device) + first[:, None]
    return WindowMetadata(
        metadata.query_start_loc,
        metadata.seq_lens - first * block_size,
        tables.gather(1, columns.clamp(max=tables.shape[1] - 1)),
        metadata.slot_mapping,
        1,
        longest,
        window,
    )


class WindowDecodeGroup(DecodeGroup):
    """Chapter 2's group, with a mask that also hides keys before the window."""

    def __init__(
        self,
        window: int,
        rows: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: Tensor,
        num_heads: int,
        key_cache: Tensor,
    ) -> None:
        super().__init__(rows, starts, seq_lens, block_tables, num_heads, key_cache)
        lens = np.stack([starts[rows + 1] - starts[rows], seq_lens[rows]])
        num_queries, seq_len = torch.from_numpy(lens)[:, :, None]  # each [n, 1]
        query_len = len(self.tokens) // len(rows)  # a sequence with fewer repeats its first
        positions = seq_len - torch.arange(query_len, 0, -1).minimum(num_queries)
        hidden = torch.arange(self.num_keys) <= positions[:, :, None] - window
        if hidden.any():
            hidden = hidden.repeat(1, num_heads // key_cache.shape[2], 1)[:, None]
            mask = torch.zeros(hidden.shape, dtype=key_cache.dtype).masked_fill_(hidden, -math.inf)
            mask = mask.to(key_cache.device)
            self.mask = mask if self.mask is None else self.mask + mask


class WindowPlan(PagedPlan):
    def __init__(self, metadata: WindowMetadata, num_heads: int, key_cache: Tensor) -> None:
        self.window = metadata.window
        super().__init__(metadata, num_heads, key_cache)

    def lengths(
        self, metadata: AttentionMetadata, key_cache: Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert isinstance(metadata, WindowMetadata)
        starts = np.asarray(metadata.query_starts)
        return starts, np.asarray(metadata.host_seq_lens), is_short_query(np.diff(starts))

    def make_groups(
        self,
        short: np.ndarray,
        query_lens: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        tables: Tensor,
        key_cache: Tensor,
    ) -> list[DecodeGroup]:
        groups = group_short_queries(short, query_lens, seq_lens, max_group_slots(key_cache))
        step = starts, seq_lens, tables, self.num_heads, key_cache
        return [WindowDecodeGroup(self.window, rows, *step) for rows in groups]

    def attend_long(self, query: Tensor, long: LongQuery, gather: Gather, scale: float) -> Tensor:
        tiles, size = [], self.key_buffer.shape[1]
        for start in range(long.seq_len - long.query_len, long.seq_len, QUERY_TILE):
            stop = min(start + QUERY_TILE, long.seq_len)
            first = max(start - self.window + 1, 0) // size
            gathered = gather(long.block_ids[first : -(-stop // size)])
            rows = slice(start - long.seq_len, stop - long.seq_len or None)
            query_tile = query[:, :, rows]
            keys, values = (repeat_for(query_tile, t[: stop - first * size]) for t in gathered)
            distance = torch.arange(start, stop)[:, None] - torch.arange(first * size, stop)
            hidden = (distance < 0) | (distance >= self.window)
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -math.inf)
            seen = query_tile, keys, values, mask.to(query.device)
            tiles.append(scaled_dot_product_attention(*seen, scale=scale))
        return torch.cat(tiles, dim=2)


class WindowBackend:
    """An `AttentionBackend`: windows are handled here, everything else by `others`."""

    def __init__(self, others: AttentionBackend) -> None:
        self.others = others

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> AttentionPlan:
        if isinstance(metadata, WindowMetadata):
            return WindowPlan(metadata, num_heads, key_cache)
        return self.others.plan(metadata, num_heads, key_cache)
