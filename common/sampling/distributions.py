"""The rows that want more than the highest logit: what is forbidden to them, and how they draw.

Rows are worked on in groups that ask for the same, and each row gets what it would get alone. What
the host knows goes to the device in a few copies, however many rows there are. Nothing here waits
for the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch

from batch_layout import to_device
from common.sampling import sampling_constraints as constraints
from common.sampling.counter_random import TOKEN_STREAM, sample_from_probs, uniforms
from common.sampling.sampler import BAD, as_float, greedy
from common.sampling.sampling_columns import (
    DRAWN,
    MIN_P,
    MIN_TOKENS,
    NARROW,
    PENALTIES,
    TOP_K,
    TOP_P,
    SamplingBatch,
)
from common.sampling.token_counts import TokenCounts


def draw(
    raw: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts | None = None
) -> torch.Tensor:
    """The token [R] of each row of `raw` [R, V], or `BAD`."""
    logits = _constrain(raw, sampling, counts)
    tokens = greedy(logits)
    if sampling.asked & DRAWN:
        (u,) = upload(raw.device, row_uniforms(sampling, TOKEN_STREAM))
        for at, probs, ids in _distributions(logits, sampling):
            drawn = sample_from_probs(probs, u[at])
            if ids is not None:
                drawn = ids.gather(1, drawn[:, None])[:, 0]
            tokens[at] = torch.where(tokens[at] == BAD, BAD, drawn)
    return tokens


def sampling_probs(
    logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts | None = None
) -> torch.Tensor:
    """The distribution [R, V] each row's token is drawn from, after every constraint. A greedy
    row is one-hot. A row without a finite maximum is all NaN. `logits` [R, V] without padding.
    `counts` are kept from call to call; without them the histories are counted anew."""
    logits = _constrain(as_float(logits), sampling, counts)
    tokens = greedy(logits)[:, None]
    probs = torch.zeros_like(logits).scatter_(1, tokens.clamp(min=0), 1.0)
    for at, row_probs, ids in _distributions(logits, sampling):
        if ids is not None:
            empty = logits.new_zeros(len(ids), logits.shape[1])
            row_probs = empty.scatter_(1, ids, row_probs.to(logits.dtype))
        probs[at] = row_probs
    return probs.masked_fill(tokens == BAD, float("nan"))


def row_uniforms(sampling: SamplingBatch, stream: int) -> np.ndarray:
    """The uniform number [R] of each of the rows' tokens."""
    seeds = torch.from_numpy(sampling.columns.seed[sampling.rows])
    return uniforms(seeds, torch.from_numpy(sampling.num_outputs), stream).numpy()


def upload(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Arrays of one dtype, in one copy."""
    return to_device(np.concatenate(arrays), device).split([len(array) for array in arrays])


def _constrain(
    logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts | None
) -> torch.Tensor:
    """With what is impossible or less likely because of the history. `logits` stay as they are."""
    if sampling.asked & MIN_TOKENS:
        logits = _forbid_stops(logits, sampling)
    if sampling.asked & PENALTIES:
        logits = _penalise(logits, sampling, counts or TokenCounts())
    return logits


def _forbid_stops(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """EOS and stop tokens are impossible before `min_tokens`."""
    columns, rows, vocab_size = sampling.columns, sampling.rows, logits.shape[1]
    (at,) = np.nonzero(sampling.num_outputs < columns.min_tokens[rows])
    forbidden = [columns.forbidden[row] for row in rows[at].tolist()]
    ids = np.array(list(chain.from_iterable(forbidden)), dtype=np.int64)
    first = np.repeat(at * vocab_size, list(map(len, forbidden)))
    (index,) = upload(logits.device, (first + ids)[ids < vocab_size])
    return logits.flatten().scatter(0, index, constraints.NEG_INF).view_as(logits)


def _penalise(logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts) -> torch.Tensor:
    columns, where = sampling.columns, np.flatnonzero(sampling.needs & PENALTIES)
    (at,) = upload(logits.device, where)
    is_known, counted = counts.count(sampling.select(where), logits.shape[1], logits.device)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    rows = sampling.rows[where]
    penalties = upload(logits.device, *(getattr(columns, name)[rows] for name in names))
    changed = constraints.apply_penalties(logits[at], is_known, counted, *penalties)
    return logits.index_copy(0, at, changed)


def _distributions(
    logits: torch.Tensor, sampling: SamplingBatch
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """`(at, probs [len(at), C], ids)` of the rows that draw. `ids` [len(at), C], ascending, name
    the tokens of the columns; None: the columns are the vocabulary.

    Rows with a small top-k leave the wide tensors at once. In float64 their sums do not depend, to
    1e-16, on the width their batch mates ask for. top-k goes first: which tokens are the k highest
    does not depend on the temperature, and min-p and top-k commute, since each keeps all tokens
    above some rank."""
    if not sampling.asked & DRAWN:
        return
    columns, device = sampling.columns, logits.device
    asked = sampling.needs & (DRAWN | TOP_K | MIN_P | TOP_P)
    order = np.argsort(asked, kind="stable")[np.count_nonzero(asked == 0) :]
    rows = sampling.rows[order]
    at, top_k = upload(device, order, columns.top_k[rows])
    names = ("temperature", "min_p", "top_p")
    temperature, min_p, top_p = upload(device, *(getattr(columns, name)[rows] for name in names))
    kinds, starts = np.unique(asked[order], return_index=True)
    for kind, start, stop in zip(kinds, starts, np.append(starts[1:], len(order)), strict=True):
        part, ids = slice(start, stop), None
        x = logits if stop - start == len(logits) else logits[at[part]]
        if kind & TOP_K:
            num_kept = columns.top_k[rows[part]]
            most = min(int(num_kept.max()), x.shape[1])
            if kind & NARROW:
                ids = constraints.top_ids(x, most)
                x = x.gather(1, ids).to(torch.float64)
            if num_kept.min() < x.shape[1]:
                x = constraints.apply_top_k(x, top_k[part], most)
        x = constraints.apply_temperature(x, temperature[part])
        if kind & MIN_P:
            x = constraints.apply_min_p(x, min_p[part])
        if kind & TOP_P:
            x = constraints.apply_top_p(x, top_p[part])
        yield at[part], x.softmax(dim=-1), ids
