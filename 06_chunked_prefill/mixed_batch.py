"""One batch of decodes and chunks: the order of the requests, and which rows yield logits.

The tokens of a step's requests are concatenated, requests with few tokens first:

    tokens            | B | C | D d d | A: chunk of 4 | E: chunk of 5 |
    query_start_loc   0   1   2       5               9               14
    short             <-- 3 requests -->                               decode_threshold = 3
    logit rows          x   x   x x x               x               .

Decodes (and the draft tokens after them, chapter 5) are short queries against long histories: many
of them are attended together. Chunks are long queries: one keeps the hardware busy. With the short
queries first, attention can treat the two sides differently: on a GPU, with two launches.

E's prompt continues in the next step, so its last row predicts a token that the prompt already has:
no logits.

Invariants: every query token of every request occurs once, at its own position; the order affects
only speed, and no token depends on it.

vLLM reorders its batch like this (`reorder_batch_to_split_decodes_and_prefills`); SGLang has
decodes and chunks in separate passes unless mixing is enabled.

See 06_chunked_prefill/README.md#decodes-first-chunks-after"""

from __future__ import annotations

import numpy as np

from batch_layout import PagedRunnerState, Queries, StepLayout, compose_in_order


def short_first(query_lens: np.ndarray, decode_threshold: int = 1) -> np.ndarray:
    """Return an order in which queries of up to `decode_threshold` tokens come first. The order is
    otherwise unchanged."""
    return np.argsort(np.asarray(query_lens) > decode_threshold, kind="stable")


def compose(
    state: PagedRunnerState, queries: Queries, block_size: int, decode_threshold: int = 1
) -> StepLayout:
    """Lay out a step of at least one query, each of at least one token."""
    order = short_first(queries.num_tokens, decode_threshold)
    queries = Queries._make(column[order] for column in queries)
    return compose_in_order(state, queries, block_size)._replace(order=order)
