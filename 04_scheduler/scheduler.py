"""The two-phase scheduler: fill the memory instead of reserving it, and survive running out.

Chapter 1 reserves at admission everything a request may ever need. Most stop early, so most of the
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
    work, allocate, in that order. The first one that does not fit ends the step: nobody overtakes.
    One that is not ready (its KV or its parent's prompt is on its way) is passed over. So is one
    that a constraint holds back, until it has waited too long: then the line waits for it.

The victim is who was admitted last; with priorities the least urgent, and of those the latest.
There, a strictly more urgent newcomer also takes the seat of the least urgent request when the
batch is full, if what is free and what the other gives back is enough. Equals never displace each
other: they would do so for ever.

Why nobody starves: under FCFS who runs longest is never a victim unless it is alone, under any
policy nobody makes room more than `max_preemptions` times (`scheduler_base.py`), and the queue
bounds overtaking (`policy_queue.py`).

vLLM's V1 scheduler has these two phases, and SGLang's is in `prefill_first_scheduler.py`. The idea
of recomputing instead of swapping: vLLM, arXiv 2309.06180.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from admission_constraints import AdmissionConstraint
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from policies import PriorityPolicy, SchedulePolicy
from policy_queue import create_queue
from prefix_cache_local import PrefixCacheLocal
from request import BLOCK_SIZE, Request
from scheduler_base import SchedulerBase, SchedulerLimits, StepPlan
from scheduler_interface import KVMemory, SchedulerOutput
from whole_prompts import ChunkPolicy

__all__ = ["Request", "Scheduler", "make_kv_memory"]


MAX_PASSED_OVER = 128  # in one step; to look at each of a hundred thousand would take longer


class _Admission(Enum):
    ADMITTED = auto()
    NOT_READY = auto()  # will be, soon: the next in line is asked meanwhile
    HELD_BACK = auto()  # by a constraint: the next is asked, unless this one has waited too long
    NO_ROOM = auto()  # not in this step, and nobody behind it either


class Scheduler(SchedulerBase):
    """A `SchedulerInterface` with preemption. `Scheduler()` has a pool of `num_gpu_blocks` blocks
    and a prefix cache of its own; `kv_memory` replaces them.

    `watermark` is the share of the blocks that an admission leaves free for those who run already;
    `reserve_all` is chapter 1's way: everything at admission. `max_overtakes` bounds how many
    requests may leave the queue before one that came earlier. `num_lookahead_tokens` slots are
    taken behind each step's tokens, where they are free, for a proposer. Debug switches: every
    `preempt_every`-th step preempts somebody, `shuffle_waiting` asks the queue in a random order.
    """

    def __init__(
        self,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 4096,
        num_gpu_blocks: int = 1000,
        policy: str | SchedulePolicy = "fcfs",
        *,
        block_size: int = BLOCK_SIZE,
        max_model_len: int | None = None,
        kv_memory: KVMemory | None = None,
        chunk_policy: ChunkPolicy | None = None,
        constraints: Sequence[AdmissionConstraint] = (),
        watermark: float = 0.01,
        reserve_all: bool = False,
        max_preemptions: int = 3,
        max_overtakes: int | None = 1000,
        preempt_every: int | None = None,
        shuffle_waiting: bool = False,
        num_lookahead_tokens: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark!r}: it must be in [0, 1)")
        if preempt_every is not None and preempt_every < 1:
            raise ValueError(f"preempt_every is {preempt_every!r}: it must be None or >= 1")
        kv_memory = kv_memory or make_kv_memory(num_gpu_blocks, block_size)
        find_cached, size = kv_memory.find_cached_blocks, kv_memory.block_size
        waiting = create_queue(policy, find_cached, size, seed, max_overtakes)
        limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, max_model_len, max_preemptions
        )
        super().__init__(
            limits, kv_memory, waiting, chunk_policy, constraints, num_lookahead_tokens
        )
        self.reserve_all = reserve_all
        self.preempt_every = preempt_every
        self._has_priorities = isinstance(waiting.policy, PriorityPolicy)
        self._num_kept_free = int(watermark * (kv_memory.capacity // kv_memory.block_size))
        self._shuffle = random.Random(seed) if shuffle_waiting else None
        self._num_steps = 0
        self._forced: dict[str, int] = {}  # number of outputs when it was last preempted by force

    def schedule(self) -> SchedulerOutput:
        """Plan a step: first those who run, then those who wait."""
        plan = self.begin_step()
        self._preempt_by_force(plan)
        self._plan_running(plan)
        if not plan.preempted:
            self._admit(plan)
        return self.finish_step(plan)

    # -- phase 1: those who run

    def _plan_running(self, plan: StepPlan) -> None:
        block_size = self.kv_memory.block_size
        room_in_block = block_size - self.num_lookahead_tokens
        running = list(self.running.values())
        num_decodes_behind: list[int] | None = None
        has_chunk = False
        for i, request in enumerate(running):
            if plan.budget == 0 or (plan.preempted and request.request_id not in self.running):
                continue  # the latter made room for one before it
            start = request.num_computed_tokens
            num_tokens = len(request.all_token_ids) + len(request.draft_token_ids) - start
            is_cut = False
            if num_tokens > 1:  # more than a decode: as much as there is
                if num_decodes_behind is None:
                    num_decodes_behind = _num_decodes_behind(running)
                num_kept = self._num_kept(request, len(running) - 1 - i, num_decodes_behind[i])
                least = 0 if has_chunk and not request.draft_token_ids else 1
                has_chunk = has_chunk or not request.draft_token_ids
                budget = max(plan.budget - num_kept, least)
                num_tokens = self._num_tokens_now(request, num_tokens, budget)
                is_cut = num_tokens < request.num_tokens - start
            # Inside a block there is nothing to ask: it was taken when its first slot was written.
            is_inside_a_block = 0 < start % block_size <= room_in_block - num_tokens
            if num_tokens and not is_inside_a_block:
                num_tokens = self._make_room(request, num_tokens, plan)
            if num_tokens:
                plan.num_tokens[request.request_id] = num_tokens
                plan.budget -= num_tokens
                if is_cut:
                    plan.num_left[request.request_id] = request.num_tokens - start - num_tokens

    def _num_kept(self, request: Request, num_behind_it: int, num_decodes_behind_it: int) -> int:
        """Of the budget, for others: a token for each decode comes before a chunk, though one chunk
        in each step goes on. A token for everybody, and a block of a prompt, before a guess."""
        if not request.draft_token_ids:
            return num_decodes_behind_it
        has_prompts = bool(self.waiting) or num_decodes_behind_it < num_behind_it
        return num_behind_it + (self.kv_memory.block_size if has_prompts else 0)

    def _num_tokens_now(self, request: Request, num_behind: int, budget: int) -> int:
        if budget == 0:
            return 0
        most = self.max_num_batched_tokens
        return self.chunk_policy.num_tokens_now(request, num_behind, budget, most)

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """How many of the tokens have got memory. Others are preempted for those that are known,
        and never for guesses. 0: the request was preempted itself."""
        start = request.num_computed_tokens
        num_lookahead = self.num_lookahead(request, start + num_tokens)
        if self.kv_memory.allocate_slots(request, num_tokens, num_lookahead):
            return num_tokens
        num_tokens = min(num_tokens, request.num_tokens - start)
        while not self.kv_memory.allocate_slots(request, num_tokens):
            victim = self._choose_victim()
            self._preempt(victim, plan)
            if victim is request:
                return 0
        return num_tokens

    def _choose_victim(self) -> Request:
        """Never a pinned one: it has what it needs, so whoever asks is not pinned itself."""
        candidates = (r for r in reversed(self.running.values()) if not self.is_pinned(r))
        if self._has_priorities:
            return max(candidates, key=lambda request: (request.priority, request.arrival_time))
        return next(candidates)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        plan.remove(victim)
        plan.preempted.append(victim)
        self.preempt(victim)

    def _preempt_by_force(self, plan: StepPlan) -> None:
        """Of those that have got a token since they were last forced: so all of them end."""
        self._num_steps += 1
        if self.preempt_every and self._num_steps % self.preempt_every == 0:
            for request in reversed(self.running.values()):
                if request.num_output_tokens > self._forced.get(request.request_id, -1):
                    self._forced[request.request_id] = request.num_output_tokens
                    return self._preempt(request, plan)

    def _forget(self, request: Request) -> None:
        self._forced.pop(request.request_id, None)
        super()._forget(request)

    # -- phase 2: those who wait

    def _admit(self, plan: StepPlan) -> None:
        if len(self.running) >= self.max_num_seqs and not self._has_priorities:
            return  # before the policy looks at the cache for nothing
        num_passed_over = 0
        for request in self._waiting_in_order():
            if plan.budget == 0 or num_passed_over == MAX_PASSED_OVER:
                break
            if self.waits_for_parent(request):
                continue  # which may be anywhere behind it, and never waits for it
            outcome = self._try_to_admit(request, plan)
            if outcome is _Admission.NO_ROOM:
                break
            if outcome is _Admission.HELD_BACK and self.waiting.is_aged(request):
                break
            if outcome is not _Admission.ADMITTED:
                num_passed_over += 1
                continue
            plan.admitted.append(request)
            if plan.preempted:
                break  # it took somebody's seat: the next may do so in the next step
        for request in plan.admitted:
            self.waiting.remove_request(request)

    def _waiting_in_order(self) -> Iterable[Request]:
        if self._shuffle is None:
            return self.waiting
        requests = list(self.waiting)
        self._shuffle.shuffle(requests)
        return requests

    def _try_to_admit(self, request: Request, plan: StepPlan) -> _Admission:
        displaced = None
        if len(self.running) >= self.max_num_seqs:
            displaced = self._displaced_by(request, plan)
            if displaced is None:
                return _Admission.NO_ROOM
        if not self.may_run(request):
            return _Admission.HELD_BACK
        computed = self.look_up(request)
        if not computed.is_ready:
            return _Admission.NOT_READY
        num_behind = request.remaining_tokens - computed.num_tokens
        if not self.chunk_policy.may_start(request, num_behind):
            self.allocate(request, computed, 0)  # what the look-up began is undone
            return _Admission.HELD_BACK
        budget = plan.budget
        if displaced is not None:
            budget += plan.num_tokens.get(displaced.request_id, 0)
        num_tokens = self._num_tokens_now(request, num_behind, budget)
        num_left = num_behind - num_tokens
        num_reserved = 0
        if self.reserve_all or self.is_pinned(request):
            num_reserved = request.max_num_tokens - 1 - request.num_tokens + num_left
        num_kept_free = self._num_kept_free_now(num_left, plan, displaced)
        if displaced is not None:
            if num_tokens and self.kv_memory.can_replace(
                displaced, request, num_tokens, num_reserved, computed, num_kept_free
            ):
                self._preempt(displaced, plan)
            else:
                num_tokens = 0  # nobody is touched for a newcomer that does not fit
        if not self.allocate(request, computed, num_tokens, num_reserved, num_kept_free):
            assert displaced is None or not num_tokens, "preempted for a newcomer without room"
            return _Admission.NO_ROOM
        plan.add(request, num_tokens)
        if num_left:
            plan.num_left[request.request_id] = num_left
        return _Admission.ADMITTED

    def _num_kept_free_now(self, num_left: int, plan: StepPlan, displaced: Request | None) -> int:
        """Blocks for the others that run. A prompt that is cut takes its first blocks now, and must
        find those of its `num_left` tokens later."""
        if len(self.running) == (displaced is not None):
            return 0
        num_left += sum(plan.num_left.values())
        if displaced is not None:
            num_left -= plan.num_left.get(displaced.request_id, 0)
        return self._num_kept_free + -(-num_left // self.kv_memory.block_size)

    def _displaced_by(self, newcomer: Request, plan: StepPlan) -> Request | None:
        """The least urgent of those that run already, if the newcomer is strictly more urgent."""
        if not self._has_priorities:
            return None
        candidates = [
            request
            for request in self.running.values()
            if request not in plan.admitted and not self.is_pinned(request)
        ]
        lowest = max(candidates, key=lambda r: (r.priority, r.arrival_time), default=None)
        return lowest if lowest is not None and lowest.priority > newcomer.priority else None


def _num_decodes_behind(running: Sequence[Request]) -> list[int]:
    """For each of them: how many of those behind it need one token only."""
    counts = [0]
    for request in reversed(running[1:]):
        counts.append(counts[-1] + (request.num_tokens - request.num_computed_tokens == 1))
    return counts[::-1]


def make_kv_memory(num_blocks: int, block_size: int = BLOCK_SIZE) -> CachedKVCacheManager:
    """A pool of `num_blocks` blocks, block 0 included, with a hash-chain prefix cache."""
    pool = BlockPool(num_blocks)
    cache = PrefixCacheLocal(pool=pool, block_size=block_size)
    return CachedKVCacheManager(pool, block_size, cache)
