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
from dataclasses import dataclass, field
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
from common.sampling.distributions import (
    Logprobs,
    RowArgs,
    prepare,
    row_probs,
    row_uniforms,
    sample_rows,
)
from common.sampling.greedy_rows import BAD, REJECTED
from common.sampling.runner_plugin import DeviceArgs, HasTokens, UploadBuffer
from common.sampling.sampler import SampleArgs, Sampler
from common.sampling.sampling_columns import SamplingBatch, SamplingColumns
from common.sampling.sampling_rules import LOGPROBS
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched


@dataclass(eq=False)
class Runs(DeviceArgs):
    """Requests that the same rule verifies, with a row for each draft and one more."""

    args: RowArgs
    max_drafts: int
    draft_probs: list[torch.Tensor]  # [number of drafts, V] of each; empty: matched
    at: Any  # [num_rows] rows in the batch
    cells: Any  # [num_rows] in a grid [num_runs, max_drafts + 1]
    cu_num_logits: Any  # [num_runs + 1]
    drafts: Any  # [num_drafts] of all runs
    accept_u: Any = None  # [num_drafts] float64, with `draft_probs`


@dataclass(eq=False)
class VerifyArgs(SampleArgs):
    runs: list[Runs] = field(default_factory=list)  # empty: no drafts


class SpeculativeSampler(Sampler):
    """Samples and verifies: 1 to k + 1 tokens for each request with k drafts.
    `draft_probs(request_id)` returns the distributions of its drafts, or None. `reject` and `match`
    are the rules, in PyTorch or as kernels."""

    def __init__(
        self,
        vocab_size: int,
        draft_probs: Callable[[str], torch.Tensor | None],
        reject: Callable[..., VerifiedTokens] = rejection_sample,
        match: Callable[..., VerifiedTokens] = rejection_sampling_batched,
    ) -> None:
        super().__init__(vocab_size)
        self.draft_probs = draft_probs
        self.reject = reject
        self.match = match

    def prepare(self, sampling: SamplingBatch) -> SampleArgs:
        drafts = sampling.drafts
        if not drafts:
            return super().prepare(sampling)
        first = np.flatnonzero(np.diff(sampling.rows, prepend=-1))  # row of each request
        lens = np.diff(first, append=len(sampling.rows))
        names = [sampling.req_ids[row] for row in first]
        probs = [self.draft_probs(name) if name in drafts else None for name in names]
        # Of the trial step that measures memory, a proposer had fewer drafts.
        probs = [None if q is None or len(q) < n - 1 else q for q, n in zip(probs, lens)]
        has_probs = np.array([q is not None for q in probs], dtype=bool)
        # They can include trimmed drafts, which `kept` leaves out.
        kept = [q[: n - 1] for q, n in zip(probs, lens) if q is not None]
        return VerifyArgs(
            req_ids=sampling.req_ids,
            logprobs=Logprobs(sampling) if sampling.batch_needs & LOGPROBS else None,
            runs=[
                self._runs_of(sampling, first[chosen], lens[chosen], draft_probs)
                for chosen, draft_probs in ((has_probs, kept), (~has_probs, []))
                if chosen.any()
            ],
        )

    def _runs_of(
        self,
        batch: SamplingBatch,
        first: np.ndarray,
        lens: np.ndarray,
        draft_probs: list[torch.Tensor],
    ) -> Runs:
        """Return the runs whose rows start at `first` and are `lens` many."""
        run = np.repeat(np.arange(len(lens)), lens)
        start = np.cumsum(lens) - lens
        column = np.arange(len(run)) - start[run]
        width = int(lens.max())
        rows = first[run] + column
        drafts = chain.from_iterable(batch.drafts.get(batch.req_ids[row], ()) for row in first)
        sampling = batch.select(rows)
        runs = Runs(
            args=prepare(sampling, self.vocab_size),
            max_drafts=width - 1,
            draft_probs=draft_probs,
            at=rows,
            cells=run * width + column,
            cu_num_logits=np.append(start, len(rows)),
            drafts=np.fromiter(drafts, dtype=np.int64),
        )
        if draft_probs:
            runs.accept_u = row_uniforms(sampling, ACCEPT_STREAM)[column < lens[run] - 1]
        return runs

    def draw(self, raw: torch.Tensor, args: SampleArgs) -> torch.Tensor:
        """Return the tokens [R] of the rows, `REJECTED` after a rejected draft."""
        if not isinstance(args, VerifyArgs):
            return super().draw(raw, args)
        tokens = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
        for runs in args.runs:
            rows = raw if len(runs.at) == len(raw) else raw[runs.at]
            token_ids, num_sampled = self._verify(runs, rows)
            columns = torch.arange(runs.max_drafts + 1, device=tokens.device)
            grid = token_ids.masked_fill(columns >= num_sampled[:, None], REJECTED)
            tokens[runs.at] = grid.flatten()[runs.cells]
        return tokens

    def _verify(self, runs: Runs, raw: torch.Tensor) -> VerifiedTokens:
        if not runs.draft_probs:
            target = sample_rows(raw, runs.args)
            return self.match(target, runs.drafts, runs.cu_num_logits, runs.max_drafts)
        target_probs = row_probs(raw, runs.args)
        verified = self.reject(
            target_probs,
            runs.drafts,
            torch.cat(runs.draft_probs),
            runs.cu_num_logits,
            runs.max_drafts,
            runs.accept_u,
            runs.args.u,
        )
        # The last token of a run was drawn from its row's distribution, which may be NaN.
        last = (verified.num_sampled - 1)[:, None]
        is_nan = target_probs[runs.cu_num_logits[:-1, None] + last, 0].isnan()
        drawn = verified.token_ids.gather(1, last).masked_fill(is_nan, BAD)
        return verified._replace(token_ids=verified.token_ids.scatter(1, last, drawn))


class HasRows(HasTokens, Protocol):
    row_of: dict[str, int]
    sampling: SamplingColumns


class ConstrainedDrafts:
    """A `DraftSampler` (chapter 5) that samples draft tokens under the request's constraints, which
    are also used to verify them. Penalties do not count the drafts of the same run.

    Without a user's seed, a draft token is drawn with a separate random number. With a seed, it is
    drawn with the same random number as the token: if the draft model has the right distribution,
    it proposes the right token."""

    def __init__(self, sampler: Sampler, state: HasRows) -> None:
        self.sampler = sampler
        self.state = state

    def needs_probs(self, request: RunnerRequest) -> bool:
        return isinstance(request.params, DrawnSeedParams) and not request.params.is_greedy

    def prepare(self, rounds: Sequence[Sequence[RunnerRequest]], device: torch.device) -> None:
        upload = UploadBuffer(device)
        self._rounds = [self._row_args(requests, n) for n, requests in enumerate(rounds)]
        for args in self._rounds:
            upload.fill(args)
        upload.send()

    def sample_drafts(
        self, logits: torch.Tensor, num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raw = self.sampler.raw_logits(logits)
        args = self._rounds[num_drafted]
        if args.draws is None:
            return sample_rows(raw, args).clamp(min=0), None
        probs = row_probs(raw, args)
        return sample_from_probs(probs, args.u), probs

    def _row_args(self, requests: Sequence[RunnerRequest], num_drafted: int) -> RowArgs:
        state = self.state
        columns = state.sampling
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
        return prepare(sampling, self.sampler.vocab_size)
