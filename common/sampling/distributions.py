"""Rows that need more than their highest logit: constraints, draws, log-probabilities.

    prepare(sampling, vocab_size)      `RowArgs`: arrays; the step's one upload makes them tensors
    sample_rows(logits, args)          tokens
    row_probs(logits, args)            distributions

Each row gets the same result as alone. Nothing here waits for the device, except on a CPU to find
how many tokens top-p keeps.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from common.sampling import sampling_constraints as constraints
from common.sampling.constrained_rows import RuleArgs, keep_to_rules, prepare_rules
from common.sampling.counter_random import sample_from_probs, uniforms
from common.sampling.greedy_rows import BAD, as_float, highest_logits, is_bad
from common.sampling.runner_plugin import DeviceArgs
from common.sampling.sampling_columns import SamplingBatch
from common.sampling.sampling_rules import (
    BITS,
    DRAWN,
    LIMITS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    TOKEN_RULES,
)
from common.sampling.token_counts import Histories, count, prepare_histories
from scheduler_interface import StepOutput


@dataclass(eq=False)
class Penalties(DeviceArgs):
    rows: Any  # [P] int64: the rows with penalties
    numbers: Any  # [3, P] float64: repetition, presence, frequency
    histories: Histories


@dataclass(eq=False)
class Limit(DeviceArgs):
    """A rule that removes tokens from some of the drawn rows."""

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: Any  # [L] int64, of the drawn rows
    numbers: Any  # [L]


@dataclass(eq=False)
class Draws(DeviceArgs):
    rows: Any  # [D] int64: the rows that are drawn
    temperature: Any  # [D] float64
    limits: list[Limit] = field(default_factory=list)  # after the temperature


@dataclass(eq=False)
class RowArgs(DeviceArgs):
    """What rows need besides their logits. None: no row needs it."""

    u: Any  # [R] float64: uniform numbers
    rules: RuleArgs | None = None
    penalties: Penalties | None = None
    draws: Draws | None = None


def prepare(sampling: SamplingBatch, vocab_size: int) -> RowArgs:
    """Return the arguments of these rows, whose arrays are tensors after the upload."""
    needs = sampling.batch_needs
    args = RowArgs(row_uniforms(sampling, sampling.streams))
    if needs & (TOKEN_RULES | MIN_TOKENS):
        args.rules = prepare_rules(sampling, vocab_size)
    if needs & PENALTIES:
        rows = np.flatnonzero(sampling.needs & PENALTIES)
        part = sampling.select(rows)
        numbers = sampling.columns.penalties[:, part.rows]
        args.penalties = Penalties(rows, numbers, prepare_histories(part, vocab_size))
    if needs & DRAWN:
        args.draws = _prepare_draws(sampling, vocab_size)
    return args


def row_uniforms(sampling: SamplingBatch, streams: np.ndarray | int) -> np.ndarray:
    """Return a uniform number [R] for each row."""
    return uniforms(
        seeds=torch.from_numpy(sampling.columns.seed[sampling.rows]),
        positions=torch.from_numpy(sampling.num_outputs),
        stream=torch.from_numpy(np.array(streams)),
    ).numpy()


def _prepare_draws(sampling: SamplingBatch, vocab_size: int) -> Draws:
    drawn = np.flatnonzero(sampling.needs & DRAWN)
    needs = sampling.needs[drawn]
    temperature, *numbers = sampling.columns.shaping[:, sampling.rows[drawn]]
    draws = Draws(drawn, temperature)
    for rule, values in zip(LIMITS, numbers, strict=True):
        at = np.flatnonzero(needs & BITS[rule.name])
        if len(at):
            values = values[at]
            apply = rule.apply or constraints.apply_top_p
            if rule.name == "top_k":
                values = values.clip(max=vocab_size)
                apply = partial(constraints.apply_top_k, max_top_k=int(values.max()))
            draws.limits.append(Limit(apply, at, values))
    return draws


def sample_rows(raw: torch.Tensor, args: RowArgs) -> torch.Tensor:
    """Return the token [R] of each row of `raw` [R, V], or `BAD`."""
    logits = _constrain(raw, args)
    highest, tokens = highest_logits(logits)
    draws = args.draws
    if draws is not None:
        drawn = sample_from_probs(_drawn_probs(logits, highest, draws), _rows(args.u, draws.rows))
        tokens = tokens.index_copy(0, draws.rows, drawn)
    return tokens.masked_fill_(is_bad(highest), BAD)


def row_probs(raw: torch.Tensor, args: RowArgs) -> torch.Tensor:
    """Return the distribution [R, V] of each row's token, after every constraint. A greedy row is
    one-hot. A row without a finite maximum is all NaN."""
    logits = _constrain(as_float(raw), args)
    highest, tokens = highest_logits(logits)
    probs = torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)
    if args.draws is not None:
        probs[args.draws.rows] = _drawn_probs(logits, highest, args.draws)
    return probs.masked_fill_(is_bad(highest)[:, None], float("nan"))


def _constrain(logits: torch.Tensor, args: RowArgs) -> torch.Tensor:
    """Return logits with forbidden tokens removed, and with biases and penalties. The given
    `logits` are unchanged."""
    if args.rules is not None:
        logits = keep_to_rules(as_float(logits), args.rules)
    if args.penalties is not None:
        rows = args.penalties.rows
        logits = as_float(logits)
        is_known, counts = count(args.penalties.histories)
        changed = constraints.apply_penalties(
            _rows(logits, rows), is_known, counts, args.penalties.numbers
        )
        logits = _replaced(logits, rows, changed)
    return logits


def _drawn_probs(logits: torch.Tensor, highest: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return the distributions [D, V] of the drawn rows."""
    x = as_float(_rows(logits, draws.rows))
    x = constraints.apply_temperature(x, _rows(highest, draws.rows), draws.temperature)
    for limit in draws.limits:
        x = _replaced(x, limit.rows, limit.apply(_rows(x, limit.rows), limit.numbers))
    return x.softmax(dim=-1)


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the rows `at`, ascending: no copy if these are all rows."""
    return x if len(at) == len(x) else x[at]


def _replaced(x: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `x` with these rows at `at`."""
    return rows if len(at) == len(x) else x.index_copy(0, at, rows)


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


class Logprobs(DeviceArgs):
    """The log-probabilities of the rows that request them."""

    def __init__(self, sampling: SamplingBatch) -> None:
        rows = np.flatnonzero(sampling.needs & LOGPROBS)
        self.rows = rows.tolist()
        self.num_top = sampling.columns.num_logprobs[sampling.rows[rows]].tolist()
        self.at: Any = rows

    def numbers(self, raw: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return `logprob_numbers` of these rows."""
        width = min(max(self.num_top), raw.shape[1])
        return logprob_numbers(as_float(_rows(raw, self.at)), tokens[self.at].clamp(min=0), width)

    def add_to(
        self, output: StepOutput, req_ids: list[str], tokens: np.ndarray, read: np.ndarray
    ) -> None:
        """Add the entries to `output`. `read` is the host's copy of `numbers`."""
        read = read.reshape(len(self.rows), -1)
        entries = entries_of(read, tokens[self.rows].tolist(), self.num_top)
        for row, entry in zip(self.rows, entries, strict=True):
            if entry.token_id >= 0:
                output.logprobs.setdefault(req_ids[row], []).append(entry)
