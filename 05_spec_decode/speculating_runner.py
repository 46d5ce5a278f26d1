"""A runner that also proposes draft tokens. It wraps another runner, and is a `ModelRunner` itself.

    plan    = scheduler.schedule()            schedules drafts like known tokens
    output  = runner.execute(plan).wait()     <-- the inner runner computes and verifies; then here:
                                                  count accepted drafts, propose new ones
    results = scheduler.update_from_output(plan, output)       rolls back the KV of rejected ones

The wrapper knows only plans and sampled tokens, as a runner in another process would. It proposes
for a request if only the token that was just sampled is uncomputed. Some requests have finished
with that token, but only the scheduler knows that, so it drops their draft tokens. A proposer needs
this step's tokens immediately, so they are written into the runner's copies of the requests; the
next plan sends them again, to the same positions.

How many tokens to propose: `FixedLength` is a constant, `beyond/adaptive_length.py` learns the best
length.

See 05_spec_decode/README.md#a-runner-around-a-runner"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from acceptance import SpecDecodeStats
from block_delta import PagedRunnerState
from proposers import Proposer, ProposerInput
from scheduler_interface import FinishedStep, ModelRunner, RunnerInput, StepOutput, StepTimer


class DraftLength(Protocol):
    def choose(self, request_ids: Sequence[str]) -> list[int]:
        """Choose how many draft tokens to propose for each of these decoding requests."""
        ...

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's draft tokens were accepted."""

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        """Record the times of a step without prompts: a target pass over `num_tokens`, then
        `num_rounds` rounds of proposing, each for `num_requests`. With 0 rounds, ignore `draft_ms`:
        nothing was proposed, or a draft model caught up on tokens that it had missed."""

    def remove_request(self, request_id: str) -> None:
        """Drop the state of a finished request. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class FixedLength(DraftLength):
    """A constant length, which ignores all observations."""

    num_spec_tokens: int

    def choose(self, request_ids: Sequence[str]) -> list[int]:
        return [self.num_spec_tokens] * len(request_ids)


class SpeculatingRunner:
    """A `ModelRunner` around `runner`. `state` must be the same object as that runner's state,
    which the runner updates."""

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer,
        draft_length: DraftLength,
        state: PagedRunnerState,
    ) -> None:
        self.runner = runner
        self.proposer = proposer
        self.draft_length = draft_length
        self.state = state
        self.stats = SpecDecodeStats()
        self._num_rounds = 0  # rounds of proposing in the last step
        self._num_rounds_before = 0

    def execute(self, plan: RunnerInput) -> FinishedStep:
        for req_id in list(self.state.requests) if plan.reset else plan.finished_req_ids:
            self.proposer.remove_request(req_id)
            self.draft_length.remove_request(req_id)
        for req_id in plan.scheduled_cached_reqs.resumed_req_ids:
            self.proposer.remove_request(req_id)  # its block table is new
        output = self.runner.execute(plan).wait()
        verify_ms = sum(output.times.values())
        clock = StepTimer()
        output.draft_token_ids = self._propose(self._count_accepted(plan, output))
        clock.lap("propose_ms")
        output.times |= clock.ms
        self._observe_times(plan, verify_ms, clock.ms["propose_ms"])
        return FinishedStep(output)

    def reset_stats(self) -> None:
        """Reset all counters to zero."""
        self.stats = SpecDecodeStats()

    def _count_accepted(self, plan: RunnerInput, output: StepOutput) -> list[ProposerInput]:
        """Count accepted draft tokens. Returns the requests that may continue, with this step's
        tokens."""
        self._append(output.token_ids)
        inputs = []
        starts = plan.starts()
        for (req_id, start), num_outputs in zip(starts.items(), self._num_outputs(starts)):
            request = self.state.requests[req_id]
            tokens = output.token_ids.get(req_id, [])
            num_computed_tokens = start + plan.num_scheduled_tokens[req_id]
            if tokens:
                num_drafted = len(plan.scheduled_draft_token_ids.get(req_id, ()))
                num_accepted = len(tokens) - 1
                self.stats.observe(num_drafted, num_accepted)
                if num_drafted:
                    self.draft_length.observe(req_id, num_drafted, num_accepted)
                num_computed_tokens -= num_drafted - num_accepted
            has_ended = num_outputs >= request.max_tokens
            if not has_ended and req_id not in output.errors:
                inputs.append(ProposerInput(request, start, num_computed_tokens))
        return inputs

    def _append(self, token_ids: dict[str, list[int]]) -> None:
        rows = self.state.rows_of(token_ids)
        num_tokens = self.state.num_tokens
        tokens = list(token_ids.values())
        num_tokens[rows] = self.state.write_tokens(rows, num_tokens[rows], tokens)

    def _num_outputs(self, req_ids: Collection[str]) -> list[int]:
        rows = self.state.rows_of(req_ids)
        return (self.state.num_tokens[rows] - self.state.num_prompt_tokens[rows]).tolist()

    def _propose(self, inputs: list[ProposerInput]) -> dict[str, list[int]]:
        ready = [f.request for f in inputs if f.request.num_tokens - f.num_computed_tokens == 1]
        req_ids = [request.req_id for request in ready]
        lengths = self.draft_length.choose(req_ids)
        num_outputs = self._num_outputs(req_ids)
        num_requested = {}
        for request, length, num in zip(ready, lengths, num_outputs, strict=True):
            # The token that follows the draft tokens is an output too. Without an output, this is a
            # prompt of which a chunk left one token.
            max_drafts = request.max_tokens - num - 1 if num else 0
            num_requested[request.req_id] = max(0, min(length, max_drafts))
        num_drafts = [num_requested.get(f.request.req_id, 0) for f in inputs]
        self._num_rounds_before = self._num_rounds
        self._num_rounds = max(num_drafts, default=0)
        if self._num_rounds == 0:
            return {}  # a draft model lags, and catches up at its next proposal
        return self.proposer.propose(inputs, num_drafts)

    def _observe_times(self, plan: RunnerInput, verify_ms: float, propose_ms: float) -> None:
        num_tokens = plan.num_scheduled_tokens
        drafts = plan.scheduled_draft_token_ids
        if num_tokens and all(n == 1 + len(drafts.get(r, ())) for r, n in num_tokens.items()):
            # After a pause, a draft model first catches up, which takes longer than proposing.
            num_rounds = self._num_rounds if self._num_rounds_before else 0
            self.draft_length.observe_step(
                len(num_tokens), sum(num_tokens.values()), num_rounds, verify_ms, propose_ms
            )
