"""Decisions of a scheduler that its state cannot show, read by its first plugin: why each waiting
request waits, in which order requests were admitted and preempted, and for which request.

A plan contains only the requests that it computes. The reason why a considered request waits
follows from the calls made for it: the plugin is the first of the list, so its `can_start` runs for
every candidate before the other rules and before blocks are allocated.

See common/events/README.md#why-a-request-waits"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast
from weakref import proxy

from base_scheduler import BaseScheduler, SchedulerPlugin
from kv_memory import UncachedKVCacheManager
from policies import SchedulePolicy
from policy_queue import PolicyQueue
from preemptive_scheduler import PreemptiveScheduler
from prefix_cache import PrefixCache, PrefixMatch
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput, StepOutput

# A plan's terms that differ from `REASONS`.
_STOPS = {"admitted": "seat", **dict.fromkeys(("rejected", "skipped"), "enough")}
_REASONS = {  # of a request with this status, whether or not it was considered
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "remote_kv",
}


class StepListener(Protocol):
    """What is told of steps and of requests that end: the recorder."""

    def begin_step(self) -> None: ...

    def received(self, plan: SchedulerOutput, output: StepOutput) -> None: ...

    def ended(self, request: Request) -> None: ...

    def checked(self) -> None: ...


class WaitReasons(SchedulerPlugin):
    """Works with any scheduler derived from chapter 1's, preemptive or not."""

    def __init__(self, memory: UncachedKVCacheManager, recorder: StepListener) -> None:
        self.memory = memory
        self._recorder = recorder
        self.num_found = 0  # tokens found by the last lookup in the cache
        self._found: dict[str, list[int]] = {}  # blocks found in this step, by request
        self.admitted: list[list[Any]] = []  # request, cached tokens
        self.preempted: list[list[Any]] = []  # request, lost tokens, request that gets its blocks
        self.lost: dict[str, int] = {}  # positions that a preempted request had computed
        self._skipped: dict[str, str] = {}  # in the step that is being planned
        self._parents: dict[str, str] = {}
        self._candidate: Request | None = None  # considered last; None: its outcome is known
        self._policy: RememberingPolicy | None = None

    def attach(self, scheduler: BaseScheduler) -> None:
        self.watched = cast("BaseScheduler", proxy(scheduler))

    def put_in(self, scheduler: BaseScheduler, last: SchedulerPlugin) -> None:
        """Become the scheduler's first plugin, and make `last` the last one."""
        queue = scheduler.waiting
        if isinstance(queue, PolicyQueue) and queue.policy.is_cache_aware:
            self._policy = RememberingPolicy(queue.policy)
            queue.policy = cast(SchedulePolicy, self._policy)
        scheduler.set_plugins([self, *scheduler.plugins, last])
        cache = self.memory.cache
        if isinstance(cache, PrefixCache):
            match_prefix = cache.match_prefix

            def match_and_tell(*arguments: Any, **keywords: Any) -> PrefixMatch:
                match = match_prefix(*arguments, **keywords)
                self.matched(match)
                return match

            cache.match_prefix = match_and_tell

    def take_out(self, scheduler: BaseScheduler, last: SchedulerPlugin) -> None:
        scheduler.set_plugins([p for p in scheduler.plugins if p is not self and p is not last])
        if self._policy is not None:
            cast(PolicyQueue, scheduler.waiting).policy = self._policy.policy
        if self.memory.cache is not None:
            vars(self.memory.cache).pop("match_prefix", None)

    def queue_order(self) -> list[str]:
        """Return the waiting requests in the order of service, without side effects. For a
        cache-aware policy, whose lookups would count as cache use, this is its last answer."""
        if self._policy is None:
            return [request.request_id for request in self.watched.waiting]
        self._policy.answers_from_memory = True
        try:
            return [request.request_id for request in self.watched.waiting]
        finally:
            self._policy.answers_from_memory = False

    def order_key(self, request: Request) -> str:
        """Return the policy's sort key as text, "" if it does not sort."""
        queue = self.watched.waiting
        if not isinstance(queue, PolicyQueue) or queue.policy.name == "fcfs":
            return ""
        key = queue.key_of(request)
        return "" if key is None else str(key)

    # -- the scheduler's calls

    def begin_step(self) -> None:
        self.admitted = []
        self.preempted = []
        self._skipped = {}
        self._parents = {}
        self._found = {}
        self._candidate = None
        self.memory.current_req_id = None
        self._recorder.begin_step()

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        self._recorder.received(plan, output)

    def check(self) -> None:
        if self._policy is not None:
            self._recorder.checked()

    def matched(self, match: PrefixMatch) -> None:
        """Called after each lookup in the prefix cache."""
        self.num_found = match.num_cached_tokens
        if (name := self.memory.current_req_id) is not None and match.blocks:
            self._found[name] = [block.block_id for block in match.blocks]

    def can_start(self, request: Request) -> bool:
        self._conclude()
        self._candidate = request
        self.memory.current_req_id = None
        return True

    def on_start(self, request: Request) -> None:
        self._candidate = None
        self.admitted.append([request.request_id, request.num_computed_tokens])

    def on_preempt(self, request: Request) -> None:
        name = request.request_id
        num = request.num_computed_tokens
        beneficiary = self.memory.current_req_id
        if beneficiary is None and self._candidate is not None:
            beneficiary = self._candidate.request_id
        self.lost[name] = max(num, self.lost.get(name, 0))
        self.preempted.append([name, num, beneficiary])

    def on_finish(self, request: Request) -> None:
        self.lost.pop(request.request_id, None)
        self._recorder.ended(request)

    # -- reasons for waiting

    def decisions(self, plan: SchedulerOutput) -> dict[str, Any]:
        """Return what a frame says of a plan besides its rows. `recomputed`: positions before
        these were computed before. `found` maps requests that stay in the queue to the blocks that
        a lookup found for them. `skipped` maps skipped requests to the reason, `parents` those
        with the reason "parent" to the request they wait for. `stop` is the reason for all others
        and the request at which it arose ("": no request was considered); None: all requests were
        considered."""
        self._conclude()
        waiting = self.queue_order()
        present = set(waiting)
        stop = self._stop_of(plan, waiting) if waiting else None
        requests = self.watched.requests
        reasons = {n: _REASONS.get(requests[n].status) or self._skipped.get(n) for n in waiting}
        skipped = {name: why for name, why in reasons.items() if why is not None}
        if stop is not None:
            stop = [_STOPS.get(stop[0], stop[0]), stop[1] if stop[1] in present else ""]
            skipped.pop(stop[1], None)
        else:  # a rule of the scheduler
            skipped |= {name: "constraint" for name in waiting if name not in skipped}
        return {
            "recomputed": self._recomputed(plan),
            "admitted": self.admitted,
            "preempted": self.preempted,
            "found": {name: blocks for name, blocks in self._found.items() if name in present},
            "skipped": skipped,
            "parents": {name: whom for name, whom in self._parents.items() if name in skipped},
            "stop": stop,
        }

    def _recomputed(self, plan: SchedulerOutput) -> dict[str, int]:
        bounds = {}
        for request, start in zip(plan.scheduled_requests, plan.start_positions):
            if request.num_preemptions:
                known = request.num_tokens - 1 if request.output_token_ids else None
                lost = self.lost.get(request.request_id, 0)
                bound = lost if known is None else known
                if bound > start:
                    bounds[request.request_id] = bound
        return bounds

    def _conclude(self) -> None:
        """Store the reason of the request that was considered last and has not started."""
        request = self._candidate
        memory = self.memory
        self._candidate = None
        if request is None:
            return
        request_id = request.request_id
        was_looked_up = memory.current_req_id == request.request_id
        if (by_status := _REASONS.get(request.status)) is not None:
            reason = by_status
        elif not was_looked_up:
            reason = "pending" if request.num_output_placeholders else "constraint"
        elif memory.blocking_req_id is not None:
            reason = "parent"
            self._parents[request_id] = memory.blocking_req_id
        else:
            reason = "constraint"  # a rule that splits prompts into chunks
        self._skipped[request_id] = reason

    def _stop_of(self, plan: SchedulerOutput, waiting: Sequence[str]) -> tuple[str, str] | None:
        """Return the reason why admission stopped, and the request at which it stopped."""
        if not isinstance(self.watched, PreemptiveScheduler):
            return self._stop_in_order(plan, waiting)
        if plan.admission_stop is None and plan.preempted_requests:
            return ("preempting", "")
        return plan.admission_stop

    def _stop_in_order(
        self, plan: SchedulerOutput, waiting: Sequence[str]
    ) -> tuple[str, str] | None:
        """Derive the stop for chapters 1 to 3, which serve first come, first served, and whose
        plans do not mention waiting requests."""
        scheduler = self.watched
        if len(scheduler.running) >= scheduler.max_num_seqs:
            return ("seat", "")
        for name in waiting:
            if self._skipped.get(name) not in ("remote_kv", "parent"):
                is_large = self._num_wanted(scheduler.requests[name]) > self._num_left(plan)
                return ("budget" if is_large else "blocks", name)
        return None

    def _num_wanted(self, request: Request) -> int:
        """Return the tokens that the request at which admission stopped would have computed."""
        memory = self.memory
        is_found = memory.current_req_id == request.request_id and memory.cache is not None
        return request.num_tokens - (self.num_found if is_found else 0)

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
