"""The sampling parameters of each request, in columns: written at admission, read at every step.

A step selects its rows of the columns with NumPy, without a Python object per request. The bits of
`needs` are the features that a row uses: a batch in which all of them are 0 is greedy.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.requests.input_processor import DrawnSeedParams
from common.sampling.runner_plugin import HasTokens, RunnerPlugin
from common.sampling.sampling_rules import NUM_PENALTIES, NUMBERS, TOKEN_RULES, needs_of
from request import SamplingParams
from scheduler_interface import NewRequestData

if TYPE_CHECKING:
    from common.requests.token_rules import TokenRules

ALL = 1 << 40  # more than the tokens of any vocabulary or answer


class SamplingColumns(RunnerPlugin):
    """A plugin with a row for each request. Unused rows are never read."""

    name = "token_rules"  # a request's data besides its parameters

    def __init__(self, num_rows: int = 0, eos_token_ids: Sequence[int] = ()) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self.numbers = np.zeros((len(NUMBERS), num_rows))  # of the rules in `NUMBERS`
        self.penalties = self.numbers[:NUM_PENALTIES]
        self.shaping = self.numbers[NUM_PENALTIES:]
        self._integers = np.zeros((5, num_rows), dtype=np.int64)
        self.needs, self.min_tokens, self.seed = self._integers[:3]
        self.num_logprobs, self.is_seed_drawn = self._integers[3:]  # num_logprobs -1: none
        self.forbidden: dict[int, np.ndarray] = {}  # row to ids impossible before `min_tokens`
        self.rules: dict[int, TokenRules] = {}  # by row, where needed

    def admit(self, row: int, new: NewRequestData) -> None:
        rules = new.features.get(self.name)
        self.write(row, new.sampling_params, self.eos_token_ids, rules)

    def write(
        self,
        row: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        rules: Mapping[str, Any] | None = None,
    ) -> None:
        p = params
        num_logprobs = -1 if p.logprobs is None else p.logprobs % (ALL + 1)  # of -1: `ALL`
        self.numbers[:, row] = [min(getattr(p, name), ALL) for name in NUMBERS]
        self._integers[:, row] = [
            needs_of(p) | TOKEN_RULES * (rules is not None),
            min(p.min_tokens, ALL),
            p.seed or 0,
            num_logprobs,
            isinstance(p, DrawnSeedParams),
        ]
        self.forbidden.pop(row, None)
        if rules is not None:
            from common.requests.token_rules import TokenRules

            self.rules[row] = TokenRules(rules)
        if p.min_tokens:
            ends = [*(() if p.ignore_eos else eos_token_ids), *p.stop_token_ids]
            self.forbidden[row] = np.array(ends, dtype=np.int64)

    def release(self, row: int) -> None:
        self.needs[row] = 0
        self.forbidden.pop(row, None)

    def may_come(self, row: int, outputs: Sequence[int], vocab_size: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        if self.needs[row] & TOKEN_RULES:
            found |= self.rules[row].may_come(np.array(outputs), vocab_size)
        if len(outputs) < self.min_tokens[row]:
            found["min_tokens"] = ~np.isin(np.arange(vocab_size), self.forbidden[row])
        return found

    def grow(self, num_rows: int) -> None:
        fresh = SamplingColumns(num_rows, self.eos_token_ids)
        before = len(self.needs)
        fresh.numbers[:, :before] = self.numbers
        fresh._integers[:, :before] = self._integers
        fresh.forbidden = self.forbidden
        fresh.rules = self.rules
        vars(self).update(vars(fresh))


@dataclass(slots=True)
class SamplingBatch:
    """The rows of logits of one step, as indices into the columns. Several adjacent rows can belong
    to one request, each with a different history: prompt, outputs, and the drafts before it."""

    columns: SamplingColumns
    req_ids: list[str]  # [R]
    rows: np.ndarray  # [R] int64, into the columns
    num_outputs: np.ndarray  # [R] int64: the output position of the row's token
    state: HasTokens  # only for penalties and bad words
    drafts: dict[str, list[int]]  # as in the plan; empty: no token is a draft
    streams: np.ndarray | int = 0  # [R], of random numbers: 0 (`TOKEN_STREAM`) for tokens
    needs: np.ndarray = field(init=False)  # [R]
    batch_needs: int = field(init=False)  # the needs of all rows; 0: all rows are greedy

    def __post_init__(self) -> None:
        self.needs = self.columns.needs[self.rows]
        self.batch_needs = int(np.bitwise_or.reduce(self.needs))

    def select(self, at: np.ndarray) -> SamplingBatch:
        """Return the rows `at`, without their request ids."""
        return replace(self, req_ids=[], rows=self.rows[at], num_outputs=self.num_outputs[at])
