"""What guesses ask of a scheduler: to be planned like known tokens, and taken back. They are a few
tokens that may follow a request's last one, and can be trimmed or dropped at any time:

    planned      after everybody has a token, and a block of a prompt that waits: then guesses
    memory       nobody is preempted to make room for a guess (a guess that found room may leave
                 somebody behind it without)
    verified     the runner says how many came true; the KV of the others is taken back
    preempted, finished, passed over with others' budget: its guesses are forgotten or wait

Chapter 4's schedulers are unchanged. To them guesses are optional tokens, and who has them is a
plugin: it says how many there are, puts those that were planned into the message, and settles what
came of them before anybody gets a token.

Invariants: no guess is in a request's tokens before it is verified, so none is ever published to a
prefix cache; a request never guesses beyond its `max_tokens`."""

from __future__ import annotations

from preemptive_scheduler import PreemptionPlugin
from request import Request, check_integers
from scheduler_interface import SchedulerOutput, StepOutput


class DraftPlugin(PreemptionPlugin):
    """The guesses of a scheduler's requests; `num_rejected_drafts` did not come true.

    `num_lookahead_tokens` slots are taken behind each step's tokens, where they are free, for a
    proposer that writes KV of its own."""

    allows_routine = False  # every step may bring guesses

    def __init__(self, num_lookahead_tokens: int = 0) -> None:
        check_integers(0, num_lookahead_tokens=num_lookahead_tokens)
        self.num_lookahead_tokens = num_lookahead_tokens
        self.drafts: dict[str, list[int]] = {}  # to be planned; never empty lists
        self.num_rejected_drafts = 0

    def num_optional_tokens(self, request: Request) -> int:
        return len(self.drafts.get(request.request_id, ()))

    def num_optional_slots(self, request: Request, end: int) -> int:
        """In which a proposer may write, if there can be tokens."""
        if self.num_lookahead_tokens == 0:
            return 0
        return max(0, min(self.num_lookahead_tokens, request.max_num_tokens - 1 - end))

    def planned(self, plan: SchedulerOutput) -> None:
        """Guesses that the plan has no room for are dropped, and never enter the model."""
        if not self.drafts:
            return
        for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True):
            request_id = request.request_id
            drafts = self.drafts.pop(request_id, None)
            num_drafts = start + plan.num_scheduled_tokens[request_id] - request.num_tokens
            if drafts and num_drafts > 0:
                plan.scheduled_draft_token_ids[request_id] = drafts[:num_drafts]

    def judged(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """Of a request that was planned with guesses, the KV of those that did not come true is
        taken back. Whoever runs and is about to reach its last token has new ones."""
        sent, brought = plan.scheduled_draft_token_ids, output.draft_token_ids
        running = self.books.running
        for request in plan.scheduled_requests if sent or brought else ():
            request_id, is_running = request.request_id, running.get(request.request_id) is request
            if not is_running and request.is_finished:
                continue  # its name may be another's
            num_new = len(output.token_ids.get(request_id, ()))
            if request_id in sent and (num_rejected := len(sent[request_id]) + 1 - num_new):
                self.books.take_back(request, num_rejected)
                self.num_rejected_drafts += num_rejected
            if is_running and (drafts := brought.get(request_id)):
                num_tokens = len(request.all_token_ids) + num_new
                num_useful = request.max_num_tokens - num_tokens - 1
                if num_useful > 0 and num_tokens - request.num_computed_tokens == 1:
                    self.drafts[request_id] = drafts[:num_useful]

    def preempted(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def ended(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)

    def check(self) -> None:
        assert self.drafts.keys() <= self.books.running.keys(), "drafts of a waiting request"
        for request_id, drafts in self.drafts.items():
            request = self.books.running[request_id]
            assert drafts and request.num_tokens + len(drafts) < request.max_num_tokens, request
