"""One batch of decodes and chunks: the order of the requests, and which rows yield logits.

The tokens of a step's requests are concatenated, requests with few tokens first:

    tokens            | B | C | D d d | A: chunk of 4 | E: chunk of 5 |
    query_start_loc   0   1   2       5               9               14
    short             <-- 3 requests -->                               decode_threshold = 3
    logit rows          x   x   x x x               x               .

Decodes (and the draft tokens after them, chapter 5) are short queries against long histories: many
of them are attended together. Chunks are long queries: one keeps the hardware busy. With the short
queries first, the border is one number, and attention can treat the two sides differently.

E's prompt continues in the next step, so its last row predicts a token that the prompt already has:
no logits.

Invariants: every query token of every request occurs once, at its own position; the order affects
only speed, and no token depends on it.

vLLM reorders its batch like this (`reorder_batch_to_split_decodes_and_prefills`); SGLang has
decodes and chunks in separate passes unless mixing is enabled.

See 06_chunked_prefill/README.md#decodes-first-chunks-after"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout, compose_in_order


def short_first(query_lens: np.ndarray, decode_threshold: int = 1) -> tuple[np.ndarray, int]:
    """Return an order in which queries of up to `decode_threshold` tokens come first, and how many
    these are. The order is otherwise unchanged."""
    is_long = np.asarray(query_lens) > decode_threshold
    return np.argsort(is_long, kind="stable"), int(np.count_nonzero(~is_long))


def compose(
    state: PagedRunnerState, queries: Queries, block_size: int, decode_threshold: int = 1
) -> StepLayout:
    """Lay out a step of at least one query, each of at least one token. The metadata in the batch's
    `attention` has `num_short`."""
    order, num_short = short_first(queries.num_tokens, decode_threshold)
    queries = Queries._make(column[order] for column in queries)
    layout = compose_in_order(state, queries, block_size)

    def compose_mixed(tensors: Sequence[torch.Tensor]) -> ComposedBatch:
        batch = layout.compose(tensors)
        attention = tuple(replace(group, num_short=num_short) for group in batch.attention)
        return replace(batch, attention=attention)

    return StepLayout(order, layout.arrays, compose_mixed)
