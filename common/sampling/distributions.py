"""The rows that want more than their highest logit: constraints, draws, log-probabilities.

Rows that ask for the same are worked on together, and each gets what it would get alone. What the
host knows goes to the device in a few copies, however many rows there are. Nothing here waits for
the device, but for one thing on a CPU: how far top-p reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from batch_layout import to_device
from common.sampling import sampling_constraints as constraints
from common.sampling.counter_random import TOKEN_STREAM, sample_from_probs, uniforms
from common.sampling.sampler import BAD, as_float, greedy
from common.sampling.sampling_columns import (
    DRAWN,
    LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    NARROW,
    PENALTIES,
    TOP_K,
    TOP_P,
    SamplingBatch,
)
from scheduler_interface import StepOutput

if TYPE_CHECKING:
    from common.sampling.token_counts import TokenCounts

_WIDTH = 1 << 8  # above the bits of `needs`


@dataclass(frozen=True, slots=True)
class Rules:
    """What is computed with: PyTorch, or kernels that give the same bits."""

    apply_penalties: Callable[..., torch.Tensor] = constraints.apply_penalties
    shape: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = constraints.shape
    apply_top_p: Callable[..., torch.Tensor] = constraints.apply_top_p
    sample_from_probs: Callable[..., torch.Tensor] = sample_from_probs


IN_TORCH = Rules()


def draw(
    raw: torch.Tensor,
    sampling: SamplingBatch,
    counts: TokenCounts | None = None,
    rules: Rules = IN_TORCH,
) -> torch.Tensor:
    """The token [R] of each row of `raw` [R, V], or `BAD`."""
    logits = _constrain(raw, sampling, counts, rules)
    tokens = greedy(logits)
    if sampling.asked & DRAWN:
        (u,) = upload(raw.device, row_uniforms(sampling, TOKEN_STREAM))
        for at, probs, ids in _distributions(logits, sampling, rules):
            drawn = rules.sample_from_probs(probs, u[at])
            if ids is not None:
                drawn = ids.gather(1, drawn[:, None])[:, 0]
            tokens[at] = torch.where(tokens[at] == BAD, BAD, drawn)
    return tokens


def sampling_probs(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    counts: TokenCounts | None = None,
    rules: Rules = IN_TORCH,
) -> torch.Tensor:
    """The distribution [R, V] each row's token is drawn from, after every constraint. A greedy
    row is one-hot. A row without a finite maximum is all NaN. `logits` [R, V] without padding.
    `counts` are kept from call to call; without them the histories are counted anew."""
    logits = _constrain(as_float(logits), sampling, counts, rules)
    tokens = greedy(logits)[:, None]
    probs = torch.zeros_like(logits).scatter_(1, tokens.clamp(min=0), 1.0)
    for at, row_probs, ids in _distributions(logits, sampling, rules):
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


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows `at`, each once: no copy if these are all."""
    return x if len(at) == len(x) else x[at]


# -- what becomes of the logits


def _constrain(
    logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts | None, rules: Rules
) -> torch.Tensor:
    """Without what is forbidden, and with penalties. The `logits` that are given stay as they
    are."""
    if sampling.asked & MIN_TOKENS:
        logits = _forbid_stops(logits, sampling)
    if sampling.asked & PENALTIES:
        from common.sampling.token_counts import TokenCounts

        logits = _penalise(logits, sampling, counts or TokenCounts(), rules)
    return logits


def _forbid_stops(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """EOS and stop tokens are impossible before `min_tokens`."""
    columns, rows, vocab_size = sampling.columns, sampling.rows, logits.shape[1]
    at = np.flatnonzero(sampling.num_outputs < columns.min_tokens[rows])
    forbidden = [columns.forbidden[row] for row in rows[at].tolist()]
    ids = np.fromiter(chain.from_iterable(forbidden), dtype=np.int64)
    starts = np.repeat(at * vocab_size, list(map(len, forbidden)))
    (index,) = upload(logits.device, (starts + ids)[ids < vocab_size])
    return logits.flatten().scatter(0, index, constraints.NEG_INF).view_as(logits)


def _penalise(
    logits: torch.Tensor, sampling: SamplingBatch, counts: TokenCounts, rules: Rules
) -> torch.Tensor:
    columns, at = sampling.columns, np.flatnonzero(sampling.needs & PENALTIES)
    part = sampling.select(at)
    is_known, counted = counts.count(part, logits.shape[1], logits.device)
    (at,) = upload(logits.device, at)
    penalties = upload(logits.device, *columns.penalties[:, part.rows])
    changed = rules.apply_penalties(_rows(logits, at), is_known, counted, *penalties)
    return changed if len(at) == len(logits) else logits.index_copy(0, at, changed)


def _distributions(
    logits: torch.Tensor, sampling: SamplingBatch, rules: Rules
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """`(at, probs [len(at), C], ids)` of the rows that draw. `ids` [len(at), C], ascending, name
    the tokens of the columns; None: the columns are the vocabulary.

    Rows with a small top-k leave the wide tensors at once, those with the same power of two at or
    above it together: so what a row sums over does not depend on its batch mates. Exponentials and
    their sums, which differ in the last bits from one program to another, are PyTorch's softmax,
    whatever the rules are."""
    if not sampling.asked & DRAWN:
        return
    columns, device, vocab_size = sampling.columns, logits.device, logits.shape[1]
    asked = sampling.needs & (DRAWN | TOP_K | MIN_P | TOP_P)
    narrow = np.flatnonzero(asked & NARROW)
    asked[narrow] += _WIDTH << np.ceil(np.log2(columns.top_k[sampling.rows[narrow]])).astype(int)
    order = np.argsort(asked, kind="stable")[np.count_nonzero(asked == 0) :]
    rows = sampling.rows[order]
    at, top_k = upload(device, order, columns.top_k[rows])
    temperature, top_p, min_p = upload(device, *columns.shaping[:, rows])
    kinds, starts = np.unique(asked[order], return_index=True)
    for kind, start, stop in zip(kinds, starts, np.append(starts[1:], len(order)), strict=True):
        part, is_narrow = slice(start, stop), bool(kind & NARROW)
        num_kept = columns.top_k[rows[part]].clip(max=vocab_size)
        most = min(int(kind) // _WIDTH, vocab_size) if is_narrow else int(num_kept.max())
        is_cut = kind & TOP_K and num_kept.min() < (most if is_narrow else vocab_size)
        x, ids = rules.shape(
            _rows(logits, at[part]),
            temperature[part],
            top_k[part] if is_cut else None,
            min_p[part] if kind & MIN_P else None,
            most,
            is_narrow,
        )
        if kind & TOP_P:
            x = rules.apply_top_p(x, top_p[part])
        yield at[part], x.softmax(dim=-1), ids


# -- log-probabilities


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability in the raw distribution of the model, before penalties and
    temperature, its rank there (1: none is likelier), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class Logprobs:
    """Of the rows that ask for them. `numbers` [rows, 2 + 2 * width] float64, in which integers are
    exact: of the token its log-probability and rank, then the likeliest ids, then theirs."""

    def __init__(self, raw: torch.Tensor, sampling: SamplingBatch, tokens: torch.Tensor) -> None:
        self.rows = np.flatnonzero(sampling.needs & LOGPROBS)
        self.num_top = sampling.columns.num_logprobs[sampling.rows[self.rows]].tolist()
        (at,) = upload(raw.device, self.rows)
        raw = _rows(raw, at)
        logprobs = raw.log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[at].clamp(min=0)[:, None])
        ranks = 1 + (logprobs > chosen).sum(dim=-1, keepdim=True)
        self.width = min(max(self.num_top), raw.shape[1])
        ids = constraints.ranked_ids(raw, self.width)
        columns = (chosen, ranks, ids, logprobs.gather(1, ids))
        self.numbers = torch.cat([column.to(torch.float64) for column in columns], dim=1)

    def add_to(
        self, output: StepOutput, req_ids: list[str], tokens: np.ndarray, read: np.ndarray
    ) -> None:
        """`read` is what was read of `numbers`."""
        read, width = read.reshape(len(self.rows), -1), self.width
        ids = read[:, 2 : 2 + width].astype(np.int64).tolist()
        columns = (self.rows.tolist(), self.num_top, ids, read.tolist())
        for row, k, likeliest, (logprob, rank, *rest) in zip(*columns):
            if tokens[row] >= 0:
                top = dict(zip(likeliest[:k], rest[width:]))
                entry = TokenLogprobs(int(tokens[row]), logprob, int(rank), top)
                output.logprobs.setdefault(req_ids[row], []).append(entry)
