"""The two-phase scheduler: allocate KV memory step by step, and preempt when it runs out.

Chapter 2 reserves, at admission, every KV slot a request could ever need. Most requests stop early,
so most of that memory is never used. This scheduler allocates only what the next step writes. More
requests run at the same time, but the pool can now run dry while requests are decoding. When it
does, the scheduler preempts a running request: it frees the request's KV, keeps its tokens, and
recomputes them later.

Every step spends one token budget, `max_num_batched_tokens`:

    | phase 1: running, in order of admission | phase 2: waiting, in policy order |
    0                                                       max_num_batched_tokens

1.  Running requests. Each is scheduled for its uncomputed tokens, up to the remaining budget. A
    prompt chunk (chapter 6) leaves one token of budget for every decode after it. If allocation
    fails, preempt a victim (`_choose_victim`) and retry, until allocation succeeds or the victim is
    the request itself. A victim that was already scheduled in this step returns its tokens to the
    budget.
2.  Waiting requests, only if phase 1 preempted nothing. For each: look up its cached prefix,
    compute how many tokens remain, allocate. Admission stops at the first request that does not
    fit, so no later request overtakes it. A request that waits for a grammar, or whose KV is still
    being loaded or computed, is skipped. A request that a plugin or the chunk policy rejects is
    skipped too, until it has aged; then admission stops there.

With priorities, a strictly more urgent request can also preempt the least urgent running request
when the batch is full, provided that it then fits into memory. Equal priorities never preempt each
other, or they would alternate forever. If there is a place in the batch but no memory, an urgent
request waits, as in vLLM: to compute long prompts again would cost the others more than it gains.

No request starves. Among equals, the request that came first is never a victim; more urgent ones
displace a request at most `max_preemptions` times (`preemptive_scheduler.py`). The number of
requests that can overtake it is bounded (`policy_queue.py`); a request that waits for external KV
waits for its own load only, which has a deadline.

With unchunked prompts and no priorities, `_num_tokens_for` returns all uncomputed tokens of a
request, `num_deferred_tokens` is empty, and `preempted_for_it` is None. Optional tokens are chapter
5's drafts.

vLLM V1 has the same two phases. Preemption by recomputation: vLLM, arXiv 2309.06180.

See 04_scheduler/README.md#two-phases"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_memory import ComputedBlocks
from policies import PriorityPolicy
from preemptive_scheduler import PreemptiveScheduler, SchedulerOptions, make_kv_memory
from request import Request, RequestStatus
from scheduler_interface import SchedulerOutput
from step_plan import Admission, StepPlan

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["Request", "RequestStatus", "Scheduler", "make_kv_memory"]


class Scheduler(PreemptiveScheduler):
    """The scheduler that preempts. The other options are those of `PreemptiveScheduler`.

    `watermark` is the share of the blocks that an admission leaves free for the other running
    requests, if there are any. `reserve_for_chunks`: an admission also leaves free blocks for the
    unfinished rest of every chunked prompt (`"every"`), or only of its own (`"own"`, vLLM's
    `scheduler_reserve_full_isl`).
    """

    def __init__(
        self,
        *,
        watermark: float = 0.01,
        reserve_for_chunks: str = "every",
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(**options)
        self.reserve_for_chunks = reserve_for_chunks
        self.preempts_for_priority = isinstance(self.waiting.policy, PriorityPolicy)
        self._num_watermark_blocks = int(watermark * self.kv_memory.pool.num_usable_blocks)

    def schedule(self) -> SchedulerOutput:
        """Plan a step: schedule running requests first, then waiting ones."""
        step = self.begin_step()
        self._plan_running(step)
        if not step.preempted:
            self.admit(step, self._try_to_admit)
        return self.finish_step(step)

    # -- phase 1: running requests

    def _plan_running(self, step: StepPlan) -> None:
        running = list(self.running.values())
        for index, request in enumerate(running):
            if step.budget == 0:
                break
            if step.preempted and request.request_id not in self.running:
                continue  # preempted earlier in this step
            num_tokens = self.num_uncomputed_tokens(request)
            if num_tokens > 1:
                num_tokens = self._num_tokens_for(request, running, index, step)
            elif num_tokens == 1 and self.hooks["num_optional_tokens"]:
                num_optional = self._num_optional_for(request, running, index, step)
                num_tokens += self.allocate_optional(request, num_optional)
            if num_tokens and self._allocate_or_preempt(request, num_tokens, step):
                step.add(request, num_tokens)

    def _num_tokens_for(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> int:
        """Return how many uncomputed tokens of `running[index]` to compute, if it has several.

        One token for each later decode takes precedence over a prompt chunk, but one chunk per step
        always makes progress.
        """
        num_uncomputed_tokens = request.num_tokens - request.num_computed_tokens
        min_budget = 0 if step.has_chunk else 1
        step.has_chunk = True
        budget = max(step.budget - step.num_decodes_after(running, index), min_budget)
        num_tokens = self.chunk_policy.num_tokens_to_schedule(
            request, num_uncomputed_tokens, budget, self.max_num_batched_tokens
        )
        step.defer(request, num_uncomputed_tokens - num_tokens)
        return num_tokens

    def _num_optional_for(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> int:
        """Return how many optional tokens of `running[index]` to schedule. One token for each later
        request, and one block for a prompt, take precedence over optional tokens."""
        num_others = len(running) - 1 - index
        num_spare = step.budget - 1 - num_others
        if self.waiting or step.num_decodes_after(running, index) < num_others:
            num_spare -= self.block_size
        return max(0, min(self.num_optional_tokens(request), num_spare))

    def _allocate_or_preempt(self, request: Request, num_tokens: int, step: StepPlan) -> bool:
        """Allocate KV for `num_tokens` tokens, preempting other requests if necessary. Returns
        False if the request itself was preempted."""
        # Inside a block there is nothing to allocate: the request got the block when it wrote the
        # block's first slot.
        if 0 < request.num_computed_tokens % self.block_size <= self.block_size - num_tokens:
            return True
        while not self.kv_memory.allocate_slots(request, num_tokens):
            victim = self._choose_victim()
            assert victim is not None, "no victim left, but a pinned request never allocates"
            self._preempt(victim, request, step)
            if victim is request:
                return False
        return True

    def _choose_victim(self, exclude: Sequence[Request] = ()) -> Request | None:
        """Return the most recently admitted request or, with priorities, the least urgent one and,
        among equals, the latest arrival. Skips pinned requests and those in `exclude`; None if no
        request is left."""
        running = reversed(self.running.values())
        candidates = (r for r in running if not self.is_pinned(r) and r not in exclude)
        if self.preempts_for_priority:
            return max(candidates, key=lambda r: (r.priority, r.arrival_time), default=None)
        return next(candidates, None)

    def _preempt(self, victim: Request, request: Request, step: StepPlan) -> None:
        """Preempt `victim` for `request`. Only more urgent requests displace: among equals, the one
        that came first is never a victim, so every request finishes without a bound; and to reserve
        up to `max_tokens` for a pinned request would waste what chapter 2 wastes."""
        step.remove(victim)
        step.preempted.append(victim)
        self.preempt(victim, self.preempts_for_priority and request.priority < victim.priority)

    # -- phase 2: waiting requests

    def _try_to_admit(self, request: Request, step: StepPlan) -> Admission:
        """Try to admit one waiting request. Checks in this order: budget, `max_num_seqs`, plugins,
        cached prefix, chunk policy, then its tokens against budget and memory. A prefix that is not
        ready skips the request; so do plugins and the chunk policy, until it has aged. All other
        checks that fail end admission."""
        if step.budget == 0:
            return Admission.BUDGET
        preempted_for_it = None
        if len(self.running) >= self.max_num_seqs:
            preempted_for_it = self._find_lower_priority(request, step)
            if preempted_for_it is None:
                return Admission.BATCH_FULL
        computed = self.find_prefix(request, step)
        if isinstance(computed, Admission):
            return computed
        return self._try_schedule_new(request, computed, preempted_for_it, step)

    def _find_lower_priority(self, new_request: Request, step: StepPlan) -> Request | None:
        """Return the running request that `new_request` may preempt: the least urgent one, if
        `new_request` is strictly more urgent."""
        if not self.preempts_for_priority:
            return None
        lowest = self._choose_victim(exclude=step.admitted)
        return lowest if lowest is not None and lowest.priority > new_request.priority else None

    def _try_schedule_new(
        self,
        request: Request,
        computed: ComputedBlocks,
        preempted_for_it: Request | None,
        step: StepPlan,
    ) -> Admission:
        """Determine how many tokens to schedule and start the request, preempting
        `preempted_for_it` first if there is one. Memory is checked before any state changes, so a
        request that does not fit leaves everything unchanged."""
        num_uncomputed_tokens = request.num_tokens - computed.num_tokens
        budget = step.budget
        num_running = len(self.running)
        num_deferred_total = sum(step.num_deferred_tokens.values())
        if preempted_for_it is not None:
            budget += step.num_tokens.get(preempted_for_it.request_id, 0)
            num_running -= 1
            num_deferred_total -= step.num_deferred_tokens.get(preempted_for_it.request_id, 0)
        num_tokens = self.chunk_policy.num_tokens_to_schedule(
            request, num_uncomputed_tokens, budget, self.max_num_batched_tokens
        )
        if num_tokens == 0:
            return Admission.BUDGET
        end = computed.num_tokens + num_tokens
        num_slots = num_tokens + self.num_reserved_slots(request, end)
        num_watermark_blocks = 0
        if num_running > 0:
            # Slots for its whole prompt, and free blocks for the others.
            num_slots = max(num_slots, num_uncomputed_tokens)
            num_watermark_blocks = self._num_watermark_blocks
            if self.reserve_for_chunks == "every":
                num_watermark_blocks += self.kv_memory.num_blocks_needed(num_deferred_total)
        if not self.kv_memory.can_allocate(
            request, num_slots, computed, num_watermark_blocks, preempted_for_it
        ):
            return Admission.BLOCKS
        if preempted_for_it is not None:
            self._preempt(preempted_for_it, request, step)
        fits = self.start_running(request, computed, num_tokens)
        assert fits, "`can_allocate` succeeded but `allocate_slots` failed"
        step.add(request, num_tokens)
        step.defer(request, num_uncomputed_tokens - num_tokens)
        return Admission.ADMITTED
