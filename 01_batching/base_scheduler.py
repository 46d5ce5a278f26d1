"""The books of a scheduler: everything but the decision. A plan goes to the runner as a delta, and
what it sampled comes back:

        add_request         a plan admits it            last token, or abort
    (new) ------> waiting ------------------> running ----------------------> (gone)

A scheduler of this book adds `schedule`: *which* requests a step computes.

A feature that is no scheduler's own is a `SchedulerPlugin` in the books' list.

Invariants: every unfinished request is either waiting or running; what is planned counts as
computed from then on; after each plan the runner's copy of a scheduled request is the scheduler's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from request import Request, RequestStatus, check_integers, require
from request_queue import RequestQueue
from scheduler_interface import EngineCoreOutput, NewRequestData, SchedulerOutput, StepOutput

_FINISHED = RequestStatus.FINISHED_STOPPED  # and everything behind it


class RunnerDelta:
    """What the runner knows of each request, so that it is sent only what is new:

    never sent   -> NewRequestData: the prompt, once
    sent before  -> CachedRequestData: the tokens that became known since
    """

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}  # tokens
        self._finished_req_ids: set[str] = set()  # since the last plan
        self._sent: deque[SchedulerOutput] = deque()  # plans whose output nobody has seen

    def knows(self, request_id: str) -> bool:
        return request_id in self._num_sent

    def forget(self, request_id: str) -> None:
        if request_id in self._num_sent:  # the runner has state of it
            self._finished_req_ids.add(request_id)
            del self._num_sent[request_id]

    def taken(self, plan: SchedulerOutput | None) -> None:
        """The runner has computed it, and all plans before it. None: nothing is waited for."""
        while self._sent and self._sent.popleft() is not plan:
            pass

    def plans_lost(self) -> list[Request]:
        """The others may never have come to the runner. It is told again who has ended, and knows
        nobody whom they admitted. Returns whom they computed."""
        for plan in self._sent:
            self._finished_req_ids |= plan.finished_req_ids
            for new in plan.scheduled_new_reqs:
                self.forget(new.req_id)
        return [request for plan in self._sent for request in plan.scheduled_requests]

    def encode(self, plan: SchedulerOutput) -> None:
        """Put what is new about the scheduled requests into the plan's message."""
        self._sent.append(plan)
        plan.finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        cached, num_sent = plan.scheduled_cached_reqs, self._num_sent
        for request in plan.scheduled_requests:
            request_id, tokens = request.request_id, request.all_token_ids
            num_known = num_sent.get(request_id)
            if num_known is None:
                plan.scheduled_new_reqs.append(self.describe(request))
            else:
                cached.req_ids.append(request_id)
                cached.new_token_ids.append(tokens[num_known:])
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(len(request.output_token_ids))
            num_sent[request_id] = len(tokens)

    def describe(self, request: Request) -> NewRequestData:
        prompt, params = request.prompt_token_ids, request.sampling_params
        computed, features = request.num_computed_tokens, request.features
        return NewRequestData(request.request_id, prompt, params, computed, features=features)


class SchedulerPlugin:
    """A feature. It is asked about single requests only where its class defines the question; it is
    told of everything else once. An empty list costs nothing."""

    # Chapter 4: False where each step of a request is to be decided on, as `sits_out` mostly wants.
    allows_routine = True

    def attach(self, books: SchedulerBooks) -> None:
        """It stands in the list of these."""

    def begin_step(self) -> None:
        """A step is going to be planned."""

    def may_start(self, request: Request) -> bool:
        """May a request that waits be admitted now? Another call would answer the same."""
        return True

    def sits_out(self, request: Request) -> bool:
        """Is nothing of a running request to be planned in this step?"""
        return False

    def started(self, request: Request) -> None:
        """It has been admitted, and runs."""

    def planned(self, plan: SchedulerOutput) -> None:
        """A plan is made; its message may still be added to."""

    def judged(self, plan: SchedulerOutput, output: StepOutput) -> None:
        """What came of a plan is known. No request has got its tokens yet."""

    def ended(self, request: Request) -> None:
        """At any moment; once, unless it was interrupted. The books still hold it."""

    def check(self) -> None:
        """Asserts what must hold between two steps."""


def defines(plugin: object, declared: Callable[..., object]) -> bool:
    """Does its class define this method, which its base only declares?"""
    return getattr(type(plugin), declared.__name__) is not declared


class SchedulerBooks:
    """Owns the requests. `max_num_seqs` of them run at once, a step computes
    `max_num_batched_tokens` tokens, and `max_model_len` bounds prompt plus outputs."""

    def __init__(
        self,
        waiting: RequestQueue,
        delta: RunnerDelta,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        check_integers(1, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        if max_model_len is not None:
            check_integers(1, max_model_len=max_model_len)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}  # every unfinished request
        self.waiting = waiting
        self.running: dict[str, Request] = {}  # in order of admission
        self.delta = delta
        self.plugins: tuple[SchedulerPlugin, ...] = ()
        self.set_plugins(plugins)

    def set_plugins(self, plugins: Sequence[SchedulerPlugin]) -> None:
        """In the order in which they are asked and told."""
        new = [plugin for plugin in plugins if plugin not in self.plugins]
        self.plugins, base = tuple(plugins), SchedulerPlugin
        for plugin in new:
            plugin.attach(self)
        self._asked_to_start = [p.may_start for p in self.plugins if defines(p, base.may_start)]
        self._asked_to_sit = [p.sits_out for p in self.plugins if defines(p, base.sits_out)]

    def may_start(self, request: Request) -> bool:
        return all(may_start(request) for may_start in self._asked_to_start)

    def sits_out(self, request: Request) -> bool:
        return any(sits_out(request) for sits_out in self._asked_to_sit)

    def going_on(self) -> list[str]:
        """A step begins. Who runs and does not sit it out, in order of admission."""
        for plugin in self.plugins:
            plugin.begin_step()
        names = list(self.running)
        for sits_out in self._asked_to_sit:
            names = [name for name in names if not sits_out(self.running[name])]
        return names

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError`, and changes nothing, if it is a duplicate or could
        never run. If a limit leaves room for fewer outputs than `max_tokens`, that is lowered, and
        `request.length_limit` says why."""
        require(isinstance(request, Request), "request", request, "a Request")
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id must be unique, got {request.request_id!r}, which is in use"
            )
        limits = self.length_limits(request)
        for reason, room in limits.items():
            if room < 1:
                raise ValueError(
                    f"{describe_prompt(request)}, but {reason} leaves no room for an output token"
                )
        self.check_prompt(request)
        for reason, room in limits.items():
            if room < request.max_tokens:
                request.max_tokens, request.length_limit = room, reason
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def check_prompt(self, request: Request) -> None:
        """Raises `ValueError` for a prompt that no step can compute."""
        if request.num_prompt_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{describe_prompt(request)}, but a whole prompt must fit in one step, "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )

    def length_limits(self, request: Request) -> dict[str, int]:
        """`{why: number of outputs that fit}`, for limits other than `max_tokens`."""
        if self.max_model_len is None:
            return {}
        room = self.max_model_len - request.num_prompt_tokens
        return {f"max_model_len={self.max_model_len}": room}

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, at any moment. Unknown and finished ones are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request := self.requests.get(request_id):
                request.status = status
                self.forget(request)

    def abort_request(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self, request: Request) -> None:
        """It has ended: nothing is left of it here, and the next plan tells the runner."""
        for plugin in self.plugins:
            plugin.ended(request)
        self.running.pop(request.request_id, None)
        with suppress(KeyError):  # a running one does not wait, unless `schedule` raised half-way
            self.waiting.remove_request(request)
        self.delta.forget(request.request_id)
        del self.requests[request.request_id]  # last: if it is interrupted, it can be done again

    def begin_anew(self) -> None:
        """A step was cut short: how far have its requests come? They are aborted, and who else
        runs. Who waits goes on waiting. May be cut short itself, and done again."""
        going = {*self.running.values(), *self.delta.plans_lost()}
        for request in list(self.requests.values()):
            if request in self.waiting and request not in going and not request.is_finished:
                request.num_computed_tokens = request.num_pending_tokens = 0
                request.status = RequestStatus.WAITING
            else:
                self.abort_request(request.request_id)
        self.delta.taken(None)

    def make_plan(
        self, num_tokens: dict[str, int], plan: SchedulerOutput | None = None
    ) -> SchedulerOutput:
        """The plan, put into `plan`, that computes the next `num_tokens[id]` tokens of these."""
        plan = plan or SchedulerOutput()
        requests = [self.requests[request_id] for request_id in num_tokens]
        plan.num_scheduled_tokens, plan.scheduled_requests = num_tokens, requests
        plan.start_positions = [request.num_computed_tokens for request in requests]
        self.delta.encode(plan)
        for request, num in zip(requests, num_tokens.values(), strict=True):
            request.num_computed_tokens += num
        for plugin in self.plugins:
            plugin.planned(plan)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: StepOutput
    ) -> Sequence[EngineCoreOutput]:
        """Take what was sampled, and release the requests that have finished. Raises `ValueError`
        for what is no `StepOutput`."""
        allowed = "a StepOutput; StepOutput(tokens_by_id) makes one"
        require(isinstance(output, StepOutput), "output", output, allowed)
        for plugin in self.plugins:
            plugin.judged(plan, output)
        rows = zip(
            plan.scheduled_requests, plan.start_positions, plan.num_scheduled_tokens.values()
        )
        results = [
            self.take_tokens(request, start, start + num_tokens, output)
            for request, start, num_tokens in rows
            if request.status < _FINISHED  # else it was aborted between schedule and update
        ]
        self.delta.taken(plan)
        return results

    def take_tokens(
        self, request: Request, start: int, end: int, output: StepOutput
    ) -> EngineCoreOutput:
        """What the step, which has written positions `[start, end)`, did for one request: it gets
        its sampled tokens, up to the one that finishes it."""
        request_id = request.request_id
        sampled = output.token_ids.get(request_id, [])
        num_new = 0
        for token_id in sampled:
            request.append_output_token(token_id)
            num_new += 1
            if request.status >= _FINISHED:
                break  # what was sampled behind it is nobody's
        result = EngineCoreOutput(request_id, sampled[:num_new])
        if request_id in output.logprobs:
            result.logprobs = output.logprobs[request_id][:num_new]
        if request_id in output.errors:
            request.status = RequestStatus.FINISHED_ERROR
            result.finish_detail = output.errors[request_id]
        else:
            self.positions_written(request, start, end)
        if request.status >= _FINISHED:
            result.finish_reason, result.stop_reason = request.finish_reason, request.stop_reason
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                result.finish_detail = request.length_limit
            self.forget(request)
        return result

    def positions_written(self, request: Request, start: int, end: int) -> None:
        """The KV of positions `[start, end)` can be used from now on."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    has_requests = has_unfinished_requests  # the posts' name

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""
        return len(self.running), len(self.waiting)

    def check_invariants(self) -> None:
        """Between two steps. O(everything)."""
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
            num_known = request.num_tokens + request.num_pending_tokens
            assert request.num_computed_tokens < num_known, f"no uncomputed tokens: {request!r}"
            assert self.delta.knows(request.request_id), repr(request)
        for request in waiting.values():
            assert request.status != RequestStatus.RUNNING, repr(request)
            assert request.num_computed_tokens == 0, repr(request)
        for plugin in self.plugins:
            plugin.check()


def describe_prompt(request: Request) -> str:
    return f"request {request.request_id!r}: prompt has {request.num_prompt_tokens} tokens"
