"""A runner that also proposes draft tokens. It wraps another runner, and is a `ModelRunner` itself.

    plan    = scheduler.schedule()            schedules drafts like known tokens
    output  = runner.execute(plan).wait()     <-- the inner runner computes and verifies; then here:
                                                  propose new ones
    results = scheduler.update_from_output(plan, output)       rolls back the KV of rejected ones

The wrapper knows only plans and sampled tokens, as a runner in another process would. It proposes
for a request if only the token that was just sampled is uncomputed. Some requests have finished
with that token, but only the scheduler knows that, so it drops their draft tokens. A proposer needs
this step's tokens immediately, so they are written into the runner's copies of the requests; the
next plan sends them again, to the same positions.

See 05_spec_decode/README.md#a-runner-around-a-runner"""

from __future__ import annotations

from collections.abc import Callable

from block_delta import PagedRunnerState
from proposers import Proposer, ProposerInput
from scheduler_interface import FinishedStep, ModelRunner, RunnerInput, StepOutput, StepTimer


class SpeculatingRunner:
    """A `ModelRunner` around `runner`. `state` must be the same object as that runner's state,
    which the runner updates. `num_possible(req_id, drafts)` returns how many of the draft tokens
    can be accepted at all: each of the others would cost a row of the next step."""

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer,
        state: PagedRunnerState,
        num_possible: Callable[[str, list[int]], int] = lambda _, drafts: len(drafts),
    ) -> None:
        self.runner = runner
        self.proposer = proposer
        self.state = state
        self.num_possible = num_possible

    def execute(self, plan: RunnerInput) -> FinishedStep:
        for req_id in list(self.state.requests) if plan.reset else plan.finished_req_ids:
            self.proposer.remove_request(req_id)
        for req_id in plan.scheduled_cached_reqs.resumed_req_ids:
            self.proposer.remove_request(req_id)  # its block table is new
        output = self.runner.execute(plan).wait()
        clock = StepTimer()
        self._append(output.token_ids)
        for req_id, drafts in self._propose(plan, output).items():
            tokens = list(drafts)
            if kept := tokens[: self.num_possible(req_id, tokens)]:
                output.draft_token_ids[req_id] = kept
        clock.lap("propose_ms")
        output.times |= clock.ms
        return FinishedStep(output)

    def _append(self, token_ids: dict[str, list[int]]) -> None:
        rows = self.state.rows_of(token_ids)
        num_tokens = self.state.num_tokens
        tokens = list(token_ids.values())
        num_tokens[rows] = self.state.write_tokens(rows, num_tokens[rows], tokens)

    def _propose(self, plan: RunnerInput, output: StepOutput) -> dict[str, list[int]]:
        """Propose for the requests that may continue. One whose last known token was not computed
        gets no drafts, but a draft model follows it."""
        inputs = []
        num_drafts = []
        starts = plan.starts()
        rows = self.state.rows_of(starts)
        num_outputs_of = self.state.num_tokens[rows] - self.state.num_prompt_tokens[rows]
        for (req_id, start), num_outputs in zip(starts.items(), num_outputs_of.tolist()):
            request = self.state.requests[req_id]
            if num_outputs >= request.max_tokens or req_id in output.errors:
                continue
            tokens = output.token_ids.get(req_id, [])
            num_computed = start + plan.num_scheduled_tokens[req_id]
            max_drafts = 0
            if tokens:
                num_drafted = len(plan.scheduled_draft_token_ids.get(req_id, ()))
                num_computed -= num_drafted + 1 - len(tokens)
                # The token that follows the draft tokens is an output too.
                max_drafts = request.max_tokens - num_outputs - 1
            inputs.append(ProposerInput(request, start, num_computed))
            num_drafts.append(min(plan.num_spec_tokens, max_drafts))
        if not any(num_drafts):
            return {}  # a draft model lags, and catches up at its next proposal
        return self.proposer.propose(inputs, num_drafts)
