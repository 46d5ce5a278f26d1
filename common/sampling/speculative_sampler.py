"""The sampler of an engine that speculates: chapter 5's two rules, with this engine's constraints.

    a request whose drafts    came with probabilities          came with none
    needs of each row         its `sampling_probs`             the token, drawn as ever
    and is decided by         `rejection_sample`               `rejection_sampling_batched`

Drafts come without probabilities from a look-up, and for a request that is greedy or named a seed.
So from the same logits such a request gets exactly the tokens that it gets without speculation,
however many drafts the load, the budget or a preemption leave it. Every constraint applies at every
draft's position, with the drafts before it as history (Trap 37)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from batch_layout import to_device
from common.sampling.counter_random import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    sample_from_probs,
)
from common.sampling.distributions import row_uniforms, sampling_probs, upload
from common.sampling.sampler import BAD, REJECTED, HasSampling, Sampler
from common.sampling.sampling_columns import (
    DRAWN,
    DrawnSeedParams,
    HasTokens,
    SamplingBatch,
    SamplingColumns,
)
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched
from scheduler_interface import StepOutput


@dataclass(slots=True)
class _Runs:
    """The requests that one rule decides, with all of their rows: one for each draft, then one for
    the bonus token."""

    raw: torch.Tensor
    sampling: SamplingBatch
    drafts: torch.Tensor  # [num_drafts] int64, of all runs
    cu_num_logits: torch.Tensor  # [num_runs + 1] int64
    most_drafts: int
    is_draft: np.ndarray  # [rows]
    draft_probs: list[torch.Tensor]  # [drafts of the run, vocab_size] of each


class SpeculativeSampler:
    """A `BatchSampler`. `draft_probs(request_id)` are the distributions of its drafts, if any.
    `reject` and `match` are the rules, in PyTorch or as kernels."""

    def __init__(
        self,
        sampler: Sampler,
        draft_probs: Callable[[str], torch.Tensor | None],
        reject: Callable[..., VerifiedTokens] = rejection_sample,
        match: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rejection_sampling_batched,
    ) -> None:
        self.reject, self.match = reject, match
        self.sampler = sampler
        self.draft_probs = draft_probs

    def sample(self, logits: torch.Tensor, batch: HasSampling) -> StepOutput:
        """1 to k + 1 tokens for each request with k drafts."""
        sampling = batch.sampling
        if not sampling.drafts:
            return self.sampler.sample(logits, batch)
        raw = self.sampler.raw_logits(logits)
        starts = np.flatnonzero(np.diff(sampling.rows, prepend=-1))  # of each request's rows
        names = [sampling.req_ids[start] for start in starts]
        probs = [self.draft_probs(r) if r in sampling.drafts else None for r in names]
        is_rejected = np.array([q is not None for q in probs], dtype=bool)
        tokens = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        for rule, is_ruled in ((self._match, ~is_rejected), (self._reject, is_rejected)):
            runs = np.flatnonzero(is_ruled)
            if len(runs):
                self._verify(rule, runs, starts, names, probs, raw, sampling, tokens)
        return self.sampler.emit(raw, sampling, tokens)

    def _verify(self, rule, runs, starts, names, probs, raw, sampling, tokens) -> None:
        """Write the tokens of the rows of `runs`."""
        lens = np.diff(starts, append=len(raw))[runs]
        cu_num_logits = np.concatenate([[0], np.cumsum(lens)])
        run = np.repeat(np.arange(len(runs)), lens)
        column = np.arange(len(run)) - cu_num_logits[run]
        rows, width = starts[runs][run] + column, int(lens.max())
        drafts = [sampling.drafts.get(names[i], ()) for i in runs]
        flat = np.fromiter(chain.from_iterable(drafts), dtype=np.int64)
        cells = run * width + column
        at, cu, cells, flat = upload(raw.device, rows, cu_num_logits, cells, flat)
        part = _Runs(
            raw if len(rows) == len(raw) else raw[at],
            sampling.select(rows),
            flat,
            cu,
            width - 1,
            column < lens[run] - 1,
            [probs[i][: len(ids)] for i, ids in zip(runs, drafts) if probs[i] is not None],
        )
        verified = rule(part)
        behind = torch.arange(width, device=raw.device) >= verified.num_sampled[:, None]
        grid = verified.token_ids.masked_fill(behind, REJECTED)
        tokens[at] = grid.flatten()[cells]

    def _match(self, part: _Runs) -> VerifiedTokens:
        target = self.sampler.draw(part.raw, part.sampling)
        return VerifiedTokens(
            *self.match(target, part.drafts, part.cu_num_logits, part.most_drafts)
        )

    def _reject(self, part: _Runs) -> VerifiedTokens:
        target_probs = sampling_probs(part.raw, part.sampling, self.sampler.counts)
        accept_u = row_uniforms(part.sampling, ACCEPT_STREAM)[part.is_draft]
        verified = self.reject(
            target_probs,
            part.drafts,
            torch.cat(part.draft_probs),
            part.cu_num_logits,
            part.most_drafts,
            *upload(part.raw.device, accept_u, row_uniforms(part.sampling, TOKEN_STREAM)),
        )
        # The last token of a run was drawn from its row's distribution, which may be NaN.
        last = (verified.num_sampled - 1)[:, None]
        is_nan = target_probs[part.cu_num_logits[:-1, None] + last, 0].isnan()
        drawn = verified.token_ids.gather(1, last).masked_fill(is_nan, BAD)
        return VerifiedTokens(verified.token_ids.scatter(1, last, drawn), verified.num_sampled)


class HasRows(HasTokens, Protocol):
    row_of: dict[str, int]


class ConstrainedDrafts:
    """A `DraftSampler` (chapter 5): guesses under the constraints of the request, which are those
    that its tokens will be held against. Penalties do not see the guesses of the same run.

    Without a seed of its own, a request's guess is a draw of its own. With a seed, it is made with
    the random number that its token will be drawn with: if the draft model is right about the
    distribution, it is right about the token."""

    def __init__(self, sampler: Sampler, columns: SamplingColumns, state: HasRows) -> None:
        self.sampler, self.columns, self.state = sampler, columns, state

    def needs_probs(self, request: RunnerRequest) -> bool:
        return isinstance(request.params, DrawnSeedParams) and not request.params.is_greedy

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raw, columns, state = self.sampler.raw_logits(logits), self.columns, self.state
        rows = np.array([state.row_of[request.req_id] for request in requests], dtype=np.int64)
        num_outputs = state.num_tokens[rows] - state.num_prompt_tokens[rows] + num_drafted
        sampling = SamplingBatch(columns, [], rows, num_outputs, state, {})
        if not sampling.asked & DRAWN:
            return self.sampler.draw(raw, sampling).clamp(min=0), None
        probs = sampling_probs(raw, sampling, self.sampler.counts)
        streams = (row_uniforms(sampling, stream) for stream in (DRAFT_STREAM, TOKEN_STREAM))
        u = np.where(columns.is_seed_drawn[rows], *streams)
        return sample_from_probs(probs, to_device(u, raw.device)), probs
