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
from paged_attention import AttentionMetadata


def compose_windows(
    compose: Callable[[PagedRunnerState, Queries, int], StepLayout],
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
    shifted = {}  # by group: where its arrays are, and its other fields
    for number, window in enumerate(windows):
        if window is not None:
            skipped = np.maximum(starts - window + 1, 0) // block_size  # blocks
            seq_lens = starts + lens - skipped * block_size
            columns = skipped[:, None] + np.arange(-(-seq_lens.max() // block_size))
            tables = state.block_tables[number]
            columns = columns.clip(max=tables.shape[1] - 1)
            fields = {
                "max_seq_len": int(seq_lens.max()),
                "window": window,
                "host_seq_lens": seq_lens.tolist(),
                "skipped": (skipped * block_size).tolist(),
            }
            shifted[number] = len(arrays), fields
            arrays += [seq_lens, tables[rows[:, None], columns]]

    def compose_both(tensors: Sequence[Tensor]) -> ComposedBatch:
        batch = layout.compose(tensors[: len(layout.arrays)])
        attention = list(batch.attention)
        for number, (at, fields) in shifted.items():
            attention[number] = replace(
                attention[number], seq_lens=tensors[at], block_tables=tensors[at + 1], **fields
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
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens - first * block_size,
        block_tables=tables.gather(1, columns.clamp(max=tables.shape[1] - 1)),
        slot_mapping=metadata.slot_mapping,
        max_query_len=1,
        max_seq_len=longest,
        window=window,
    )
