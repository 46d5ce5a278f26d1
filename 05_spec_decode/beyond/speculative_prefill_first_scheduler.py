"""Guesses in the prefill-first school (chapter 4's `beyond/`), where a decode batch has a token for
everybody who runs:

    budget      a second token for anybody comes after a first for all, and in a mixed batch after
                a page for a prompt
    memory      if the next tokens and the guesses do not fit, all guesses are dropped before
                anybody is retracted
    prefills    who decodes waits, and so do its guesses
"""

from __future__ import annotations

from prefill_first_scheduler import PrefillFirstScheduler
from speculative_scheduler import DraftBooks
from step_plan import StepPlan


class SpeculativePrefillFirstScheduler(DraftBooks, PrefillFirstScheduler):
    """Chapter 4's `PrefillFirstScheduler` with guesses."""

    def check_decode_mem(self, step: StepPlan) -> bool:
        self._trim_drafts(step.budget)
        if self._get_room():
            return True
        for request in self.running_batch.reqs:  # nobody is retracted for a guess
            self.drafts.pop(request.request_id, None)
        return super().check_decode_mem(step)

    def _trim_drafts(self, budget: int) -> None:
        reqs = self.running_batch.reqs
        num_spare = budget - len(reqs)
        if self.mixing and (self.waiting or self.chunked_req is not None):
            num_spare -= self.kv_memory.block_size
        for request in reqs:
            drafts = self.drafts.pop(request.request_id, [])[: max(0, num_spare)]
            if drafts:
                self.drafts[request.request_id] = drafts
                num_spare -= len(drafts)

    def _get_room(self) -> bool:
        """For tokens and guesses, and behind them slots to guess in, where these are free. Whoever
        got some keeps them."""
        size, allocate_slots = self.kv_memory.block_size, self.kv_memory.allocate_slots
        for request in self.running_batch.reqs:
            num_left_in_page = -request.num_computed_tokens % size
            num_tokens = self.num_behind(request)
            if num_tokens > num_left_in_page and not allocate_slots(request, num_tokens):
                return False
            num_more = self.num_lookahead(request, request.num_computed_tokens + num_tokens)
            if num_tokens + num_more > num_left_in_page:
                allocate_slots(request, num_tokens, num_more)
        return True
