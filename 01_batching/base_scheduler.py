"""The state of a scheduler: everything except the decision. Each step sends a plan to the runner as
a delta, and gets the sampled tokens back:

        add_request         a plan admits it            last token, or abort
    (new) ------> waiting ------------------> running ----------------------> (gone)

A scheduler derives from this class and adds `schedule`, which decides *which* requests a step
computes. A feature that is independent of the kind of scheduler is a `SchedulerPlugin` in the list.

Invariants: every unfinished request is either waiting or running; scheduled tokens count as
computed from then on; after each plan, the runner's copy of a scheduled request equals the
scheduler's.

See 01_batching/README.md#bookkeeping"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import proxy

from request import Request, RequestStatus
from request_queue import RequestQueue
from scheduler_interface import (
    NO_FINITE_LOGITS,
    EngineCoreOutput,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
)

_FINISHED = RequestStatus.FINISHED_STOPPED  # and every later status


class DeltaEncoder:
    """Encodes plans as deltas: tracks what the runner knows of each request, and sends only
    changes.

    never sent   -> NewRequestData: the prompt, once
    sent before  -> CachedRequestData: the tokens that became known since
    """

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}  # tokens
        self._finished_req_ids: set[str] = set()  # since the last plan
        self._must_reset = False  # the runner, by the next plan

    def is_tracked(self, request_id: str) -> bool:
        return request_id in self._num_sent

    def remove_request(self, request_id: str) -> None:
        if request_id in self._num_sent:  # the runner has state for it
            self._finished_req_ids.add(request_id)
            del self._num_sent[request_id]

    def reset(self) -> None:
        """Forget what was sent, after a step that failed: it is unknown what the runner got. The
        next plan tells it to forget every request too."""
        for request_id in list(self._num_sent):
            self.remove_request(request_id)
        self._finished_req_ids = set()
        self._must_reset = True

    def encode(self, plan: SchedulerOutput) -> None:
        """Write the changes of the scheduled requests into the plan's message."""
        plan.reset = self._must_reset
        self._must_reset = False
        plan.finished_req_ids = self._finished_req_ids
        self._finished_req_ids = set()
        cached = plan.scheduled_cached_reqs
        num_sent = self._num_sent
        for request in plan.scheduled_requests:
            request_id = request.request_id
            tokens = request.all_token_ids
            num_known = num_sent.get(request_id)
            if num_known is None:
                plan.scheduled_new_reqs.append(self.make_new_request_data(request))
            else:
                cached.req_ids.append(request_id)
                cached.new_token_ids.append(tokens[num_known:])
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(len(request.output_token_ids))
            num_sent[request_id] = len(tokens)

    def make_new_request_data(self, request: Request) -> NewRequestData:
        prompt = request.prompt_token_ids
        params = request.sampling_params
        computed = request.num_computed_tokens
        features = request.features
        return NewRequestData(request.request_id, prompt, params, computed, features=features)


class SchedulerPlugin:
    """A feature of a scheduler: a class with the hooks that it needs. Those in `PER_REQUEST` are
    called for one request after another, but only if a plugin defines them.

    Optional tokens are draft tokens (chapter 5). They follow a request's last known token, and are
    scheduled if budget and memory are left after every request got what it needs."""

    PER_REQUEST = ("can_start", "skips_step", "num_optional_tokens", "num_optional_slots")
    scheduler: Any  # the plugin's `BaseScheduler`

    def attach(self, scheduler: BaseScheduler) -> None:
        """Called when the plugin is added to a scheduler. The reference is weak: in a cycle, only
        Python's garbage collector would free an engine's memory."""
        self.scheduler = proxy(scheduler)

    def begin_step(self) -> None:
        """Called before a step is planned."""

    def can_start(self, request: Request) -> bool:
        """Whether a waiting request can be admitted now. Must not change state: another call
        returns the same."""
        return True

    def skips_step(self, request: Request) -> bool:
        """Whether a running request skips this step."""
        return False

    def num_optional_tokens(self, request: Request) -> int:
        """How many optional tokens a request with one uncomputed token has."""
        return 0

    def num_optional_slots(self, request: Request, end: int) -> int:
        """How many slots after position `end` are useful to the request, if they are free."""
        return 0

    def victim(self) -> Request | None:
        """Return a request to preempt before this step is planned, or None (chapter 4)."""

    def on_preempt(self, request: Request) -> None:
        """Called before the request loses its KV (chapter 4)."""

    def on_start(self, request: Request) -> None:
        """Called when a request was admitted and runs."""

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Called when a plan is complete. The plugin can still add to its message."""

    def on_output(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """Called with the output for a plan, before any request gets its tokens."""

    def on_finish(self, request: Request) -> None:
        """Called when a request finishes, at any time; once, unless the call was interrupted. The
        scheduler still holds the request."""

    def check(self) -> None:
        """Assert what must hold between two steps."""


def overrides(plugin: object, declared: Callable[..., object]) -> bool:
    """Whether the plugin's class overrides this method of its base."""
    return getattr(type(plugin), declared.__name__) is not declared


class BaseScheduler:
    """Owns the requests. Runs up to `max_num_seqs` of them at a time, with `max_num_batched_tokens`
    tokens per step; `max_model_len` limits prompt plus outputs.

    A step is one call of `schedule`, whose scheduled tokens count as computed from then on, and one
    of `update_from_output`, which skips requests that were aborted in between."""

    def __init__(
        self,
        waiting: RequestQueue,
        delta: DeltaEncoder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prompt_len = max_num_batched_tokens  # a step computes whole prompts
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}  # every unfinished request
        self.waiting = waiting
        self.running: dict[str, Request] = {}  # in order of admission
        self.delta = delta
        self.set_plugins(plugins)

    def set_plugins(self, plugins: Sequence[SchedulerPlugin]) -> None:
        """Set the plugins, in the order in which their hooks are called."""
        self.plugins = tuple(plugins)
        self.hooks: dict[str, list[Callable[..., Any]]] = {}  # of `PER_REQUEST`
        for plugin in self.plugins:
            plugin.attach(self)
        for name in SchedulerPlugin.PER_REQUEST:
            declared = getattr(SchedulerPlugin, name)
            defining = [plugin for plugin in self.plugins if overrides(plugin, declared)]
            self.hooks[name] = [getattr(plugin, name) for plugin in defining]

    def schedule(self) -> SchedulerOutput:
        """Plan a step."""
        raise NotImplementedError

    def can_start(self, request: Request) -> bool:
        return all(can_start(request) for can_start in self.hooks["can_start"])

    def skips_step(self, request: Request) -> bool:
        return any(skips_step(request) for skips_step in self.hooks["skips_step"])

    def runnable_ids(self) -> list[str]:
        """Begin a step. Returns the ids of running requests that do not skip it, in order of
        admission."""
        for plugin in self.plugins:
            plugin.begin_step()
        return [name for name, request in self.running.items() if not self.skips_step(request)]

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError`, and changes nothing, if its id is in use or it
        could never run. If a limit allows fewer outputs than `max_tokens`, that is lowered, and
        `request.length_limit` names the limit."""
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id must be unique, got {request.request_id!r}, which is in use"
            )
        limits = self.length_limits(request)
        for reason, room in limits.items():
            if room < 1:
                raise ValueError(
                    f"{describe_prompt(request)}, which leaves no room for an output: {reason}"
                )
        self.check_prompt(request)
        for reason, room in limits.items():
            if room < request.max_tokens:
                request.max_tokens = room
                request.length_limit = reason
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def check_prompt(self, request: Request) -> None:
        """Raise `ValueError` for a prompt that no step can compute."""
        if request.num_prompt_tokens > self.max_prompt_len:
            raise ValueError(
                f"{describe_prompt(request)}, but a whole prompt must fit in one step, "
                f"max_num_batched_tokens={self.max_prompt_len}"
            )

    def length_limits(self, request: Request) -> dict[str, int]:
        """`{limit: number of outputs that fit}`, for limits other than `max_tokens`."""
        if self.max_model_len is None:
            return {}
        room = self.max_model_len - request.num_prompt_tokens
        return {f"max_model_len={self.max_model_len}": room}

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """Finish requests from outside, at any time. Unknown and finished ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request := self.requests.get(request_id):
                request.status = status
                self._free_request(request)

    def abort_request(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _free_request(self, request: Request) -> None:
        """Remove a finished request from the scheduler; the next plan tells the runner."""
        for plugin in self.plugins:
            plugin.on_finish(request)
        self.running.pop(request.request_id, None)
        # A running request is not queued, unless `schedule` was interrupted.
        with suppress(KeyError):
            self.waiting.remove_request(request)
        self.delta.remove_request(request.request_id)
        del self.requests[request.request_id]  # last, so that an interrupted call can be repeated

    def clear(self) -> None:
        """Recover from a step that failed. All requests that have started end with an error, since
        their state is unknown; the others stay in the queue. Safe to interrupt and call again."""
        self.delta.reset()
        for request in list(self.requests.values()):
            has_started = request.num_preemptions or request.status >= RequestStatus.RUNNING
            if request in self.waiting and not has_started:
                self.running.pop(request.request_id, None)
                request.num_computed_tokens = 0
            else:
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def make_plan(
        self, num_tokens: dict[str, int], plan: SchedulerOutput | None = None
    ) -> SchedulerOutput:
        """Fill in `plan` (or a new plan) to compute the next `num_tokens[id]` tokens of these
        requests."""
        plan = plan or SchedulerOutput()
        requests = [self.requests[request_id] for request_id in num_tokens]
        plan.num_scheduled_tokens = num_tokens
        plan.scheduled_requests = requests
        plan.start_positions = [request.num_computed_tokens for request in requests]
        self.delta.encode(plan)
        for request, num in zip(requests, num_tokens.values(), strict=True):
            request.num_computed_tokens += num
        for plugin in self.plugins:
            plugin.on_plan(plan)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        """Append the sampled tokens, and remove the requests that finished."""
        for plugin in self.plugins:
            plugin.on_output(plan, output)
        rows = zip(
            plan.scheduled_requests, plan.start_positions, plan.num_scheduled_tokens.values()
        )
        return [
            self.append_sampled_tokens(request, start, start + num_tokens, output)
            for request, start, num_tokens in rows
            if request.status < _FINISHED  # else it was aborted between schedule and update
        ]

    def append_sampled_tokens(
        self, request: Request, start: int, end: int, output: StepOutput
    ) -> EngineCoreOutput:
        """Process the output of one request, whose positions `[start, end)` the step has written.
        Appends its sampled tokens, up to the one that finishes it."""
        request_id = request.request_id
        sampled = output.token_ids.get(request_id, [])
        num_new = 0
        for token_id in sampled:
            request.append_output_token(token_id)
            num_new += 1
            if request.status >= _FINISHED:
                break  # tokens sampled after the last one are discarded
        result = EngineCoreOutput(request_id, sampled[:num_new])
        if request_id in output.logprobs:
            result.logprobs = output.logprobs[request_id][:num_new]
        if request_id in output.errors:
            request.status = RequestStatus.FINISHED_ERROR
            result.finish_detail = output.errors[request_id]
            request.has_bad_kv = result.finish_detail == NO_FINITE_LOGITS
        else:
            self.on_positions_computed(request, start, end)
        if request.status >= _FINISHED:
            result.finish_reason = request.finish_reason
            result.stop_reason = request.stop_reason
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                result.finish_detail = request.length_limit
            self._free_request(request)
        return result

    def on_positions_computed(self, request: Request, start: int, end: int) -> None:
        """Called when the KV of positions `[start, end)` can be used."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""
        return len(self.running), len(self.waiting)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state is inconsistent between two steps. O(all
        requests)."""
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} are running"
        waiting = {request.request_id: request for request in self.waiting}
        assert len(waiting) == len(self.waiting), "a request is in the waiting queue twice"
        assert waiting.keys().isdisjoint(self.running), "a request is both running and waiting"
        assert waiting.keys() | self.running.keys() == self.requests.keys()
        for request in self.requests.values():
            request.check_invariants()
            assert not request.is_finished, repr(request)
        for request in self.running.values():
            assert request.status == RequestStatus.RUNNING, repr(request)
            num_known = request.num_tokens + request.num_output_placeholders
            assert request.num_computed_tokens < num_known, f"no uncomputed tokens: {request!r}"
            assert self.delta.is_tracked(request.request_id), repr(request)
        for request in waiting.values():
            assert request.status != RequestStatus.RUNNING, repr(request)
            assert request.num_computed_tokens == 0, repr(request)
        for plugin in self.plugins:
            plugin.check()


def describe_prompt(request: Request) -> str:
    return f"request {request.request_id!r}: prompt has {request.num_prompt_tokens} tokens"
