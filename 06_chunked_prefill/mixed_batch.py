"""One batch of decodes and chunks: who stands where, and which rows yield logits.

The requests of a step lie end to end, those with few tokens first:

    tokens            | B | C | D d d | E: chunk of 4 | A: chunk of 6 |
    query_start_loc   0   1   2       5               9               15
    short             <-- 3 requests -->                               decode_threshold = 3
    logit rows          x   x   x x x               .               x

Decodes (and the guesses behind them, chapter 5) are short queries against long histories: many of
them are attended together, and each reads its own keys once for hardly any arithmetic. Chunks are
long queries: one is enough to keep the hardware busy. With the short ones in front the border is
one number, and an attention kernel can treat the two sides differently without sorting anything.

A request yields logits only in the step that computes the last token it has: E's prompt goes on, so
its last row is not a prediction of anything that is unknown, and nothing may be sampled there.

Invariants: every query token of every request occurs once, at its own position; the order is a
matter of speed only and no token depends on it.

vLLM reorders its batch so (`reorder_batch_to_split_decodes_and_prefills`); SGLang has decodes and
chunks in separate passes unless told to mix them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from batch_layout import BlockTables, lay_out
from paged_attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Query:
    """What a request computes in a step: positions `[start, start + num_tokens)`, of which the last
    `num_drafts` hold guesses."""

    row: int  # in the block tables
    start: int
    num_tokens: int
    num_known: int  # tokens that the request has, guesses not counted
    num_drafts: int = 0

    @property
    def num_logit_rows(self) -> int:
        """One for its last known token and one for each guess; none while its prompt goes on."""
        is_last = self.start + self.num_tokens - self.num_drafts == self.num_known
        return 1 + self.num_drafts if is_last else 0


@dataclass(slots=True, eq=False)
class MixedMetadata(AttentionMetadata):
    """Chapter 2's metadata, and what the host knows of it: nobody has to ask the device."""

    num_short: int = 0  # sequences in front that have few query tokens
    query_starts: Sequence[int] = ()  # query_start_loc
    host_seq_lens: Sequence[int] = ()  # seq_lens


@dataclass(frozen=True, slots=True)
class MixedBatch:
    order: list[int]  # the queries as they were given, in the order of the batch
    positions: torch.Tensor  # [num_tokens] int64
    attention: MixedMetadata
    query_start_loc: np.ndarray  # [num_queries + 1] int64
    logit_indices: np.ndarray  # [num_logit_rows] int64, into the tokens


def short_first(query_lens: Sequence[int], decode_threshold: int = 1) -> tuple[list[int], int]:
    """An order in which queries of up to `decode_threshold` tokens come first, and how many these
    are. Otherwise nobody changes places."""
    order = sorted(range(len(query_lens)), key=lambda i: query_lens[i] > decode_threshold)
    return order, sum(n <= decode_threshold for n in query_lens)


def compose(
    tables: BlockTables,
    queries: Sequence[Query],
    block_size: int,
    device: torch.device,
    decode_threshold: int = 1,
) -> MixedBatch:
    """Lay out a step of at least one query, each of at least one token."""
    order, num_short = short_first([query.num_tokens for query in queries], decode_threshold)
    queries = [queries[i] for i in order]
    starts = [query.start for query in queries]
    query_lens = [query.num_tokens for query in queries]
    layout = lay_out(tables, [q.row for q in queries], starts, query_lens, block_size, device)
    ends = layout.query_start_loc[1:]
    indices = [
        np.arange(end - query.num_logit_rows, end)
        for query, end in zip(queries, ends.tolist(), strict=True)
    ]
    given = {f.name: getattr(layout.attention, f.name) for f in fields(AttentionMetadata) if f.init}
    attention = MixedMetadata(
        **given,
        num_short=num_short,
        query_starts=layout.query_start_loc.tolist(),
        host_seq_lens=[start + n for start, n in zip(starts, query_lens)],
    )
    return MixedBatch(
        order, layout.positions, attention, layout.query_start_loc, np.concatenate(indices)
    )
