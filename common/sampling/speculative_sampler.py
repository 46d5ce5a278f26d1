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
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from common.requests.input_processor import DrawnSeedParams
from common.sampling.counter_random import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    sample_from_probs,
)
from common.sampling.distributions import RowArgs, row_probs, row_uniforms, sample_rows
from common.sampling.greedy_rows import BAD, REJECTED
from common.sampling.runner_plugin import HasTokens, UploadBuffer
from common.sampling.sampler import AsyncStepOutput, BatchSampler, Sampler
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched


class _Runs:
    """Requests that the same rule verifies. The rows of each start at `first` and are `lens` many:
    one for each draft and one more. `draft_probs` [number of drafts, V] of each, or none."""

    def __init__(
        self,
        batch: SamplingBatch,
        first: np.ndarray,
        lens: np.ndarray,
        draft_probs: list[torch.Tensor],
        sampler: Sampler,
        upload: UploadBuffer,
    ) -> None:
        run = np.repeat(np.arange(len(lens)), lens)
        start = np.cumsum(lens) - lens
        column = np.arange(len(run)) - start[run]
        width = int(lens.max())
        rows = first[run] + column
        drafts = chain.from_iterable(batch.drafts.get(batch.req_ids[row], ()) for row in first)
        sampling = batch.select(rows)
        self.draft_probs = draft_probs
        self.max_drafts = width - 1
        self.args = sampler.prepare(sampling, upload)
        # Arrays until the upload, then tensors.
        self.at: Any = rows  # rows in the batch
        self.cells: Any = run * width + column  # in a grid [num_runs, max_drafts + 1]
        self.cu_num_logits: Any = np.append(start, len(rows))  # [num_runs + 1] int64
        self.drafts: Any = np.fromiter(drafts, dtype=np.int64)  # of all runs
        self.accept_u: Any = None
        if draft_probs:
            self.accept_u = row_uniforms(sampling, ACCEPT_STREAM)[column < lens[run] - 1]
        upload.fill(self)


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
        # They can include trimmed drafts, which `kept` leaves out.
        kept = [q[: n - 1] for q, n in zip(probs, lens) if q is not None]
        parts = [
            _Runs(sampling, first[chosen], lens[chosen], draft_probs, self.sampler, upload)
            for chosen, draft_probs in ((has_probs, kept), (~has_probs, []))
            if chosen.any()
        ]
        draw = partial(self._verify_all, parts)
        return AsyncStepOutput(sampling, upload, self.sampler.raw_logits, draw)

    def _verify_all(self, parts: list[_Runs], raw: torch.Tensor) -> torch.Tensor:
        """Return the tokens [R] of the rows, `REJECTED` after a rejected draft."""
        tokens = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        for part in parts:
            rows = raw if len(part.at) == len(raw) else raw[part.at]
            token_ids, num_sampled = self._verify(part, rows)
            columns = torch.arange(part.max_drafts + 1, device=tokens.device)
            grid = token_ids.masked_fill(columns >= num_sampled[:, None], REJECTED)
            tokens[part.at] = grid.flatten()[part.cells]
        return tokens

    def _verify(self, part: _Runs, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids [num_runs, max_drafts + 1], and how many of each run are sampled."""
        if not part.draft_probs:
            target = sample_rows(raw, part.args)
            return self.match(target, part.drafts, part.cu_num_logits, part.max_drafts)
        target_probs = row_probs(raw, part.args)
        verified = self.reject(
            target_probs,
            part.drafts,
            torch.cat(part.draft_probs),
            part.cu_num_logits,
            part.max_drafts,
            part.accept_u,
            part.args.u,
        )
        # The last token of a run was drawn from its row's distribution, which may be NaN.
        last = (verified.num_sampled - 1)[:, None]
        is_nan = target_probs[part.cu_num_logits[:-1, None] + last, 0].isnan()
        drawn = verified.token_ids.gather(1, last).masked_fill(is_nan, BAD)
        return verified.token_ids.scatter(1, last, drawn), verified.num_sampled


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
        self._rounds = [self._prepare(requests, n) for n, requests in enumerate(rounds)]
        return self._upload.arrays

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        self._upload.take(tensors)

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raw = self.sampler.raw_logits(logits)
        args = self._rounds[num_drafted]
        if args.draws is None:
            return sample_rows(raw, args).clamp(min=0), None
        probs = row_probs(raw, args)
        return sample_from_probs(probs, args.u), probs

    def _prepare(self, requests: Sequence[RunnerRequest], num_drafted: int) -> RowArgs:
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
        )
        return self.sampler.prepare(sampling, self._upload)
