"""Record requests and steps as events: arrivals, plans and their reasons, results, ends.

    RequestWatch  a scheduler plugin                      requests considered, admitted, preempted,
                                                          ended
    StepWatch     wraps the scheduler, in the recorder    arrivals; plans and results with times

A plan contains only the requests that it computes. The reason why a considered request waits
follows from the calls made for it: the plugin is the first of the list, so its `can_start` runs for
every candidate before the other rules and before blocks are allocated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import proxy

from base_scheduler import BaseScheduler
from common.events.event_kinds import (
    Admitted,
    Arrived,
    Computed,
    Finished,
    Planned,
    Preempted,
    Queue,
    Updated,
)
from common.events.event_log import EventLog, TextDeltas, label_of
from common.events.watched_memory import MemoryWatch
from policies import SchedulePolicy
from policy_queue import PolicyQueue
from preemptive_scheduler import PreemptionPlugin
from prefix_cache import extra_keys_of, normalise_extra_keys
from request import Request, RequestStatus
from scheduler_interface import EngineCoreOutput, SchedulerInterface, SchedulerOutput, StepOutput
from step_plan import PreemptiveSchedulerOutput, StepResults

MAX_LOOKED_AT = 1_000  # waiting requests, for the order of the queue at each arrival
_STOPS = {"admitted": "seat", "passed over": "enough"}  # a plan's terms that differ from `REASONS`


class RequestWatch(PreemptionPlugin):
    """Records the requests of any scheduler derived from chapter 1's, preemptive or not."""

    def __init__(
        self,
        log: EventLog,
        texts: TextDeltas,
        memory: MemoryWatch,
        adapter_name: Callable[[str], str | None],  # by digest, while the adapter has a name
    ) -> None:
        self.log, self.texts, self.memory = log, texts, memory
        self._adapter_name = adapter_name
        self.is_updating = False
        self.passed_over: dict[str, str] = {}  # in the step that is being planned
        self.parents: dict[str, str] = {}
        self._asked: Request | None = None  # considered last, until its outcome is known
        self._order: dict[str, None] = {}  # waiting requests, in the order that was recorded
        self._policy: RememberingPolicy | None = None

    def attach(self, scheduler: BaseScheduler) -> None:
        self.watched = cast("BaseScheduler", proxy(scheduler))

    def put_in(self, scheduler: BaseScheduler) -> None:
        queue = scheduler.waiting
        if isinstance(queue, PolicyQueue) and queue.policy.is_cache_aware:
            self._policy = RememberingPolicy(queue.policy)
            queue.policy = cast(SchedulePolicy, self._policy)
        scheduler.set_plugins([self, *scheduler.plugins])
        self._order = dict.fromkeys(self.queue_order())

    def take_out(self, scheduler: BaseScheduler) -> None:
        scheduler.set_plugins([plugin for plugin in scheduler.plugins if plugin is not self])
        if self._policy is not None:
            cast(PolicyQueue, scheduler.waiting).policy = self._policy.policy

    # -- the waiting queue

    def queue_order(self) -> list[str]:
        """Return the waiting requests in the order of service, without side effects. For a
        cache-aware policy, whose look-ups would count as cache use, this is its last answer."""
        if self._policy is None:
            return [request.request_id for request in self.watched.waiting.in_order()]
        self._policy.answers_from_memory = True
        try:
            return [request.request_id for request in self.watched.waiting.in_order()]
        finally:
            self._policy.answers_from_memory = False

    def note_queue(self) -> None:
        """Record the queue's order if it is not arrival order with preempted requests in front."""
        order = self.queue_order()
        if order != list(self._order):
            self._order = dict.fromkeys(order)
            self.memory.note(Queue(order))

    def order_key(self, request: Request) -> str:
        """Return the policy's sort key as text, "" if it does not sort."""
        queue = self.watched.waiting
        if not isinstance(queue, PolicyQueue) or queue.policy.name == "fcfs":
            return ""
        key = queue.key_of(request)
        return "" if key is None else str(key)

    def brought(self, request: Request) -> dict[str, str]:
        """Return the request's "adapter" and "grammar", each "" if it has none."""
        digest, source = map(request.features.get, ("adapter", "grammar"))
        adapter = digest and (self._adapter_name(digest) or digest[:8])
        return {"adapter": adapter or "", "grammar": source.split('"')[1] if source else ""}

    def check(self) -> None:
        """Record the queue's order again: the scheduler's check has just queried the policy."""
        self.note_queue()

    # -- requests

    def arrived(self, request: Request) -> None:
        log = self.log
        self.memory.note(
            Arrived(
                log.now(),
                request.request_id,
                list(request.prompt_token_ids),
                self.texts.begin(request),
                request.max_tokens,
                request.priority,
                label_of(normalise_extra_keys(extra_keys_of(request))),
                self.order_key(request),
                **self.brought(request),
            )
        )
        self._order[request.request_id] = None
        if len(self._order) <= MAX_LOOKED_AT:
            self.note_queue()

    def on_start(self, request: Request) -> None:
        self._asked = None
        self._order.pop(request.request_id, None)
        self.memory.note(Admitted(request.request_id, request.num_computed_tokens))

    def on_preempt(self, request: Request) -> None:
        self.memory.note(Preempted(request.request_id, request.num_computed_tokens))
        self._order = {request.request_id: None, **self._order}

    def on_finish(self, request: Request) -> None:
        request_id, reason = request.request_id, request.finish_reason or ""
        has_last_token = self.is_updating and reason != "error"
        rest = "" if has_last_token else self.texts.end(request)
        detail = request.length_limit if reason == "length" else None
        self._order.pop(request_id, None)
        self.memory.note(
            Finished(self.log.now(), request_id, reason, request.stop_reason, detail, rest)
        )

    # -- reasons for waiting

    def begin_step(self) -> None:
        self.passed_over, self.parents, self._asked = {}, {}, None

    def can_start(self, request: Request) -> bool:
        self._conclude()
        self._asked, self.memory.memory.current_req_id = request, None
        return True

    def _conclude(self) -> None:
        """Store the reason of the request that was considered last and has not started."""
        request, memory = self._asked, self.memory.memory
        self._asked = None
        if request is None:
            return
        request_id, was_looked_up = request.request_id, memory.current_req_id == request.request_id
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            reason = "grammar"
        elif not was_looked_up:
            reason = "pending" if request.num_output_placeholders else "constraint"
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            reason = "remote_kv"
        elif memory.blocking_req_id is not None:
            reason, self.parents[request_id] = "parent", memory.blocking_req_id
        else:
            reason = "constraint"  # a rule that splits prompts into chunks
        self.passed_over[request_id] = reason

    def reasons(
        self, plan: SchedulerOutput
    ) -> tuple[dict[str, str], dict[str, str], list[str] | None]:
        """Return `passed_over`, `parents` and `stop` (see `Planned`) of the waiting requests."""
        self._conclude()
        stop = self._stop_of(plan) if self._order else None
        if stop is not None:
            stop = (_STOPS.get(stop[0], stop[0]), stop[1] if stop[1] in self._order else "")
            self.passed_over.pop(stop[1], None)
        elif unasked := [name for name in self._order if name not in self.passed_over]:
            self.passed_over |= dict.fromkeys(unasked, "constraint")  # a rule of the scheduler
        passed_over = {name: why for name, why in self.passed_over.items() if name in self._order}
        parents = {name: whom for name, whom in self.parents.items() if name in passed_over}
        return passed_over, parents, None if stop is None else list(stop)

    def _stop_of(self, plan: SchedulerOutput) -> tuple[str, str] | None:
        """Return the reason why admission stopped, and the request at which it stopped."""
        if not isinstance(plan, PreemptiveSchedulerOutput):
            return self._stop_in_order(plan)
        if plan.admission_stop is None and plan.preempted_requests:
            return ("preempting", "")
        return plan.admission_stop

    def _stop_in_order(self, plan: SchedulerOutput) -> tuple[str, str] | None:
        """Derive the stop for chapters 1 to 3, which serve first come, first served, and whose
        plans do not mention waiting requests."""
        scheduler = self.watched
        if len(scheduler.running) >= scheduler.max_num_seqs:
            return ("seat", "")
        for name in self._order:
            if self.passed_over.get(name) not in ("remote_kv", "parent"):
                is_large = self._num_wanted(scheduler.requests[name]) > self._num_left(plan)
                return ("budget" if is_large else "blocks", name)
        return None

    def _num_wanted(self, request: Request) -> int:
        """Return the tokens that the request at which admission stopped would have computed."""
        memory = self.memory
        was_looked_up = (
            memory.memory.current_req_id == request.request_id and memory.cache is not None
        )
        return request.num_tokens - (memory.num_found if was_looked_up else 0)

    def _num_left(self, plan: SchedulerOutput) -> int:
        """Return the tokens left of the budget. One token was reserved for each request that was
        already running."""
        new = [request.req_id for request in plan.scheduled_new_reqs]
        num_spent = sum(plan.num_scheduled_tokens[name] for name in new)
        num_running = len(self.watched.running) - len(new)
        return self.watched.max_num_batched_tokens - num_running - num_spent


class RememberingPolicy:
    """Wraps a policy and remembers its last answer."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self._order: list[Request] = []
        self.answers_from_memory = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def order(self, requests: Sequence[Request]) -> list[Request]:
        if not self.answers_from_memory:
            self._order = list(self.policy.order(requests))
            return list(self._order)
        present = dict.fromkeys(requests)
        known = [request for request in self._order if request in present]
        return list(dict.fromkeys([*known, *present]))


class StepWatch:
    """A `SchedulerInterface` that wraps another. Events from a plan on are written when the oldest
    plan in flight has ended. `num_in_flight` plans were made before this wrapper was installed."""

    def __init__(
        self, scheduler: SchedulerInterface, watch: RequestWatch, num_in_flight: int
    ) -> None:
        self._scheduler, self._watch = scheduler, watch
        self.under_way = deque(range(num_in_flight))  # step numbers of the plans in flight
        self._num_planned = num_in_flight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_request(self, request: Request) -> None:
        self._scheduler.add_request(request)
        self._watch.arrived(request)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        self._scheduler.finish_requests(request_ids, status)
        if isinstance(request_ids, str) and (cut := self._watch.texts.cut_of(request_ids)):
            self._watch.memory.note(cut)  # the last token may already have ended the request

    def schedule(self) -> SchedulerOutput:
        watch, log, step = self._watch, self._watch.log, self._num_planned
        log.close_step()
        log.in_step = True
        start = time.monotonic()
        plan = self._scheduler.schedule()
        schedule_ms = round((time.monotonic() - start) * 1e3, 4)
        watch.note_queue()
        rows = (list(plan.num_scheduled_tokens), plan.start_positions)
        counts = list(plan.num_scheduled_tokens.values())
        drafts, reasons = plan.scheduled_draft_token_ids, watch.reasons(plan)
        begun = log.since_start(start)
        watch.memory.note(Planned(step, begun, schedule_ms, *rows, counts, drafts, *reasons))
        self.under_way.append(step)
        self._num_planned += 1
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        watch, log = self._watch, self._watch.log
        alive = [request for request in plan.scheduled_requests if not request.is_finished]
        log.close_step()
        watch.memory.settle()
        log.in_step = watch.is_updating = True
        position, start = log.position, time.monotonic()
        try:
            results = self._scheduler.update_from_output(plan, output)
        finally:
            watch.is_updating = False
        end = time.monotonic()
        watch.note_queue()
        watch.memory.settle()
        step, begun = self.under_way.popleft(), log.since_start(start)
        log.note_at(position, self._computed(step, begun, plan, output, alive, results))
        log.end_step(Updated(step, log.since_start(end), round((end - start) * 1e3, 4)))
        return results

    def _computed(
        self,
        step: int,
        time_s: float,
        plan: SchedulerOutput,
        output: StepOutput,
        alive: Sequence[Request],
        results: Sequence[EngineCoreOutput],
    ) -> Computed:
        tokens = _taken_tokens(alive, results, output)
        texts, drafts, sampled = self._watch.texts, plan.scheduled_draft_token_ids, output.token_ids
        pieces = {r.request_id: texts.add(r, tokens[r.request_id]) for r in alive}
        guessed = [r.request_id for r in alive if r.request_id in drafts]
        gone = {r.request_id for r in plan.scheduled_requests} - tokens.keys()
        return Computed(
            step,
            time_s,
            {name: round(ms, 4) for name, ms in output.times.items()},
            {name: ids for name, ids in tokens.items() if ids},
            {name: parts for name, parts in pieces.items() if parts},
            {name: _verdict(len(drafts[name]), sampled.get(name)) for name in guessed},
            {name: sampled[name] for name in gone if sampled.get(name)},
        )

    def steps_failed(self) -> None:
        """Drop the plans in flight, which will have no results."""
        self.under_way.clear()


def _taken_tokens(
    alive: Sequence[Request], results: Sequence[EngineCoreOutput], output: StepOutput
) -> dict[str, list[int]]:
    """Return the tokens that became outputs, by request. With lazy results (`StepResults`), only
    the slow path's are read."""
    slow_path: Mapping[str, EngineCoreOutput] = {}
    if isinstance(results, StepResults):
        slow_path = results.slow_path
    else:
        slow_path = {result.request_id: result for result in results}
    tokens = {}
    for request in alive:
        result = slow_path.get(request.request_id)
        ids = output.token_ids.get(request.request_id, ())
        tokens[request.request_id] = list(ids if result is None else result.new_token_ids)
    return tokens


def _verdict(num_drafts: int, token_ids: Sequence[int] | None) -> list[int]:
    """Return the numbers of accepted and rejected draft tokens."""
    num_accepted = max(0, len(token_ids or ()) - 1)
    return [num_accepted, num_drafts - num_accepted]
