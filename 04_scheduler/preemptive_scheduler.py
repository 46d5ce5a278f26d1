"""The state that a preemptive scheduler keeps, whichever request it chooses to run or preempt.

        add_request          admission                 last token, or abort
    (new) ------> waiting -------------> running ----------------------> (gone)
                     ^                     |
                     +---- preemption -----+        KV is freed, outputs are kept

The upper row is chapter 1's base scheduler. Nothing here depends on *which* request is chosen.

Preemption is by recomputation: a victim loses its KV and keeps its tokens. When it is admitted
again, its prompt and outputs are computed as one prompt, except for the prefix that is still
cached. So preemption sets `num_computed_tokens = 0`, and needs no other counter.

A request that others have displaced `max_preemptions` times is *pinned*: it is admitted again only
with memory for everything that it may still generate, and is never chosen again. Which preemptions
count as displacements, the subclass says.

Invariants: those of chapter 1's base scheduler; only running requests have KV; a plan schedules a
request at most once.

See 04_scheduler/README.md#phase-1-running-requests"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypedDict

from base_scheduler import BaseScheduler, SchedulerPlugin
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import ComputedBlocks, NotReady, UncachedKVCacheManager
from policies import SchedulePolicy, get_policy
from policy_queue import PolicyQueue
from prefix_cache_local import PrefixCacheLocal
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput
from step_plan import Admission, PreemptionDeltaEncoder, StepPlan
from unchunked import ChunkPolicy, Unchunked

# Waiting requests that a step tries in vain. To try all of a long queue could take longer than the
# step.
MAX_SKIPPED = 512


class SchedulerOptions(TypedDict, total=False):
    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    policy: str | SchedulePolicy
    block_size: int
    max_model_len: int | None
    kv_memory: UncachedKVCacheManager | None
    chunk_policy: ChunkPolicy | None
    defer_on_shared_prefix: bool
    max_preemptions: int
    max_overtakes: int | None
    plugins: Sequence[SchedulerPlugin]


class PreemptiveScheduler(BaseScheduler):
    """A base class without `schedule`: a subclass builds it from `begin_step`,
    `admit`, `find_prefix`, `start_running`, `preempt` and `finish_step`.

    Makes a pool of `num_gpu_blocks` blocks and a prefix cache; `kv_memory` replaces both. A request
    whose prefix is being computed by another request waits for it, or computes it again immediately
    (`defer_on_shared_prefix=False`, as in vLLM). At most `max_overtakes` requests leave the queue
    before one that came earlier. With `max_preemptions=0` every request gets all its memory at
    admission, as in chapter 2.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        num_gpu_blocks: int = 1000,
        policy: str | SchedulePolicy = "fcfs",
        block_size: int = 16,
        max_model_len: int | None = None,
        kv_memory: UncachedKVCacheManager | None = None,
        chunk_policy: ChunkPolicy | None = None,
        defer_on_shared_prefix: bool = True,
        max_preemptions: int = 3,
        max_overtakes: int | None = 1000,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        if not isinstance(policy, SchedulePolicy):
            policy = get_policy(policy)()
        waiting = PolicyQueue(policy, max_overtakes)
        kv_memory = kv_memory or make_kv_memory(num_gpu_blocks, block_size)
        self.delta: PreemptionDeltaEncoder
        super().__init__(
            waiting=waiting,
            delta=PreemptionDeltaEncoder(kv_memory),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            plugins=plugins,
        )
        self.waiting: PolicyQueue = waiting
        self.max_preemptions = max_preemptions
        self.defer_on_shared_prefix = defer_on_shared_prefix
        self.kv_memory = kv_memory
        self.block_size = kv_memory.block_size
        self.chunk_policy = chunk_policy or Unchunked()
        self.max_prompt_len = self.chunk_policy.max_prompt_len(max_num_batched_tokens)
        self.preempts_for_priority = False
        # Tokens that preempted requests have computed again: lost, and not found in the cache.
        self.num_recomputed_tokens = 0
        # Computed tokens that each preempted request lost.
        self._num_preempted_tokens: dict[str, int] = {}
        self._num_displacements: Counter[str] = Counter()

    # -- adding and removing requests

    def length_limits(self, request: Request) -> dict[str, int]:
        capacity = self.kv_memory.capacity
        # The last token is sampled and never fed back, so it needs no KV slot.
        room = capacity - request.num_prompt_tokens + 1
        return super().length_limits(request) | {f"the KV memory holds {capacity} positions": room}

    def _free_request(self, request: Request) -> None:
        self.kv_memory.free(request)
        self._num_preempted_tokens.pop(request.request_id, None)
        self._num_displacements.pop(request.request_id, None)
        super()._free_request(request)

    def clear(self) -> None:
        self.waiting.clear()
        super().clear()

    # -- from waiting to running, and back

    def is_pinned(self, request: Request) -> bool:
        """Whether the request gets all its memory at admission, and keeps it: it was displaced
        `max_preemptions` times."""
        return self._num_displacements[request.request_id] >= self.max_preemptions

    def num_uncomputed_tokens(self, request: Request) -> int:
        """Number of uncomputed tokens of a running request; 0 if a plugin skips it in this step."""
        if self.hooks["skips_step"] and self.skips_step(request):
            return 0
        num_known = len(request.all_token_ids) + request.num_output_placeholders
        return num_known - request.num_computed_tokens

    def num_optional_tokens(self, request: Request) -> int:
        """How many optional tokens could follow the last known one of a request with one uncomputed
        token."""
        return sum(num_tokens(request) for num_tokens in self.hooks["num_optional_tokens"])

    def allocate_optional(self, request: Request, num_optional: int) -> int:
        """Allocate memory for a decode's next token and `num_optional` ones after it, if there is
        memory for all of them. No request is preempted for them. Returns how many optional tokens
        got memory."""
        end = request.num_computed_tokens + 1 + num_optional
        slots = [num_slots(request, end) for num_slots in self.hooks["num_optional_slots"]]
        num_slots = max(slots, default=0)
        if (num_optional or num_slots) and self.kv_memory.allocate_slots(
            request, 1 + num_optional, num_slots
        ):
            return num_optional
        return 0

    def rollback_computed_tokens(self, request: Request, num_tokens: int) -> None:
        """Roll back the last `num_tokens` computed positions, whose tokens were rejected."""
        if self.running.get(request.request_id) is request:
            request.num_computed_tokens -= num_tokens
        else:  # preempted in the meantime: it lost all of them
            self._num_preempted_tokens[request.request_id] -= num_tokens

    def find_prefix(self, request: Request, step: StepPlan) -> ComputedBlocks | Admission:
        """Return the cached prefix of a waiting request, or the outcome if it cannot start: its
        prefix is not ready, or a plugin or the chunk policy rejects it. A rejected request that has
        aged, after those that this step admits, stops admission. The blocks are not held and can be
        evicted at any time: look them up again before every attempt to admit the request."""
        num_leaving = len(step.admitted)
        is_aged = partial(self.waiting.is_aged, request, num_leaving)
        if not self.can_start(request):
            return Admission.CONSTRAINT if is_aged() else Admission.SKIPPED
        computed = self.kv_memory.get_computed_blocks(request, self.defer_on_shared_prefix)
        request.status = RequestStatus.WAITING
        if computed is NotReady.LOADING:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        elif request.num_preemptions:
            request.status = RequestStatus.PREEMPTED
        if isinstance(computed, NotReady):
            return Admission.SKIPPED
        if not self.chunk_policy.can_start(request, request.num_tokens - computed.num_tokens):
            return Admission.CONSTRAINT if is_aged() else Admission.SKIPPED
        return computed

    def num_reserved_slots(self, request: Request, end: int) -> int:
        """How many slots after position `end` a request gets at admission: all that it may still
        need if it is pinned. The last token is sampled and never fed back, so it needs none."""
        return request.max_num_tokens - 1 - end if self.is_pinned(request) else 0

    def start_running(
        self, request: Request, computed: ComputedBlocks, num_new_tokens: int
    ) -> bool:
        """Allocate KV for a waiting request (`num_new_tokens` slots after its `computed` blocks,
        and the reserved ones) and mark it as running. Returns False, and leaves it waiting, if the
        allocation fails."""
        num_reserved = self.num_reserved_slots(request, computed.num_tokens + num_new_tokens)
        if not self.kv_memory.allocate_slots(request, num_new_tokens, num_reserved, computed):
            return False
        self.running[request.request_id] = request
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed.num_tokens
        else:
            num_lost = self._num_preempted_tokens.pop(request.request_id)
            self.num_recomputed_tokens += num_lost - computed.num_tokens
        request.num_computed_tokens = computed.num_tokens
        request.status = RequestStatus.RUNNING
        for plugin in self.plugins:
            plugin.on_start(request)
        return True

    def preempt(self, request: Request, is_displaced: bool = True) -> None:
        """Free a running request's KV and return it to the queue: to the front, or where the policy
        sorts it. If it `is_displaced`, this counts towards `max_preemptions`."""
        for plugin in self.plugins:
            plugin.on_preempt(request)
        self.kv_memory.free(request)
        self._num_preempted_tokens[request.request_id] = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if is_displaced:
            self._num_displacements[request.request_id] += 1
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self.delta.request_preempted(request.request_id)
        self.waiting.prepend_request(request)

    # -- one step

    def running_with_chunks(self) -> Collection[Request]:
        """Running requests that can be scheduled in the same step as a prompt chunk."""
        return self.running.values()

    def begin_step(self) -> StepPlan:
        for plugin in self.plugins:
            plugin.begin_step()
        self.chunk_policy.begin_step(self.running_with_chunks(), self._num_wanted_tokens)
        step = StepPlan(
            budget=self.max_num_batched_tokens,
            num_uncomputed_tokens=self.num_uncomputed_tokens,
            num_recomputed_before=self.num_recomputed_tokens,
        )
        for plugin in self.plugins:
            if (victim := plugin.victim()) is not None:
                step.preempted.append(victim)
                self.preempt(victim)
        return step

    def _num_wanted_tokens(self, request: Request) -> int:
        return self.num_uncomputed_tokens(request) + self.num_optional_tokens(request)

    def admit(self, step: StepPlan, try_to_admit: Callable[[Request, StepPlan], Admission]) -> None:
        """Try waiting requests in the order of service, until one does not fit. A request that is
        not ready is skipped."""
        if len(self.running) >= self.max_num_seqs and not self.preempts_for_priority:
            step.stop = ("seat", "")
            return  # before a cache-aware policy sorts the queue in vain
        num_skipped = 0
        for request in self.waiting:
            if request.status == RequestStatus.WAITING_FOR_GRAMMAR:
                continue  # even if it has aged: no running request can make room for it
            outcome = try_to_admit(request, step)
            if outcome is Admission.ADMITTED:
                step.admitted.append(request)
            elif request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:  # cheap to ask again
                num_skipped += 1
            if not outcome.continues or step.preempted or num_skipped == MAX_SKIPPED:
                step.stop = (outcome.value, request.request_id)
                break  # after a preemption for priority, later requests wait for the next step
        for request in step.admitted:
            self.waiting.remove_request(request)

    def finish_step(self, step: StepPlan) -> SchedulerOutput:
        """Build the message for the runner. Scheduled tokens count as computed from here on."""
        plan = SchedulerOutput(
            preempted_requests=step.preempted,
            admission_stop=step.stop,
            num_recomputed_tokens=self.num_recomputed_tokens - step.num_recomputed_before,
            num_kv_blocks_in_use=self.kv_memory.num_blocks_in_use,
            block_moves=self.kv_memory.pop_table_updates(),
        )
        return self.make_plan(step.num_tokens, plan)

    def on_positions_computed(self, request: Request, start: int, end: int) -> None:
        if end % self.block_size < end - start:  # a block was filled
            # Optional tokens that were rejected do not count.
            self.kv_memory.cache_blocks(request, min(end, request.num_tokens - 1))

    # -- state

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state is inconsistent between two steps. O(all requests and
        blocks)."""
        super().check_invariants()
        for request in self.waiting:
            request_id = request.request_id
            assert not self.kv_memory.get_block_ids(request_id), f"{request!r} holds blocks"
            assert (request_id in self._num_preempted_tokens) == (request.num_preemptions > 0), (
                repr(request)
            )
        assert self._num_preempted_tokens.keys() <= self.requests.keys() - self.running.keys()
        assert self._num_displacements.keys() <= self.requests.keys()


def make_kv_memory(num_blocks: int, block_size: int = 16) -> CachedKVCacheManager:
    """Make a pool of `num_blocks` blocks, block 0 included, with a hash-chain prefix cache."""
    pool = BlockPool(num_blocks)
    cache = PrefixCacheLocal(pool=pool, block_size=block_size)
    return CachedKVCacheManager(pool, block_size, cache)
