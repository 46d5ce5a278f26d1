"""Chapter 1's scheduler over blocks: its state machine and its mirror, and what memory adds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from block_delta import PagedRunnerState
from block_pool import BlockPool
from input_batch import RunnerState
from kv_cache_manager import KVCacheManager
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request
from scheduler_interface import CachedRequestData, NewRequestData, SchedulerOutput, StepOutput
from test_fcfs_scheduler import FCFSMachine, MirrorRunner, make, refused, step


def memory_of(num_blocks: int, block_size: int = 1) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks + 1), block_size)


class MirrorOfTables(MirrorRunner):
    """And the block tables."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__()
        self.manager = manager

    def make_state(self) -> RunnerState:
        return PagedRunnerState(max_num_seqs=2, max_blocks_per_request=20)  # rows must grow

    def must_equal(self, plan: SchedulerOutput) -> None:
        super().must_equal(plan)
        assert plan.num_kv_blocks_in_use == self.manager.num_blocks_in_use
        for request in plan.scheduled_requests:
            table = list(self.manager.get_block_ids(request.request_id))
            assert self.state.block_ids(request.request_id) == table
            assert len(table) * self.manager.block_size >= request.num_computed_tokens


class PagedFCFSMachine(FCFSMachine):
    """Chapter 1's machine, every rule of it, with a pool that is often too small."""

    def make(self, max_num_seqs, budget, max_model_len, data) -> None:
        block_size = data.draw(st.integers(1, 5))
        self.memory = memory_of(-(-data.draw(st.integers(8, 40)) // block_size), block_size)
        self.scheduler = PagedFCFSScheduler(self.memory, max_num_seqs, budget, max_model_len)
        self.runner = MirrorOfTables(self.memory)

    def never_fits(self, num_positions: int) -> bool:
        return num_positions > self.memory.capacity

    def num_reserved_blocks(self, request: Request) -> int:
        return -(-(request.max_num_tokens - 1) // self.memory.block_size)

    def can_admit(self, request: Request) -> bool:
        return self.num_reserved_blocks(request) <= self.memory.pool.num_free_blocks

    @invariant()
    def every_request_holds_its_reservation(self):
        running = self.scheduler.running
        for req_id, request in running.items():
            assert len(self.memory.get_block_ids(req_id)) == self.num_reserved_blocks(request)
        held = sum(map(self.num_reserved_blocks, running.values()))
        assert self.memory.num_blocks_in_use == held, "somebody who is not running holds blocks"
        self.memory.check_invariants(running.values())

    def teardown(self):
        super().teardown()
        if hasattr(self, "scheduler"):
            assert self.memory.num_blocks_in_use == 0
            assert not self.scheduler.delta._num_blocks and not self.runner.state.row_of


TestPagedFCFSMachine = PagedFCFSMachine.TestCase
TestPagedFCFSMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# -- readable cases


def scheduler_with(
    memory: KVCacheManager, *requests: Request, **limits: int | None
) -> PagedFCFSScheduler:
    scheduler = PagedFCFSScheduler(memory, **limits)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def test_a_request_that_the_whole_memory_could_not_hold_is_refused_at_once():
    """Trap 16: the request neither waits forever nor stops the engine, and no other request is
    affected."""
    scheduler = scheduler_with(memory_of(8), make("other", 3))
    step(scheduler)
    refused(scheduler, make("r", 5, 5), "9 positions do not fit")
    assert step(scheduler) == {"other": 1}
    shortened = make("s", 5, 5)
    scheduler = scheduler_with(memory_of(8), shortened, max_model_len=9)
    assert shortened.max_tokens == 4, "what the model cuts short needs no memory"


def test_the_largest_request_that_fits_is_served_to_its_last_token():
    """The last token is sampled and never fed back: it needs no position."""
    memory, request = memory_of(8), make("r", 5, max_tokens=4)
    scheduler = scheduler_with(memory, request, max_num_batched_tokens=5)
    counts = [step(scheduler) for _ in range(4)]
    assert counts == [{"r": 5}, {"r": 1}, {"r": 1}, {"r": 1}]
    assert request.finish_reason == "length" and request.num_computed_tokens == 8
    assert memory.num_blocks_in_use == 0


def test_a_plan_says_how_many_blocks_are_held_while_it_runs():
    memory = memory_of(4, block_size=4)
    scheduler = scheduler_with(memory, make("a", 5, 1))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, StepOutput({"a": [7]}))
    assert plan.num_kv_blocks_in_use == 2 and memory.num_blocks_in_use == 0
    assert scheduler.schedule().num_kv_blocks_in_use == 0


def test_an_id_that_is_used_again_gets_its_new_table_sent():
    memory = memory_of(4, block_size=4)
    scheduler = scheduler_with(memory, make("a", 4, 1))
    step(scheduler)
    scheduler.add_request(make("a", 6, 1))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.block_ids == (memory.get_block_ids("a"),) == ([2, 3],)


class Grows(KVCacheManager):
    """Reserves nothing."""

    def allocate_slots(self, request, num_new_tokens, num_reserved_tokens=0):
        return super().allocate_slots(request, num_new_tokens)


def test_blocks_that_come_later_are_sent_when_they_come_each_once():
    """Chapter 4's schedulers take a block when a token needs it. The delta is the same."""
    memory = Grows(BlockPool(9), 2)
    scheduler = scheduler_with(memory, make("a", 3, 9))
    plan = scheduler.schedule()
    assert plan.scheduled_new_reqs[0].block_ids == ([1, 2],)
    sent = []
    for _ in range(5):
        scheduler.update_from_output(plan, StepOutput({"a": [7]}))
        assert memory.allocate_slots(scheduler.requests["a"], 1)
        plan = scheduler.schedule()
        sent.append(plan.scheduled_cached_reqs.new_block_ids)
    #    position  3      4       5      6       7
    assert sent == [[()], [([3],)], [()], [([4],)], [()]]


def test_new_block_ids_in_the_message_are_copies():
    """Trap 9: the manager's table goes on growing."""
    memory = Grows(BlockPool(9), 2)
    scheduler = scheduler_with(memory, make("a", 3, 9))
    plan = scheduler.schedule()
    assert memory.allocate_slots(scheduler.requests["a"], 4)
    assert plan.scheduled_new_reqs[0].block_ids == ([1, 2],)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must be .*>= 1, got 0"):
        PagedFCFSScheduler(memory_of(8), **{name: 0})


# -- what the runner keeps of it


def test_a_table_that_is_sent_whole_replaces_the_one_that_was_known():
    """A request that was preempted comes back with other blocks, fewer perhaps."""
    state = PagedRunnerState(max_num_seqs=1, max_blocks_per_request=4)
    params = make("a", 1).sampling_params
    state.apply(SchedulerOutput([NewRequestData("a", [1, 2], params, 0, ([5, 6, 7],))]))
    plan = SchedulerOutput()
    cached = plan.scheduled_cached_reqs
    cached.req_ids, cached.new_token_ids, cached.new_block_ids = ["a"], [[1, 2, 9]], [([8, 5],)]
    cached.num_computed_tokens, cached.num_output_tokens = [0], [1]
    cached.resumed_req_ids = {"a"}
    state.apply(plan)
    assert state.block_ids("a") == [8, 5]
    cached.new_token_ids, cached.new_block_ids, cached.resumed_req_ids = [[4]], [([3],)], set()
    cached.num_output_tokens = [2]
    state.apply(plan)
    assert state.block_ids("a") == [8, 5, 3]
    assert state.requests["a"].output_token_ids == [9, 4]


@pytest.mark.parametrize("known", [[], [8], [8, 9], [8, 9, 10]])
@pytest.mark.parametrize("sent", [[], [10], [11, 12], [3, 8, 9], [1, 2, 3, 8, 9, 10], [1, 2, 3]])
@pytest.mark.parametrize("num_outputs", range(5))
def test_tokens_overlay_those_that_are_known_as_in_chapter_1(known, sent, num_outputs):
    """The sent tokens start at an earlier output, within the prompt, or at 0. Later known tokens
    are dropped."""
    if not -3 <= num_outputs - len(sent) <= len(known):
        return
    states = RunnerState(), PagedRunnerState(max_num_seqs=1, max_blocks_per_request=1)
    new = [NewRequestData(name, [1, 2, 3], make(name, 1).sampling_params) for name in "ab"]
    first = CachedRequestData([*"ba"], [[8], known], [0, 0], [1, len(known)], [(), ()])
    second = CachedRequestData([*"ab"], [sent, [9]], [0, 0], [num_outputs, 2], [(), ()])
    for state in states:
        state.apply(SchedulerOutput(new))
        for changes in (first, second):
            state.apply(SchedulerOutput(scheduled_cached_reqs=changes))
    lists, rows = ({n: r.output_token_ids for n, r in s.requests.items()} for s in states)
    assert rows == lists
    assert rows["b"] == [8, 9] and len(rows["a"]) == num_outputs
