"""What every scheduler of this chapter has to do besides deciding.

Requests come, wait, run, may be preempted, and end, in their own time or when somebody aborts them.
Each plan is sent to the runner as a delta, and what the runner sampled comes back. None of that
depends on *who* is chosen, so it is written once, here; `scheduler.py` and
`prefill_first_scheduler.py` only choose.

        add_request          admission                 last token, or abort
    (new) ------> waiting -------------> running ----------------------> (gone)
                     ^                     |
                     +---- preemption -----+        KV is freed, outputs are kept

Preemption is by recomputation: a victim loses its KV and keeps its tokens. When it is admitted
again, prompt and outputs are computed as if they were one prompt, less what the prefix cache still
has of them. Its counters say all of that: `num_computed_tokens = 0`.

A bound keeps preemption from being for ever. A request that was preempted `max_preemptions` times
is *pinned*: it is admitted again only with room for everything it may still generate, so it never
asks for more, and it is never chosen again.

Invariants: every unfinished request is either waiting or running; only running ones have KV; a plan
gives no request tokens twice; what is planned counts as computed from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from admission_constraints import AdmissionConstraint
from request import Request, RequestStatus
from request_queue import RequestQueue
from scheduler_interface import (
    BlockCopy,
    ComputedBlocks,
    EngineCoreOutput,
    KVMemory,
    SchedulerOutput,
)
from scheduler_stats import SchedulerLimits, SchedulerStats
from step_plan import RunnerDelta, StepPlan
from whole_prompts import ChunkPolicy, WholePrompts


class SchedulerBase:
    """Owns the requests. A subclass has `schedule`, built of `begin_step`, `look_up`, `allocate`,
    `preempt` and `finish_step`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_memory: KVMemory,
        waiting: RequestQueue,
        chunk_policy: ChunkPolicy | None = None,
        constraints: Sequence[AdmissionConstraint] = (),
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        self.kv_memory = kv_memory
        self.chunk_policy = chunk_policy or WholePrompts()
        self.constraints = list(constraints)
        self.num_lookahead_tokens = num_lookahead_tokens
        self.requests: dict[str, Request] = {}  # every unfinished request
        self.waiting = waiting
        self.running: dict[str, Request] = {}  # in order of admission
        self.delta = RunnerDelta(kv_memory)
        self._num_lost: dict[str, int] = {}  # tokens that a preempted request had computed
        self._stats = SchedulerStats()

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError`, and changes nothing, if it is a duplicate or could
        never run. Where the model or the whole KV memory ends before `max_tokens` does, that is
        lowered, and `request.length_limit` says by what."""
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id is {request.request_id!r}: a request with this id is unfinished"
            )
        max_tokens, length_limit = self._check_can_ever_run(request)
        request.max_tokens, request.length_limit = max_tokens, length_limit
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def _check_can_ever_run(self, request: Request) -> tuple[int, str | None]:
        num_prompt = request.num_prompt_tokens
        prompt = f"request {request.request_id!r}: the prompt has {num_prompt} tokens"
        limits = {}  # the last token is sampled and never fed back: it needs no KV slot
        if self.max_model_len is not None:
            limits[f"max_model_len={self.max_model_len}"] = self.max_model_len - num_prompt
        capacity = self.kv_memory.capacity
        limits[f"the KV memory holds {capacity} positions"] = capacity - num_prompt + 1
        for reason, room in limits.items():
            if room < 1:
                raise ValueError(f"{prompt}, and {reason}: there must be room for one more")
        longest = self.chunk_policy.longest_prompt(self.max_num_batched_tokens)
        if num_prompt > longest:
            raise ValueError(
                f"{prompt}: it must fit one step whole, max_num_batched_tokens={longest}"
            )
        reason = min(limits, key=limits.get)
        if limits[reason] >= request.max_tokens:
            return request.max_tokens, None
        return limits[reason], reason

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, at any moment: waiting, running, preempted, or planned and not
        yet updated. Ids of unknown or finished requests are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                request.status = status
                self._forget(request)

    def abort_request(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _forget(self, request: Request) -> None:
        request_id = request.request_id
        self.kv_memory.free(request)
        del self.requests[request_id]
        if self.running.pop(request_id, None) is None:
            self.waiting.remove_request(request)
        else:
            self._tell_constraints("has_stopped", request)
        self._tell_constraints("forget", request)
        self._num_lost.pop(request_id, None)
        self.delta.request_finished(request)
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._stats.total_aborted += 1
        else:
            self._stats.total_finished += 1

    def _tell_constraints(self, event: str, request: Request) -> None:
        for constraint in self.constraints:
            getattr(constraint, event)(request)

    # -- from waiting to running, and back

    def is_pinned(self, request: Request) -> bool:
        """It was preempted as often as it may be: it gets all its memory at once, and keeps it."""
        return request.num_preemptions >= self.limits.max_preemptions

    def num_lookahead(self, request: Request, end: int) -> int:
        """Slots behind position `end` in which a proposer may guess (chapter 5), as far as there
        can be tokens."""
        return max(0, min(self.num_lookahead_tokens, request.max_num_tokens - 1 - end))

    def may_run(self, request: Request) -> bool:
        return all(constraint.may_run(request) for constraint in self.constraints)

    def _parent_to_share(self, request: Request) -> Request | None:
        if request.parent_id is None or request.num_preemptions:
            return None  # whoever comes back has outputs of its own, and asks the cache
        return self.requests.get(request.parent_id)

    def waits_for_parent(self, request: Request) -> bool:
        parent = self._parent_to_share(request)
        return parent is not None and parent.num_computed_tokens < parent.num_prompt_tokens

    def look_up(self, request: Request) -> ComputedBlocks:
        """What of a waiting request need not be computed. Follow up with `allocate`, in this step.

        A sample (`n > 1`) shares its parent's prompt as soon as that is computed, and until then it
        is not ready: in `request.num_computed_tokens` it has what it shares."""
        if self.waits_for_parent(request):
            return ComputedBlocks(is_ready=False)
        parent = self._parent_to_share(request)
        if parent is not None:
            # Logits of its own are wanted, so it computes the last prompt token again.
            request.num_computed_tokens = request.num_prompt_tokens - 1
            self.kv_memory.fork(parent, request)
            return ComputedBlocks()
        computed = self.kv_memory.get_computed_blocks(request)
        if computed.is_loading:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        elif request.num_preemptions:
            request.status = RequestStatus.PREEMPTED
        else:
            request.status = RequestStatus.WAITING
        return computed

    def allocate(
        self,
        request: Request,
        computed: ComputedBlocks,
        num_new_tokens: int,
        num_reserved: int = 0,
        num_blocks_kept_free: int = 0,
    ) -> bool:
        """Seat a request that was looked up, with room for its new tokens and `num_reserved` more.
        False, and it waits as before, for 0 new tokens or if the memory refuses."""
        num_known = request.num_computed_tokens + computed.num_tokens
        if num_new_tokens and self.kv_memory.allocate_slots(
            request, num_new_tokens, num_reserved, computed, num_blocks_kept_free
        ):
            self.seat(request, num_known)
            return True
        if request.num_computed_tokens:  # it shares its parent's blocks, and gives them back
            self.kv_memory.free(request)
            request.num_computed_tokens = 0
        return False

    def seat(self, request: Request, num_computed_tokens: int) -> None:
        """It has its memory: it runs. `num_computed_tokens` of it need not be computed."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed_tokens
            self._stats.total_admitted += 1
            self._stats.total_cached_tokens += num_computed_tokens
        else:
            num_lost = self._num_lost.pop(request.request_id)
            self._stats.total_recomputed_tokens += num_lost - num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        self._tell_constraints("has_started", request)

    def preempt(self, request: Request) -> None:
        """Take a running request's KV. It waits in front, or wherever the policy puts it."""
        self.kv_memory.free(request)
        self._num_lost[request.request_id] = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self._tell_constraints("has_stopped", request)
        self.delta.request_preempted(request)
        self.waiting.prepend_request(request)
        self._stats.total_preempted += 1

    # -- the plan becomes a message

    def beside_chunks(self) -> Collection[Request]:
        """Who may share a step with a piece of a prompt."""
        return self.running.values()

    def begin_step(self) -> StepPlan:
        self.chunk_policy.begin_step(self.beside_chunks())
        return StepPlan(self.max_num_batched_tokens)

    def finish_step(self, plan: StepPlan) -> SchedulerOutput:
        """The delta for the runner. The planned tokens count as computed from here on."""
        output = SchedulerOutput(
            num_scheduled_tokens=plan.num_tokens,
            scheduled_requests=[self.requests[request_id] for request_id in plan.num_tokens],
            preempted_requests=plan.preempted,
        )
        self.delta.encode(output.scheduled_requests, output)
        for request, num_tokens in zip(output.scheduled_requests, plan.num_tokens.values()):
            if request.draft_token_ids:
                self._send_drafts(request, output)
            request.num_computed_tokens += num_tokens
        output.num_kv_blocks_in_use = self.kv_memory.num_blocks_in_use
        output.block_copies = [BlockCopy(*copy) for copy in self.kv_memory.take_block_copies()]
        self._stats.total_scheduled += len(plan.num_tokens)
        self._stats.total_scheduled_tokens += self.max_num_batched_tokens - plan.budget
        if output.is_empty and self.waiting:
            self.kv_memory.wait_for_loads()
        return output

    def _send_drafts(self, request: Request, output: SchedulerOutput) -> None:
        """Those that the plan has room for; the others are dropped, and never enter the model."""
        num_planned = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        num_drafts = max(0, num_planned - request.num_tokens)
        request.draft_token_ids = request.draft_token_ids[:num_drafts]
        if num_drafts:
            output.scheduled_draft_token_ids[request.request_id] = request.draft_token_ids

    # -- what came of it

    def update_from_output(
        self, output: SchedulerOutput, token_ids: dict[str, list[int]]
    ) -> list[EngineCoreOutput]:
        """Append each request's sampled tokens, up to the one that finishes it, and release who has
        finished. A request that was planned with drafts brings those that were accepted and one
        more; the KV of the others is taken back."""
        results = []
        block_size = self.kv_memory.block_size
        num_scheduled = output.num_scheduled_tokens.values()
        for request, num_tokens in zip(output.scheduled_requests, num_scheduled):
            if request.status >= _FINISHED:
                continue  # aborted between schedule and update
            start = request.num_computed_tokens - num_tokens
            sampled = token_ids.get(request.request_id, [])
            if request.draft_token_ids:
                self._take_back_rejected(request, len(sampled))
            num_new = 0
            for token_id in sampled:
                request.append_output_token(token_id)
                num_new += 1
                if request.status >= _FINISHED:
                    break  # what was sampled behind it is nobody's
            if request.num_computed_tokens // block_size > start // block_size:
                self.kv_memory.cache_blocks(request)
            result = EngineCoreOutput(request.request_id, sampled[:num_new])
            if request.status >= _FINISHED:
                self._finish(request, result)
            results.append(result)
        return results

    def _take_back_rejected(self, request: Request, num_sampled: int) -> None:
        num_rejected = len(request.draft_token_ids) + 1 - num_sampled
        request.draft_token_ids = []
        request.num_computed_tokens -= num_rejected
        self._stats.total_rejected_drafts += num_rejected

    def _finish(self, request: Request, result: EngineCoreOutput) -> None:
        self._forget(request)
        result.finish_reason, result.stop_reason = request.finish_reason, request.stop_reason
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            result.finish_detail = request.length_limit

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Take tokens proposed for the next step (chapter 5): for running requests that need one
        token only, and no more than can still become outputs."""
        for request_id, drafts in draft_token_ids.items():
            request = self.running.get(request_id)
            if request is not None and request.num_tokens - request.num_computed_tokens == 1:
                num_useful = request.max_num_tokens - request.num_tokens - 1
                request.draft_token_ids = list(drafts[: max(0, num_useful)])

    # -- questions

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """`has_unfinished_requests` by its other name."""
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """`(running, waiting)`."""
        return len(self.running), len(self.waiting)

    def get_stats(self) -> SchedulerStats:
        """A copy."""
        cache = getattr(self.kv_memory, "cache", None)
        return replace(
            self._stats,
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_preempted=len(self._num_lost),
            kv_cache_usage=self.kv_memory.usage,
            prefix_cache_hit_rate=0.0 if cache is None else cache.stats.hit_rate,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes (chapter 3). False while some are in use."""
        return self.kv_memory.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Between two steps. O(everything)."""
        assert len(self.running) <= self.max_num_seqs
        waiting = {request.request_id: request for request in self.waiting}
        assert len(waiting) == len(self.waiting), "somebody waits twice"
        assert waiting.keys().isdisjoint(self.running), "running, and waiting"
        assert waiting.keys() | self.running.keys() == self.requests.keys()
        assert self._num_lost.keys() <= waiting.keys()
        for request in self.requests.values():
            assert not request.is_finished, repr(request)
            request.check_invariants()
        for request in self.running.values():
            assert request.status == RequestStatus.RUNNING, repr(request)
            assert request.num_computed_tokens < request.num_tokens, f"nothing to do: {request!r}"
            assert self.delta.knows(request), repr(request)
        for request_id, request in waiting.items():
            assert request.status in _WAITING, repr(request)
            assert request.num_computed_tokens == 0, repr(request)
            assert not self.kv_memory.get_block_ids(request_id), f"{request!r} holds blocks"
            assert (request_id in self._num_lost) == (request.num_preemptions > 0), repr(request)


_FINISHED = RequestStatus.FINISHED_STOPPED
_WAITING = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.PREEMPTED,
)
