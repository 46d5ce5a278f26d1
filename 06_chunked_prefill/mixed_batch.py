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
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout, compose_in_order
from paged_attention import AttentionMetadata, HostMetadata


@dataclass(slots=True, eq=False)
class MixedMetadata(HostMetadata):
    """Chapter 2's metadata of a batch in which short queries come first."""

    num_short: int = 0  # sequences at the front with few query tokens


def short_first(query_lens: np.ndarray, decode_threshold: int = 1) -> tuple[np.ndarray, int]:
    """Return an order in which queries of up to `decode_threshold` tokens come first, and how many
    these are. The order is otherwise unchanged."""
    is_long = np.asarray(query_lens) > decode_threshold
    return np.argsort(is_long, kind="stable"), int(np.count_nonzero(~is_long))


def compose(
    state: PagedRunnerState, queries: Queries, block_size: int, decode_threshold: int = 1
) -> StepLayout:
    """Lay out a step of at least one query, each of at least one token. The batch's `attention`
    holds `MixedMetadata`."""
    order, num_short = short_first(queries.num_tokens, decode_threshold)
    queries = Queries._make(column[order] for column in queries)
    layout = compose_in_order(state, queries, block_size)

    def compose_mixed(tensors: Sequence[torch.Tensor]) -> ComposedBatch:
        batch = layout.compose(tensors)
        query_starts = np.append(0, queries.num_tokens.cumsum()).tolist()
        seq_lens = (queries.starts + queries.num_tokens).tolist()
        host = {"query_starts": query_starts, "host_seq_lens": seq_lens, "num_short": num_short}
        names = [f.name for f in fields(AttentionMetadata)]
        given = [{name: getattr(m, name) for name in names} for m in batch.attention]
        attention = tuple(MixedMetadata(**values, **host) for values in given)
        return replace(batch, attention=attention)

    return StepLayout(order, layout.arrays, compose_mixed)
