"""Score the rows of a step for `prompt_logprobs.py`.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from common.sampling.distributions import TokenLogprobs, entries_of, logprob_numbers
from common.sampling.sampler import as_float, from_device
from scheduler_interface import StepOutput

MAX_ROWS = 256  # rows of logits computed at a time
Run = tuple[str, int, int]  # request id, number of tokens, number of top tokens per entry


class ScoredPrompts:
    """The scored tokens of one step: `tokens`, scored by the rows `at` of its hidden states."""

    def __init__(
        self,
        at: torch.Tensor,  # [num_rows] int64
        tokens: torch.Tensor,  # [num_rows] int64
        tokens_here: np.ndarray,  # the same, on the host
        runs: Sequence[Run],
        vocab_size: int,
    ) -> None:
        self.at = at
        self.tokens = tokens
        self.tokens_here = tokens_here
        self.runs = runs
        self.vocab_size = vocab_size
        self._reads: list[Callable[[], np.ndarray]] = []

    def score(
        self, hidden: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Score the rows, given `hidden` [num_tokens, hidden_size] of the whole step. Called in the
        forward pass; starts the copies to the host without waiting for them."""
        width = max(num_top for _, _, num_top in self.runs)
        for at, tokens in zip(self.at.split(MAX_ROWS), self.tokens.split(MAX_ROWS)):
            raw = as_float(to_logits(hidden[at])[:, : self.vocab_size])
            numbers = logprob_numbers(raw, tokens.clamp(max=self.vocab_size - 1), width)
            self._reads.append(from_device(numbers))

    def add_to(self, output: StepOutput) -> None:
        """Wait for the scores and add them to `output`."""
        read = np.concatenate([read() for read in self._reads])
        first = 0
        for req_id, num_rows, num_top in self.runs:
            part = slice(first, first + num_rows)
            tokens = self.tokens_here[part].tolist()
            first = first + num_rows
            entries = entries_of(read[part], tokens, [num_top] * num_rows)
            output.prompt_logprobs[req_id] = [self._possible(entry) for entry in entries]

    def _possible(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Return the entry, with -inf for a padding token of the vocabulary. A prompt can contain
        such tokens, which are never sampled."""
        if entry.token_id < self.vocab_size:
            return entry
        return replace(entry, logprob=-np.inf, rank=self.vocab_size + 1)
