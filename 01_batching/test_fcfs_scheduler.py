"""The scheduler under a runner that knows only what it is told.

`MirrorRunner` rebuilds every request from the deltas in the plans, as a runner in another process
would. A state machine adds, aborts and steps at random, and compares the two after every plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fcfs_scheduler import FCFSScheduler
from request import Request, RequestStatus, SamplingParams
from scheduler_interface import ComputedBlocks, SchedulerOutput, UnlimitedKVMemory

EOS, STOP, VOCAB_SIZE = 0, 1, 9


def next_token(token_ids: list[int]) -> int:
    """The fake model: any change of any token, or of their number, changes what follows."""
    return random.Random(repr(token_ids)).randrange(VOCAB_SIZE)


def continuation(prompt: list[int], params: SamplingParams, max_tokens: int) -> list[int]:
    """What the fake model says to a request that is alone in the world."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


class MirrorRunner:
    """Knows requests only from `NewRequestData` and `CachedRequestData`."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.num_prompt: dict[str, int] = {}

    def take(self, plan: SchedulerOutput) -> None:
        for req_id in plan.finished_req_ids:
            for known in (self.token_ids, self.num_computed, self.num_prompt):
                del known[req_id]  # KeyError: finished twice, or never sent
        order = []
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.token_ids, "sent as new twice"
            self.token_ids[new.req_id] = list(new.prompt_token_ids)
            self.num_computed[new.req_id] = new.num_computed_tokens
            self.num_prompt[new.req_id] = len(new.prompt_token_ids)
            order.append(new.req_id)
        cached = plan.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "chapter 1 does not preempt"
        for i, req_id in enumerate(cached.req_ids):
            self.token_ids[req_id] += cached.new_token_ids[i]
            assert cached.num_computed_tokens[i] == self.num_computed[req_id]
            num_outputs = len(self.token_ids[req_id]) - self.num_prompt[req_id]
            assert cached.num_output_tokens[i] == num_outputs
            order.append(req_id)
        assert order == list(plan.num_scheduled_tokens)
        assert order == [request.request_id for request in plan.scheduled_requests]
        for req_id, num_tokens in plan.num_scheduled_tokens.items():
            assert num_tokens >= 1
            self.num_computed[req_id] += num_tokens

    def sample(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        sampled = {}
        for req_id in plan.num_scheduled_tokens:
            assert self.num_computed[req_id] == len(self.token_ids[req_id]), "not caught up"
            sampled[req_id] = [next_token(self.token_ids[req_id])]
        return sampled

    def must_equal(self, plan: SchedulerOutput) -> None:
        for request in plan.scheduled_requests:
            assert self.token_ids[request.request_id] == request.all_token_ids
            assert self.num_computed[request.request_id] == request.num_computed_tokens


class CountedMemory(UnlimitedKVMemory):
    """Positions reserved for each request, out of `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.capacity - sum(self.reserved.values())

    def fits_when_empty(self, num_tokens: int) -> bool:
        return num_tokens <= self.capacity

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        have = self.reserved.get(request.request_id, 0)
        need = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        need += computed.num_tokens if computed is not None else 0
        if need - have > self.num_free:
            return False
        self.reserved[request.request_id] = max(have, need)
        return True

    def free(self, request: Request) -> None:
        self.reserved.pop(request.request_id, None)


class RememberingMemory(UnlimitedKVMemory):
    """Answers every look-up from `known`, and writes down what it is asked."""

    def __init__(self) -> None:
        self.known: dict[str, ComputedBlocks] = {}
        self.calls: list[tuple] = []

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        self.calls.append(("look up", request.request_id))
        return self.known.get(request.request_id, ComputedBlocks())

    def allocate_slots(self, request, num_new_tokens, num_lookahead_tokens=0, computed=None):
        num_known = computed.num_tokens if computed is not None else 0
        self.calls.append(("allocate", request.request_id, num_new_tokens, num_known))
        return True

    def cache_blocks(self, request: Request) -> None:
        written = request.num_computed_tokens
        self.calls.append(("cache", request.request_id, written, request.num_tokens))

    def wait_for_loads(self) -> None:
        self.calls.append(("wait",))


def test_what_is_known_is_looked_up_before_the_work_is_sized():
    """Trap 4: of 13 tokens 12 are cached, so one is scheduled, and fits a budget of one."""
    memory = RememberingMemory()
    memory.known["a"] = ComputedBlocks(num_tokens=12)
    scheduler = FCFSScheduler(max_num_batched_tokens=14, kv_memory=memory)
    scheduler.add_request(Request.from_tokens("a", range(13), 3))
    scheduler.add_request(Request.from_tokens("b", range(13), 3))
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 13}
    assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [12, 0]
    assert memory.calls[:2] == [("look up", "a"), ("allocate", "a", 1, 12)]
    assert scheduler.requests["a"].num_cached_tokens == 12
    scheduler.update_from_output(plan, {"a": [5], "b": [6]})
    scheduler.check_invariants()


def test_kv_is_shared_after_the_forward_pass_and_before_the_token_is_known():
    memory = RememberingMemory()
    scheduler = FCFSScheduler(kv_memory=memory)
    scheduler.add_request(Request.from_tokens("a", range(4), 2))
    plan = scheduler.schedule()
    assert not [call for call in memory.calls if call[0] == "cache"]
    scheduler.update_from_output(plan, {"a": [9]})
    assert memory.calls[-1] == ("cache", "a", 4, 4)


def test_an_aborted_request_is_not_shared():
    memory = RememberingMemory()
    scheduler = FCFSScheduler(kv_memory=memory)
    scheduler.add_request(Request.from_tokens("a", range(4), 2))
    plan = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.update_from_output(plan, {"a": [9]})
    assert not [call for call in memory.calls if call[0] == "cache"]


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_request_whose_kv_is_on_its_way_is_passed_over(is_loading):
    memory = RememberingMemory()
    memory.known["a"] = ComputedBlocks(is_ready=False, is_loading=is_loading)
    scheduler = FCFSScheduler(kv_memory=memory)
    for name in "abc":
        scheduler.add_request(Request.from_tokens(name, range(4), 2))
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["b", "c"]
    waiting = RequestStatus.WAITING_FOR_REMOTE_KVS if is_loading else RequestStatus.WAITING
    assert scheduler.requests["a"].status == waiting
    scheduler.update_from_output(plan, {"b": [5], "c": [6]})
    scheduler.check_invariants()
    memory.known["a"] = ComputedBlocks(num_tokens=3)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert scheduler.requests["a"].status == RequestStatus.RUNNING


def test_a_loading_request_can_be_aborted():
    memory = RememberingMemory()
    memory.known["a"] = ComputedBlocks(is_ready=False, is_loading=True)
    scheduler = FCFSScheduler(kv_memory=memory)
    scheduler.add_request(Request.from_tokens("a", range(4), 2))
    assert scheduler.schedule().is_empty
    scheduler.abort_request("a")
    assert not scheduler.has_unfinished_requests() and not scheduler.waiting
    scheduler.check_invariants()


def test_the_scheduler_waits_for_kv_only_if_there_is_nothing_else_to_do():
    memory = RememberingMemory()
    memory.known["a"] = ComputedBlocks(is_ready=False, is_loading=True)
    scheduler = FCFSScheduler(kv_memory=memory)
    scheduler.add_request(Request.from_tokens("a", range(4), 2))
    scheduler.schedule()
    assert memory.calls[-1] == ("wait",)
    scheduler.add_request(Request.from_tokens("b", range(4), 2))
    scheduler.schedule()
    assert memory.calls.count(("wait",)) == 1


def snapshot(scheduler: FCFSScheduler) -> tuple:
    memory = scheduler.kv_memory
    return (
        [r.request_id for r in scheduler.waiting],
        list(scheduler.running),
        set(scheduler._finished_req_ids),
        dict(scheduler._num_sent),
        dict(memory.reserved) if isinstance(memory, CountedMemory) else None,
        [(repr(r), r.max_tokens, list(r.all_token_ids)) for r in scheduler.requests.values()],
    )


def refused(scheduler: FCFSScheduler, request: Request, match: str) -> None:
    """Adding raises `ValueError`, and has changed neither the scheduler nor the request."""
    before = snapshot(scheduler), repr(request), request.max_tokens
    with pytest.raises(ValueError, match=match):
        scheduler.add_request(request)
    assert (snapshot(scheduler), repr(request), request.max_tokens) == before


class FCFSMachine(RuleBasedStateMachine):
    """Between any two rules the scheduler is either between two steps (`plan` is None) or between
    `schedule` and `update_from_output`."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        max_model_len=st.none() | st.integers(6, 14),
        capacity=st.integers(8, 40),
    )
    def start(self, max_num_seqs, budget, max_model_len, capacity):
        self.memory = CountedMemory(capacity)
        self.scheduler = FCFSScheduler(max_num_seqs, budget, max_model_len, self.memory)
        self.runner = MirrorRunner()
        self.requests: dict[str, Request] = {}  # all that were ever accepted
        self.num_scheduled: dict[str, int] = {}
        self.to_be_reported: set[str] = set()  # ended, and the runner has not been told
        self.queue: list[str] = []  # arrival order of those that wait
        self.plan: SchedulerOutput | None = None

    @rule(
        prompt=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=13),
        max_tokens=st.integers(1, 6),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), (STOP,)]),
    )
    def add(self, prompt, max_tokens, ignore_eos, stop):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop)
        request = Request(str(len(self.requests)), prompt, params, eos_token_ids=[EOS])
        room = (self.scheduler.max_model_len or 10**9) - len(prompt)
        if len(prompt) > self.scheduler.max_num_batched_tokens:
            refused(self.scheduler, request, "must fit one step|max_model_len")
        elif room < 1:
            refused(self.scheduler, request, "max_model_len")
        elif len(prompt) + min(max_tokens, room) - 1 > self.memory.capacity:
            refused(self.scheduler, request, "do not fit the KV memory")
        else:
            self.scheduler.add_request(request)
            assert request.max_tokens == min(max_tokens, room)
            self.requests[request.request_id] = request
            self.num_scheduled[request.request_id] = 0
            self.queue.append(request.request_id)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def a_duplicate_is_refused(self, data):
        req_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        refused(self.scheduler, Request.from_tokens(req_id, [2], 1), "is unfinished")

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        """At any moment, between `schedule` and `update_from_output` too; of any request, also one
        that has finished."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if request.is_finished:
            before = snapshot(self.scheduler)
            self.scheduler.abort_request(request.request_id)
            assert snapshot(self.scheduler) == before
            return
        self.scheduler.abort_request(request.request_id)
        assert request.status == RequestStatus.FINISHED_ABORTED
        self.ended(request)

    @rule()
    def an_unknown_id_is_ignored(self):
        before = snapshot(self.scheduler)
        self.scheduler.finish_requests(["nobody", "?"], RequestStatus.FINISHED_ABORTED)
        assert snapshot(self.scheduler) == before

    def ended(self, request: Request) -> None:
        if request.request_id in self.queue:
            self.queue.remove(request.request_id)
        if request.request_id in self.runner.token_ids:
            self.to_be_reported.add(request.request_id)
        computed = request.num_computed_tokens
        assert self.num_scheduled[request.request_id] == computed
        if (
            request.status != RequestStatus.FINISHED_ABORTED
        ):  # total scheduled = prompt + outputs - 1
            assert computed == request.num_prompt_tokens + request.num_output_tokens - 1

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        was_running = list(self.scheduler.running)
        plan = self.plan = self.scheduler.schedule()
        self.runner.take(plan)
        self.runner.must_equal(plan)
        for req_id, num_tokens in plan.num_scheduled_tokens.items():
            self.num_scheduled[req_id] += num_tokens

        assert plan.finished_req_ids == self.to_be_reported
        self.to_be_reported = set()
        assert plan.total_num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        admitted = [new.req_id for new in plan.scheduled_new_reqs]
        assert admitted == self.queue[: len(admitted)], "not in order of arrival"
        self.queue = self.queue[len(admitted) :]
        assert list(plan.num_scheduled_tokens) == admitted + was_running
        assert all(plan.num_scheduled_tokens[req_id] == 1 for req_id in was_running)
        assert plan.is_empty == (not self.scheduler.running)
        if self.queue:
            self.head_must_not_fit(plan)

    def head_must_not_fit(self, plan: SchedulerOutput) -> None:
        head = self.requests[self.queue[0]]
        budget_left = self.scheduler.max_num_batched_tokens - plan.total_num_scheduled_tokens
        assert (
            len(self.scheduler.running) == self.scheduler.max_num_seqs
            or head.num_prompt_tokens > budget_left
            or head.max_num_tokens - 1 > self.memory.num_free
        ), "a request waits although there is room for it"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def update(self):
        plan, self.plan = self.plan, None
        alive = [request for request in plan.scheduled_requests if not request.is_finished]
        frozen = {
            request.request_id: repr(request)
            for request in plan.scheduled_requests
            if request.is_finished
        }
        sampled = self.runner.sample(plan)
        results = self.scheduler.update_from_output(plan, sampled)
        assert [result.request_id for result in results] == [r.request_id for r in alive]
        for result, request in zip(results, alive):
            assert result.new_token_ids == sampled[request.request_id]
            assert result.finish_reason == request.finish_reason
            if request.is_finished:
                self.ended(request)
        assert all(repr(self.requests[req_id]) == state for req_id, state in frozen.items())
        self.scheduler.check_invariants()

    @invariant()
    def outputs_are_those_of_the_request_alone(self):
        for request in self.requests.values():
            alone = continuation(
                request.prompt_token_ids, request.sampling_params, request.max_tokens
            )
            assert request.output_token_ids == alone[: request.num_output_tokens]
            ended = request.is_finished and request.status != RequestStatus.FINISHED_ABORTED
            assert not ended or request.num_output_tokens == len(alone)

    @invariant()
    def counts_and_memory_agree(self):
        unfinished = {i for i, request in self.requests.items() if not request.is_finished}
        running = unfinished - set(self.queue)
        scheduler = self.scheduler
        assert set(scheduler.requests) == unfinished
        assert scheduler.get_request_counts() == (len(running), len(self.queue))
        assert scheduler.get_num_unfinished_requests() == len(unfinished)
        assert scheduler.has_unfinished_requests() == bool(unfinished)
        assert self.memory.reserved == {i: self.requests[i].max_num_tokens - 1 for i in running}
        assert self.memory.num_free >= 0

    def teardown(self):
        """Everybody ends, within a bound, and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.update()
        left = [r for r in self.requests.values() if not r.is_finished]
        for _ in range(sum(request.max_tokens for request in left)):  # one at a time would do
            self.schedule()
            self.update()
        assert not self.scheduler.has_unfinished_requests()
        self.schedule()
        assert not self.runner.token_ids, "the runner was not told of everybody's end"
        assert not self.memory.reserved and not self.scheduler._num_sent


TestFCFSMachine = FCFSMachine.TestCase
TestFCFSMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- readable cases


def make(request_id: str, num_prompt: int, max_tokens: int = 4) -> Request:
    return Request.from_tokens(request_id, list(range(10, 10 + num_prompt)), max_tokens)


def scheduler_with(*requests: Request, **limits) -> FCFSScheduler:
    scheduler = FCFSScheduler(**limits)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def step(scheduler: FCFSScheduler) -> dict[str, int]:
    """One step in which everybody samples token 7. Returns the plan's token counts."""
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, {req_id: [7] for req_id in plan.num_scheduled_tokens})
    scheduler.check_invariants()
    return plan.num_scheduled_tokens


def test_running_requests_get_their_token_before_anyone_is_admitted():
    """Trap 18: a stream of new prompts never stops those already running."""
    scheduler = scheduler_with(make("a", 3, 50), make("b", 3, 50), max_num_batched_tokens=8)
    step(scheduler)
    for i in range(40):
        scheduler.add_request(make(str(i), 6, max_tokens=1))
        assert step(scheduler) == {str(i): 6, "a": 1, "b": 1}


def test_a_short_prompt_does_not_overtake_a_long_one():
    scheduler = scheduler_with(
        make("long", 7, 1), make("longer", 8, 1), make("short", 1, 1), max_num_batched_tokens=8
    )
    assert step(scheduler) == {"long": 7}
    assert step(scheduler) == {"longer": 8}
    assert step(scheduler) == {"short": 1}


def test_running_never_exceeds_max_num_seqs_however_many_arrive_in_one_step():
    """Trap 17: those admitted in this very step count too."""
    scheduler = scheduler_with(*(make(str(i), 2, 3) for i in range(9)), max_num_seqs=3)
    for _ in range(3):  # three waves of three, each three steps long
        assert [len(step(scheduler)) for _ in range(3)] == [3, 3, 3]
        assert scheduler.get_request_counts()[0] == 0
    assert not scheduler.has_unfinished_requests()


def test_a_long_queue_does_not_stop_admission():
    """Trap 23: those who wait are not counted against `max_num_seqs`."""
    scheduler = scheduler_with(*(make(str(i), 2, 1) for i in range(50)), max_num_seqs=2)
    assert step(scheduler) == {"0": 2, "1": 2}
    assert step(scheduler) == {"2": 2, "3": 2}


def test_a_freed_slot_is_taken_in_the_very_next_step():
    scheduler = scheduler_with(
        make("a", 2, 1), make("b", 2, 5), make("c", 3, 5), max_num_seqs=2, max_num_batched_tokens=8
    )
    assert step(scheduler) == {"a": 2, "b": 2}
    assert step(scheduler) == {"c": 3, "b": 1}


def test_the_budget_left_over_by_running_requests_is_the_limit_for_prompts():
    scheduler = scheduler_with(make("a", 4), make("b", 4), max_num_batched_tokens=4)
    assert step(scheduler) == {"a": 4}
    assert step(scheduler) == {"a": 1}  # 3 are left, b needs 4
    scheduler.abort_request("a")
    assert step(scheduler) == {"b": 4}


@pytest.mark.parametrize(
    ("limits", "num_prompt", "max_tokens", "match"),
    [
        ({"max_num_batched_tokens": 8}, 9, 1, "max_num_batched_tokens=8"),
        ({"max_model_len": 8}, 8, 1, "max_model_len=8"),
        ({"kv_memory": CountedMemory(8)}, 5, 5, "9 positions do not fit the KV memory"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(limits, num_prompt, max_tokens, match):
    """Trap 16: it neither waits for ever nor stops the engine, and nobody else notices."""
    scheduler = scheduler_with(make("other", 3), **limits)
    step(scheduler)
    refused(scheduler, make("r", num_prompt, max_tokens), match)
    assert step(scheduler) == {"other": 1}


def test_the_largest_request_that_fits_is_served_to_its_last_token():
    """The last token is sampled and never fed back: it needs no position."""
    memory = CountedMemory(8)
    request = make("r", 5, max_tokens=4)
    scheduler = scheduler_with(request, max_num_batched_tokens=5, kv_memory=memory)
    counts = [step(scheduler) for _ in range(4)]
    assert counts == [{"r": 5}, {"r": 1}, {"r": 1}, {"r": 1}]
    assert request.finish_reason == "length" and request.num_computed_tokens == 8
    assert not memory.reserved


def test_max_model_len_lowers_max_tokens():
    request = make("r", 5, max_tokens=10)
    scheduler = scheduler_with(request, max_model_len=7)
    step(scheduler)
    assert not request.is_finished
    step(scheduler)
    assert (request.finish_reason, request.num_tokens) == ("length", 7)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        FCFSScheduler(**{name: 0})


def test_a_request_that_never_ran_is_not_reported_as_finished():
    scheduler = scheduler_with(make("a", 2), make("b", 2), max_num_seqs=1)
    step(scheduler)
    scheduler.abort_request("b")
    assert scheduler.schedule().finished_req_ids == set()


def test_an_id_can_be_used_again_even_while_its_last_step_is_under_way():
    scheduler = scheduler_with(make("a", 2))
    plan = scheduler.schedule()
    scheduler.abort_request("a")
    again = make("a", 3)
    scheduler.add_request(again)
    assert scheduler.update_from_output(plan, {"a": [7]}) == []
    assert again.output_token_ids == []
    plan = scheduler.schedule()
    assert plan.finished_req_ids == {"a"}  # a runner forgets first, and then takes the new one
    assert [new.prompt_token_ids for new in plan.scheduled_new_reqs] == [again.prompt_token_ids]
    runner = MirrorRunner()
    runner.token_ids = {"a": [1]}
    runner.num_computed, runner.num_prompt = {"a": 1}, {"a": 1}
    runner.take(plan)
    runner.must_equal(plan)


def test_several_tokens_of_one_step_are_cut_behind_the_one_that_finishes():
    """Trap 38, the scheduler's half: what follows the end is not taken."""
    params = SamplingParams(max_tokens=9, stop_token_ids=[5])
    request = Request("r", [2, 3], params)
    scheduler = scheduler_with(request)
    plan = scheduler.schedule()
    (result,) = scheduler.update_from_output(plan, {"r": [8, 5, 8, 8]})
    assert result.new_token_ids == [8, 5] == request.output_token_ids
    assert (result.finish_reason, result.stop_reason) == ("stop", 5)


def test_the_invariants_notice_a_request_that_lags():
    scheduler = scheduler_with(make("a", 2), make("b", 2))
    step(scheduler)
    scheduler.running["a"].num_computed_tokens -= 1
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


# -- n > 1: children share the prompt of their parent


class SharingMemory(CountedMemory):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.forks: list[tuple[str, str, int]] = []

    def fork(self, parent: Request, child: Request) -> None:
        self.forks.append((parent.request_id, child.request_id, child.num_computed_tokens))
        self.reserved[child.request_id] = 0


def child_of(parent: Request, request_id: str, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, parent.prompt_token_ids, params, parent_id=parent.request_id)


def test_a_child_waits_for_its_parents_prompt_and_computes_one_token_of_it():
    memory = SharingMemory(100)
    parent = make("p", 5)
    scheduler = scheduler_with(parent, child_of(parent, "c"), kv_memory=memory)
    assert step(scheduler) == {"p": 5}
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"c": 1, "p": 1}
    assert plan.scheduled_new_reqs[0].num_computed_tokens == 4
    assert memory.forks == [("p", "c", 4)]


def test_a_child_whose_parent_has_ended_computes_its_prompt_itself():
    memory = SharingMemory(100)
    parent = make("p", 5, max_tokens=1)
    scheduler = scheduler_with(parent, child_of(parent, "c"), kv_memory=memory)
    assert step(scheduler) == {"p": 5}
    assert step(scheduler) == {"c": 5}
    assert memory.forks == []


def test_a_fork_that_cannot_be_admitted_is_undone():
    memory = SharingMemory(12)
    parent = make("p", 5, max_tokens=6)  # reserves 10
    child = child_of(parent, "c")
    scheduler = scheduler_with(parent, child, kv_memory=memory)
    step(scheduler)
    assert step(scheduler) == {"p": 1}
    assert memory.forks and memory.reserved == {"p": 10}
    assert child.num_computed_tokens == 0 and child.status == RequestStatus.WAITING
    scheduler.abort_request("p")
    assert step(scheduler) == {"c": 5}
