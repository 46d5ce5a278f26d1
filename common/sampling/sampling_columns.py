"""What each request asks of a sampler, in columns: written at its admission, read at every step.

A step picks its rows out of the columns with NumPy and meets no object of a request. `needs` says
with one byte or two what a row asks for at all: a batch in which it is 0 everywhere is greedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from batch_layout import all_to_device
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
        self._numbers = np.zeros((6, num_rows))
        self.temperature, self.top_p, self.min_p = self.shaping = self._numbers[:3]
        self.penalties = self._numbers[3:]  # repetition, presence, frequency
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = self.penalties
        self._integers = np.zeros((7, num_rows), dtype=np.int64)
        self.needs, self.top_k, self.min_tokens, self.seed = self._integers[:4]
        self.num_logprobs, self.is_seed_drawn = self._integers[4:6]  # num_logprobs -1: none
        self.num_writes = self._integers[6]  # tells the requests of a row apart
        self.forbidden: dict[int, list[int]] = {}  # row to ids impossible before `min_tokens`

    def write(self, row: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """The row is this request's from now on."""
        p, num_logprobs = params, -1 if params.logprobs is None else params.logprobs
        penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        self._numbers[:, row] = p.temperature, p.top_p, p.min_p, *penalties
        integers = _needs(p), p.top_k, p.min_tokens, p.seed or 0, num_logprobs
        is_seed_drawn, num_writes = isinstance(p, DrawnSeedParams), self.num_writes[row] + 1
        self._integers[:, row] = *integers, is_seed_drawn, num_writes
        self.forbidden.pop(row, None)
        if p.min_tokens:
            self.forbidden[row] = [*(() if p.ignore_eos else eos_token_ids), *p.stop_token_ids]

    def clear(self, row: int) -> None:
        """The row is nobody's."""
        self.needs[row] = 0
        self.forbidden.pop(row, None)

    def grow(self, num_rows: int) -> None:
        """To `num_rows`, as many as now or more. The rows that there are stay."""
        fresh, before = SamplingColumns(num_rows), len(self.needs)
        fresh._numbers[:, :before], fresh._integers[:, :before] = self._numbers, self._integers
        fresh.forbidden = self.forbidden
        vars(self).update(vars(fresh))


def _needs(p: SamplingParams) -> int:
    is_penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
    needs = LOGPROBS * (p.logprobs is not None) | MIN_TOKENS * (p.min_tokens > 0)
    needs |= PENALTIES * is_penalised
    if p.is_greedy:
        return needs
    needs |= NARROW if 0 < p.top_k <= MOST_NARROW else WIDE
    return needs | TOP_K * (p.top_k > 0) | MIN_P * (p.min_p > 0) | TOP_P * (p.top_p < 1)


class Cargo:
    """Arrays that go to a device in one copy."""

    def __init__(self, device: torch.device, arrays: Iterable[np.ndarray] = ()) -> None:
        self.device, self.arrays = device, list(arrays)
        self.tensors: Sequence[torch.Tensor] = ()  # the same, where they have been sent

    def add(self, array: np.ndarray) -> Callable[[], torch.Tensor]:
        """Its tensor, for whoever asks when it is there."""
        index = len(self.arrays)
        self.arrays.append(np.ascontiguousarray(array))  # as kernels like it
        return lambda: self.tensors[index]

    def send(self) -> None:
        self.tensors = all_to_device(self.device, *self.arrays)


class HasTokens(Protocol):
    """Columns of the runner's state, a row for each request."""

    token_ids: np.ndarray  # [num_rows, max_len] int32: prompt, outputs, drafts of this step
    num_tokens: np.ndarray  # [num_rows] int64: prompt and outputs
    num_prompt_tokens: np.ndarray  # [num_rows] int64

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Ids on the device, with those in place that are below 0: they are pending."""
        ...


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
    streams: np.ndarray | int = 0  # [R], of random numbers: 0 (`TOKEN_STREAM`) for tokens
    are_counted: bool = False  # what is new for penalties was staged before, in the same cargo
    needs: np.ndarray = field(init=False)  # [R]
    asked: int = field(init=False)  # the needs of all rows; 0: each wants the highest logit

    def __post_init__(self) -> None:
        self.needs = self.columns.needs[self.rows]
        self.asked = int(np.bitwise_or.reduce(self.needs))

    def select(self, at: np.ndarray) -> SamplingBatch:
        """The rows `at`, without their names."""
        return replace(self, req_ids=[], rows=self.rows[at], num_outputs=self.num_outputs[at])
