"""First come, first served, decided anew at every iteration.

A static batch is filled once and emptied once: a slot whose request has ended stays empty until the
longest one ends. Scheduling per iteration (Orca, OSDI 2022) asks before every forward pass who
computes what, so that a freed slot is taken in the very next step.

One step has a budget of `max_num_batched_tokens`:

    | one token for each running request | whole prompts from the front of the queue | unused |
    0                           len(running)                              max_num_batched_tokens

Running requests come first, so admission cannot starve them, and since a prompt is only admitted
into what is left, `len(running)` never grows past the budget. The queue is not overtaken: if its
head does not fit, nobody behind it is admitted. Only a request whose KV is on its way is passed
over, until it has come: another request computes it in this step, or it is loaded (chapter 3). A
head that could never fit is refused when it arrives, so nobody waits for ever.

Memory is reserved in full at admission, for the prompt and everything the request may still
generate. That is safe, because a running request can never run out, and wasteful, because most
requests stop early: chapter 4 replaces it.

Invariants: `len(running) <= max_num_seqs`; no plan exceeds the budget; a running request is exactly
one token behind between two steps; every unfinished request is either waiting or running."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from request import Request, RequestStatus
from request_queue import create_request_queue
from scheduler_interface import (
    BlockCopy,
    CachedRequestData,
    ComputedBlocks,
    EngineCoreOutput,
    KVMemory,
    NewRequestData,
    SchedulerOutput,
    UnlimitedKVMemory,
)


class _Outcome(Enum):
    ADMITTED = auto()
    NOT_READY = auto()  # more of its KV is there soon: the next one is asked meanwhile
    NO_ROOM = auto()  # not in this step, and nobody behind it either


class FCFSScheduler:
    """Iteration-level scheduling of whole prompts. A `SchedulerInterface`.

    `kv_memory` is asked before a request is admitted; without one, memory is taken to be unlimited.
    `max_model_len` bounds prompt plus outputs. Raises `ValueError` for limits below 1."""

    def __init__(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        kv_memory: KVMemory | None = None,
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be >= 1")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv_memory = kv_memory or UnlimitedKVMemory()

        self.requests: dict[str, Request] = {}  # every unfinished request
        self.waiting = create_request_queue("fcfs")
        self.running: dict[str, Request] = {}  # in order of admission
        self._finished_req_ids: set[str] = set()  # finished since the last plan
        self._num_sent: dict[
            str, tuple[int, int]
        ] = {}  # what the runner knows: (tokens, block ids)

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError`, and changes nothing, if it is a duplicate or could
        never run."""
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id is {request.request_id!r}: a request with this id is unfinished"
            )
        max_tokens = request.max_tokens
        if self.max_model_len is not None:
            max_tokens = min(max_tokens, self.max_model_len - request.num_prompt_tokens)
        self._check_can_ever_run(request, max_tokens)
        request.max_tokens = max_tokens
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def _check_can_ever_run(self, request: Request, max_tokens: int) -> None:
        prompt = (
            f"request {request.request_id!r}: the prompt has {request.num_prompt_tokens} tokens"
        )
        if max_tokens < 1:
            raise ValueError(
                f"{prompt}: it must leave room for one more in max_model_len={self.max_model_len}"
            )
        if request.num_prompt_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{prompt}: a whole prompt must fit one step, "
                f"max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        # The last token is sampled but never fed back: it needs no KV slot.
        num_positions = request.num_prompt_tokens + max_tokens - 1
        if not self.kv_memory.fits_when_empty(num_positions):
            raise ValueError(
                f"{prompt} and max_tokens is {max_tokens}: {num_positions} positions do not fit "
                "the KV memory even when it is empty; lower max_tokens or raise num_blocks"
            )

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside. Ids of unknown or finished requests are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                if request_id not in self.running:
                    self.waiting.remove_request(request)
                request.status = status
                self._forget(request)

    def abort_request(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _forget(self, request: Request) -> None:
        self.kv_memory.free(request)
        del self.requests[request.request_id]
        self.running.pop(request.request_id, None)
        if self._num_sent.pop(request.request_id, None) is not None:  # the runner has state of it
            self._finished_req_ids.add(request.request_id)

    # -- one step

    def schedule(self) -> SchedulerOutput:
        """Plan a step: new requests first, then a token for everyone who was running before."""
        plan = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        was_running = list(self.running.values())
        budget = self.max_num_batched_tokens - len(was_running)
        for request in self._admit(budget):
            self._plan_new(request, request.num_tokens - request.num_computed_tokens, plan)
        for request in was_running:
            self._plan_running(request, plan)
        plan.num_kv_blocks_in_use = self.kv_memory.num_blocks_in_use
        plan.block_copies = [BlockCopy(*copy) for copy in self.kv_memory.take_block_copies()]
        if plan.is_empty and self.waiting:
            self.kv_memory.wait_for_loads()
        return plan

    def _admit(self, budget: int) -> list[Request]:
        """Take requests from the front of the queue into `running` for as long as they fit."""
        admitted = []
        for request in self.waiting:
            if len(self.running) == self.max_num_seqs:
                break
            outcome = self._try_to_admit(request, budget)
            if outcome is _Outcome.NO_ROOM:
                break
            if outcome is _Outcome.ADMITTED:
                budget -= request.num_tokens - request.num_computed_tokens
                self.running[request.request_id] = request
                admitted.append(request)
        for request in admitted:
            self.waiting.remove_request(request)
        return admitted

    def _try_to_admit(self, request: Request, budget: int) -> _Outcome:
        """What is known already is looked up first, and the work is sized after that."""
        parent = self.requests.get(request.parent_id) if request.parent_id is not None else None
        if parent is not None:
            if parent.num_output_tokens == 0:
                # Its prompt waits to be loaded, or is computed in this very step. In the next one
                # the child shares it, if nobody has taken the memory meanwhile: the line waits.
                is_computed_now = parent.request_id in self.running
                return _Outcome.NO_ROOM if is_computed_now else _Outcome.NOT_READY
            # The child needs logits of its own, so it computes the last prompt token again.
            request.num_computed_tokens = request.num_prompt_tokens - 1
            self.kv_memory.fork(parent, request)
            computed = ComputedBlocks()
        else:
            computed = self.kv_memory.get_computed_blocks(request)
        if not computed.is_ready:
            loading, waiting = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING
            request.status = loading if computed.is_loading else waiting
            return _Outcome.NOT_READY
        request.status = RequestStatus.WAITING
        num_known = request.num_computed_tokens + computed.num_tokens
        num_new_tokens = request.num_tokens - num_known
        num_reserved = request.max_num_tokens - 1 - request.num_tokens
        fits = num_new_tokens <= budget
        if fits and self.kv_memory.allocate_slots(request, num_new_tokens, num_reserved, computed):
            request.num_computed_tokens = request.num_cached_tokens = num_known
            return _Outcome.ADMITTED
        if parent is not None:  # a fork that was not admitted gives back what it shared
            self.kv_memory.free(request)
            request.num_computed_tokens = 0
        return _Outcome.NO_ROOM

    def _plan_new(self, request: Request, num_new_tokens: int, plan: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        block_ids = list(self.kv_memory.get_block_ids(request.request_id))
        plan.scheduled_new_reqs.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                request.num_computed_tokens,
                block_ids,
            )
        )
        self._num_sent[request.request_id] = (request.num_tokens, len(block_ids))
        self._count(request, num_new_tokens, plan)

    def _plan_running(self, request: Request, plan: SchedulerOutput) -> None:
        has_room = self.kv_memory.allocate_slots(request, num_new_tokens=1)
        assert has_room, f"{request!r} was admitted with everything it needs"
        cached: CachedRequestData = plan.scheduled_cached_reqs
        num_tokens_sent, num_blocks_sent = self._num_sent[request.request_id]
        block_ids = self.kv_memory.get_block_ids(request.request_id)
        cached.req_ids.append(request.request_id)
        cached.new_token_ids.append(request.all_token_ids[num_tokens_sent:])
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)
        cached.new_block_ids.append(list(block_ids[num_blocks_sent:]))
        self._num_sent[request.request_id] = (request.num_tokens, len(block_ids))
        self._count(request, 1, plan)

    @staticmethod
    def _count(request: Request, num_new_tokens: int, plan: SchedulerOutput) -> None:
        request.num_computed_tokens += num_new_tokens
        plan.num_scheduled_tokens[request.request_id] = num_new_tokens
        plan.scheduled_requests.append(request)

    def update_from_output(
        self, output: SchedulerOutput, token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append each request's sampled tokens, up to the one that finishes it, and release who has
        finished."""
        results = []
        for request in output.scheduled_requests:
            if request.is_finished:
                continue  # aborted between schedule and update
            self.kv_memory.cache_blocks(request)
            num_before = request.num_output_tokens
            for token_id in token_ids.get(request.request_id, ()):
                request.append_output_token(token_id)
                if request.is_finished:
                    self._forget(request)
                    break
            results.append(
                EngineCoreOutput(
                    request.request_id,
                    request.output_token_ids[num_before:],
                    request.finish_reason,
                    request.stop_reason,
                )
            )
        return results

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        raise NotImplementedError("FCFSScheduler does not speculate; chapter 4's Scheduler does")

    # -- questions

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""
        return len(self.running), len(self.waiting)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes (chapter 3). False while some are in use."""
        return self.kv_memory.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Between two steps."""
        assert len(self.running) <= min(self.max_num_seqs, self.max_num_batched_tokens)
        waiting_ids = [request.request_id for request in self.waiting]
        assert len(waiting_ids) == len(self.waiting)
        assert set(waiting_ids).isdisjoint(self.running)
        assert set(waiting_ids) | set(self.running) == set(self.requests)
        assert set(self._num_sent) == set(self.running)
        for request in self.requests.values():
            request.check_invariants()
            assert not request.is_finished, repr(request)
        for request in self.running.values():
            assert request.status == RequestStatus.RUNNING, repr(request)
            assert request.num_tokens - request.num_computed_tokens == 1, repr(request)
        for request in self.waiting:
            assert request.status < RequestStatus.RUNNING, repr(request)
            assert request.num_computed_tokens == 0, repr(request)
