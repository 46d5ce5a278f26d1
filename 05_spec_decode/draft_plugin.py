"""Draft tokens in a scheduler: scheduled like known tokens, and rolled back if they are rejected.
Draft tokens are a few tokens that may follow a request's last one. They can be trimmed or dropped
at any time:

    scheduled    after each request has a token, and a waiting prompt a block
    memory       no request is preempted for a draft token (but one that got memory can leave too
                 little for a later request)
    verified     the runner reports how many were accepted; the KV of the others is rolled back
    preempted, finished, or budget used up by others: the draft tokens are dropped or wait

Chapter 4's schedulers are unchanged. For them, draft tokens are optional tokens that a plugin owns:
it reports their number, adds the scheduled ones to the message, and handles rejections before any
request gets its tokens. It also counts accepted tokens, and says in the message how many to
propose: `FixedLength` is a constant, `beyond/adaptive_length.py` learns the best number.

Invariants: a draft token is not among a request's tokens before it is verified, so none is ever
published to a prefix cache; no draft token exceeds the request's `max_tokens`.

See 05_spec_decode/README.md#draft-tokens-in-a-scheduler"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acceptance import SpecDecodeStats
from base_scheduler import SchedulerPlugin
from request import Request, check_integers
from scheduler_interface import SchedulerOutput, StepOutput


class FixedLength:
    """How many draft tokens to propose: always the same number."""

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens

    def choose(self, num_requests: int) -> int:
        """Choose the number of draft tokens for each of these requests."""
        return self.num_spec_tokens

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's draft tokens were accepted."""

    def observe_step(
        self, num_requests: int, num_tokens: int, num_rounds: int, verify_ms: float, draft_ms: float
    ) -> None:
        """Record the times of a step without prompts: a target pass over `num_tokens`, then
        `num_rounds` rounds of proposing, each for `num_requests`. With 0 rounds, ignore `draft_ms`:
        nothing was proposed, or a draft model caught up on tokens that it had missed."""


class DraftPlugin(SchedulerPlugin):
    """Draft tokens by request. `num_rejected_drafts` counts the ones the target model rejected.
    `num_lookahead_tokens` slots are allocated after each step's tokens, if they are free, for a
    proposer that writes its own KV. `sequences`, by request id, know after how many of several new
    tokens a stop string ends (`num_wanted`)."""

    def __init__(
        self,
        num_lookahead_tokens: int = 0,
        length: FixedLength | None = None,
        sequences: Mapping[str, Any] | None = None,
    ) -> None:
        check_integers(0, num_lookahead_tokens=num_lookahead_tokens)
        self.num_lookahead_tokens = num_lookahead_tokens
        self.length = length or FixedLength(0)
        self.sequences = {} if sequences is None else sequences
        self.drafts: dict[str, list[int]] = {}  # by request id, to be scheduled; never empty lists
        self.num_rejected_drafts = 0
        self.stats = SpecDecodeStats()
        self._num_spec_tokens_before = 0

    def num_optional_tokens(self, request: Request) -> int:
        return len(self.drafts.get(request.request_id, ()))

    def num_optional_slots(self, request: Request, end: int) -> int:
        """Slots that the proposer may write, as far as the request can still have tokens there."""
        if self.num_lookahead_tokens == 0:
            return 0
        return max(0, min(self.num_lookahead_tokens, request.max_num_tokens - 1 - end))

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Add the scheduled draft tokens to the message. Those that did not fit are dropped, and
        never enter the model."""
        plan.num_spec_tokens = self.length.choose(len(plan.num_scheduled_tokens))
        if not self.drafts:
            return
        for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True):
            request_id = request.request_id
            drafts = self.drafts.pop(request_id, None)
            num_drafts = start + plan.num_scheduled_tokens[request_id] - request.num_tokens
            if drafts and num_drafts > 0:
                plan.scheduled_draft_token_ids[request_id] = drafts[:num_drafts]

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """Count accepted draft tokens, and roll back the KV of rejected ones. Store the new draft
        tokens of running requests, but none beyond a request's last token."""
        sent = plan.scheduled_draft_token_ids
        brought = output.draft_token_ids
        running = self.scheduler.running
        for request in plan.scheduled_requests:
            request_id = request.request_id
            is_running = running.get(request.request_id) is request
            if not is_running and request.is_finished:
                continue  # its id may belong to another request now
            num_new = self._trim(request_id, output)
            if num_new:
                num_drafted = len(sent.get(request_id, ()))
                self.stats.observe(num_drafted, num_new - 1)
                if num_drafted:
                    self.length.observe(num_drafted, num_new - 1)
            if request_id in sent and (num_rejected := len(sent[request_id]) + 1 - num_new):
                self.scheduler.rollback_computed_tokens(request, num_rejected)
                self.num_rejected_drafts += num_rejected
            if is_running and (drafts := brought.get(request_id)):
                num_tokens = len(request.all_token_ids) + num_new
                num_useful = request.max_num_tokens - num_tokens - 1
                if num_useful > 0 and num_tokens - request.num_computed_tokens == 1:
                    self.drafts[request_id] = drafts[:num_useful]
        self._observe_times(plan, output.times)

    def _trim(self, request_id: str, output: StepOutput) -> int:
        """Drop the tokens after a stop string, and return how many are left."""
        tokens = output.token_ids.get(request_id, [])
        if len(tokens) > 1 and (sequence := self.sequences.get(request_id)) is not None:
            num_wanted = sequence.num_wanted(tokens)
            del tokens[num_wanted:]
            del output.logprobs.get(request_id, [])[num_wanted:]
        return len(tokens)

    def _observe_times(self, plan: SchedulerOutput, times: dict[str, float]) -> None:
        num_tokens = plan.num_scheduled_tokens
        drafts = plan.scheduled_draft_token_ids
        is_decode = all(n == 1 + len(drafts.get(r, ())) for r, n in num_tokens.items())
        if num_tokens and is_decode and "propose_ms" in times:
            # After a pause, a draft model first catches up, which takes longer than proposing.
            num_rounds = plan.num_spec_tokens if self._num_spec_tokens_before else 0
            draft_ms = times["propose_ms"]
            verify_ms = sum(times.values()) - draft_ms
            self.length.observe_step(
                len(num_tokens), sum(num_tokens.values()), num_rounds, verify_ms, draft_ms
            )
        self._num_spec_tokens_before = plan.num_spec_tokens

    def reset_stats(self) -> None:
        """Reset all counters to zero."""
        self.stats = SpecDecodeStats()

    def on_preempt(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def on_finish(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def check(self) -> None:
        assert self.drafts.keys() <= self.scheduler.running.keys(), "drafts of a waiting request"
        for request_id, drafts in self.drafts.items():
            request = self.scheduler.running[request_id]
            assert drafts and request.num_tokens + len(drafts) < request.max_num_tokens, request
