"""A scheduler that plans a step while the one before it still runs.

A request in that one has a token that nobody here knows yet. It is counted, and the request may be
planned on:

    step            n          n + 1       n + 2         one token each
    planned     | known 5  | known 5    | known 6
                | pending 0| pending 1  | pending 1      the token of the step before
    computed    | 4        | 5          | 6              behind = known + pending - computed = 1

The runner has sampled the pending token itself: the message names it by `PENDING`, and sends it
once more when it is known. Which token it is can not be foreseen, only that it will be there:

    the last one allowed     nothing is planned behind it
    EOS, a stop token        shows one step late: one more token was planned, and is nobody's

Whoever ends, is aborted or is preempted while a step of it is under way gives up its memory at
once, and only once: the next owner's step runs after that one. A token that is under way is kept
if its request is preempted meanwhile.

Invariant: when nothing is under way, nothing is pending. (vLLM counts `num_output_placeholders`;
SGLang puts future token ids into the sequence.)
"""

from __future__ import annotations

from collections import deque

from base_scheduler import SchedulerBooks, SchedulerPlugin
from request import Request
from scheduler_interface import PENDING, SchedulerOutput, StepOutput


class OverlapPlugin(SchedulerPlugin):
    """Counts what is pending. `update_from_output` is called for each plan in turn, at most two of
    which are under way. `num_discarded_tokens` were computed for requests that had ended."""

    def __init__(self) -> None:
        self._sampling: deque[list[Request]] = deque()  # of each plan under way, who gets a token
        self.num_discarded_tokens = 0

    def attach(self, books: SchedulerBooks) -> None:
        self._requests = books.requests

    @property
    def has_work(self) -> bool:
        """Somebody could be planned now. (A plan may still be empty: the memory decides.)"""
        return not all(map(self.sits_out, self._requests.values()))

    def may_start(self, request: Request) -> bool:
        """Preempted with a token under way, it waits for that."""
        return not request.num_pending_tokens

    def sits_out(self, request: Request) -> bool:
        """The last token allowed is pending."""
        num_pending = request.num_pending_tokens
        num_outputs = len(request.output_token_ids) + num_pending
        return num_pending > 0 and num_outputs == request.max_tokens

    def planned(self, plan: SchedulerOutput) -> None:
        cached, requests = plan.scheduled_cached_reqs, self._requests
        for i, request_id in enumerate(cached.req_ids):
            if requests[request_id].num_pending_tokens:
                cached.new_token_ids[i].append(PENDING)
                cached.pending_req_ids.append(request_id)
                cached.num_output_tokens[i] += 1
        sampling: list[Request] = []
        for request in plan.scheduled_requests:
            num_known = len(request.all_token_ids) + request.num_pending_tokens
            if request.num_computed_tokens == num_known:
                sampling.append(request)
                request.num_pending_tokens += 1
        self._sampling.append(sampling)

    def judged(self, plan: SchedulerOutput, output: StepOutput) -> None:
        for request in self._sampling.popleft():
            request.num_pending_tokens -= 1
        for request, num_tokens in zip(plan.scheduled_requests, plan.num_scheduled_tokens.values()):
            if request.is_finished:
                self.num_discarded_tokens += num_tokens

    def forget_plans(self) -> None:
        """The steps under way have failed, and what they sampled never comes."""
        for sampling in self._sampling:
            for request in sampling:
                request.num_pending_tokens = 0
        self._sampling.clear()

    def check(self) -> None:
        pending = [request for part in self._sampling for request in part]
        for request in self._requests.values():  # of two with one name, the first has ended
            num_pending = sum(each is request for each in pending)
            assert request.num_pending_tokens == num_pending, repr(request)
