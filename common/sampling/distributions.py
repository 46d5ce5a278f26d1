"""Rows that need more than their highest logit: constraints, draws, log-probabilities.

Rows with the same needs are computed together, and each row gets the same result as alone. The
host's arrays are sent to the device in one copy, before the logits exist. Nothing here waits for
the device, except on a CPU to find how many tokens top-p keeps.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from common.sampling import sampling_constraints as constraints
from common.sampling.counter_random import sample_from_probs, uniforms
from common.sampling.greedy_rows import BAD, as_float, highest_logits, is_bad
from common.sampling.runner_plugin import UploadBuffer
from common.sampling.sampling_columns import SamplingBatch, flat_index
from common.sampling.sampling_rules import (
    BITS,
    DRAWN,
    LIMITS,
    LOGPROBS,
    MIN_TOKENS,
    NARROW,
    NEG_INF,
    NEXT_BIT,
    NUM_PENALTIES,
    NUMBERS,
    PENALTIES,
    TOKEN_RULES,
    TOP_K,
)
from scheduler_interface import StepOutput

if TYPE_CHECKING:
    from common.sampling.token_counts import TokenCounts

_LIMITS = {rule.name: rule.apply or constraints.apply_top_p for rule in LIMITS}
_GROUPED = DRAWN | TOP_K | sum(BITS[rule.name] for rule in LIMITS)


def row_uniforms(sampling: SamplingBatch, streams: np.ndarray | int) -> np.ndarray:
    """Return a uniform number [R] for each row."""
    return uniforms(
        seeds=torch.from_numpy(sampling.columns.seed[sampling.rows]),
        positions=torch.from_numpy(sampling.num_outputs),
        stream=torch.from_numpy(np.array(streams)),
    ).numpy()


def _forbidden(sampling: SamplingBatch, vocab_size: int) -> np.ndarray:
    """Return the flat indices of impossible logits: EOS and stop tokens before `min_tokens`."""
    columns = sampling.columns
    rows = sampling.rows
    at = np.flatnonzero(sampling.num_outputs < columns.min_tokens[rows])
    forbidden = [columns.forbidden[row] for row in rows[at].tolist()]
    ids = np.fromiter(chain.from_iterable(forbidden), dtype=np.int64)
    return flat_index(np.repeat(at, list(map(len, forbidden))), ids, vocab_size)[0]


class HasCounts(Protocol):
    """The part of a sampler that its rows use."""

    vocab_size: int

    @cached_property
    def counts(self) -> TokenCounts: ...


class StagedRows:
    """The staged constraints and draws of a batch. `__init__` makes all arrays for them."""

    def __init__(self, sampler: HasCounts, sampling: SamplingBatch, upload: UploadBuffer) -> None:
        columns = sampling.columns
        vocab_size = sampler.vocab_size
        self.batch_needs = sampling.batch_needs
        self.u = upload.add(row_uniforms(sampling, sampling.streams))
        if self.batch_needs & TOKEN_RULES:
            from common.sampling.constrained_rows import stage_rules

            self.keep_to_rules = stage_rules(sampling, upload, vocab_size)
        if self.batch_needs & MIN_TOKENS:
            self.forbidden = upload.add(_forbidden(sampling, vocab_size))
        if self.batch_needs & PENALTIES:
            at = np.flatnonzero(sampling.needs & PENALTIES)
            part = sampling.select(at)
            self.penalised = upload.add(at)
            self.penalties = upload.add(columns.penalties[:, part.rows])
            self.count = sampler.counts.stage(part, upload, vocab_size)
        if self.batch_needs & DRAWN:
            order, self.groups = _groups(sampling, vocab_size)
            rows = sampling.rows[order]
            self.order = upload.add(order)
            self.top_k = upload.add(columns.top_k[rows])
            self.shaping = upload.add(columns.shaping[:, rows])

    def draw(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the token [R] of each row of `raw` [R, V], or `BAD`."""
        logits = self._constrain(raw)
        highest, tokens = highest_logits(logits)
        for at, probs, ids in self._distributions(logits, highest):
            drawn = sample_from_probs(probs, _rows(self.u(), at))
            if ids is not None:
                drawn = ids.gather(1, drawn[:, None])[:, 0]
            if len(at) == len(tokens):
                tokens = drawn
            else:
                tokens[at] = drawn
        return tokens.masked_fill_(is_bad(highest), BAD)

    def probs(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the distribution [R, V] of each row's token, after every constraint. A greedy row
        is one-hot. A row without a finite maximum is all NaN."""
        logits = self._constrain(as_float(raw))
        highest, tokens = highest_logits(logits)
        probs = torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)
        for at, row_probs, ids in self._distributions(logits, highest):
            if ids is not None:
                empty = logits.new_zeros(len(ids), logits.shape[1])
                row_probs = empty.scatter_(1, ids, row_probs.to(logits.dtype))
            probs[at] = row_probs
        return probs.masked_fill_(is_bad(highest)[:, None], float("nan"))

    def _constrain(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with forbidden tokens removed, and with biases and penalties. The given
        `logits` are unchanged."""
        if self.batch_needs & (TOKEN_RULES | MIN_TOKENS | PENALTIES):
            logits = as_float(logits)
        if self.batch_needs & TOKEN_RULES:
            logits = self.keep_to_rules(logits)
        if self.batch_needs & MIN_TOKENS:
            flat = logits.flatten().scatter(0, self.forbidden(), NEG_INF)
            logits = flat.view_as(logits)
        if self.batch_needs & PENALTIES:
            at = self.penalised()
            is_known, counted = self.count()
            repetition, presence, frequency = self.penalties().unbind()
            changed = constraints.apply_penalties(
                _rows(logits, at),
                is_known=is_known,
                output_counts=counted,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
            )
            logits = changed if len(at) == len(logits) else logits.index_copy(0, at, changed)
        return logits

    def _distributions(
        self, logits: torch.Tensor, highest: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield `(at, probs [len(at), C], ids)` of the drawn rows. `ids` [len(at), C], ascending,
        are the tokens of the columns; None: the columns are the vocabulary."""
        if not self.batch_needs & DRAWN:
            return
        order, top_k = self.order(), self.top_k()
        numbers = dict(zip(NUMBERS[NUM_PENALTIES:], self.shaping().unbind()))
        for part, kind, max_top_k, is_cut in self.groups:
            x, ids = constraints.shape(
                _rows(logits, order[part]),
                _rows(highest, order[part]),
                numbers["temperature"][part],
                top_k[part] if is_cut else None,
                max_top_k,
                bool(kind & NARROW),
            )
            for name, apply in _LIMITS.items():
                if kind & BITS[name]:
                    x = apply(x, numbers[name][part])
            yield order[part], x.softmax(dim=-1), ids


def _groups(sampling: SamplingBatch, vocab_size: int) -> tuple[np.ndarray, list[tuple]]:
    """Return the drawn rows, ordered by group, and the groups: slice, needs, an upper bound of
    their top-k (0: no bound), and whether top-k removes tokens from any row.

    Rows with a small top-k leave the wide tensors first, grouped by top-k rounded up to a power of
    two, so the columns that a row sums over do not depend on the other rows of the batch."""
    top_k = sampling.columns.top_k[sampling.rows]
    needs = sampling.needs & _GROUPED
    narrow = np.flatnonzero(needs & NARROW)
    needs[narrow] += NEXT_BIT << np.ceil(np.log2(top_k[narrow])).astype(int)
    order = np.argsort(needs, kind="stable")[np.count_nonzero(needs == 0) :]
    kinds, starts = np.unique(needs[order], return_index=True)
    groups = []
    for kind, start, stop in zip(kinds.tolist(), starts, [*starts[1:], len(order)]):
        num_kept = top_k[order[start:stop]].clip(max=vocab_size)
        is_narrow = kind & NARROW
        max_top_k = min(kind // NEXT_BIT, vocab_size) if is_narrow else int(num_kept.max())
        is_cut = bool(kind & TOP_K) and num_kept.min() < (max_top_k if is_narrow else vocab_size)
        groups.append((slice(start, stop), kind, max_top_k, is_cut))
    return order, groups


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the rows `at`, which are distinct: no copy if these are all rows."""
    return x if len(at) == len(x) else x[at]


# -- log-probabilities


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability in the model's raw distribution, before penalties and temperature,
    its rank there (1: the likeliest), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


def logprob_numbers(raw: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Return `[rows, 2 + 2 * width]` float64, in which integers are exact: log-probability and rank
    of each row's token, then the likeliest ids, then their log-probabilities."""
    logprobs = raw.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = 1 + (logprobs > chosen).sum(dim=-1, keepdim=True)
    ids = constraints.ranked_ids(raw, width)
    columns = (chosen, ranks, ids, logprobs.gather(1, ids))
    return torch.cat([column.to(torch.float64) for column in columns], dim=1)


def entries_of(
    numbers: np.ndarray, tokens: Sequence[int], num_top: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Yield the entries of numbers that were read, with the first `num_top` of each row."""
    width = numbers.shape[1] // 2 - 1
    ids = numbers[:, 2 : 2 + width].astype(np.int64).tolist()
    for token, k, likeliest, (logprob, rank, *tail) in zip(tokens, num_top, ids, numbers.tolist()):
        yield TokenLogprobs(token, logprob, int(rank), dict(zip(likeliest[:k], tail[width:])))


class Logprobs:
    """The log-probabilities of the rows that request them."""

    def __init__(self, sampling: SamplingBatch, upload: UploadBuffer) -> None:
        self.rows = np.flatnonzero(sampling.needs & LOGPROBS)
        self.num_top = sampling.columns.num_logprobs[sampling.rows[self.rows]].tolist()
        self.width = max(self.num_top)
        self.at = upload.add(self.rows)

    def numbers(self, raw: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return `logprob_numbers` of these rows."""
        at = self.at()
        self.width = min(self.width, raw.shape[1])
        return logprob_numbers(as_float(_rows(raw, at)), tokens[at].clamp(min=0), self.width)

    def add_to(
        self, output: StepOutput, req_ids: list[str], tokens: np.ndarray, read: np.ndarray
    ) -> None:
        """Add the entries to `output`. `read` is the host's copy of `numbers`."""
        read = read.reshape(len(self.rows), -1)
        entries = entries_of(read, tokens[self.rows].tolist(), self.num_top)
        for row, entry in zip(self.rows.tolist(), entries, strict=True):
            if entry.token_id >= 0:
                output.logprobs.setdefault(req_ids[row], []).append(entry)
