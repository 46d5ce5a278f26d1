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
request gets its tokens.

Invariants: a draft token is not among a request's tokens before it is verified, so none is ever
published to a prefix cache; no draft token exceeds the request's `max_tokens`.

See 05_spec_decode/README.md#draft-tokens-in-a-scheduler"""

from __future__ import annotations

from base_scheduler import SchedulerPlugin
from request import Request, check_integers
from scheduler_interface import SchedulerOutput, StepOutput


class DraftPlugin(SchedulerPlugin):
    """Draft tokens by request. `num_rejected_drafts` counts the ones the target model rejected.
    `num_lookahead_tokens` slots are allocated after each step's tokens, if they are free, for a
    proposer that writes its own KV."""

    def __init__(self, num_lookahead_tokens: int = 0) -> None:
        check_integers(0, num_lookahead_tokens=num_lookahead_tokens)
        self.num_lookahead_tokens = num_lookahead_tokens
        self.drafts: dict[str, list[int]] = {}  # by request id, to be scheduled; never empty lists
        self.num_rejected_drafts = 0

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
        if not self.drafts:
            return
        for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True):
            request_id = request.request_id
            drafts = self.drafts.pop(request_id, None)
            num_drafts = start + plan.num_scheduled_tokens[request_id] - request.num_tokens
            if drafts and num_drafts > 0:
                plan.scheduled_draft_token_ids[request_id] = drafts[:num_drafts]

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """Roll back the KV of rejected draft tokens. Store the new draft tokens of running
        requests, but none beyond a request's last token."""
        sent = plan.scheduled_draft_token_ids
        brought = output.draft_token_ids
        running = self.scheduler.running
        for request in plan.scheduled_requests if sent or brought else ():
            request_id = request.request_id
            is_running = running.get(request.request_id) is request
            if not is_running and request.is_finished:
                continue  # its id may belong to another request now
            num_new = len(output.token_ids.get(request_id, ()))
            if request_id in sent and (num_rejected := len(sent[request_id]) + 1 - num_new):
                self.scheduler.rollback_computed_tokens(request, num_rejected)
                self.num_rejected_drafts += num_rejected
            if is_running and (drafts := brought.get(request_id)):
                num_tokens = len(request.all_token_ids) + num_new
                num_useful = request.max_num_tokens - num_tokens - 1
                if num_useful > 0 and num_tokens - request.num_computed_tokens == 1:
                    self.drafts[request_id] = drafts[:num_useful]

    def on_preempt(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def on_finish(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def check(self) -> None:
        assert self.drafts.keys() <= self.scheduler.running.keys(), "drafts of a waiting request"
        for request_id, drafts in self.drafts.items():
            request = self.scheduler.running[request_id]
            assert drafts and request.num_tokens + len(drafts) < request.max_num_tokens, request
