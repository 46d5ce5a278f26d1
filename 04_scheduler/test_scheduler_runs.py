"""Whole runs of every scheduler: tokens are those of an uninterrupted run, whatever happened on the
way, and what must always hold holds after every step. With steps in flight:
beyond/test_overlapped_scheduling.py.

The model is fake and its KV is not: see fake_model.py. With the real model the same is shown in
common/tests/test_equivalence_matrix.py."""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import scheduler_steps
from bounded_loops import as_long_as
from cache_checks import cached_prefixes
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from fake_model import FakeModelRunner, _mix, continuation
from kv_connector import KVConnector
from kv_memory import KeyedRequest, UncachedKVCacheManager
from loading_kv_cache_manager import LoadingKVCacheManager
from policies import PriorityPolicy
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus, SamplingParams
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepHandle
from scheduler_steps import SchedulerLoop, make_scheduler, preempted_ids, preempting
from sglang_policies import POLICIES, policy_by_name

CACHES = (None, "hash", "radix")
SCHEDULERS = (Scheduler, PrefillFirstScheduler, CachingFCFSScheduler)
VOCAB = 4  # few tokens, so that prefixes are shared by chance
LONGEST, MOST = 10, 9  # prompt and outputs in random runs


class AnswersAreChecked:
    """`can_allocate` says what freeing one and seating the other would come to, tried on a copy."""

    max_step_tokens = sys.maxsize
    checks_all = False  # without: only answers about a victim; the scheduler asserts the others

    def can_allocate(self, request, num_tokens, computed, num_watermark_blocks=0, freeing=None):
        answer = super().can_allocate(request, num_tokens, computed, num_watermark_blocks, freeing)
        if freeing is None and not self.checks_all:
            return answer
        memory, request, computed, freeing = copy.deepcopy((self, request, computed, freeing))
        if freeing is not None:
            memory.free(freeing)
        num_new = min(num_tokens, self.max_step_tokens)
        is_room = memory.allocate_slots(request, num_new, num_tokens - num_new, computed)
        num_free = memory.pool.num_usable_blocks - memory.num_blocks_in_use
        asked = (request, num_tokens, freeing)
        assert answer == (is_room and num_free >= num_watermark_blocks), asked
        return answer


class CheckedMemory(AnswersAreChecked, UncachedKVCacheManager):
    pass


class CheckedCachedMemory(AnswersAreChecked, CachedKVCacheManager):
    pass


make_memory = partial(
    scheduler_steps.make_memory, uncached=CheckedMemory, cached=CheckedCachedMemory
)


class World(SchedulerLoop):
    """A loop of any scheduler. With a plugin that plans ahead, several steps are in flight, and the
    invariants hold at any moment."""

    plugin: Any = None
    num_in_flight = 1
    vocab_size = VOCAB

    def __init__(self, memory: UncachedKVCacheManager, kind=Scheduler, **options):
        if "policy" in options:
            options["policy"] = policy_by_name(options["policy"], memory)
        if self.plugin is not None:
            options["plugins"] = [self.plugin]
        self.is_forced = options.get("preempt_every") is not None
        super().__init__(make_scheduler(kind, kv_memory=memory, **options))
        self.in_flight: deque[tuple[SchedulerOutput, StepHandle | None]] = deque()
        self.num_recomputed_tokens = 0  # as the plans say

    @property
    def plans(self) -> list[SchedulerOutput]:
        return [plan for plan, _ in self.in_flight]

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < self.num_in_flight

    @property
    def is_settled(self) -> bool:
        """Whether the invariants must hold now."""
        return self.plugin is not None or not self.in_flight

    def schedule(self) -> SchedulerOutput:
        before = set(self.scheduler.running)
        plan = super().schedule()
        is_ahead = self.plugin is not None  # without, the runner reads the plan as late as possible
        self.in_flight.append((plan, self.runner.execute(plan) if is_ahead else None))
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        self.num_recomputed_tokens += getattr(plan, "num_recomputed_tokens", 0)
        admitted = self.scheduler.running.keys() - before
        has_priorities = isinstance(getattr(self.scheduler.waiting, "policy", None), PriorityPolicy)
        assert not preempted_ids(plan) or not admitted or has_priorities, "Trap 21"
        if isinstance(self.scheduler, Scheduler):  # in a prefill, decodes wait
            skipped = self.scheduler.running.keys() - plan.num_scheduled_tokens.keys()
            is_ready = self.scheduler.num_uncomputed_tokens
            skipped = [r for r in skipped if is_ready(self.scheduler.running[r])]
            is_used_up = plan.total_num_scheduled_tokens == self.scheduler.max_num_batched_tokens
            assert not skipped or is_used_up, "Trap 20: a running request gets a token"
        return plan

    def settle(self) -> None:
        """The oldest step in flight ends."""
        plan, handle = self.in_flight.popleft()
        self.receive(plan, (handle or self.runner.execute(plan)).wait())

    def advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` is called while the runner is at work."""
        while self.may_schedule:
            self.schedule()
        meanwhile()
        self.settle()

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.advance(meanwhile)
        self.check()

    def lose_plans(self) -> None:
        """As where a step has failed: what runs is aborted."""
        for _, handle in self.in_flight:
            handle.wait()
        self.in_flight.clear()
        self.plugin.discard_plans()
        for request_id in list(self.scheduler.running):
            self.scheduler.abort_request(request_id)

    def check(self) -> None:
        super().check()
        known = self.scheduler.requests.keys() | self.scheduler.delta._finished_req_ids
        assert self.runner.state.requests.keys() <= known
        for request in self.scheduler.requests.values():
            outputs = self.outputs[request.request_id]
            expected = continuation(request.prompt_token_ids, len(outputs), VOCAB)
            assert outputs == expected == request.output_token_ids, request
            if isinstance(self.scheduler, PreemptiveScheduler) and not self.is_forced:
                num_displacements = self.scheduler._num_displacements[request.request_id]
                assert num_displacements <= self.scheduler.max_preemptions

    def run(self, max_steps: int = 1000, step: Callable[[], None] | None = None) -> None:
        """Run to the end, where nothing is held."""
        if self.plans and not self.may_schedule:
            self.settle()
        for _ in as_long_as(self.scheduler.has_unfinished_requests, max_steps):
            (step or self.step)()
        while self.plans:
            self.settle()
        assert self.memory.num_blocks_in_use == 0
        for request in self.finished:
            assert request.output_token_ids == self.continuation(request), request


# -- random runs


class SlowConnector(KVConnector):
    """Has the KV of every prompt's first blocks. A load takes `num_polls` questions."""

    def __init__(self, num_polls: int, block_size: int) -> None:
        self.bind(None, block_size, ())
        self.num_polls = num_polls
        self.runner: FakeModelRunner | None = None
        self.loads: dict[str, list] = {}  # request, block ids, first position, polls to come

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_full = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        self.start = num_computed_tokens
        return max(0, num_full - num_computed_tokens), True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.loads[request.request_id] = [request, list(block_ids), self.start, self.num_polls]

    def get_finished_load(self, request_id):
        load = self.loads[request_id]
        load[3] -= 1
        if load[3] > 0:
            return None
        request, block_ids, start, _ = self.loads.pop(request_id)
        kv: list[int] = []
        for token_id in request.all_token_ids[: start + len(block_ids) * self.block_size]:
            kv.append(_mix(kv, token_id))
        for position in range(start, len(kv)):
            block_id = block_ids[(position - start) // self.block_size]
            self.runner._kv[block_id * self.block_size + position % self.block_size] = kv[position]
        return len(kv) - start

    def cancel_load(self, request_id):
        self.loads.pop(request_id, None)

    def _nothing(self, *_):
        pass

    request_finished = wait_for_load = close = _nothing


def random_load(
    rng: random.Random, cache: str | None, spare_blocks: Sequence[int] = (-2, -1, 0, 1)
) -> tuple[UncachedKVCacheManager, list[KeyedRequest]]:
    """A pool of hardly more than one request's blocks, and requests that share beginnings, some of
    which end at a stop token. The cache "loads" is one whose KV comes from elsewhere."""
    block_size = rng.choice([1, 2, 4, 7])
    needed = -(-(LONGEST + MOST) // block_size)
    num_blocks = needed + rng.choice([*spare_blocks, needed, 4 * needed])
    if cache == "loads":
        connector = SlowConnector(rng.choice([1, 3, 10]), block_size)
        manager = partial(LoadingKVCacheManager, connector=connector)
        memory = scheduler_steps.make_memory("hash", num_blocks, block_size, cached=manager)
    else:
        memory = make_memory(cache, num_blocks, block_size)
    families = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))] for _ in range(3)]
    requests = []
    for i in range(8):
        tokens = rng.choice(families) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        stops = rng.choice([(), (), (), (rng.randrange(VOCAB),)])
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(1, MOST), ignore_eos=True, stop_token_ids=stops
        )
        keys = rng.choice([(), (), (("salt", "x"),), (("lora", rng.randint(0, 2)),)])
        fields = {"priority": rng.randint(0, 3), "extra_keys": keys}
        tokens = tokens[: min(LONGEST, memory.capacity - 1)]
        requests.append(KeyedRequest(f"r{i}", tokens, params, (), **fields))
    return memory, requests


def random_options(rng: random.Random, kind: type = Scheduler) -> dict:
    options = {
        "max_num_seqs": rng.choice([1, 2, 3, 16]),
        "max_num_batched_tokens": rng.choice([10, 11, 24, 200]),
    }
    if kind is CachingFCFSScheduler:
        return options
    options |= {
        "policy": rng.choice(sorted(POLICIES)),
        "max_preemptions": rng.choice([0, 1, 2, 3, 100]),
        "max_overtakes": rng.choice([0, 3, 1000]),
        "preempt_every": rng.choice([None, None, None, 1, 2, 3, 4, 5]),
    }
    if kind is not PrefillFirstScheduler:
        return options | {"watermark": rng.choice([0.0, 0.01, 0.3])}
    options |= {
        "max_preemptions": rng.randint(1, 3),  # in chunks of a token, 100 take thousands of steps
        "mixing": rng.random() < 0.4,
        "chunked_prefill_size": rng.choice([None, None, 1, 3, 4, 8]),
        "init_new_token_ratio": rng.choice([0.0, 0.3, 1.0]),
        "min_new_token_ratio": 0.0,
        "new_token_ratio_decay_steps": rng.randint(1, 20),
        "max_consecutive_prefills": rng.choice([1, 2, 8, None]),
    }
    if options["chunked_prefill_size"] is not None:  # chunked prompts can be longer than a step
        options["max_num_batched_tokens"] = rng.randint(1, 24)
    return options


# -- a state machine


SMALL_WORLDS = {
    "kind": st.sampled_from((Scheduler, PrefillFirstScheduler)),
    "cache": st.sampled_from(CACHES),
    "seed": st.integers(0, 2**32),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of calls, for every policy, in pools of hardly more than one request. After each,
    everything that must hold; then all other requests arrive, and the run is brought to its end. A
    name is used again as soon as its request has ended."""

    world_type = World

    @initialize(**SMALL_WORLDS)
    def start(self, kind, cache, seed, **options):
        rng = random.Random(seed)
        spare = (
            (0, 1) if kind is CachingFCFSScheduler else (-2, -1, 0, 1)
        )  # it refuses what can't fit
        memory, self.to_come = random_load(rng, cache, spare)
        self.world = self.world_type(memory, kind, **random_options(rng, kind) | options)
        self.has_ends = rng.random() < 0.5
        if cache == "loads":
            memory.connector.runner = self.world.runner

    @precondition(lambda self: self.to_come)
    @rule(num_alike=st.sampled_from([1, 1, 1, 3]))
    def add(self, num_alike):
        request = self.to_come.pop()
        for _ in range(num_alike):
            twin = copy.deepcopy(request)
            known = self.world.scheduler.requests
            twin.request_id = next(name for name in map("r{}".format, count()) if name not in known)
            self.world.take(twin)

    @precondition(lambda self: self.world.may_schedule)
    @rule(by_force=st.booleans())
    def schedule(self, by_force):
        by_force = by_force and isinstance(self.world.scheduler, PreemptiveScheduler)
        with preempting(self.world.scheduler) if by_force else nullcontext():
            self.world.schedule()

    @precondition(lambda self: self.world.plans)
    @rule()
    def update(self):
        self.world.settle()

    @precondition(lambda self: self.world.plans and self.world.plugin is not None)
    @rule()
    def fail(self):
        self.world.lose_plans()

    @precondition(lambda self: self.world.may_schedule)
    @rule(num_steps=st.sampled_from([1, 1, 2, 5]))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.world.step()

    @precondition(lambda self: self.world.scheduler.requests and self.has_ends)
    @rule(data=st.data(), is_stopped=st.booleans())
    def end(self, data, is_stopped):
        request_id = data.draw(st.sampled_from(sorted(self.world.scheduler.requests)))
        _end(self.world, request_id, is_stopped)
        assert request_id not in self.world.scheduler.requests

    @rule()
    def reset(self):
        self.world.scheduler.kv_memory.reset_prefix_cache()

    @invariant()
    def holds(self):
        if getattr(self, "world", None) is not None and self.world.is_settled:
            self.world.check()

    def teardown(self):
        if getattr(self, "world", None) is None:
            return
        if self.world.plans and not self.world.may_schedule:
            self.world.settle()
        while self.to_come:
            self.add(1)
            self.world.step()
        self.world.run(5000)
        if isinstance(self.world.scheduler, PreemptiveScheduler):
            recomputed = self.world.scheduler.num_recomputed_tokens
            assert recomputed == self.world.num_recomputed_tokens
            self.world.check_account(getattr(self.world.plugin, "num_discarded_tokens", 0))


def _end(world: World, request_id: str, is_stopped: bool) -> None:
    ended = RequestStatus.FINISHED_STOPPED if is_stopped else RequestStatus.FINISHED_ABORTED
    world.scheduler.finish_requests(request_id, ended)


class LoadingMachine(SchedulerMachine):
    """Loads hold memory while they are under way. Of those that a step passes, one or more are
    asked again: neither refused loads in front nor those that have arrived behind block the
    queue."""

    @initialize(**SMALL_WORLDS | {"cache": st.just("loads")}, num=st.sampled_from([1, 2, 128]))
    def start(self, num, **options):
        mock.patch("preemptive_scheduler.MAX_SKIPPED", num).start()
        super().start(**options)

    def teardown(self):
        try:
            super().teardown()
        finally:
            mock.patch.stopall()


SETTINGS = settings(max_examples=60, stateful_step_count=25, deadline=None)
SchedulerMachine.TestCase.settings = LoadingMachine.TestCase.settings = SETTINGS
TestSchedulerMachine = pytest.mark.net(SchedulerMachine.TestCase)
TestLoadingMachine = pytest.mark.net(LoadingMachine.TestCase)


# -- every interleaving


def fingerprint(world: World, num_added: int) -> tuple:
    """The state that the future depends on: equal states need to be explored once."""
    scheduler = world.scheduler
    blocks: dict[int, int] = {}  # by order of appearance: which block it is does not matter
    num_displacements = getattr(scheduler, "_num_displacements", Counter())
    states = tuple(
        (
            request_id,
            request.status,
            request.num_computed_tokens,
            request.num_tokens,
            request.num_output_placeholders,
            request.num_preemptions > 0,
            min(num_displacements[request_id], getattr(scheduler, "max_preemptions", 0)),
            tuple(
                blocks.setdefault(block_id, len(blocks))
                for table in scheduler.kv_memory.get_tables(request_id)
                for block_id in table
            ),
        )
        for request_id, request in sorted(scheduler.requests.items())
    )
    cache = scheduler.kv_memory.cache
    cached = ()
    if cache is not None:
        found = cached_prefixes(cache)
        cached = tuple(sorted((p.group, p.token_ids, p.num_users) for p in found))
    order = (tuple(scheduler.running), tuple(r.request_id for r in scheduler.waiting))
    plans = tuple(tuple(plan.num_scheduled_tokens.items()) for plan in world.plans)
    ready = tuple(getattr(scheduler, "_ready", ()))  # with several steps in flight
    state = (num_added, states, order, cached, plans, ready)
    if isinstance(scheduler, PrefillFirstScheduler):
        for batch in (scheduler.running_batch, scheduler.last_batch):
            names = tuple(r.request_id for r in batch.reqs if not r.is_finished)
            state += (batch.forward_mode, names)
        state += (scheduler.chunked_req and scheduler.chunked_req.request_id,)
        state += (scheduler._num_prefills_in_a_row, round(scheduler.new_token_ratio, 1))
    return state


def successors(world: World, num_added: int, prompts: list[tuple[list[int], int, int]]):
    """Every action that is possible now, each on a copy."""
    actions: list[Callable[[World], None]] = []
    if num_added < len(prompts):
        tokens, max_tokens, priority = prompts[num_added]
        request = Request.from_tokens(f"r{num_added}", tokens, max_tokens, priority, 0.0)
        other = copy.deepcopy(world)
        other.take(request)
        yield other, num_added + 1
    if world.may_schedule:
        actions.append(lambda other: other.schedule())
        if world.scheduler.running:
            actions.append(_preempt)
    if world.plans:
        actions.append(lambda other: other.settle())
    for request_id in world.scheduler.requests:
        for is_stopped in (False, True):
            actions.append(partial(_end, request_id=request_id, is_stopped=is_stopped))
    for action in actions:
        other = copy.deepcopy(world)
        action(other)
        yield other, num_added


def _preempt(world: World) -> None:
    """Between two steps; in one, if the scheduler has batches to keep."""
    scheduler = world.scheduler
    if not isinstance(scheduler, PreemptiveScheduler):
        return world.schedule()
    if isinstance(scheduler, Scheduler):
        return scheduler.preempt(scheduler.running[next(reversed(scheduler.running))])
    with preempting(scheduler):
        world.schedule()


def explore(world: World, prompts: list[tuple[list[int], int, int]], share: float = 1) -> None:
    """Add, schedule, update, preempt, abort, stop, in every order. All states that are reached are
    checked, and a `share` of them leads on. From every seventh, every request is run to the end."""
    rng = random.Random(1)
    seen = {fingerprint(world, 0)}
    frontier = [(world, 0)]
    for _ in as_long_as(lambda: frontier, max_rounds=200_000):
        world, num_added = frontier.pop()
        for other, num in successors(world, num_added, prompts):
            state = fingerprint(other, num)
            if state in seen:
                continue
            seen.add(state)
            if other.is_settled:
                SchedulerLoop.check(other)
            if len(seen) % 7 == 0:  # liveness: most states share their ends
                end = copy.deepcopy(other)
                end.run(60, end.advance)
            if rng.random() < share:
                frontier.append((other, num))
    assert len(seen) > 300


PROMPTS = [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)]  # outputs, priority
SHORT = [([0, 1, 1], 3, 1), ([0, 1, 2, 3], 2, 0), ([0, 1], 4, 1)]
DISPLACING = [([0, 1, 1], 4, 1), ([2, 3, 2], 3, 2), ([1, 0, 0, 1, 1], 1, 0)]


@pytest.mark.net
@pytest.mark.parametrize(
    ("cache", "kind", "policy", "share", "prompts"),
    [
        (None, Scheduler, "fcfs", 1, SHORT),
        (None, Scheduler, "priority", 1, SHORT),
        (None, PrefillFirstScheduler, "fcfs", 0.8, SHORT),
        # Trap 60: the third is the most urgent, and finds two running.
        (None, Scheduler, "priority", 1, DISPLACING),
        pytest.param(None, Scheduler, "fcfs", 1, PROMPTS, marks=pytest.mark.slow),
        pytest.param(None, Scheduler, "priority", 1, PROMPTS, marks=pytest.mark.slow),
        pytest.param(None, PrefillFirstScheduler, "fcfs", 1, PROMPTS, marks=pytest.mark.slow),
        pytest.param("hash", Scheduler, "fcfs", 1, PROMPTS, marks=pytest.mark.slow),
        pytest.param("hash", Scheduler, "priority", 1, DISPLACING, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests_in_five_blocks(cache, kind, policy, share, prompts):
    num_blocks = 5 if kind is Scheduler else 9  # this one sets memory aside
    options = {"max_num_seqs": 2, "max_preemptions": 2}
    options["max_num_batched_tokens"] = 7 if prompts is DISPLACING else 5
    world = World(make_memory(cache, num_blocks, 2), kind, policy=policy, **options)
    explore(world, prompts, share)
