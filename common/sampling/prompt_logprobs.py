"""Log-probabilities of a prompt's own tokens: `prompt_logprobs`.

    position     0      1      2      3
    token        a      b      c      d       the prompt
    hidden       h0     h1     h2     h3      h3: a token is sampled, as usual
    scored              b      c      d       by h0, h1, h2: raw distributions, as for outputs
    entries     None    b      c      d       `RequestOutput.prompt_logprobs`

Each chunk of a prompt scores its positions. In a step that scores tokens, all tokens go through the
last layer; in other steps only the sampled rows do. Logits are computed for at most 256 rows at a
time, which the memory plan includes: for a whole step they would be larger than the model.

A cached prefix has no hidden states, so a request with `prompt_logprobs` reads no cached prefix.
Its KV is published as usual. If a prompt has `n` samples, only the first one requests the scores.
Positions scored before a preemption are not scored again.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from common.models.model_config import SCORED
from common.sampling.distributions import TokenLogprobs, entries_of, logprob_numbers
from common.sampling.greedy_rows import as_float
from common.sampling.runner_plugin import DeviceArgs, RunnerPlugin, StepRows
from common.sampling.sampler import from_device
from scheduler_interface import NewRequestData, StepOutput

MAX_ROWS = 256  # rows of logits computed at a time


class PromptLogprobs(RunnerPlugin):
    """The plugin. `features["prompt_logprobs"]` is the number of top tokens per entry; -1: all."""

    name = SCORED
    is_in_forward = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._columns = np.zeros((3, 0), dtype=np.int64)

    def grow(self, num_rows: int) -> None:
        more = np.zeros((3, num_rows - self._columns.shape[1]), dtype=np.int64)
        self._columns = np.concatenate([self._columns, more], axis=1)
        # Positions [next, end) whose next token has not been scored yet.
        self._next, self._end, self._num_top = self._columns

    def admit(self, row: int, new: NewRequestData) -> None:
        num_top = new.features.get(self.name)
        self._columns[:, row] = 0
        if num_top is not None:
            self._end[row] = len(new.prompt_token_ids) - 1
            self._num_top[row] = self.vocab_size if num_top < 0 else min(num_top, self.vocab_size)

    def concerns(self, rows: np.ndarray) -> bool:
        return bool((self._next[rows] < self._end[rows]).any())

    def stage(self, step: StepRows) -> ScoredPrompts | None:
        rows, starts, num_tokens, _ = step.queries
        first_positions = np.maximum(starts, self._next[rows])
        lens = np.minimum(starts + num_tokens, self._end[rows]) - first_positions
        scored = np.flatnonzero(lens > 0)
        if not len(scored):  # preempted: these positions were already scored
            return None
        lens = lens[scored]
        first_positions = first_positions[scored]
        rows = rows[scored]
        within = np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens)
        first_rows = (num_tokens.cumsum() - num_tokens - starts)[scored] + first_positions
        positions = np.repeat(first_positions, lens) + within
        tokens = step.state.token_ids[np.repeat(rows, lens), positions + 1].astype(np.int64)
        self._next[rows] = first_positions + lens
        return ScoredPrompts(
            at=np.repeat(first_rows, lens) + within,
            tokens=tokens,
            token_ids=tokens.tolist(),
            req_ids=[step.req_ids[i] for i in np.repeat(scored, lens).tolist()],
            num_top=np.repeat(self._num_top[rows], lens).tolist(),
            vocab_size=self.vocab_size,
        )


@dataclass(eq=False)
class ScoredPrompts(DeviceArgs):
    """The scored tokens of one step, by the rows `at` of its hidden states."""

    at: Any  # [num_rows] int64
    tokens: Any  # [num_rows] int64
    token_ids: list[int]  # the same, on the host
    req_ids: list[str]  # of each token
    num_top: list[int]  # entries of each token
    vocab_size: int
    reads: list[Callable[[], np.ndarray]] = field(default_factory=list)

    def score(
        self, hidden: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Score the rows, given `hidden` [num_tokens, hidden_size] of the whole step. Called in the
        forward pass; starts the copies to the host without waiting for them."""
        for at, tokens in zip(self.at.split(MAX_ROWS), self.tokens.split(MAX_ROWS)):
            raw = as_float(to_logits(hidden[at])[:, : self.vocab_size])
            tokens = tokens.clamp(max=self.vocab_size - 1)
            self.reads.append(from_device(logprob_numbers(raw, tokens, max(self.num_top))))

    def add_to(self, output: StepOutput) -> None:
        """Wait for the scores and add them to `output`."""
        read = np.concatenate([read() for read in self.reads])
        entries = entries_of(read, self.token_ids, self.num_top)
        for req_id, entry in zip(self.req_ids, entries, strict=True):
            output.prompt_logprobs.setdefault(req_id, []).append(self._possible(entry))

    def _possible(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Return the entry, with -inf for a padding token of the vocabulary. A prompt can contain
        such tokens, which are never sampled."""
        if entry.token_id < self.vocab_size:
            return entry
        return replace(entry, logprob=-np.inf, rank=self.vocab_size + 1)
