"""A plugin for pipelined steps: each plan passes through several stages, one after the other.

The layers of a model are spread over stages, and each stage computes another plan at the same time:

    stage 0   | A | B | A' | B' |          A, B    plans for different requests
    stage 1       | A | B  | A' | B'       A'      for those of A, when their tokens are known

So several plans are in flight. A request with a token in flight has no uncomputed token: its next
step starts from that token's id, which the first stage does not know yet. Only such requests wait:

    known tokens that are not computed     scheduled, though an earlier step is in flight: chunks
                                           of a prompt follow each other from stage to stage
    a token in flight                      the request skips this step; others are scheduled
    a token arrived                        the request is ready, after those that already were

If the first plan took all requests, none would be left for the other stages. So decodes are split:
a plan takes `ceil(decodes / num_micro_batches)` of the ready requests, the longest ready first.
Prompts are not counted, because the budget of a step bounds them.

No request starves: a ready request is never overtaken, and a plan takes at least one ready request
if budget and memory allow it. If every plan has budget for its share, each request is in one of
`num_micro_batches` consecutive plans.

A request that finishes, is aborted or is preempted while its steps are in flight frees its memory
immediately, and only once: each stage computes the plans in order, so the step of the next request
to use that memory comes later. A token in flight is kept. A preempted request runs again only when
no step of it is in flight, because such a step does not write to its new blocks.

Invariants: a request has at most one step in flight that samples; a running request is in its
prompt, ready, or in flight; no token sent to the runner is pending. (vLLM's scheduler skips
requests in flight too, and takes all others; SGLang keeps a running batch for each stage.)

See common/parallel/README.md#the-scheduler"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from base_scheduler import SchedulerPlugin
from request import Request
from scheduler_interface import SchedulerOutput, StepOutput


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: SchedulerOutput
    sampling: list[Request]  # requests that get tokens from it


class PipelinePlugin(SchedulerPlugin):
    """Schedules pipelined steps, in any scheduler, with or without preemption. `update_from_output`
    is called for each plan in order; any number can be in flight. `num_discarded_tokens` counts
    tokens computed for requests that had finished."""

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._steps: deque[_InFlight] = deque()
        # Running requests with a token in flight; the other running ones are ready or in a prompt.
        self._in_flight: dict[str, Request] = {}
        self._ready: dict[str, Request] = {}  # in the order in which their tokens arrived
        self._chosen: set[str] = set()  # ready requests that this plan takes
        self.num_discarded_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request could be scheduled now. (The plan can still be empty if memory is
        short.)"""
        scheduler = self.scheduler
        if len(self._in_flight) < len(scheduler.running):
            return True
        return bool(scheduler.waiting) and len(scheduler.running) < scheduler.max_num_seqs

    def begin_step(self) -> None:
        num_decodes = len(self._ready) + len(self._in_flight)
        self._chosen = set(islice(self._ready, -(-num_decodes // self.num_micro_batches)))

    def can_start(self, request: Request) -> bool:
        if request.num_output_placeholders:
            return False
        return not request.num_preemptions or not any(
            request in step.plan.scheduled_requests for step in self._steps
        )

    def skips_step(self, request: Request) -> bool:
        """Whether the request is in flight, or ready but not in this plan."""
        if request.num_output_placeholders:
            return True
        return request.request_id in self._ready and request.request_id not in self._chosen

    def on_plan(self, plan: SchedulerOutput) -> None:
        sampling: list[Request] = []
        for request in plan.scheduled_requests:
            self._ready.pop(request.request_id, None)
            # One token for each position after the last known one (chapter 5), and one more.
            num_sampled = request.num_computed_tokens - len(request.all_token_ids) + 1
            if num_sampled > 0:
                request.num_output_placeholders = num_sampled
                self._in_flight[request.request_id] = request
                sampling.append(request)
        self._steps.append(_InFlight(plan, sampling))

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        step = self._steps.popleft()
        assert step.plan is plan, "plans must end in order"
        for request in step.sampling:
            request.num_output_placeholders = 0
            request_id = request.request_id
            if self._in_flight.get(request_id) is request:  # else it finished or was preempted
                self._ready[request_id] = self._in_flight.pop(request_id)
        for request, num_tokens in zip(plan.scheduled_requests, plan.num_scheduled_tokens.values()):
            if request.is_finished:
                self.num_discarded_tokens += num_tokens

    def on_preempt(self, request: Request) -> None:
        self._in_flight.pop(request.request_id, None)
        self._ready.pop(request.request_id, None)

    def on_finish(self, request: Request) -> None:
        self.on_preempt(request)

    def discard_plans(self) -> None:
        """Drop all plans in flight, which have failed and whose tokens never arrive. Running
        requests have lost some tokens, so abort them."""
        for step in self._steps:
            for request in step.sampling:
                request.num_output_placeholders = 0
        self._steps.clear()
        self._in_flight.clear()

    def check(self) -> None:
        in_flight = self._in_flight.keys()
        ready = self._ready.keys()
        assert in_flight.isdisjoint(ready) and in_flight | ready <= self.scheduler.running.keys()
        for request in self.scheduler.requests.values():
            # If two requests had this id, the first one has finished.
            num_steps = sum(request in step.sampling for step in self._steps)
            assert num_steps == (request.num_output_placeholders > 0), repr(request)
        for request_id, request in self.scheduler.running.items():
            num_uncomputed_tokens = len(request.all_token_ids) - request.num_computed_tokens
            assert (request_id in in_flight) == (request.num_output_placeholders > 0), repr(request)
            if request_id in in_flight:
                assert num_uncomputed_tokens == 1 - request.num_output_placeholders, repr(request)
            elif request_id in ready:
                assert num_uncomputed_tokens == 1, repr(request)
