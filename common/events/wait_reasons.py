"""Decisions of a scheduler that its state cannot show, read by its first plugin: why each waiting
request waits, in which order requests were admitted and preempted, and for which request.

A plan contains only the requests that it computes. The reason why a considered request waits
follows from the calls made for it: the plugin is the first of the list, so its `can_start` runs for
every candidate before the other rules and before blocks are allocated.

See common/events/README.md#why-a-request-waits"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import proxy

from base_scheduler import BaseScheduler, SchedulerPlugin
from kv_memory import UncachedKVCacheManager
from policy_queue import PolicyQueue
from preemptive_scheduler import PreemptiveScheduler
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput, StepOutput

# A plan's terms that differ from `REASONS`.
_STOPS = {"admitted": "seat", "rejected": "enough", "skipped": "enough"}
_REASONS = {  # of a request with this status, whether or not it was considered
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "remote_kv",
}


class WaitReasons(SchedulerPlugin):
    """Works with any scheduler derived from chapter 1's, preemptive or not. Tells `recorder`, the
    `FrameRecorder`, of steps and of requests that end."""

    def __init__(self, memory: UncachedKVCacheManager, recorder: Any) -> None:
        self._memory = memory
        self._recorder = recorder
        self._plan_end = _PlanEnd(recorder)
        self._lost: dict[str, int] = {}  # positions that a preempted request had computed
        self._clear()

    def _clear(self) -> None:
        """Forget the step that was planned before."""
        self._admitted: list[list[Any]] = []  # request, cached tokens
        self._preempted: list[list[Any]] = []  # request, lost tokens, request that gets its blocks
        self._skipped: dict[str, str] = {}
        self._parents: dict[str, str] = {}
        self._candidate: Request | None = None  # considered last; None: its outcome is known
        self._memory.current_req_id = None

    def attach(self, scheduler: BaseScheduler) -> None:
        self._watched = cast("BaseScheduler", proxy(scheduler))

    def put_in(self, scheduler: BaseScheduler) -> None:
        """Become the scheduler's first plugin, and be told of plans by its last one."""
        scheduler.set_plugins([self, *scheduler.plugins, self._plan_end])

    def take_out(self, scheduler: BaseScheduler) -> None:
        own = (self, self._plan_end)
        scheduler.set_plugins([plugin for plugin in scheduler.plugins if plugin not in own])

    def queue_order(self) -> list[str]:
        """Return the waiting requests in the order of service; for a cache-aware policy, whose
        lookups would count as uses of the cache, in that of arrival."""
        scheduler = self._watched
        queue = scheduler.waiting
        if isinstance(queue, PolicyQueue) and queue.policy.is_cache_aware:
            return [name for name in scheduler.requests if name not in scheduler.running]
        return [request.request_id for request in queue]

    def order_key(self, request: Request) -> str:
        """Return the policy's sort key as text, "" if it does not sort."""
        queue = self._watched.waiting
        if not isinstance(queue, PolicyQueue) or queue.policy.name == "fcfs":
            return ""
        key = queue.key_of(request)
        return "" if key is None else str(key)

    # -- the scheduler's calls

    def begin_step(self) -> None:
        self._clear()
        self._recorder.begin_step()

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        self._recorder.received(plan, output)

    def can_start(self, request: Request) -> bool:
        self._conclude()
        self._candidate = request
        self._memory.current_req_id = None
        return True

    def on_start(self, request: Request) -> None:
        self._candidate = None
        self._admitted.append([request.request_id, request.num_computed_tokens])

    def on_preempt(self, request: Request) -> None:
        name = request.request_id
        num = request.num_computed_tokens
        beneficiary = self._memory.current_req_id
        if beneficiary is None and self._candidate is not None:
            beneficiary = self._candidate.request_id
        self._lost[name] = max(num, self._lost.get(name, 0))
        self._preempted.append([name, num, beneficiary])

    def on_finish(self, request: Request) -> None:
        self._lost.pop(request.request_id, None)
        self._recorder.ended(request)

    # -- reasons for waiting

    def decisions(self, plan: SchedulerOutput) -> dict[str, Any]:
        """Return what a frame says of a plan besides its rows. `recomputed`: positions before
        these were computed before. `skipped` maps skipped requests to the reason, `parents` those
        with the reason "parent" to the request they wait for. `stop` is the reason for all others
        and the request at which it arose ("": no request was considered); None: all requests were
        considered."""
        self._conclude()
        waiting = self.queue_order()
        stop = self._stop_of(plan, waiting) if waiting else None
        requests = self._watched.requests
        reasons = {n: _REASONS.get(requests[n].status) or self._skipped.get(n) for n in waiting}
        skipped = {name: why for name, why in reasons.items() if why is not None}
        if stop is not None:
            stop = [_STOPS.get(stop[0], stop[0]), stop[1] if stop[1] in reasons else ""]
            skipped.pop(stop[1], None)
        else:  # a rule of the scheduler
            skipped |= {name: "constraint" for name in waiting if name not in skipped}
        names = [request.request_id for request in plan.scheduled_requests]
        return {
            "recomputed": {name: self._lost[name] for name in names if name in self._lost},
            "admitted": self._admitted,
            "preempted": self._preempted,
            "skipped": skipped,
            "parents": {name: whom for name, whom in self._parents.items() if name in skipped},
            "stop": stop,
        }

    def _conclude(self) -> None:
        """Store the reason of the request that was considered last and has not started."""
        request = self._candidate
        self._candidate = None
        if request is None:
            return
        name = request.request_id
        reason = "constraint"  # such as one that splits prompts into chunks
        if self._memory.current_req_id != name:  # before any lookup
            reason = "pending" if request.num_output_placeholders else "constraint"
        elif (parent := self._memory.blocking_req_id) is not None:
            reason = "parent"
            self._parents[name] = parent
        self._skipped[name] = reason

    def _stop_of(self, plan: SchedulerOutput, waiting: Sequence[str]) -> tuple[str, str] | None:
        """Return the reason why admission stopped, and the request at which it stopped. The plans
        of chapters 1 to 3, which serve first come, first served, do not mention it."""
        if isinstance(self._watched, PreemptiveScheduler):
            if plan.admission_stop is None and plan.preempted_requests:
                return ("preempting", "")
            return plan.admission_stop
        if len(self._watched.running) >= self._watched.max_num_seqs:
            return ("seat", "")
        tried = (name for name in waiting if self._skipped.get(name) not in ("remote_kv", "parent"))
        first = next(tried, None)
        return None if first is None else ("front", first)


class _PlanEnd(SchedulerPlugin):
    """Gets each plan when the other plugins, such as speculation, have added to it."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def on_plan(self, plan: SchedulerOutput) -> None:
        self._recorder.planned(plan)
