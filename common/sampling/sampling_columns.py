"""What each request asks of a sampler, in columns: written at its admission, read at every step.

A step picks its rows out of the columns with NumPy and meets no object of a request. `needs` says
with one byte or two what a row asks for at all: a batch in which it is 0 everywhere is greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from request import SamplingParams

# Bits of `needs`. A drawn row is narrow, among the `MOST_NARROW` highest or fewer, or wide.
NARROW, WIDE, TOP_K, MIN_P, TOP_P, PENALTIES, MIN_TOKENS, LOGPROBS = (1 << i for i in range(8))
DRAWN = NARROW | WIDE
MOST_NARROW = 256


class DrawnSeedParams(SamplingParams):
    """Parameters of a request that named no seed: this one was drawn for it. What follows from it
    need not be the same with and without guesses."""

    __slots__ = ()


class SamplingColumns:
    """A row for each request. What stands in the rows of nobody is never read."""

    def __init__(self, num_rows: int) -> None:
        self.needs = np.zeros(num_rows, dtype=np.int64)
        self.temperature = np.ones(num_rows)
        self.top_p = np.ones(num_rows)
        self.min_p = np.zeros(num_rows)
        self.repetition_penalty = np.ones(num_rows)
        self.presence_penalty = np.zeros(num_rows)
        self.frequency_penalty = np.zeros(num_rows)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)  # -1: none
        self.is_seed_drawn = np.zeros(num_rows, dtype=bool)
        self.num_writes = np.zeros(num_rows, dtype=np.int64)  # tells a row's requests apart
        self.forbidden: dict[int, list[int]] = {}  # row to ids impossible before `min_tokens`

    def write(self, row: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """The row is this request's from now on."""
        self.needs[row] = _needs(params)
        self.temperature[row] = params.temperature
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.top_k[row], self.min_tokens[row] = params.top_k, params.min_tokens
        self.seed[row] = params.seed or 0
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.is_seed_drawn[row] = isinstance(params, DrawnSeedParams)
        self.num_writes[row] += 1
        self.forbidden.pop(row, None)
        if params.min_tokens:
            eos = () if params.ignore_eos else eos_token_ids
            self.forbidden[row] = sorted({*eos, *params.stop_token_ids})

    def clear(self, row: int) -> None:
        """The row is nobody's."""
        self.needs[row] = 0
        self.forbidden.pop(row, None)

    def grow(self, num_rows: int) -> None:
        """To `num_rows`, as many as now or more. The rows that there are stay."""
        fresh = SamplingColumns(num_rows)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                getattr(fresh, name)[: len(column)] = column
                setattr(self, name, getattr(fresh, name))


def _needs(params: SamplingParams) -> int:
    rest = params.presence_penalty or params.frequency_penalty
    needs = LOGPROBS * (params.logprobs is not None) | MIN_TOKENS * (params.min_tokens > 0)
    needs |= PENALTIES * (params.repetition_penalty != 1 or rest != 0)
    if params.is_greedy:
        return needs
    needs |= NARROW if 0 < params.top_k <= MOST_NARROW else WIDE
    return (
        needs | TOP_K * (params.top_k > 0) | MIN_P * (params.min_p > 0) | TOP_P * (params.top_p < 1)
    )


class HasTokens(Protocol):
    """Columns of the runner's state, a row for each request."""

    token_ids: np.ndarray  # [num_rows, max_len] int32: prompt, outputs, drafts of this step
    num_tokens: np.ndarray  # [num_rows] int64: prompt and outputs
    num_prompt_tokens: np.ndarray  # [num_rows] int64


@dataclass(slots=True)
class SamplingBatch:
    """The rows of logits of one step, by the columns of their requests. Several, side by side, may
    belong to one request, each with its own history: prompt, outputs, and the drafts before it."""

    columns: SamplingColumns
    req_ids: list[str]  # [R]
    rows: np.ndarray  # [R] int64, into the columns
    num_outputs: np.ndarray  # [R] int64: the output position of the row's token
    state: HasTokens  # for penalties, and for nothing else
    drafts: dict[str, list[int]]  # as the plan has them; none: no token is a draft
    needs: np.ndarray = field(init=False)  # [R]
    asked: int = field(init=False)  # the needs of all rows; 0: each wants the highest logit

    def __post_init__(self) -> None:
        self.needs = self.columns.needs[self.rows]
        self.asked = int(np.bitwise_or.reduce(self.needs))

    def select(self, at: np.ndarray) -> SamplingBatch:
        """The rows `at`, without their names."""
        return replace(self, req_ids=[], rows=self.rows[at], num_outputs=self.num_outputs[at])
