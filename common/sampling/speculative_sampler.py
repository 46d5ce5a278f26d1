"""The sampler for speculative decoding: chapter 5's two rules, with this engine's constraints.

    drafts of a request       with probabilities               without probabilities
    needed from each row      its distribution                 the token, drawn as usual
    verified by               `rejection_sample`               `rejection_sampling_batched`

Drafts have no probabilities if they are from a look-up, or if the request is greedy or has a seed.
From the same logits, such a request gets exactly the tokens that it gets without speculation,
however many drafts the load, the budget or a preemption leave it. Every constraint applies at every
draft's position, with the drafts before it as history (Trap 37).

See 05_spec_decode/README.md#8-how-the-engine-uses-it"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from common.requests.input_processor import DrawnSeedParams
from common.sampling.counter_random import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    sample_from_probs,
)
from common.sampling.distributions import StagedRows, row_uniforms
from common.sampling.greedy_rows import BAD, REJECTED
from common.sampling.runner_plugin import HasTokens, UploadBuffer
from common.sampling.sampler import AsyncStepOutput, BatchSampler, Draw, Sampler
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.sampling_rules import DRAWN
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched

Rule = Callable[[torch.Tensor], VerifiedTokens]


class _Runs:
    """Requests that the same rule verifies. The rows of each start at `first` and are `lens` many:
    one for each draft and one more."""

    def __init__(
        self, batch: SamplingBatch, first: np.ndarray, lens: np.ndarray, upload: UploadBuffer
    ) -> None:
        run = np.repeat(np.arange(len(lens)), lens)
        start = np.cumsum(lens) - lens
        column = np.arange(len(run)) - start[run]
        width = int(lens.max())
        rows = first[run] + column
        drafts = chain.from_iterable(batch.drafts.get(batch.req_ids[row], ()) for row in first)
        self.sampling = batch.select(rows)
        self.max_drafts = width - 1
        self.is_draft = column < lens[run] - 1
        self.at = upload.add(rows)  # rows in the batch
        self.cells = upload.add(run * width + column)  # in a grid [num_runs, max_drafts + 1]
        self.cu_num_logits = upload.add(np.append(start, len(rows)))  # [num_runs + 1] int64
        self.drafts = upload.add(np.fromiter(drafts, dtype=np.int64))  # of all runs

    def verify(self, raw: torch.Tensor, tokens: torch.Tensor, rule: Rule) -> None:
        """Verify these rows of `raw` and write their `tokens`."""
        at = self.at()
        verified = rule(raw if len(at) == len(raw) else raw[at])
        columns = torch.arange(self.max_drafts + 1, device=tokens.device)
        lags = columns >= verified.num_sampled[:, None]
        grid = verified.token_ids.masked_fill(lags, REJECTED)
        tokens[at] = grid.flatten()[self.cells()]


class SpeculativeSampler(BatchSampler):
    """Samples and verifies. `draft_probs(request_id)` returns the distributions of its drafts, or
    None. `reject` and `match` are the rules, in PyTorch or as kernels."""

    def __init__(
        self,
        sampler: Sampler,
        draft_probs: Callable[[str], torch.Tensor | None],
        reject: Callable[..., VerifiedTokens] = rejection_sample,
        match: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rejection_sampling_batched,
    ) -> None:
        self.reject = reject
        self.match = match
        self.sampler = sampler
        self.draft_probs = draft_probs

    def stage(self, sampling: SamplingBatch, upload: UploadBuffer) -> AsyncStepOutput:
        """Stage 1 to k + 1 tokens for each request with k drafts."""
        drafts = sampling.drafts
        if not drafts:
            return self.sampler.stage(sampling, upload)
        first = np.flatnonzero(np.diff(sampling.rows, prepend=-1))  # row of each request
        lens = np.diff(first, append=len(sampling.rows))
        names = [sampling.req_ids[row] for row in first]
        probs = [self.draft_probs(name) if name in drafts else None for name in names]
        has_probs = np.array([q is not None for q in probs], dtype=bool)
        parts: list[tuple[_Runs, Rule]] = []
        if has_probs.any():  # can include trimmed drafts, which `kept` leaves out
            part = _Runs(sampling, first[has_probs], lens[has_probs], upload)
            kept = [q[: n - 1] for q, n in zip(probs, lens) if q is not None]
            parts.append((part, self._rejection(part, kept, upload)))
        if not has_probs.all():
            part = _Runs(sampling, first[~has_probs], lens[~has_probs], upload)
            parts.append((part, self._matching(part, upload)))

        def draw(raw: torch.Tensor) -> torch.Tensor:
            tokens = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
            for part, rule in parts:
                part.verify(raw, tokens, rule)
            return tokens

        return AsyncStepOutput(sampling, upload, self.sampler.raw_logits, draw)

    def _matching(self, part: _Runs, upload: UploadBuffer) -> Rule:
        draw = self.sampler.stage_draw(part.sampling, upload)

        def rule(raw: torch.Tensor) -> VerifiedTokens:
            target = draw(raw)
            token_ids, num_sampled = self.match(
                target, part.drafts(), part.cu_num_logits(), part.max_drafts
            )
            return VerifiedTokens(token_ids=token_ids, num_sampled=num_sampled)

        return rule

    def _rejection(
        self, part: _Runs, draft_probs: list[torch.Tensor], upload: UploadBuffer
    ) -> Rule:
        rows = StagedRows(self.sampler, part.sampling, upload)
        accept_u = upload.add(row_uniforms(part.sampling, ACCEPT_STREAM)[part.is_draft])

        def rule(raw: torch.Tensor) -> VerifiedTokens:
            target_probs = rows.probs(raw)
            cu_num_logits = part.cu_num_logits()
            verified = self.reject(
                target_probs,
                part.drafts(),
                torch.cat(draft_probs),
                cu_num_logits,
                part.max_drafts,
                accept_u(),
                rows.u(),
            )
            # The last token of a run was drawn from its row's distribution, which may be NaN.
            last = (verified.num_sampled - 1)[:, None]
            is_nan = target_probs[cu_num_logits[:-1, None] + last, 0].isnan()
            drawn = verified.token_ids.gather(1, last).masked_fill(is_nan, BAD)
            return VerifiedTokens(verified.token_ids.scatter(1, last, drawn), verified.num_sampled)

        return rule


class HasRows(HasTokens, Protocol):
    row_of: dict[str, int]


class ConstrainedDrafts:
    """A `DraftSampler` (chapter 5) that samples draft tokens under the request's constraints, which
    are also used to verify them. Penalties do not count the drafts of the same run.

    Without a user's seed, a draft token is drawn with a separate random number. With a seed, it is
    drawn with the same random number as the token: if the draft model has the right distribution,
    it proposes the right token."""

    def __init__(self, sampler: Sampler, columns: SamplingColumns, state: HasRows) -> None:
        self.sampler = sampler
        self.columns = columns
        self.state = state

    def needs_probs(self, request: RunnerRequest) -> bool:
        return isinstance(request.params, DrawnSeedParams) and not request.params.is_greedy

    def stage(
        self, rounds: Sequence[Sequence[RunnerRequest]], device: torch.device
    ) -> Sequence[np.ndarray]:
        self._upload = UploadBuffer(device)
        self._rounds = [self._stage(requests, n) for n, requests in enumerate(rounds)]
        return self._upload.arrays

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        self._upload.tensors = tensors

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raw = self.sampler.raw_logits(logits)
        staged = self._rounds[num_drafted]
        if not isinstance(staged, StagedRows):
            return staged(raw).clamp(min=0), None
        probs = staged.probs(raw)
        return sample_from_probs(probs, staged.u()), probs

    def _stage(self, requests: Sequence[RunnerRequest], num_drafted: int) -> StagedRows | Draw:
        columns = self.columns
        state = self.state
        rows = np.array([state.row_of[request.req_id] for request in requests], dtype=np.int64)
        num_outputs = state.num_tokens[rows] - state.num_prompt_tokens[rows] + num_drafted
        streams = np.where(columns.is_seed_drawn[rows], DRAFT_STREAM, TOKEN_STREAM)
        sampling = SamplingBatch(
            columns=columns,
            req_ids=[],
            rows=rows,
            num_outputs=num_outputs,
            state=state,
            drafts={},
            streams=streams,
            are_counted=num_drafted > 0,
        )
        if sampling.batch_needs & DRAWN:
            return StagedRows(self.sampler, sampling, self._upload)
        return self.sampler.stage_draw(sampling, self._upload)
