"""From logits to tokens: every constraint of `SamplingParams`, for the whole batch at once.

    raw logits --> log-probabilities, where asked for
        | min_tokens: EOS and stop tokens impossible; repetition, presence, frequency penalties
        +--> greedy rows: the highest; of equals, the lowest id
        | temperature, min-p, top-k, top-p
        | softmax                                    `sampling_probs` ends here (for chapter 5)
        +--> inverse of the cumulative distribution at a uniform number

A batch of greedy rows needs what is in this file; `distributions.py` has the rest. What the host
wants to know of a step, it reads at once.

A logit row is used as float64 if it is float64, otherwise as float32; cumulative sums are float64
or integers. A row without a finite maximum (NaN, +inf, or no token allowed) is an error of its
request and of no other."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from batch_layout import from_device
from common.sampling.sampling_columns import LOGPROBS, PENALTIES, SamplingBatch
from scheduler_interface import NO_FINITE_LOGITS, StepOutput

if TYPE_CHECKING:
    from common.sampling.distributions import Rules
    from common.sampling.token_counts import TokenCounts

BAD, REJECTED = -1, -2  # in place of a row's token: no finite maximum; behind a rejected draft


class HasSampling(Protocol):
    """A batch, as a sampler sees it."""

    sampling: SamplingBatch


class BatchSampler(Protocol):
    def begin(self, logits: torch.Tensor, batch: HasSampling) -> UnreadStep:
        """Choose tokens for the rows of `logits` [R, vocab_size or wider]; R may be 0."""
        ...

    def sample(self, logits: torch.Tensor, batch: HasSampling) -> StepOutput:
        """And wait: the tokens, log-probabilities and errors of the batch's requests."""
        return self.begin(logits, batch).wait()


class Sampler(BatchSampler):
    """Chooses each row's next token. `vocab_size`: logits beyond it are padding and never win.
    `rules`: kernels; None: PyTorch. Keeps token counts where there are penalties. Neither changes
    what is sampled."""

    def __init__(self, vocab_size: int | None = None, rules: Rules | None = None) -> None:
        self.vocab_size, self.given_rules = vocab_size, rules

    @cached_property
    def rules(self) -> Rules:
        from common.sampling.distributions import IN_TORCH

        return self.given_rules or IN_TORCH

    @cached_property
    def counts(self) -> TokenCounts:
        from common.sampling.token_counts import TokenCounts

        return TokenCounts()

    def begin(self, logits: torch.Tensor, batch: HasSampling) -> UnreadStep:
        """One token for each row."""
        raw = self.raw_logits(logits)
        return UnreadStep(raw, batch.sampling, self.draw(raw, batch.sampling))

    def raw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Without padding lanes, in the dtype that is computed in."""
        return as_float(logits[:, : self.vocab_size])

    def draw(self, raw: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        """The token [R] of each row of `raw_logits`, or `BAD`."""
        if sampling.asked | LOGPROBS == LOGPROBS:
            return greedy(raw)
        from common.sampling.distributions import draw

        counts = self.counts if sampling.asked & PENALTIES else None
        return draw(raw, sampling, counts, self.rules)


class UnreadStep:
    """Sampled `tokens` [R] int64 that are on their way to the host; `raw` [R, V] are the logits."""

    def __init__(self, raw: torch.Tensor, sampling: SamplingBatch, tokens: torch.Tensor) -> None:
        self.tokens, self.req_ids, self._logprobs = tokens, sampling.req_ids, None
        if sampling.asked & LOGPROBS:
            from common.sampling.distributions import Logprobs

            self._logprobs = Logprobs(raw, sampling, tokens)
            tokens = torch.cat([tokens.to(torch.float64), self._logprobs.numbers.flatten()])
        self._read = from_device(tokens)

    def wait(self) -> StepOutput:
        """What became of them. The host waits here, and only here."""
        output, req_ids, read = StepOutput(), self.req_ids, self._read()
        ids = read[: len(req_ids)].astype(np.int64, copy=False)
        output.token_ids = dict(zip(req_ids, ids[:, None].tolist()))
        if len(output.token_ids) < len(ids) or ids.min(initial=0) < 0:
            _sort_out(output, req_ids, ids.tolist())
        if self._logprobs is not None:
            self._logprobs.add_to(output, req_ids, ids, read[len(req_ids) :])
        return output


def _sort_out(output: StepOutput, req_ids: list[str], tokens: list[int]) -> None:
    """Requests with several rows, and rows without a token. A request that has got tokens comes to
    its bad row again in the next step, and to no draft before it."""
    output.token_ids = {}
    for req_id, token in zip(req_ids, tokens, strict=True):
        if token >= 0:
            output.token_ids.setdefault(req_id, []).append(token)
        elif token == BAD and req_id not in output.token_ids:
            output.errors[req_id] = NO_FINITE_LOGITS


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's lowest id [R]; `BAD` where the highest is not finite."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
    else:  # NumPy's argmax is vectorised and ten times as quick; both take the first of equals
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(highest.isfinite(), tokens, BAD)


def as_float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)
