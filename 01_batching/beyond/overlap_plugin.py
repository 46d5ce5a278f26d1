"""A plugin that lets a scheduler plan a step while the one before it still runs.

A request in the running step has a token that the scheduler does not know yet. The token is
counted, and the request can be scheduled again:

    step            n          n + 1       n + 2         one token each
    scheduled   | known 5  | known 5    | known 6
                | pending 0| pending 1  | pending 1      the token of the step before
    computed    | 4        | 5          | 6              uncomputed = known + pending - computed = 1

The runner has sampled the pending token itself: the message refers to it by `PENDING`, and sends it
again when it is known. The value of the token cannot be foreseen, only that there will be one:

    the last one allowed     nothing is scheduled after it
    EOS, a stop token        shows one step late: one token too many was scheduled, and is discarded

A request that finishes, is aborted or is preempted while its step is in flight frees its memory
immediately, and only once: the step of the next request to use that memory runs after that one. If
the request was preempted, a token in flight is kept.

Invariant: when no step is in flight, no token is pending. (vLLM counts `num_output_placeholders`;
SGLang puts future token ids into the sequence.)

See common/README.md#a-step-ahead"""

from __future__ import annotations

from collections import deque

from base_scheduler import SchedulerPlugin
from request import Request
from scheduler_interface import PENDING, SchedulerOutput, StepOutput


class OverlapPlugin(SchedulerPlugin):
    """Counts pending tokens. `update_from_output` is called for each plan in order; at most two
    plans are in flight. `num_discarded_tokens` counts tokens computed for requests that had
    finished."""

    def __init__(self) -> None:
        # For each plan in flight, the requests that get a token.
        self._sampling: deque[list[Request]] = deque()
        self.num_discarded_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request could be scheduled now. (The plan can still be empty if memory is
        short.)"""
        return not all(map(self.skips_step, self.scheduler.requests.values()))

    def can_start(self, request: Request) -> bool:
        return not request.num_output_placeholders

    def skips_step(self, request: Request) -> bool:
        """Whether the last token allowed is pending."""
        num_pending = request.num_output_placeholders
        num_outputs = len(request.output_token_ids) + num_pending
        return num_pending > 0 and num_outputs == request.max_tokens

    def on_plan(self, plan: SchedulerOutput) -> None:
        cached = plan.scheduled_cached_reqs
        requests = self.scheduler.requests
        for i, request_id in enumerate(cached.req_ids):
            if requests[request_id].num_output_placeholders:
                cached.new_token_ids[i].append(PENDING)
                cached.pending_req_ids.append(request_id)
                cached.num_output_tokens[i] += 1
        sampling: list[Request] = []
        for request in plan.scheduled_requests:
            num_known = len(request.all_token_ids) + request.num_output_placeholders
            if request.num_computed_tokens == num_known:
                sampling.append(request)
                request.num_output_placeholders += 1
        self._sampling.append(sampling)

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        for request in self._sampling.popleft():
            request.num_output_placeholders -= 1
        for request, num_tokens in zip(plan.scheduled_requests, plan.num_scheduled_tokens.values()):
            if request.is_finished:
                self.num_discarded_tokens += num_tokens

    def discard_plans(self) -> None:
        """Drop the steps in flight, which have failed and whose tokens never arrive."""
        for sampling in self._sampling:
            for request in sampling:
                request.num_output_placeholders = 0
        self._sampling.clear()

    def check(self) -> None:
        pending = [request for part in self._sampling for request in part]
        # If two requests had this id, the first one has finished.
        for request in self.scheduler.requests.values():
            num_pending = sum(each is request for each in pending)
            assert request.num_output_placeholders == num_pending, repr(request)
