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
)
from common.sampling.distributions import row_uniforms, sampling_probs, upload
from common.sampling.sampler import (
    BAD,
    REJECTED,
    BatchSampler,
    HasSampling,
    Sampler,
    UnreadStep,
)
from common.sampling.sampling_columns import (
    DRAWN,
    DrawnSeedParams,
    HasTokens,
    SamplingBatch,
    SamplingColumns,
)
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched


@dataclass(slots=True)
class _Runs:
    """Requests that one rule decides, with all of their rows: one for each draft and one behind."""

    raw: torch.Tensor
    sampling: SamplingBatch
    is_draft: np.ndarray  # [rows]
    at: torch.Tensor  # [rows], in the batch
    cells: torch.Tensor  # [rows], in a grid [num_runs, most_drafts + 1]
    cu_num_logits: torch.Tensor  # [num_runs + 1] int64
    drafts: torch.Tensor  # [num_drafts] int64, of all runs
    most_drafts: int

    @classmethod
    def of(
        cls, raw: torch.Tensor, batch: SamplingBatch, first: np.ndarray, lens: np.ndarray
    ) -> _Runs:
        """Of those whose rows are the `lens` from `first` on."""
        run, start = np.repeat(np.arange(len(lens)), lens), np.cumsum(lens) - lens
        column, width = np.arange(len(run)) - start[run], int(lens.max())
        rows = first[run] + column
        part = batch.select(rows)
        drafts = chain.from_iterable(batch.drafts.get(batch.req_ids[row], ()) for row in first)
        at, cells, cu_num_logits, flat = upload(
            raw.device,
            rows,
            run * width + column,
            np.append(start, len(rows)),
            np.fromiter(drafts, dtype=np.int64),
        )
        raw = raw if len(rows) == len(raw) else raw[at]
        is_draft = column < lens[run] - 1
        return cls(raw, part, is_draft, at, cells, cu_num_logits, flat, width - 1)


class SpeculativeSampler(BatchSampler):
    """`draft_probs(request_id)` are the distributions of its drafts, if any.
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

    def begin(self, logits: torch.Tensor, batch: HasSampling) -> UnreadStep:
        """1 to k + 1 tokens for each request with k drafts."""
        sampling, drafts = batch.sampling, batch.sampling.drafts
        if not drafts:
            return self.sampler.begin(logits, batch)
        raw = self.sampler.raw_logits(logits)
        first = np.flatnonzero(np.diff(sampling.rows, prepend=-1))  # row of each request
        lens = np.diff(first, append=len(raw))
        names = [sampling.req_ids[row] for row in first]
        probs = [self.draft_probs(name) if name in drafts else None for name in names]
        has_probs = np.array([q is not None for q in probs], dtype=bool)
        tokens = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        if has_probs.any():  # for more drafts than there are, if some were trimmed
            part = _Runs.of(raw, sampling, first[has_probs], lens[has_probs])
            kept = [q[: n - 1] for q, n in zip(probs, lens) if q is not None]
            self._write(tokens, part, self._reject(part, torch.cat(kept)))
        if not has_probs.all():
            part = _Runs.of(raw, sampling, first[~has_probs], lens[~has_probs])
            target = self.sampler.draw(part.raw, part.sampling)
            found = self.match(target, part.drafts, part.cu_num_logits, part.most_drafts)
            self._write(tokens, part, VerifiedTokens(*found))
        return UnreadStep(raw, sampling, tokens)

    def _write(self, tokens: torch.Tensor, part: _Runs, verified: VerifiedTokens) -> None:
        columns = torch.arange(part.most_drafts + 1, device=tokens.device)
        is_behind = columns >= verified.num_sampled[:, None]
        grid = verified.token_ids.masked_fill(is_behind, REJECTED)
        tokens[part.at] = grid.flatten()[part.cells]

    def _reject(self, part: _Runs, draft_probs: torch.Tensor) -> VerifiedTokens:
        sampler = self.sampler
        target_probs = sampling_probs(part.raw, part.sampling, sampler.counts, sampler.rules)
        accept_u = row_uniforms(part.sampling, ACCEPT_STREAM)[part.is_draft]
        verified = self.reject(
            target_probs,
            part.drafts,
            draft_probs,
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
        rules = self.sampler.rules
        probs = sampling_probs(raw, sampling, self.sampler.counts, rules)
        streams = (row_uniforms(sampling, stream) for stream in (DRAFT_STREAM, TOKEN_STREAM))
        u = np.where(columns.is_seed_drawn[rows], *streams)
        return rules.sample_from_probs(probs, to_device(u, raw.device)), probs
