"""A scheduler whose steps pass through several stages, one behind the other.

The layers of a model are spread over stages, and each stage computes another plan at one time:

    stage 0   | A | B | A' | B' |          A, B    plans for different requests
    stage 1       | A | B  | A' | B'       A'      for those of A, when their tokens are known

So several plans are under way. Whoever has a token under way is not behind: the next one cannot be
computed before that is known, since the first stage starts from its id. Nothing else is held back:

    known tokens that are not computed     planned, though a step before is under way: chunks of a
                                           prompt follow each other from stage to stage
    a token under way                      the request sits out; the scheduler takes others
    a token has come                       the request is ready, behind those who were so before

If the first plan took everybody, nobody would be left for the other stages. So decodes are split: a
plan takes `ceil(decodes / num_micro_batches)` of those who are ready, the longest ready first.
Prompts are not counted: the budget of a step bounds them.

Why nobody starves: who is ready is overtaken by nobody, and a plan takes at least one of the ready,
if the budget and the memory allow it. Where every plan has room for its share, everybody is in one
of `num_micro_batches` plans in a row.

Whoever ends, is aborted or is preempted while steps of it are under way gives up its memory at
once, and only once: each stage computes the plans in order, so the next owner's step comes after
these. A token that is under way is kept. A preempted one runs again when no step of it is under
way: what such a step has written is not in its new blocks.

Invariants: a request has at most one step under way that samples; whoever runs is in a prompt, is
ready, or is in flight; nothing that the runner is sent is pending. (vLLM's scheduler passes over
requests in flight too, and takes all the others; SGLang keeps a running batch for each stage.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import cast
from weakref import proxy

from base_scheduler import SchedulerBooks
from preemptive_scheduler import PreemptionPlugin
from request import Request, check_integers
from scheduler_interface import SchedulerOutput, StepOutput


@dataclass(frozen=True, slots=True)
class _Step:
    plan: SchedulerOutput
    sampling: list[Request]  # whom it brings tokens


class PipelinePlugin(PreemptionPlugin):
    """Of any scheduler, with preemption or without. `update_from_output` is called for each plan in
    turn; any number may be under way. `num_discarded_tokens` were computed for requests that had
    ended."""

    allows_routine = False  # a routine step comes right behind the last one: here none does

    def __init__(self, num_micro_batches: int) -> None:
        check_integers(1, num_micro_batches=num_micro_batches)
        self.num_micro_batches = num_micro_batches
        self._under_way: deque[_Step] = deque()
        # Of those who run; the others are in a prompt.
        self._in_flight: dict[str, Request] = {}
        self._ready: dict[str, Request] = {}  # whose token came first is first
        self._chosen: set[str] = set()  # of the ready, for this plan
        self.num_discarded_tokens = 0

    def attach(self, books: SchedulerBooks) -> None:
        self._books = cast("SchedulerBooks", proxy(books))  # not held: no circle

    @property
    def has_work(self) -> bool:
        """Somebody could be planned now. (A plan may still be empty: the memory decides.)"""
        books = self._books
        if len(self._in_flight) < len(books.running):
            return True
        return bool(books.waiting) and len(books.running) < books.max_num_seqs

    def begin_step(self) -> None:
        num_decodes = len(self._ready) + len(self._in_flight)
        self._chosen = set(islice(self._ready, -(-num_decodes // self.num_micro_batches)))

    def may_start(self, request: Request) -> bool:
        if request.num_pending_tokens:
            return False
        return not request.num_preemptions or not any(
            request in step.plan.scheduled_requests for step in self._under_way
        )

    def sits_out(self, request: Request) -> bool:
        """It is in flight, or its turn comes later."""
        if request.num_pending_tokens:
            return True
        return request.request_id in self._ready and request.request_id not in self._chosen

    def planned(self, plan: SchedulerOutput) -> None:
        sampling: list[Request] = []
        for request in plan.scheduled_requests:
            self._ready.pop(request.request_id, None)
            # As many as are computed behind the last known one (chapter 5), and one more.
            num_sampled = request.num_computed_tokens - len(request.all_token_ids) + 1
            if num_sampled > 0:
                request.num_pending_tokens = num_sampled
                self._in_flight[request.request_id] = request
                sampling.append(request)
        self._under_way.append(_Step(plan, sampling))

    def judged(self, plan: SchedulerOutput, output: StepOutput) -> None:
        step = self._under_way.popleft()
        assert step.plan is plan, "plans must end in order"
        for request in step.sampling:
            request.num_pending_tokens = 0
            request_id = request.request_id
            if self._in_flight.get(request_id) is request:  # else it has ended or was preempted
                self._ready[request_id] = self._in_flight.pop(request_id)
        for request, num_tokens in zip(plan.scheduled_requests, plan.num_scheduled_tokens.values()):
            if request.is_finished:
                self.num_discarded_tokens += num_tokens

    def preempted(self, request: Request) -> None:
        self._in_flight.pop(request.request_id, None)
        self._ready.pop(request.request_id, None)

    def ended(self, request: Request) -> None:
        self.preempted(request)

    def forget_plans(self) -> None:
        """The steps under way have failed, and what they sampled never comes. Whoever runs has lost
        some of it: abort them."""
        for step in self._under_way:
            for request in step.sampling:
                request.num_pending_tokens = 0
        self._under_way.clear()
        self._in_flight.clear()

    def check(self) -> None:
        sampling = [request.request_id for step in self._under_way for request in step.sampling]
        in_flight, ready = self._in_flight.keys(), self._ready.keys()
        assert in_flight.isdisjoint(ready) and in_flight | ready <= self._books.running.keys()
        for request_id, request in self._books.requests.items():
            # Of two with one name, the first has ended.
            pending = [r for step in self._under_way for r in step.sampling if r is request]
            assert len(pending) == (request.num_pending_tokens > 0), repr(request)
            assert sampling.count(request_id) >= len(pending)
        for request_id, request in self._books.running.items():
            num_behind = len(request.all_token_ids) - request.num_computed_tokens
            assert (request_id in in_flight) == (request.num_pending_tokens > 0), repr(request)
            if request_id in in_flight:
                assert num_behind == 1 - request.num_pending_tokens, repr(request)
            else:
                assert num_behind == 1 if request_id in ready else num_behind > 0, repr(request)
