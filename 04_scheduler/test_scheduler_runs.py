"""Whole runs of the two-phase scheduler: tokens are those of an uninterrupted run, whatever
happened on the way, and what must always hold holds after every step.

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
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import scheduler_steps
from bounded_loops import as_long_as
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from fake_model import FakeModelRunner, continuation
from kv_memory import KeyedRequest, UncachedKVCacheManager
from policies import PriorityPolicy
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request, RequestStatus, SamplingParams
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepHandle, StepOutput
from scheduler_steps import make_scheduler, preempting
from sglang_policies import POLICIES, policy_over

CACHES = (None, "hash", "radix")
VOCAB = 4  # few tokens, so that prefixes are shared by chance


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
        assert answer == (is_room and num_free >= num_watermark_blocks), (
            request,
            num_tokens,
            freeing,
        )
        return answer


class CheckedMemory(AnswersAreChecked, UncachedKVCacheManager):
    pass


class CheckedCachedMemory(AnswersAreChecked, CachedKVCacheManager):
    pass


make_memory = partial(
    scheduler_steps.make_memory, uncached=CheckedMemory, cached=CheckedCachedMemory
)


class World:
    """A scheduler, a fake model, and what every request should have said so far."""

    def __init__(self, memory: UncachedKVCacheManager, kind=Scheduler, **options):
        if "policy" in options:
            options["policy"] = policy_over(memory, options["policy"], options.get("seed", 0))
        self.is_forced = options.get("preempt_every") is not None
        self.scheduler = make_scheduler(kind, kv_memory=memory, **options)
        self.runner = FakeModelRunner(memory.block_size, VOCAB)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[Request, str]] = {}
        self.pending: SchedulerOutput | None = None
        self.num_recomputed_tokens = 0  # as the plans say

    num_discarded_tokens = 0  # with steps in flight

    @property
    def plans(self) -> list[SchedulerOutput]:
        """The plans of the steps in flight."""
        return [] if self.pending is None else [self.pending]

    @property
    def may_schedule(self) -> bool:
        return self.pending is None

    @property
    def is_settled(self) -> bool:
        """Whether the invariants must hold now."""
        return self.pending is None

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)
        self.outputs[request.request_id] = []

    def schedule(self) -> None:
        self.pending = self.plan()

    def plan(self) -> SchedulerOutput:
        num_before = {r: q.num_computed_tokens for r, q in self.scheduler.running.items()}
        output = self.scheduler.schedule()
        assert output.total_tokens <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        self.num_recomputed_tokens += getattr(output, "num_recomputed_tokens", 0)
        admitted = self.scheduler.running.keys() - num_before.keys()
        victims = {r.request_id for r in getattr(output, "preempted_requests", ())}
        has_priorities = isinstance(getattr(self.scheduler.waiting, "policy", None), PriorityPolicy)
        assert not victims or not admitted or has_priorities, "Trap 21"
        assert victims.isdisjoint(output.num_scheduled_tokens), "Trap 21"
        if not isinstance(self.scheduler, Scheduler):
            return output  # in a prefill, decodes wait
        # A running request that was not preempted gets a token, as long as the budget lasts (Trap
        # 20).
        skipped = self.scheduler.running.keys() - output.num_scheduled_tokens.keys()
        skipped = [
            r for r in skipped if self.scheduler.num_uncomputed_tokens(self.scheduler.running[r])
        ]
        assert not skipped or output.total_tokens == self.scheduler.max_num_batched_tokens
        return output

    def update(self) -> None:
        output, self.pending = self.pending, None
        assert output is not None
        self.take(output, self.runner.execute(output).wait())

    def take(self, output: SchedulerOutput, sampled: StepOutput) -> None:
        for result in self.scheduler.update_from_output(output, sampled):
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason:
                request = next(
                    r for r in output.scheduled_requests if r.request_id == result.request_id
                )
                self.finished[result.request_id] = (request, result.finish_reason)

    def advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` is called while the runner is at work."""
        self.schedule()
        meanwhile()
        self.update()

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.advance(meanwhile)
        self.check()

    def check(self) -> None:
        self.scheduler.check_invariants()
        memory = self.scheduler.kv_memory
        memory.check_invariants(self.scheduler.running.values())
        known = set(self.scheduler.requests)
        assert self.runner.state.requests.keys() <= known | self.scheduler.delta._finished_req_ids
        for request in self.scheduler.requests.values():
            outputs = self.outputs[request.request_id]
            expected = continuation(request.prompt_token_ids, len(outputs), VOCAB)
            assert outputs == expected == request.output_token_ids, request
            if isinstance(self.scheduler, PreemptiveScheduler) and not self.is_forced:
                num_displacements = self.scheduler._num_displacements[request.request_id]
                assert num_displacements <= self.scheduler.max_preemptions

    def check_end(self) -> None:
        """Everything finished: nothing is held, and every token is accounted for."""
        for request, _ in self.finished.values():
            expected = continuation(request.prompt_token_ids, request.max_tokens, VOCAB)
            assert self.outputs[request.request_id] == expected, request
        assert self.scheduler.kv_memory.num_blocks_in_use == 0
        if not isinstance(self.scheduler, PreemptiveScheduler):
            return
        stats = self.scheduler.get_stats()
        assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
        assert stats.total_finished == len(self.finished)
        assert stats.total_recomputed_tokens == self.num_recomputed_tokens
        if not stats.total_aborted:
            needed = sum(r.num_tokens - 1 for r, _ in self.finished.values())
            assert stats.total_scheduled_tokens == (
                needed
                - stats.total_cached_tokens
                + stats.total_recomputed_tokens
                + self.num_discarded_tokens
            )


class WorldUnderWay(World):
    """A world with several steps in flight, whose invariants hold at any moment."""

    is_settled = True
    plugin: Any  # of the scheduler, which plans ahead
    num_in_flight = 2

    def __init__(self, memory: UncachedKVCacheManager, kind=Scheduler, **options):
        super().__init__(memory, kind, plugins=[self.plugin], **options)
        self.in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()

    @property
    def num_discarded_tokens(self) -> int:
        return self.plugin.num_discarded_tokens

    @property
    def plans(self) -> list[SchedulerOutput]:
        return [plan for plan, _ in self.in_flight]

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < self.num_in_flight

    def schedule(self) -> None:
        plan = self.plan()
        self.in_flight.append((plan, self.runner.execute(plan)))

    def update(self) -> None:
        plan, handle = self.in_flight.popleft()
        self.take(plan, handle.wait())

    def advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        while self.may_schedule:
            self.schedule()
        meanwhile()
        self.update()

    def lose_plans(self) -> None:
        """As where a step has failed."""
        for _, handle in self.in_flight:
            handle.wait()
        self.in_flight.clear()
        self.plugin.discard_plans()

    def run(self, max_steps: int = 300) -> None:
        to_the_end(self, self.step, max_steps)
        self.check_end()


def to_the_end(world: World, step: Callable[[], None], max_steps: int) -> None:
    if world.plans and not world.may_schedule:
        world.update()
    for _ in range(max_steps):
        if not world.scheduler.has_unfinished_requests():
            break
        step()
    while world.plans:
        world.update()
    assert not world.scheduler.has_unfinished_requests(), f"stuck: {world.scheduler.requests}"
    assert world.scheduler.kv_memory.num_blocks_in_use == 0


# -- random runs


def random_request(
    rng: random.Random, request_id: str, families: list, longest: int
) -> KeyedRequest:
    prompt = (rng.choice(families) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))])[
        :longest
    ]
    params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 14), ignore_eos=True)
    keys = rng.choice([(), (), (("salt", "x"),), (("lora", rng.randint(0, 2)),)])
    priority = rng.randint(0, 3)
    return KeyedRequest(request_id, prompt, params, (), priority=priority, extra_keys=keys)


def random_load(
    rng: random.Random, cache: str | None, spare_blocks: Sequence[int] = (-2, -1, 0, 1)
) -> tuple[UncachedKVCacheManager, list[KeyedRequest]]:
    """A pool of hardly more than one request's blocks, and requests that share beginnings."""
    block_size = rng.choice([1, 2, 4, 7])
    families = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))] for _ in range(3)]
    needed = -(-(16 + 14) // block_size)
    memory = make_memory(
        cache, needed + rng.choice([*spare_blocks, needed, 4 * needed]), block_size
    )
    longest = min(16, memory.capacity - 1)
    return memory, [random_request(rng, f"r{i}", families, longest) for i in range(14)]


def equals_of(request: KeyedRequest, num: int) -> list[KeyedRequest]:
    arguments = (request.prompt_token_ids, request.sampling_params, ())
    keys = {"priority": request.priority, "extra_keys": request.extra_keys}
    return [KeyedRequest(f"{request.request_id}.{i}", *arguments, **keys) for i in range(num)]


def run_at_random(
    world: World, rng: random.Random, to_come: list[KeyedRequest], *, has_aborts: bool
) -> None:
    """Trickling arrivals, equal prompts, aborts while the runner is at work."""
    scheduler = world.scheduler

    def abort() -> None:
        if has_aborts and rng.random() < 0.05 and scheduler.requests:
            scheduler.abort_request(rng.choice(sorted(scheduler.requests)))

    for _ in as_long_as(lambda: to_come or scheduler.has_unfinished_requests(), max_rounds=3000):
        if to_come and rng.random() < 0.4:
            request = to_come.pop()
            for each in (request, *equals_of(request, rng.choice([0, 0, 0, 2]))):
                world.add(each)
        world.step(abort)


def random_options(rng: random.Random, kind: type = Scheduler) -> dict:
    options = {
        "max_num_seqs": rng.choice([1, 2, 3, 16]),
        "max_num_batched_tokens": rng.choice([16, 17, 24, 200]),
    }
    if kind is CachingFCFSScheduler:
        return options
    options |= {
        "policy": rng.choice(sorted(POLICIES)),
        "max_preemptions": rng.choice([1, 2, 3, 100]),
        "max_overtakes": rng.choice([0, 3, 1000]),
        "preempt_every": rng.choice([None, None, None, 1, 2, 3, 4, 5]),
        "shuffle_waiting": rng.random() < 0.2,
        "seed": rng.randrange(1000),
    }
    if kind is not PrefillFirstScheduler:
        extra = {"watermark": rng.choice([0.0, 0.01, 0.3]), "reserve_all": rng.random() < 0.15}
        return options | extra
    return options | {
        "max_preemptions": rng.randint(1, 3),  # in chunks of a token, 100 take thousands of steps
        "mixing": rng.random() < 0.4,
        "chunked_prefill_size": rng.choice([None, None, 1, 3, 4, 8]),
        "init_new_token_ratio": rng.choice([0.0, 0.3, 1.0]),
        "min_new_token_ratio": 0.0,
        "new_token_ratio_decay_steps": rng.randint(1, 20),
        "max_consecutive_prefills": rng.choice([1, 2, 8, None]),
    }


@pytest.mark.net
@pytest.mark.sample(seed=20)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_run_says_what_an_uninterrupted_one_says(seed, cache):
    """Every policy, pools of hardly more than one request, arrivals, aborts, equal prompts."""
    rng = random.Random(f"{seed} {cache}")
    memory, to_come = random_load(rng, cache)
    world = World(memory, **random_options(rng))
    run_at_random(world, rng, to_come, has_aborts=seed % 3 == 0)
    world.check_end()


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("preempt_every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_missing", [-1, 0, 1])
def test_pools_of_exactly_enough_and_one_more_or_less(num_missing, preempt_every, cache):
    """Two requests of 5 blocks each at their end, in 10 blocks, and in one more and one less."""
    world = World(
        make_memory(cache, 10 - num_missing, 4), preempt_every=preempt_every, watermark=0.0
    )
    for name in ("a", "b"):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        world.add(Request(name, [1, 2, 3, 0, 1, 2, ord(name) % VOCAB, 3, 3], params))
    to_the_end(world, world.step, 200)
    world.check_end()
    assert len(world.finished) == 2


@pytest.mark.sample
@pytest.mark.parametrize("kind", [Scheduler, PrefillFirstScheduler, CachingFCFSScheduler])
@pytest.mark.parametrize("cache", CACHES)
def test_the_full_blocks_of_equal_prompts_are_computed_once(cache, kind):
    """Four requests with one prompt of 10 tokens, two full blocks of four. Without a cache each
    computes its own."""
    memory = make_memory(cache, 40, 4)
    world = World(memory, kind, max_num_seqs=8, max_num_batched_tokens=100)
    for i in range(4):
        world.add(Request.from_tokens(f"r{i}", [0, 1, 2, 3, 3, 2, 1, 0, 0, 1], 5))
    num_scheduled = 0
    for _ in as_long_as(world.scheduler.has_unfinished_requests, max_rounds=20):
        plan = world.scheduler.schedule()
        num_scheduled += plan.total_num_scheduled_tokens
        sampled = world.runner.execute(plan).wait()
        world.scheduler.update_from_output(plan, sampled)
    num_outputs = 4 * (5 - 1)  # the last is never fed back
    assert num_scheduled == num_outputs + (4 * 10 if cache is None else 10 + 3 * 2)


# -- a state machine


SMALL_WORLDS = {
    "kind": st.sampled_from((Scheduler, PrefillFirstScheduler)),
    "prefill_first": st.fixed_dictionaries(
        {
            "mixing": st.booleans(),
            "chunked_prefill_size": st.sampled_from([None, 1, 3, 4, 8]),
            "init_new_token_ratio": st.sampled_from([0.0, 0.3, 1.0]),
            "min_new_token_ratio": st.just(0.0),
            "max_consecutive_prefills": st.sampled_from([1, 2, 8, None]),
        }
    ),
    "cache": st.sampled_from(CACHES),
    "policy": st.sampled_from(sorted(POLICIES)),
    "block_size": st.sampled_from([1, 2, 3]),
    "num_blocks": st.integers(5, 14),
    "max_num_seqs": st.integers(1, 4),
    "max_preemptions": st.integers(1, 3),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of calls, for both schools. After each, everything that must hold."""

    world_type = World

    @initialize(**SMALL_WORLDS)
    def start(self, kind, prefill_first, cache, block_size, num_blocks, **options):
        memory = make_memory(cache, num_blocks, block_size)
        if kind is PrefillFirstScheduler:
            options |= prefill_first
        self.world = self.world_type(memory, kind, max_num_batched_tokens=12, **options)
        self.num_requests = 0

    @rule(data=st.data(), length=st.integers(1, 6), max_tokens=st.integers(1, 7))
    def add(self, data, length, max_tokens):
        scheduler = self.world.scheduler
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = f"r{self.num_requests}"
        others = [q.prompt_token_ids for q in scheduler.requests.values()]
        tokens = data.draw(st.sampled_from([tokens, *others]))
        request = Request(name, tokens, params, (), priority=data.draw(st.integers(0, 2)))
        before = set(scheduler.requests)
        if len(tokens) > scheduler.kv_memory.capacity:
            with pytest.raises(ValueError):
                scheduler.add_request(request)
            assert set(scheduler.requests) == before
            return
        self.world.add(request)
        self.num_requests += 1

    @precondition(lambda self: self.world.may_schedule)
    @rule(by_force=st.booleans())
    def schedule(self, by_force):
        with preempting(self.world.scheduler) if by_force else nullcontext():
            self.world.schedule()

    @precondition(lambda self: self.world.plans)
    @rule()
    def update(self):
        self.world.update()

    @precondition(lambda self: self.world.may_schedule)
    @rule()
    def step(self):
        self.world.step()

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(data=st.data())
    def end(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.world.scheduler.requests)))
        status = data.draw(
            st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
        )
        self.world.scheduler.finish_requests(request_id, status)
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
        to_the_end(self.world, self.world.step, 1000)


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)
TestSchedulerMachine = pytest.mark.net(SchedulerMachine.TestCase)


# -- every interleaving


def fingerprint(world: World, num_added: int) -> tuple:
    """The state that the future depends on: equal states need to be explored once."""
    scheduler = world.scheduler
    blocks: dict[int, int] = {}  # by order of appearance: which block it is does not matter

    def name(block_id: int) -> int:
        return blocks.setdefault(block_id, len(blocks))

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
            tuple(name(b) for ids in scheduler.kv_memory.get_tables(request_id) for b in ids),
        )
        for request_id, request in sorted(scheduler.requests.items())
    )
    cache = scheduler.kv_memory.cache
    cached = ()
    if cache is not None:
        group = lambda prefix: getattr(prefix, "group", 0)  # noqa: E731
        found = cache.cached_prefixes()
        cached = tuple(sorted((group(p), p.token_ids, p.num_users) for p in found))
    order = (tuple(scheduler.running), tuple(r.request_id for r in scheduler.waiting))
    plans = [tuple(plan.num_scheduled_tokens.items()) for plan in world.plans]
    ready = tuple(getattr(scheduler, "_ready", ()))  # with several steps in flight
    return (num_added, states, order, cached, tuple(plans), ready, *_batches(scheduler))


def _batches(scheduler) -> tuple:
    """The additional state of the prefill-first scheduler."""
    if not isinstance(scheduler, PrefillFirstScheduler):
        return ()
    last = scheduler.last_batch
    batches = [
        (batch.forward_mode, [r.request_id for r in batch.reqs if not r.is_finished])
        for batch in (scheduler.running_batch, last)
    ]
    cut = scheduler.chunked_req and scheduler.chunked_req.request_id
    ratio = round(scheduler.new_token_ratio, 1)
    return (str(batches), cut, scheduler._num_prefills_in_a_row, ratio)


def successors(world: World, num_added: int, prompts: list[tuple[list[int], int, int]]):
    """Every action that is possible now, each on a copy."""

    def then(action) -> World:
        other = copy.deepcopy(world)
        action(other)
        return other

    if num_added < len(prompts):
        tokens, max_tokens, priority = prompts[num_added]
        request = Request.from_tokens(f"r{num_added}", tokens, max_tokens, priority, 0.0)
        yield then(lambda other: other.add(request)), num_added + 1
    if world.may_schedule:
        yield then(lambda other: other.schedule()), num_added
        if world.scheduler.running:
            yield then(_preempt), num_added
    if world.plans:
        yield then(lambda other: other.update()), num_added
    for request_id in world.scheduler.requests:
        for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED):
            yield (
                then(lambda other, r=request_id, s=status: other.scheduler.finish_requests(r, s)),
                num_added,
            )


def _preempt(world: World) -> None:
    """Between two steps; in one, if the scheduler has batches to keep."""
    scheduler = world.scheduler
    if not isinstance(scheduler, PreemptiveScheduler):
        return world.schedule()
    if isinstance(scheduler, Scheduler):
        return scheduler.preempt(scheduler.running[next(reversed(scheduler.running))])
    with preempting(scheduler):
        world.schedule()


@pytest.mark.net
@pytest.mark.parametrize(
    ("cache", "kind", "policy", "share"),
    [
        (None, Scheduler, "fcfs", 1),
        (None, Scheduler, "priority", 0.8),
        (None, PrefillFirstScheduler, "fcfs", 0.75),
        pytest.param(None, Scheduler, "priority", 1, marks=pytest.mark.slow),
        pytest.param(None, PrefillFirstScheduler, "fcfs", 1, marks=pytest.mark.slow),
        pytest.param("hash", Scheduler, "fcfs", 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests_in_five_blocks(cache, kind, policy, share):
    """Add, schedule, update, preempt, abort, stop, in every order; or on from a `share` of the
    states. From every seventh reachable state, every request is run to the end."""
    prompts = [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)]
    world = World(
        make_memory(cache, 5 if kind is Scheduler else 9, 2),  # this one sets memory aside
        kind,
        policy=policy,
        max_num_seqs=2,
        max_num_batched_tokens=5,
        max_preemptions=2,
    )
    _explore(world, prompts, share)


@pytest.mark.net
@pytest.mark.parametrize("cache", [None, pytest.param("hash", marks=pytest.mark.slow)])
def test_every_interleaving_with_a_new_request_that_displaces_another(cache, monkeypatch):
    """Trap 60. The third is the most urgent and finds two running: in every state in which the
    memory is asked whether it can replace one, the answer is tried, and both answers occur."""
    answers: Counter[bool] = Counter()
    checked = AnswersAreChecked.can_allocate

    def counted(self, request, num_tokens, computed, num_watermark_blocks=0, freeing=None) -> bool:
        answer = checked(self, request, num_tokens, computed, num_watermark_blocks, freeing)
        if freeing is not None:
            answers[answer] += 1
        return answer

    monkeypatch.setattr(AnswersAreChecked, "can_allocate", counted)
    prompts = [([0, 1, 1], 4, 1), ([2, 3, 2], 3, 2), ([1, 0, 0, 1, 1], 1, 0)]
    memory = make_memory(cache, 5, 2)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 7, "max_preemptions": 2}
    _explore(World(memory, policy="priority", **options), prompts)
    assert min(answers[True], answers[False]) > 0, answers


def _explore(world: World, prompts: list[tuple[list[int], int, int]], share: float = 1) -> None:
    """All states that are reached are checked, and a `share` of them leads on."""
    rng = random.Random(1)
    seen = {fingerprint(world, 0)}
    frontier = [(world, 0)]
    kinds: Counter[str] = Counter()
    for _ in as_long_as(lambda: frontier, max_rounds=200_000):
        world, num_added = frontier.pop()
        for other, count in successors(world, num_added, prompts):
            state = fingerprint(other, count)
            if state in seen:
                continue
            seen.add(state)
            if other.is_settled:
                _check_without_bound(other)
            if isinstance(world.scheduler, PreemptiveScheduler):
                was_preempted = any(r.num_preemptions for r in other.scheduler.requests.values())
                kinds["preempted"] += was_preempted
            kinds["planned"] += bool(other.plans)
            kinds["side by side"] += len(other.scheduler.running) > 1
            if len(seen) % 7 == 0:  # liveness: most states share their ends
                _run_to_the_end(copy.deepcopy(other))
            if rng.random() < share:
                frontier.append((other, count))
    assert len(seen) > 400 and min(kinds.values()) > 50, kinds


def _check_without_bound(world: World) -> None:
    world.scheduler.check_invariants()
    world.scheduler.kv_memory.check_invariants(world.scheduler.running.values())


def _run_to_the_end(world: World) -> None:
    to_the_end(world, world.advance, 60)
    for request, _ in world.finished.values():
        outputs = world.outputs[request.request_id]
        assert outputs == continuation(request.prompt_token_ids, len(outputs), VOCAB)


class NothingIsRoutine(Scheduler):
    def fast_path_end(self, request: Request) -> int:
        return -1


@pytest.mark.net
@pytest.mark.parametrize("seed", range(30))
def test_the_fast_path_plans_the_same_step_as_the_slow_path(seed):
    """The same requests, tokens and abortions: every plan, message and result of the two is equal,
    with full pools, priorities, ends at stop tokens, errors, and blocks of one token."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 16])
    limits = {"max_num_seqs": rng.choice([2, 5, 9]), "max_num_batched_tokens": rng.choice([12, 60])}
    limits |= {"block_size": size, "num_gpu_blocks": 2 + rng.choice([40, 90, 300]) // size}
    limits |= {"policy": rng.choice(["fcfs", "priority"]), "preempt_every": rng.choice([None, 3])}
    both = make_scheduler(Scheduler, **limits), make_scheduler(NothingIsRoutine, **limits)
    num_fast_path = 0
    for step in range(80):
        if rng.random() < 0.3:
            params = SamplingParams(
                temperature=0, max_tokens=rng.randint(1, 30), stop_token_ids=[3]
            )
            prompt = [rng.randrange(9) for _ in range(rng.randint(1, 10))]
            for scheduler in both:
                new = Request(str(step), prompt, params, (2,), float(step), step % 3)
                scheduler.add_request(new)
        plans = [scheduler.schedule() for scheduler in both]
        shown = [
            (
                *(p.num_scheduled_tokens, p.start_positions, p.scheduled_new_reqs),
                *(p.scheduled_cached_reqs, p.finished_req_ids, p.block_moves),
                *([r.request_id for r in p.preempted_requests], p.num_kv_blocks_in_use),
            )
            for p in plans
        ]
        assert shown[0] == shown[1], (seed, step)
        plan = plans[0]
        num_fast_path += sum(
            r.num_computed_tokens <= r.fast_path_until + 1 for r in plan.scheduled_requests
        )
        if plan.num_scheduled_tokens and rng.random() < 0.1:
            aborted = rng.choice(list(plan.num_scheduled_tokens))
            for scheduler in both:
                scheduler.abort_request(aborted)
        token_ids, errors = {}, {}
        for request in plan.scheduled_requests:
            if request.num_computed_tokens == request.num_tokens and rng.random() < 0.98:
                token_ids[request.request_id] = [rng.randrange(60)]
            elif request.num_computed_tokens == request.num_tokens:
                errors[request.request_id] = "bad"
        results = []
        for scheduler, output in zip(both, plans, strict=True):
            copies = {name: list(tokens) for name, tokens in token_ids.items()}
            results.append(
                list(scheduler.update_from_output(output, StepOutput(copies, errors=errors)))
            )
            scheduler.check_invariants()
        assert results[0] == results[1], (seed, step)
    assert both[0].get_stats() == both[1].get_stats()
    assert num_fast_path or size < 3
