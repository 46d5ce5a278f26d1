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
from itertools import accumulate

import torch

from common.sampling.counter_random import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TOKEN_STREAM,
    sample_from_probs,
)
from common.sampling.sampler import HasSampling, Sampler, SamplingBatch, sampling_probs
from common.sampling.sampling_columns import DrawnSeedParams
from input_batch import RunnerRequest
from rejection_sampler import VerifiedTokens, rejection_sample, rejection_sampling_batched
from scheduler_interface import StepOutput


@dataclass(slots=True)
class _Run:
    """One request: its rows of logits, `[start, stop)`, the last one for the bonus token."""

    req_id: str
    start: int
    stop: int
    probs: torch.Tensor | None  # [num_drafts, vocab_size]

    @property
    def num_drafts(self) -> int:
        return self.stop - self.start - 1


@dataclass(slots=True)
class _Runs:
    """Those that one rule decides, with all of their rows."""

    raw: torch.Tensor
    sampling: SamplingBatch
    runs: list[_Run]
    drafts: torch.Tensor  # [num_drafts] int64, of all runs
    cu_num_logits: torch.Tensor  # [num_runs + 1] int64

    @property
    def most_drafts(self) -> int:
        return max(run.num_drafts for run in self.runs)


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
        if not batch.draft_token_ids:
            return self.sampler.sample(logits, batch)
        raw = self.sampler.raw_logits(logits)
        sampling = batch.sampling
        runs = self._runs(batch)
        matched = [run for run in runs if run.probs is None]
        rejected = [run for run in runs if run.probs is not None]
        tokens = self._verify(self._match, matched, raw, batch)
        tokens |= self._verify(self._reject, rejected, raw, batch)
        for run_tokens in tokens.values():
            if run_tokens[-1] < 0 and len(run_tokens) > 1:
                run_tokens.pop()  # the next step comes to this row again, and to no draft before it
        rows = [run.start + i for run in runs for i in range(len(tokens[run.req_id]))]
        flat = [token for run in runs for token in tokens[run.req_id]]
        return self.sampler.emit(raw, sampling, rows, flat)

    def _runs(self, batch: HasSampling) -> list[_Run]:
        runs, start = [], 0
        while start < len(batch.sampling.req_ids):
            req_id = batch.sampling.req_ids[start]
            num_drafts = len(batch.draft_token_ids.get(req_id, ()))
            probs = self.draft_probs(req_id) if num_drafts else None
            probs = None if probs is None else probs[:num_drafts]  # some may have been trimmed
            runs.append(_Run(req_id, start, start + num_drafts + 1, probs))
            start += num_drafts + 1
        return runs

    def _verify(
        self,
        rule: Callable[[_Runs], torch.Tensor],
        runs: list[_Run],
        raw: torch.Tensor,
        batch: HasSampling,
    ) -> dict[str, list[int]]:
        """The tokens of each run; it ends with a -1 at logits that say nothing."""
        if not runs:
            return {}
        rows = [row for run in runs for row in range(run.start, run.stop)]
        cu_num_logits = torch.tensor([0, *accumulate(r.stop - r.start for r in runs)])
        drafts = [token for run in runs for token in batch.draft_token_ids.get(run.req_id, ())]
        part = _Runs(
            raw if len(rows) == len(raw) else raw[rows],
            batch.sampling.select(rows),
            runs,
            torch.tensor(drafts, dtype=torch.int64).to(raw.device),
            cu_num_logits.to(raw.device),
        )
        result = rule(part).tolist()  # the host waits here
        return {
            run.req_id: row[:num_sampled]
            for run, (num_sampled, *row) in zip(runs, result, strict=True)
        }

    def _match(self, part: _Runs) -> torch.Tensor:
        """[num_runs, 1 + most tokens]: the first column says how many of the others count."""
        target = self.sampler.draw(part.raw, part.sampling)
        drafts, cu_num_logits = part.drafts, part.cu_num_logits
        tokens, num_sampled = self.match(target, drafts, cu_num_logits, part.most_drafts)
        return torch.cat([num_sampled[:, None], tokens], dim=1)

    def _reject(self, part: _Runs) -> torch.Tensor:  # the same
        sampling, device = part.sampling, part.raw.device
        every = range(len(sampling.req_ids))
        is_bonus = {stop - 1 for stop in accumulate(run.num_drafts + 1 for run in part.runs)}
        target_probs = sampling_probs(part.raw, sampling, self.sampler.counts)
        accept_u = sampling.uniforms([i for i in every if i not in is_bonus], ACCEPT_STREAM)
        verified = self.reject(
            target_probs,
            part.drafts,
            torch.cat([run.probs for run in part.runs if run.probs is not None]),
            part.cu_num_logits,
            part.most_drafts,
            accept_u.to(device),
            sampling.uniforms(every, TOKEN_STREAM).to(device),
        )
        # The last token of a run was drawn from its row's distribution, which may be NaN.
        last = (verified.num_sampled - 1)[:, None]
        is_nan = target_probs[part.cu_num_logits[:-1, None] + last, 0].isnan()
        drawn = verified.token_ids.gather(1, last).masked_fill(is_nan, -1)
        tokens = verified.token_ids.scatter(1, last, drawn)
        return torch.cat([verified.num_sampled[:, None], tokens], dim=1)


class ConstrainedDrafts:
    """A `DraftSampler` (chapter 5): guesses under the constraints of the request, which are those
    that its tokens will be held against. Penalties do not see the guesses of the same run.

    Without a seed of its own, a request's guess is a draw of its own. With a seed, it is made with
    the random number that its token will be drawn with: if the draft model is right about the
    distribution, it is right about the token."""

    def __init__(self, sampler: Sampler, eos_token_ids: Sequence[int] = ()) -> None:
        self.sampler = sampler
        self.eos_token_ids = tuple(eos_token_ids)

    def needs_probs(self, request: RunnerRequest) -> bool:
        return isinstance(request.params, DrawnSeedParams) and not request.params.is_greedy

    def sample_drafts(
        self, logits: torch.Tensor, requests: Sequence[RunnerRequest], num_drafted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        raw = self.sampler.raw_logits(logits)
        sampling = SamplingBatch(num_unseen=num_drafted)
        for request in requests:
            sampling.add(request, [], self.eos_token_ids)
        if all(request.params.is_greedy for request in requests):
            return self.sampler.draw(raw, sampling).clamp(min=0), None
        rows = range(len(requests))
        probs = sampling_probs(raw, sampling, self.sampler.counts)
        own = torch.tensor([self.needs_probs(request) for request in requests])
        u = torch.where(
            own, sampling.uniforms(rows, DRAFT_STREAM), sampling.uniforms(rows, TOKEN_STREAM)
        )
        return sample_from_probs(probs, u.to(raw.device)), probs
