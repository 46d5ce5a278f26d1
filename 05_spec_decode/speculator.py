"""Speculation as the engine's loop sees it: who guesses, how much, and how it went.

    output  = scheduler.schedule()                      plans drafts like tokens that are known
    ...                                                 one row of logits for each of them
    sampled = sampler.sample(logits, batch)             accepted drafts and one token more
    results = scheduler.update_from_output(...)         takes back the KV of those rejected
    drafts  = speculator.propose(output, sampled)       <-- here, for the next step

A request is guessed on if it still runs and is behind by nothing but its last token. All that the
scheduler knows of the matter are `draft_token_ids`: tokens that may be trimmed or dropped at any
time. They count against the budget, they are never published to a prefix cache, a preemption
forgets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from draft_length import DraftLength
from engine_core import StepRecord
from proposers import Proposer
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput


@dataclass(slots=True)
class SpecDecodeStats:
    """A *pass* is one request in one step that yields tokens; `num_tokens` is what they yielded.
    `accepted_by_position[i]` counts drafts at place i of their run; those behind a rejection are in
    `drafted_by_position` all the same."""

    num_passes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    num_drafted_passes: int = 0
    num_rejections: int = 0  # passes that ended with one

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.num_passes += 1
        self.num_tokens += 1 + num_accepted
        if num_drafted == 0:
            return
        self.num_drafted_passes += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_rejections += num_accepted < num_drafted
        missing = num_drafted - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for i in range(num_drafted):
            self.drafted_by_position[i] += 1
            self.accepted_by_position[i] += i < num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Of all drafts, those behind a rejection included."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each place that were accepted, and so were all before them."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of a pass that had drafts: those accepted, and one more."""
        return 1 + self.num_accepted / self.num_drafted_passes if self.num_drafted_passes else 1.0

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


class Speculator:
    """One proposer, one rule for lengths, and the books."""

    def __init__(self, proposer: Proposer, draft_length: DraftLength) -> None:
        self.proposer = proposer
        self.draft_length = draft_length
        self.stats = SpecDecodeStats()
        self._num_rounds = 0  # of the last proposal
        self._num_rounds_before = 0

    def propose(
        self, output: SchedulerOutput, sampled: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        """Called when the scheduler has taken the sampled tokens. Drafts for the next step."""
        for request_id in output.finished_req_ids:
            self._forget(request_id)
        following: list[Request] = []
        for request in output.scheduled_requests:
            self._observe(request, output, sampled)
            if request.status is RequestStatus.RUNNING:
                following.append(request)
            else:
                self._forget(request.request_id)
        ready = [r for r in following if r.num_tokens - r.num_computed_tokens == 1]
        lengths = self.draft_length.choose(ready)
        wanted = {
            request.request_id: max(0, min(length, request.max_num_tokens - request.num_tokens - 1))
            for request, length in zip(ready, lengths, strict=True)
        }
        num_drafts = [wanted.get(request.request_id, 0) for request in following]
        self._num_rounds_before, self._num_rounds = self._num_rounds, max(num_drafts, default=0)
        if self._num_rounds == 0:
            return {}  # a draft model falls behind, and catches up when it is asked again
        return self.proposer.propose(following, num_drafts)

    def observe_step(self, record: StepRecord) -> None:
        """How long the step took that ended with the last proposal."""
        scheduled = record.num_scheduled_tokens
        is_decode = all(n == 1 + record.drafts.get(r, (0, 0))[0] for r, n in scheduled.items())
        if scheduled and is_decode:
            verify_ms = record.prepare_ms + record.forward_ms + record.sample_ms
            num_tokens = sum(scheduled.values())
            # After a pause a draft model first catches up, which takes longer than guessing.
            num_rounds = self._num_rounds if self._num_rounds_before else 0
            self.draft_length.observe_step(
                len(scheduled), num_tokens, num_rounds, verify_ms, record.propose_ms
            )

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        return self.proposer.draft_probs(request_id)

    def _observe(
        self, request: Request, output: SchedulerOutput, sampled: dict[str, list[int]]
    ) -> None:
        tokens = sampled.get(request.request_id)
        if tokens:
            num_drafted = len(output.scheduled_draft_token_ids.get(request.request_id, ()))
            self.stats.observe(num_drafted, len(tokens) - 1)
            if num_drafted:
                self.draft_length.observe(request.request_id, num_drafted, len(tokens) - 1)

    def _forget(self, request_id: str) -> None:
        self.proposer.forget(request_id)
        self.draft_length.forget(request_id)
