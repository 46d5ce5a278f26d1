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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, cast
from weakref import proxy

from base_scheduler import BaseScheduler, SchedulerPlugin, describe_prompt, overrides
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import ComputedBlocks, NotReady, UncachedKVCacheManager
from policies import SchedulePolicy, get_policy
from policy_queue import PolicyQueue, ShuffledQueue
from prefix_cache_local import PrefixCacheLocal
from request import Request, RequestStatus, check_integers
from step_plan import Admission, PreemptionDeltaEncoder, PreemptiveSchedulerOutput, StepPlan
from unchunked import ChunkPolicy, Unchunked


@dataclass(slots=True)
class SchedulerStats:
    """Current counts, and totals since the scheduler was made. `stats["num_running"]` also
    works."""

    num_waiting: int = 0  # including preempted requests
    num_running: int = 0
    num_preempted: int = 0  # waiting requests that were preempted
    total_scheduled: int = 0  # requests in a plan, summed over all steps
    total_scheduled_tokens: int = 0
    total_admitted: int = 0  # each request counted once
    total_finished: int = 0
    total_aborted: int = 0
    total_preempted: int = 0
    # Tokens not computed at first admission, because they were cached.
    total_cached_tokens: int = 0
    total_recomputed_tokens: int = 0  # lost by preemption and not found in the cache
    kv_cache_usage: float = 0.0  # share of the KV memory that requests hold
    prefix_cache_hit_rate: float = 0.0

    def __getitem__(self, name: str) -> int | float:
        return getattr(self, name)


class PreemptionPlugin(SchedulerPlugin):
    """A feature of a scheduler that preempts. Optional tokens (draft tokens) follow a request's
    last known token; they are scheduled if budget and memory are left after every request got what
    it needs."""

    scheduler: PreemptiveScheduler

    def attach(self, scheduler: BaseScheduler) -> None:
        if not isinstance(scheduler, PreemptiveScheduler):
            raise ValueError(f"{type(self).__name__} needs a preemptive scheduler")
        # A weak reference: in a reference cycle, an engine's memory would be freed only by Python's
        # garbage collector.
        self.scheduler = cast("PreemptiveScheduler", proxy(scheduler))

    def victim(self) -> Request | None:
        """Return a request to preempt before this step is planned, or None."""

    def on_preempt(self, request: Request) -> None:
        """Called before the request loses its KV."""

    def num_optional_tokens(self, request: Request) -> int:
        """How many optional tokens could be computed for a request with one uncomputed token."""
        return 0

    def num_optional_slots(self, request: Request, end: int) -> int:
        """How many slots after position `end` are useful to the request, if they are free."""
        return 0


class SchedulerOptions(TypedDict, total=False):
    block_size: int
    max_model_len: int | None
    kv_memory: UncachedKVCacheManager | None
    chunk_policy: ChunkPolicy | None
    defer_on_shared_prefix: bool
    max_preemptions: int
    max_overtakes: int | None
    shuffle_waiting: bool
    seed: int
    plugins: Sequence[SchedulerPlugin]


class PreemptiveScheduler(BaseScheduler):
    """A base class without `schedule`: a subclass builds it from `begin_step`,
    `get_computed_blocks`, `start_running`, `preempt` and `finish_step`.

    Makes a pool of `num_gpu_blocks` blocks and a prefix cache; `kv_memory` replaces both. A request
    whose prefix is being computed by another request waits for it, or computes it again immediately
    (`defer_on_shared_prefix=False`, as in vLLM). At most `max_overtakes` requests leave the queue
    before one that came earlier. `shuffle_waiting` (a debug switch) tries waiting requests in
    random order. Raises `ValueError` that names the field.
    """

    def __init__(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        num_gpu_blocks: int = 1000,
        policy: str | SchedulePolicy = "fcfs",
        *,
        block_size: int = 16,
        max_model_len: int | None = None,
        kv_memory: UncachedKVCacheManager | None = None,
        chunk_policy: ChunkPolicy | None = None,
        defer_on_shared_prefix: bool = True,
        max_preemptions: int = 3,
        max_overtakes: int | None = 1000,
        shuffle_waiting: bool = False,
        seed: int = 0,
        plugins: Sequence[SchedulerPlugin] = (),
    ) -> None:
        check_integers(1, max_preemptions=max_preemptions)
        if not isinstance(policy, SchedulePolicy):
            policy = get_policy(policy)()
        waiting = PolicyQueue(policy, max_overtakes)
        if shuffle_waiting:
            waiting = ShuffledQueue(policy, max_overtakes, seed)
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
        self._num_preempted_tokens: dict[
            str, int
        ] = {}  # computed tokens that each preempted request lost
        self._num_displacements: Counter[str] = Counter()
        self._stats = SchedulerStats()

    def set_plugins(self, plugins: Sequence[SchedulerPlugin]) -> None:
        super().set_plugins(plugins)
        extended = [p for p in self.plugins if isinstance(p, PreemptionPlugin)]
        tokens = PreemptionPlugin.num_optional_tokens
        slots = PreemptionPlugin.num_optional_slots
        self._preemption_plugins = extended
        self._optional_token_hooks = [
            p.num_optional_tokens for p in extended if overrides(p, tokens)
        ]
        self._optional_slot_hooks = [p.num_optional_slots for p in extended if overrides(p, slots)]

    # -- adding and removing requests

    def check_prompt(self, request: Request) -> None:
        longest = self.chunk_policy.max_prompt_len(self.max_num_batched_tokens)
        if request.num_prompt_tokens > longest:
            raise ValueError(
                f"{describe_prompt(request)}, but a whole prompt must fit in one step, "
                f"max_num_batched_tokens={longest}"
            )

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
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._stats.total_aborted += 1
        else:
            self._stats.total_finished += 1

    def clear(self) -> None:
        self.waiting.clear()
        super().clear()

    # -- from waiting to running, and back

    def is_pinned(self, request: Request) -> bool:
        """Whether the request was displaced `max_preemptions` times: it gets all its memory at
        admission, and keeps it."""
        return self._num_displacements[request.request_id] >= self.max_preemptions

    def num_uncomputed_tokens(self, request: Request) -> int:
        """Number of uncomputed tokens of a running request; 0 if a plugin skips it in this step."""
        if self._skip_hooks and self.skips_step(request):
            return 0
        num_known = len(request.all_token_ids) + request.num_output_placeholders
        return num_known - request.num_computed_tokens

    def num_optional_tokens(self, request: Request) -> int:
        """Number of optional tokens that could be computed after the last known token of a request
        with one uncomputed token."""
        num_optional = 0
        for num_tokens in self._optional_token_hooks:
            num_optional += num_tokens(request)
        return num_optional

    def num_optional_slots(self, request: Request, end: int) -> int:
        max_slots = 0
        for num_slots in self._optional_slot_hooks:
            max_slots = max(max_slots, num_slots(request, end))
        return max_slots

    def rollback_computed_tokens(self, request: Request, num_tokens: int) -> None:
        """Roll back the last `num_tokens` computed positions, whose tokens were rejected."""
        if self.running.get(request.request_id) is request:
            request.num_computed_tokens -= num_tokens
        else:  # preempted in the meantime: it lost all of them
            self._num_preempted_tokens[request.request_id] -= num_tokens

    def get_computed_blocks(self, request: Request) -> ComputedBlocks | NotReady:
        """Find the cached prefix of a waiting request. The blocks are not held and can be evicted
        at any time: look them up again before every attempt to admit the request."""
        computed = self.kv_memory.get_computed_blocks(request, self.defer_on_shared_prefix)
        request.status = RequestStatus.WAITING
        if computed is NotReady.LOADING:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        elif request.num_preemptions:
            request.status = RequestStatus.PREEMPTED
        return computed

    def find_prefix(self, request: Request, num_leaving: int) -> ComputedBlocks | Admission:
        """Return the cached prefix of a waiting request, or the outcome if it cannot start: its
        prefix is not ready, or a plugin or the chunk policy rejects it. A rejected request that has
        aged, after the `num_leaving` requests that this step admits, stops admission."""
        if not self.can_start(request):
            return self._skip_unless_aged(request, num_leaving, Admission.REJECTED)
        computed = self.get_computed_blocks(request)
        if isinstance(computed, NotReady):
            return Admission.SKIPPED
        if not self.chunk_policy.can_start(request, request.num_tokens - computed.num_tokens):
            return self._skip_unless_aged(request, num_leaving, Admission.SKIPPED)
        return computed

    def _skip_unless_aged(
        self, request: Request, num_leaving: int, outcome: Admission
    ) -> Admission:
        is_aged = self.waiting.is_aged(request, num_leaving)
        return Admission.CONSTRAINT if is_aged else outcome

    def start_running(
        self, request: Request, computed: ComputedBlocks, num_new_tokens: int, num_reserved: int
    ) -> bool:
        """Allocate KV for a waiting request (`num_new_tokens` + `num_reserved` slots after its
        `computed` blocks) and mark it as running. Returns False, and leaves it waiting, if the
        allocation fails."""
        if not self.kv_memory.allocate_slots(request, num_new_tokens, num_reserved, computed):
            return False
        self.running[request.request_id] = request
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed.num_tokens
            self._stats.total_admitted += 1
            self._stats.total_cached_tokens += computed.num_tokens
        else:
            num_preempted_tokens = self._num_preempted_tokens.pop(request.request_id)
            self._stats.total_recomputed_tokens += num_preempted_tokens - computed.num_tokens
        request.num_computed_tokens = computed.num_tokens
        request.status = RequestStatus.RUNNING
        for plugin in self.plugins:
            plugin.on_start(request)
        return True

    def preempt(self, request: Request, is_displaced: bool = True) -> None:
        """Free a running request's KV and return it to the queue: to the front, or where the policy
        sorts it. If it `is_displaced`, this counts towards `max_preemptions`."""
        for plugin in self._preemption_plugins:
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
        self._stats.total_preempted += 1

    # -- one step

    def running_with_chunks(self) -> Collection[Request]:
        """Running requests that can be scheduled in the same step as a prompt chunk."""
        return self.running.values()

    def begin_step(self) -> StepPlan:
        for plugin in self.plugins:
            plugin.begin_step()
        self._num_recomputed_before = self._stats.total_recomputed_tokens
        num_wanted = lambda r: self.num_uncomputed_tokens(r) + self.num_optional_tokens(r)  # noqa: E731
        self.chunk_policy.begin_step(self.running_with_chunks(), num_wanted)
        step = StepPlan(self.max_num_batched_tokens, self.num_uncomputed_tokens)
        for plugin in self._preemption_plugins:
            if (victim := plugin.victim()) is not None:
                step.preempted.append(victim)
                self.preempt(victim)
        return step

    def finish_step(self, step: StepPlan) -> PreemptiveSchedulerOutput:
        """Build the message for the runner. Scheduled tokens count as computed from here on."""
        num_recomputed = self._stats.total_recomputed_tokens - self._num_recomputed_before
        plan = PreemptiveSchedulerOutput(
            preempted_requests=step.preempted,
            admission_stop=step.stop,
            num_recomputed_tokens=num_recomputed,
            num_kv_blocks_in_use=self.kv_memory.num_blocks_in_use,
            block_moves=self.kv_memory.pop_table_updates(),
        )
        self._stats.total_scheduled += len(step.num_tokens)
        self._stats.total_scheduled_tokens += self.max_num_batched_tokens - step.budget
        self.make_plan(step.num_tokens, plan)
        return plan

    def on_positions_computed(self, request: Request, start: int, end: int) -> None:
        if end % self.block_size < end - start:  # a block was filled
            # Optional tokens that were rejected do not count.
            self.kv_memory.cache_blocks(request, min(end, request.num_tokens - 1))

    # -- state

    def get_stats(self) -> SchedulerStats:
        """A copy of the counters."""
        cache = self.kv_memory.cache
        return replace(
            self._stats,
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_preempted=len(self._num_preempted_tokens),
            kv_cache_usage=self.kv_memory.usage,
            prefix_cache_hit_rate=0.0 if cache is None else cache.stats.hit_rate,
        )

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
