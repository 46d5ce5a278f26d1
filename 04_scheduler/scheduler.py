"""The two-phase scheduler: fill the memory instead of reserving it, and survive running out.

Chapter 2 reserves at admission everything a request may ever need. Most stop early, so most of the
reservation is never used. Here a request gets only what its next step writes, and memory can run
out in the middle of things. Then somebody is preempted: its KV is freed, its tokens are kept, and
it is computed again later.

One step shares one budget of `max_num_batched_tokens`:

    | phase 1: those who run, in order of admission | phase 2: those who wait, in policy order |
    0                                                                    max_num_batched_tokens

1.  Each running request gets the tokens it is behind, as far as the budget goes; a chunk of a
    prompt (chapter 6) leaves a token for each one behind it that decodes. If the memory refuses, a
    victim is preempted and the memory asked again, until it agrees or the victim is the request
    itself. A victim that was planned in this step already gives everything back.
2.  Only if nobody was preempted: look up what the cache has of the next request in line, size the
    work, allocate, in that order. The first that does not fit ends the step: it is not overtaken.
    One that is not ready (its KV is on its way) is passed over. So is one that a constraint holds
    back, until it has waited too long: then the line waits for it.

The victim is who was admitted last; with priorities the least urgent, and of those the last to
arrive. There, a strictly more urgent newcomer also takes the seat of the least urgent request when
the batch is full, if it then fits the memory. Equals would displace each other for ever.

Why nobody starves: under FCFS the one that has run longest is a victim only if all others that run
are pinned; under any policy nobody makes room more than `max_preemptions` times
(`preemptive_scheduler.py`), the queue bounds overtaking (`policy_queue.py`), and so does whoever
lets KV come from outside (`kv_loads.py` of chapter 3).

First reading: take prompts to be whole, and nobody to have a priority. Then `_num_tokens_for` is
what a request is behind, `num_left` is empty and `displaced` is None.

vLLM's V1 scheduler has these two phases. Recomputing instead of swapping: vLLM, arXiv 2309.06180.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kv_memory import ComputedBlocks, NotReady
from policies import PriorityPolicy, SchedulePolicy
from preemptive_scheduler import SchedulerBase, SchedulerOptions, make_kv_memory
from request import Request, RequestStatus, require
from step_plan import PreemptingPlan, StepPlan

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["Request", "RequestStatus", "Scheduler", "SimpleBlockManager", "make_kv_memory"]

MAX_PASSED_OVER = 128  # in one step; to look at each of a hundred thousand would take longer


class _Admission(Enum):
    ADMITTED = "admitted"
    PASSED_OVER = "passed over"  # not yet: the next in line is asked meanwhile
    SEAT, CONSTRAINT, BUDGET, BLOCKS = "seat", "constraint", "budget", "blocks"  # the line waits


class Scheduler(SchedulerBase):
    """A `SchedulerInterface` with preemption. All other options are those of `SchedulerBase`.
    `watermark` is the share of the blocks that an admission leaves free for those who run already.
    `keep_for_prompts` is what it leaves besides: room for the rest of `"every"` prompt that is cut,
    or of its `"own"` only, as vLLM does (`scheduler_reserve_full_isl`). `reserve_all` is chapter
    2's way: everything at admission."""

    def __init__(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        num_gpu_blocks: int = 1000,
        policy: str | SchedulePolicy = "fcfs",
        *,
        watermark: float = 0.01,
        keep_for_prompts: str = "every",
        reserve_all: bool = False,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {watermark!r}")
        is_known = keep_for_prompts in ("every", "own")
        require(is_known, "keep_for_prompts", keep_for_prompts, "'every' or 'own'")
        super().__init__(max_num_seqs, max_num_batched_tokens, num_gpu_blocks, policy, **options)
        self._keeps_for_every = keep_for_prompts == "every"
        self.reserve_all = reserve_all
        self._has_priorities = isinstance(self.waiting.policy, PriorityPolicy)
        self._num_kept_free = int(watermark * self.kv_memory.pool.num_usable_blocks)

    def schedule(self) -> PreemptingPlan:
        """Plan a step: first those who run, then those who wait."""
        step = self.begin_step()
        self._plan_running(step)
        if not step.preempted:
            self._admit(step)
        return self.finish_step(step)

    # -- phase 1: those who run

    def _plan_running(self, step: StepPlan) -> None:
        running, planned, budget = list(self.running.values()), step.num_tokens, step.budget
        for index, request in enumerate(running):
            if budget == 0:
                break
            if request.num_computed_tokens <= request.routine_until:
                planned[request.request_id] = 1
                budget -= 1
            else:
                step.budget = budget
                self._plan_one(request, running, index, step)
                budget = step.budget
        step.budget = budget

    def _plan_one(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> None:
        if step.preempted and request.request_id not in self.running:
            return  # it made room for one before it
        num_behind = num_tokens = self.num_behind(request)
        if num_tokens > 1:
            num_tokens = self._num_tokens_for(request, running, index, step)
        num_more = 0
        if num_behind == 1 and self._asked_for_tokens:
            num_more = self._num_optional_for(request, running, index, step)
        if num_tokens and (num_tokens := self._get_room(request, num_tokens, num_more, step)):
            step.add(request, num_tokens)
            if num_behind == 1:
                request.routine_until = self.routine_end(request)
                if request.num_computed_tokens <= request.routine_until:
                    step.decided.remove(request.request_id)

    def _num_tokens_for(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> int:
        """How many of the tokens that `running[index]` is behind, if these are several. A token for
        each decode comes before a piece of a prompt, though one such piece in each step goes on."""
        num_behind = request.num_tokens - request.num_computed_tokens
        least = 0 if step.has_piece else 1
        step.has_piece = True
        budget = max(step.budget - step.num_decodes_behind(running, index), least)
        most = self.max_num_batched_tokens
        num_tokens = self.chunk_policy.num_tokens_now(request, num_behind, budget, most)
        if num_tokens < num_behind:
            step.num_left[request.request_id] = num_behind - num_tokens
        return num_tokens

    def _num_optional_for(
        self, request: Request, running: Sequence[Request], index: int, step: StepPlan
    ) -> int:
        """A token for everybody behind it, and a block of a prompt, come before an optional one."""
        num_optional = self.num_optional_tokens(request)
        if num_optional == 0:
            return 0
        num_others = len(running) - 1 - index
        num_spare = step.budget - 1 - num_others
        if num_optional <= num_spare - self.block_size:
            return num_optional  # whoever waits
        has_prompts = bool(self.waiting) or step.num_decodes_behind(running, index) < num_others
        return max(0, min(num_optional, num_spare - (self.block_size if has_prompts else 0)))

    def _get_room(self, request: Request, num_tokens: int, num_more: int, step: StepPlan) -> int:
        """How many of the tokens have got memory, `num_more` optional ones included if there is
        room for all of them. For the others somebody is preempted. 0: the request was itself."""
        block_size, with_more, num_slots = self.block_size, num_tokens + num_more, 0
        if self._asked_for_slots:
            num_slots = self.num_optional_slots(request, request.num_computed_tokens + with_more)
        # Inside a block there is nothing to ask: it was taken when its first slot was written.
        if 0 < request.num_computed_tokens % block_size <= block_size - with_more - num_slots:
            return with_more
        if (num_more or num_slots) and self.kv_memory.allocate_slots(request, with_more, num_slots):
            return with_more
        while not self.kv_memory.allocate_slots(request, num_tokens):
            victim = self._choose_victim()
            assert victim is not None, "no victim left, but a pinned request never allocates"
            self._preempt(victim, step)
            if victim is request:
                return 0
        return num_tokens

    def _choose_victim(self, spared: Sequence[Request] = ()) -> Request | None:
        """The last admitted, or the least urgent; never a pinned one."""
        running = reversed(self.running.values())
        candidates = (r for r in running if not self.is_pinned(r) and r not in spared)
        if self._has_priorities:
            return max(candidates, key=lambda r: (r.priority, r.arrival_time), default=None)
        return next(candidates, None)

    def _preempt(self, victim: Request, step: StepPlan) -> None:
        step.remove(victim)
        step.preempted.append(victim)
        self.preempt(victim)

    # -- phase 2: those who wait

    def _admit(self, step: StepPlan) -> None:
        if len(self.running) >= self.max_num_seqs and not self._has_priorities:
            step.stop = ("seat", "")
            return  # before the policy looks at the cache for nothing
        num_passed_over, goes_on = 0, (_Admission.ADMITTED, _Admission.PASSED_OVER)
        for request in self.waiting:
            outcome = self._try_to_admit(request, step)
            num_passed_over += outcome is _Admission.PASSED_OVER
            if outcome not in goes_on or step.preempted or num_passed_over == MAX_PASSED_OVER:
                step.stop = (outcome.value, request.request_id)
                break  # preempted: it took somebody's seat, and the next may in the next step
        for request in step.admitted:
            self.waiting.remove_request(request)

    def _try_to_admit(self, request: Request, step: StepPlan) -> _Admission:
        """Asked in this order: seat, constraints, cache, chunk policy; then budget and memory."""
        if step.budget == 0:
            return _Admission.BUDGET
        displaced = None
        if len(self.running) >= self.max_num_seqs:
            displaced = self._displaced_by(request, step)
            if displaced is None:
                return _Admission.SEAT
        if not self.may_start(request):
            return self._hold_back(request)
        computed = self.look_up(request)
        if isinstance(computed, NotReady):
            return _Admission.PASSED_OVER
        if not self.chunk_policy.may_start(request, request.num_tokens - computed.num_tokens):
            return self._hold_back(request)
        return self._fit_in(request, computed, displaced, step)

    def _hold_back(self, request: Request) -> _Admission:
        """Something is against it. The next is asked, unless this one has waited too long."""
        is_aged = self.waiting.is_aged(request)
        return _Admission.CONSTRAINT if is_aged else _Admission.PASSED_OVER

    def _displaced_by(self, newcomer: Request, step: StepPlan) -> Request | None:
        """Whose seat a strictly more urgent newcomer may take."""
        if not self._has_priorities:
            return None
        lowest = self._choose_victim(spared=step.admitted)
        return lowest if lowest is not None and lowest.priority > newcomer.priority else None

    def _fit_in(
        self, request: Request, computed: ComputedBlocks, displaced: Request | None, step: StepPlan
    ) -> _Admission:
        """Size its work and seat it, in the place of `displaced` if there is one. The memory is
        asked before anybody is touched: if the request does not fit, nothing has changed."""
        num_behind = request.num_tokens - computed.num_tokens
        rest = step if displaced is None else step.without(displaced)
        most = self.max_num_batched_tokens
        num_tokens = self.chunk_policy.num_tokens_now(request, num_behind, rest.budget, most)
        if num_tokens == 0:
            return _Admission.BUDGET
        num_left = num_behind - num_tokens
        num_reserved = 0
        if self.reserve_all or self.is_pinned(request):
            num_reserved = request.max_num_tokens - 1 - request.num_tokens + num_left
        num_slots, num_kept_free = num_tokens + num_reserved, 0
        if len(self.running) > (0 if displaced is None else 1):
            # Room for the rest of its own prompt, and something for the others.
            num_slots = max(num_slots, num_behind)
            num_owed = sum(rest.num_left.values()) if self._keeps_for_every else 0
            num_kept_free = self._num_kept_free + self.kv_memory.num_blocks_needed(num_owed)
        if not self.kv_memory.can_allocate(request, num_slots, computed, num_kept_free, displaced):
            return _Admission.BLOCKS
        if displaced is not None:
            self._preempt(displaced, step)
        has_room = self.seat(request, computed, num_tokens, num_reserved)
        assert has_room, "`can_allocate` succeeded but `allocate_slots` failed"
        step.add(request, num_tokens, num_left)
        step.admitted.append(request)
        return _Admission.ADMITTED


class SimpleBlockManager:  # the posts' name
    """`num_blocks` blocks of `block_size` positions, and how many each request has. The engine does
    not use it: its schedulers ask a `KVMemory` (chapter 3)."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_held: Counter[str] = Counter()

    def allocate(self, req_id: str, num_new_blocks: int) -> bool:
        """False: refused, and nothing has changed."""
        if num_new_blocks > self.get_num_free_blocks():
            return False
        self._num_held[req_id] += num_new_blocks
        return True

    def free(self, req_id: str) -> None:
        self._num_held.pop(req_id, None)

    def get_num_free_blocks(self) -> int:
        return self.num_blocks - self._num_held.total()

    def blocks_needed_for_new_tokens(self, req: Request, num_new_tokens: int) -> int:
        """Blocks that are missing for so many tokens after the computed ones."""
        num_blocks = -(-(req.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, num_blocks - self._num_held[req.request_id])
