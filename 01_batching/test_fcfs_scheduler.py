"""The scheduler under a runner that knows only what it is told: a state machine adds, aborts and
steps at random, and compares the two after every plan. Chapter 2 runs it over blocks."""

from __future__ import annotations

from pathlib import Path

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

from base_scheduler import DeltaEncoder, SchedulerPlugin
from fcfs_scheduler import FCFSScheduler
from input_batch import RunnerState
from request import Request, RequestStatus, SamplingParams
from scheduler_interface import SchedulerOutput, StepOutput
from step_log import VOCAB_SIZE, Case, StepLog, StepLoop, cases_of, next_token

EOS, STOP = 0, 1


def continuation(request: Request) -> list[int]:
    """The fake model's output for a request that runs alone."""
    tokens = list(request.prompt_token_ids)
    ends = {*request.sampling_params.stop_token_ids, *([EOS] * (EOS in request.end_ids))}
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[request.num_prompt_tokens :]


class MirrorRunner:
    """Knows requests only from the messages of the plans."""

    def __init__(self) -> None:
        self.num_computed: dict[str, int] = {}
        self.state = self.make_state()

    def make_state(self) -> RunnerState:
        return RunnerState()

    def take(self, plan: SchedulerOutput) -> None:
        for req_id in plan.finished_req_ids:
            del self.num_computed[req_id]  # KeyError: finished twice, or never sent
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.num_computed, "sent as new twice"
            self.num_computed[new.req_id] = new.num_computed_tokens
        assert not plan.scheduled_cached_reqs.resumed_req_ids, "chapter 1 does not preempt"
        starts = plan.starts()
        counts = plan.num_scheduled_tokens
        assert list(starts) == list(counts) == [r.request_id for r in plan.scheduled_requests]
        assert list(starts.values()) == plan.start_positions
        assert starts.items() <= self.num_computed.items()
        self.state.apply(plan)
        for req_id, num_tokens in counts.items():
            assert num_tokens >= 1
            self.num_computed[req_id] += num_tokens

    def sample(self, plan: SchedulerOutput) -> StepOutput:
        output = StepOutput()
        for req_id in plan.num_scheduled_tokens:
            tokens = self.state.requests[req_id].tokens(0, 99)
            assert self.num_computed[req_id] == len(tokens), "not caught up"
            output.token_ids[req_id] = [next_token(tokens)]
        return output

    def must_equal(self, plan: SchedulerOutput) -> None:
        assert self.state.requests.keys() == self.num_computed.keys()
        requests = {request.request_id: request for request in plan.scheduled_requests}
        cached = plan.scheduled_cached_reqs
        for name, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            assert num_outputs == requests[name].num_output_tokens
        for request in plan.scheduled_requests:
            known = self.state.requests[request.request_id]
            assert known.tokens(0, request.num_tokens + 1) == request.all_token_ids
            assert known.params is request.sampling_params
            assert self.num_computed[request.request_id] == request.num_computed_tokens


def snapshot(scheduler: FCFSScheduler) -> str:
    delta = scheduler.delta
    known = scheduler.requests.values()
    state = [*scheduler.waiting], [*scheduler.running], delta._finished_req_ids, delta._num_sent
    return repr((state, [(request.max_tokens, request.all_token_ids) for request in known]))


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
        data=st.data(),
    )
    def start(self, max_num_seqs, budget, max_model_len, data):
        self.make(max_num_seqs, budget, max_model_len, data)
        self.requests: dict[str, Request] = {}  # all that were ever accepted
        self.to_be_reported: set[str] = set()  # ended, and the runner has not been told
        self.queue: list[str] = []  # arrival order of those that wait
        self.plan: SchedulerOutput | None = None

    def make(self, max_num_seqs, budget, max_model_len, data) -> None:
        self.scheduler = FCFSScheduler(max_num_seqs, budget, max_model_len)
        self.runner = MirrorRunner()

    def never_fits(self, num_positions: int) -> bool:
        """Whether the memory is too small for `num_positions` even if no other request runs."""
        return False

    def can_admit(self, request: Request) -> bool:
        """Would the memory take this request in, now?"""
        return True

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
            refused(self.scheduler, request, "must fit in one step|max_model_len")
        elif room < 1:
            refused(self.scheduler, request, "max_model_len")
        elif self.never_fits(len(prompt) + min(max_tokens, room) - 1):
            refused(self.scheduler, request, "do not fit")
        else:
            self.scheduler.add_request(request)
            assert request.max_tokens == min(max_tokens, room)
            self.requests[request.request_id] = request
            self.queue.append(request.request_id)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def a_duplicate_is_refused(self, data):
        req_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        refused(self.scheduler, Request.from_tokens(req_id, [2], 1), "must be unique, got")

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        """At any moment; of any request, also one that has finished."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        before = snapshot(self.scheduler) if request.is_finished else ""
        self.scheduler.abort_request(request.request_id)
        if before:
            assert snapshot(self.scheduler) == before
        else:
            assert request.status == RequestStatus.FINISHED_ABORTED
            self.on_finished(request)

    def on_finished(self, request: Request) -> None:
        if request.request_id in self.queue:
            self.queue.remove(request.request_id)
        if request.request_id in self.runner.num_computed:
            self.to_be_reported.add(request.request_id)
        if request.finish_reason in ("stop", "length"):  # scheduled = prompt + outputs - 1
            assert request.num_computed_tokens == request.num_tokens - 1

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        was_running = list(self.scheduler.running)
        plan = self.plan = self.scheduler.schedule()
        self.runner.take(plan)
        self.runner.must_equal(plan)
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
        head = self.requests[self.queue[0]] if self.queue else None
        budget_left = self.scheduler.max_num_batched_tokens - plan.total_num_scheduled_tokens
        assert (
            head is None
            or len(self.scheduler.running) == self.scheduler.max_num_seqs
            or head.num_prompt_tokens > budget_left
            or not self.can_admit(head)
        ), "a request waits although there is room for it"

    @precondition(lambda self: self.plan is not None)
    @rule()
    def update(self):
        self.answer(self.runner.sample(self.plan))

    @precondition(lambda self: self.plan is not None and not self.plan.is_empty)
    @rule(data=st.data())
    def update_with_an_error(self, data):
        output = self.runner.sample(self.plan)
        req_id = data.draw(st.sampled_from(sorted(output.token_ids)))
        del output.token_ids[req_id]
        output.errors[req_id] = "why"
        self.answer(output)

    def answer(self, output: StepOutput) -> None:
        plan = self.plan
        self.plan = None
        scheduled = plan.scheduled_requests
        alive = [request for request in scheduled if not request.is_finished]
        frozen = {r.request_id: repr(r) for r in scheduled if r.is_finished}
        results = self.scheduler.update_from_output(plan, output)
        assert [result.request_id for result in results] == [r.request_id for r in alive]
        for result, request in zip(results, alive):
            assert result.new_token_ids == output.token_ids.get(request.request_id, [])
            assert result.finish_reason == request.finish_reason
            assert (result.finish_reason == "error") == (request.request_id in output.errors)
            if request.is_finished:
                self.on_finished(request)
        assert all(repr(self.requests[req_id]) == state for req_id, state in frozen.items())
        self.scheduler.check_invariants()

    @invariant()
    def outputs_are_those_of_the_request_alone(self):
        for request in self.requests.values():
            alone = continuation(request)
            assert request.output_token_ids == alone[: request.num_output_tokens]
            is_whole = request.finish_reason in ("stop", "length")
            assert not is_whole or request.num_output_tokens == len(alone)

    @invariant()
    def counts_agree(self):
        unfinished = {i for i, request in self.requests.items() if not request.is_finished}
        scheduler = self.scheduler
        num_running = len(unfinished - set(self.queue))
        assert set(scheduler.requests) == unfinished
        assert scheduler.get_request_counts() == (num_running, len(self.queue))
        assert scheduler.has_unfinished_requests() == bool(unfinished)

    def teardown(self):
        """Every request finishes within a bound, and the runner keeps no request."""
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
        assert not self.runner.num_computed, "the runner was not told of everybody's end"
        assert not self.runner.state.requests and not self.scheduler.delta._num_sent


TestFCFSMachine = pytest.mark.net(FCFSMachine.TestCase)
TestFCFSMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# -- decisions, and what a row of their log cannot say


class MirrorLoop(StepLoop):
    """A loop whose runner knows only what it is told."""

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        self.runner.take(plan)
        self.runner.must_equal(plan)
        return self.runner.sample(plan)


@pytest.mark.net
@cases_of(Path(__file__).with_name("fcfs_plans.txt"))
def test_fcfs_plans(case: Case):
    loop = MirrorLoop(FCFSScheduler(**case.options))
    loop.runner = MirrorRunner()
    StepLog(loop).perform(case)


def make(request_id: str, num_prompt: int, max_tokens: int = 4) -> Request:
    return Request.from_tokens(request_id, list(range(10, 10 + num_prompt)), max_tokens)


class HoldsBack(SchedulerPlugin):
    held = "held"

    def can_start(self, request: Request) -> bool:
        return request.request_id != self.held


class Takes(FCFSScheduler):
    taken = ""

    def _allocate(self, request: Request) -> bool:
        self.taken += request.request_id
        return True


@pytest.mark.parametrize("budget", [2, 9])
def test_who_is_held_back_or_finds_no_room_waits_in_its_place(budget):
    """And room is asked for last, since who says yes may have taken it."""
    scheduler = Takes(plugins=[plugin := HoldsBack()], max_num_batched_tokens=budget)
    for name, num_prompt in (("a", 1), ("held", 2), ("b", 1)):
        scheduler.add_request(make(name, num_prompt))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert [request.request_id for request in scheduler.waiting] == ["held", "b"]
    assert scheduler.taken == "a"
    plugin.held = ""
    assert ("held" in scheduler.schedule().num_scheduled_tokens) == (budget == 9)


def test_an_id_can_be_used_again_even_while_its_last_step_is_under_way():
    scheduler, runner = FCFSScheduler(), MirrorRunner()
    scheduler.add_request(make("a", 2))
    runner.take(plan := scheduler.schedule())
    scheduler.abort_request("a")
    scheduler.add_request(again := make("a", 3))
    again.features = {"colour": "red"}
    assert scheduler.update_from_output(plan, StepOutput({"a": [7]})) == []
    assert again.output_token_ids == []
    runner.take(plan := scheduler.schedule())
    assert plan.finished_req_ids == {"a"}  # a runner forgets first, and then takes the new one
    assert [new.features for new in plan.scheduled_new_reqs] == [{"colour": "red"}]
    runner.must_equal(plan)


@pytest.mark.parametrize(("max_tokens", "detail"), [(10, "max_model_len=6"), (1, None)])
def test_max_model_len_lowers_max_tokens_and_it_is_said_when_the_request_ends(max_tokens, detail):
    scheduler = FCFSScheduler(max_num_batched_tokens=5, max_model_len=6)
    scheduler.add_request(make("r", 5, max_tokens))
    (result,) = scheduler.update_from_output(scheduler.schedule(), StepOutput({"r": [7]}))
    assert (result.finish_reason, result.finish_detail) == ("length", detail)


@pytest.mark.parametrize("num_outputs", [0, 1])  # that it has before the runner knows it
def test_the_runner_is_sent_each_token_that_it_lacks_once(num_outputs):
    delta = DeltaEncoder()
    request = make("a", 3, 9)
    request.num_computed_tokens = 2  # not what the runner knows
    for _ in range(num_outputs):
        request.append_output_token(6)
    delta.encode(plan := SchedulerOutput(scheduled_requests=[request]))
    assert plan.scheduled_cached_reqs.req_ids == []  # it is new: all of it is sent
    for tokens in ([], [7], [8, 9], []):
        for token in tokens:
            request.append_output_token(token)
        delta.encode(plan := SchedulerOutput(scheduled_requests=[request]))
        cached = plan.scheduled_cached_reqs
        assert (cached.new_token_ids, cached.num_computed_tokens) == ([tokens], [2])


def test_after_a_lost_plan_the_runner_forgets_all():
    """A request that has finished keeps its row in the runner if the plan that said so was lost."""
    scheduler = FCFSScheduler(max_num_seqs=1)
    runner = RunnerState()
    scheduler.add_request(make("ended", 3))
    runner.apply(scheduler.schedule())
    scheduler.abort_request("ended")
    for name in ("new", "waits"):
        scheduler.add_request(make(name, 3))
    scheduler.schedule()
    scheduler.clear()
    scheduler.check_invariants()
    assert list(scheduler.requests) == ["waits"]
    scheduler.abort_request("waits")
    scheduler.add_request(make("new", 4))  # another one of this name
    runner.apply(plan := scheduler.schedule())
    assert plan.reset and not plan.finished_req_ids
    assert [(name, row.num_tokens) for name, row in runner.requests.items()] == [("new", 4)]
    assert not scheduler.schedule().reset
