"""What guesses ask of a scheduler: to be planned like known tokens, and taken back. They are a few
tokens that may follow a request's last one, and can be trimmed or dropped at any time:

    planned      after everybody has a token, and a block of a prompt that waits: then guesses
    memory       nobody is preempted to make room for a guess (a guess that found room may leave
                 somebody behind it without)
    verified     the runner says how many came true; the KV of the others is taken back
    preempted, finished, passed over with others' budget: its guesses are forgotten or wait

Chapter 4's scheduler is unchanged below: guesses are added where it counts tokens, asks for room,
makes the message and takes what came of it.

Invariants: no guess is in a request's tokens before it is verified, so none is ever published to a
prefix cache; a request never guesses beyond its `max_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from request import Request, check_integers
from scheduler import Scheduler
from scheduler_base import SchedulerBase, SchedulerStats
from scheduler_interface import EngineCoreOutput, SchedulerOutput, StepOutput
from step_plan import StepPlan, StepResults


@dataclass(slots=True)
class SpeculativeSchedulerStats(SchedulerStats):
    total_rejected_drafts: int = 0


class DraftBooks(SchedulerBase):
    """The guesses of a scheduler's requests. Mixed into a scheduler, in front of it.

    `num_lookahead_tokens` slots are taken behind each step's tokens, where they are free, for a
    proposer that writes KV of its own."""

    def __init__(self, *arguments: Any, num_lookahead_tokens: int = 0, **keywords: Any) -> None:
        check_integers(0, num_lookahead_tokens=num_lookahead_tokens)
        super().__init__(*arguments, **keywords)
        self._stats: SpeculativeSchedulerStats = SpeculativeSchedulerStats()
        self.num_lookahead_tokens = num_lookahead_tokens
        self.drafts: dict[str, list[int]] = {}  # to be planned; never empty lists
        self._num_sent: dict[str, int] = {}  # drafts in the step that is under way

    def num_behind(self, request: Request) -> int:
        return super().num_behind(request) + len(self.drafts.get(request.request_id, ()))

    def routine_end(self, request: Request) -> int:
        return -1  # every step may bring guesses: none is routine

    def num_lookahead(self, request: Request, end: int) -> int:
        """Slots behind position `end` in which a proposer may write, if there can be tokens."""
        return max(0, min(self.num_lookahead_tokens, request.max_num_tokens - 1 - end))

    def preempt(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)
        super().preempt(request)

    def forget(self, request: Request) -> None:
        self.drafts.pop(request.request_id, None)
        self._num_sent.pop(request.request_id, None)
        super().forget(request)

    def make_plan(self, num_tokens: dict[str, int]) -> SchedulerOutput:
        """Guesses that the plan has no room for are dropped, and never enter the model."""
        plan = super().make_plan(num_tokens)
        if self.drafts:
            for request, start in zip(plan.scheduled_requests, plan.start_positions, strict=True):
                request_id = request.request_id
                drafts = self.drafts.pop(request_id, None)
                num_drafts = start + num_tokens[request_id] - request.num_tokens
                if drafts and num_drafts > 0:
                    plan.scheduled_draft_token_ids[request_id] = drafts[:num_drafts]
                    self._num_sent[request_id] = num_drafts
        return plan

    def update_from_output(self, plan: SchedulerOutput, output: StepOutput) -> StepResults:
        results = super().update_from_output(plan, output)
        for request_id, drafts in output.draft_token_ids.items():
            request = self.running.get(request_id)  # None: it has ended, or was preempted
            if request is not None and request.num_tokens - request.num_computed_tokens == 1:
                num_useful = request.max_num_tokens - request.num_tokens - 1
                if useful := drafts[: max(0, num_useful)]:
                    self.drafts[request_id] = list(useful)
        return results

    def take_tokens(
        self, request: Request, start: int, end: int, output: StepOutput
    ) -> EngineCoreOutput:
        """A request that was planned with guesses brings those that came true and one more; the KV
        of the others is taken back."""
        num_drafts = self._num_sent.pop(request.request_id, 0)
        if num_drafts:
            num_rejected = num_drafts + 1 - len(output.token_ids.get(request.request_id, ()))
            request.num_computed_tokens -= num_rejected
            end -= num_rejected
            self._stats.total_rejected_drafts += num_rejected
        return super().take_tokens(request, start, end, output)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.drafts.keys() <= self.running.keys(), "guesses of somebody who does not run"
        for request_id in self._num_sent:
            assert self.requests[request_id].num_pending_tokens, "guesses sent and not judged"
        for request_id, drafts in self.drafts.items():
            request = self.running[request_id]
            assert drafts and request.num_tokens + len(drafts) < request.max_num_tokens, request


class SpeculativeScheduler(DraftBooks, Scheduler):
    """Chapter 4's `Scheduler` with guesses."""

    def _num_tokens_for(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> int:
        drafts = self.drafts.get(request.request_id)
        if drafts is None:
            return super()._num_tokens_for(request, running, index, step)
        # A token for everybody behind it, and a block of a prompt, come before a guess.
        num_others = len(running) - 1 - index
        has_prompts = bool(self.waiting) or step.num_decodes_behind(running, index) < num_others
        num_kept = num_others + (self.kv_memory.block_size if has_prompts else 0)
        return min(1 + len(drafts), max(step.budget - num_kept, 1))

    def _get_room(self, request: Request, num_tokens: int, step: StepPlan) -> int:
        """With slots to guess in and room for its guesses, if there is; without, if not."""
        start, block_size = request.num_computed_tokens, self.kv_memory.block_size
        num_slots = num_tokens + self.num_lookahead_tokens
        if 0 < start % block_size <= block_size - num_slots:
            return num_tokens
        num_lookahead = self.num_lookahead(request, start + num_tokens)
        if self.kv_memory.allocate_slots(request, num_tokens, num_lookahead):
            return num_tokens
        num_known = request.num_tokens - start
        return super()._get_room(request, min(num_tokens, num_known), step)
