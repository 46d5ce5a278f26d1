"""Attention with a window: each query sees its own key and the `window - 1` before it.

    window 4, blocks of 2      keys  | 0 1 | 2 3 | 4 5 | 6 7 |
    query 5 (a decode at 5)            . .   x x   x x            sees 2 to 5
    queries 5 to 7 (a chunk)           . .   x x   x x   x x      the first 2 to 5, the last 4 to 7

Blocks before the first query's window are not read, and the KV memory may have freed them. So a
sequence is laid out as if it began with the first visible block: a shorter table, a shorter
sequence, and a mask at its left end. The cost of attention follows the window, not the length.

There is one layout for all backends. `PagedPlan` masks the left end and splits long queries into
tiles. The Triton kernels have the window as a constant; compiled decodes hide slots of their first
block.

Invariant: no block before the first query's window is read, not even into a product with zero,
because it may hold another request's KV, or NaN. Earlier slots in the first visible block are the
sequence's own, and hidden by a mask.

vLLM and FlashAttention have the window as an argument of the kernel. Sources: Longformer, arXiv
2004.05150; Mistral 7B, arXiv 2310.06825.

See 02_paged_kv/beyond/WINDOWS.md"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout
from paged_attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    TorchAttentionBackend,
)

Compose = Callable[[PagedRunnerState, Queries, int], StepLayout]


def compose_windows(
    compose: Compose,
    windows: Sequence[int | None],
    state: PagedRunnerState,
    queries: Queries,
    block_size: int,
) -> StepLayout:
    """Lay out a step as `compose` does. In groups of layers that have one of `windows`, each
    sequence begins with the first block that a query sees."""
    layout = compose(state, queries, block_size)
    rows, starts, lens, _ = (column[layout.order] for column in queries)
    arrays = [*layout.arrays]
    made = []
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

    def compose_both(tensors: Sequence[Tensor]) -> ComposedBatch:
        batch = layout.compose(tensors[: len(layout.arrays)])
        attention = list(batch.attention)
        for number, window, at, host_seq_lens, skipped in made:
            attention[number] = replace(
                attention[number],
                seq_lens=tensors[at],
                block_tables=tensors[at + 1],
                max_seq_len=max(host_seq_lens),
                window=window,
                host_seq_lens=host_seq_lens,
                skipped=skipped,
            )
        return replace(batch, attention=tuple(attention))

    return StepLayout(layout.order, arrays, compose_both)


def window_of_decodes(
    metadata: AttentionMetadata, window: int, block_size: int
) -> AttentionMetadata:
    """The window of a step of decodes, by tensors alone: it is part of a graph, and reads nothing
    on the host. `metadata` has whole tables and lengths."""
    first = (metadata.seq_lens - window).clamp(min=0) // block_size  # the first visible block
    tables = metadata.block_tables
    longest = min(metadata.max_seq_len, window + block_size - 1)
    columns = torch.arange(-(-longest // block_size), device=tables.device) + first[:, None]
    return AttentionMetadata(
        metadata.query_start_loc,
        metadata.seq_lens - first * block_size,
        tables.gather(1, columns.clamp(max=tables.shape[1] - 1)),
        metadata.slot_mapping,
        1,
        longest,
        window,
    )


class WindowBackend:
    """An `AttentionBackend`: windows are computed by chapter 2, everything else by `others`, which
    may know no windows."""

    def __init__(self, others: AttentionBackend) -> None:
        self.others = others

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> AttentionPlan:
        backend = self.others if metadata.window is None else TorchAttentionBackend()
        return backend.plan(metadata, num_heads, key_cache)
