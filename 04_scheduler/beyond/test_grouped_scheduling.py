"""Chapter 4's scheduler over tables in groups: every interleaving of small runs, with a model that
looks at what it reads in each group."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import ClassVar

import pytest

from block_pool import BlockPool
from cached_grouped_memory import CachedGroupedMemory
from fake_model import FakeModelRunner
from grouped_kv_memory import GroupedKVMemory, max_blocks, max_window_blocks
from kv_memory import ComputedBlocks, SharingRunnerState
from request import Request, SamplingParams
from scheduler import Scheduler
from scheduler_interface import StepOutput
from test_scheduler_runs import VOCAB, AnswersAreChecked, World, _explore
from unchunked import ChunkToBudget


class Checked(AnswersAreChecked, GroupedKVMemory):
    checks_all = True


class CheckedCache(AnswersAreChecked, CachedGroupedMemory):
    """And every hit is the longest that brute force finds."""

    checks_all = True
    hits: ClassVar[Counter[str]] = Counter()  # of all copies

    def get_computed_blocks(self, request, wait_for_others=True):
        found = super().get_computed_blocks(request, wait_for_others)
        if isinstance(found, ComputedBlocks):
            known = {(k.group, k.token_ids) for k in self.cache.cached_prefixes()}
            tokens, size = request.all_token_ids, self.block_size
            holding = [
                end
                for end in range(0, len(tokens), size)
                if all(
                    (group, tuple(tokens[:stop])) in known
                    for group, window in enumerate(self.windows)
                    for stop in range(size, end + 1, size)
                    if window is None or stop > end - window + 1
                )
            ]
            assert found.num_tokens == holding[-1], (request, found)
            self.hits[f"{found.num_tokens} tokens"] += 1
        return found


class GroupedModelRunner(FakeModelRunner):
    """The first group sees everything and makes the tokens. In the others each query must find, in
    the slots of its window, what was written for these very positions of its own request."""

    def __init__(self, block_size: int, windows: list[int | None]) -> None:
        super().__init__(block_size, VOCAB, SharingRunnerState(4, 64, len(windows)))
        self.windows = windows

    def _compute(self, req_id, tokens, start, stop, written):
        predicted = super()._compute(req_id, tokens, start, stop, written)
        size = self.block_size
        for group, window in enumerate(self.windows):
            block_ids = self.state.block_ids(req_id, group=group)
            slots = [block_ids[p // size] * size + p % size for p in range(stop)]
            if group:
                assert written.isdisjoint(slots[start:])
                written.update(slots[start:])
                for position in range(start, stop):
                    self._kv[slots[position]] = hash((group, *tokens[: position + 1]))
                for query in range(start, stop):
                    for seen in range(max(0, query - window + 1), query + 1):
                        expected = hash((group, *tokens[: seen + 1]))
                        assert self._kv.get(slots[seen]) == expected, (req_id, query, seen)
        return predicted


@pytest.mark.parametrize(
    ("windows", "num_blocks", "share"),
    [
        ([None, 3], 9, 1),
        pytest.param([None, 3], 11, 1, marks=pytest.mark.slow),
        pytest.param([None, 2, 4], 14, 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests(windows, num_blocks, share):
    memory = Checked(BlockPool(num_blocks + 1), 2, windows, max_step_tokens=5)
    _explore(make_world(memory), [([0, 1, 1], 4, 1), ([0, 1, 2, 3], 3, 0), ([0, 1], 5, 1)], share)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "share"),
    [
        ([None, 4], 10, 0.85),
        pytest.param([None, 4], 10, 1, marks=pytest.mark.slow),
        pytest.param([None, 3], 13, 1, marks=pytest.mark.slow),
        pytest.param([None, 2, 4], 16, 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_with_a_prefix_cache(windows, num_blocks, share):
    memory = CheckedCache(BlockPool(num_blocks + 1), 2, windows, max_step_tokens=5)
    CheckedCache.hits.clear()
    prompts = [([0, 1, 1, 0, 2], 4, 1), ([0, 1, 1, 3], 4, 0), ([2, 1], 5, 1)]
    _explore(make_world(memory), prompts, share)
    assert min(CheckedCache.hits[f"{n} tokens"] for n in (0, 2, 4, 6)) > 20, CheckedCache.hits


@pytest.mark.parametrize(
    ("windows", "num_blocks"), [([5], 5), ([5], 6), ([None, 5], 18), ([None, 5], 22)]
)
@pytest.mark.parametrize("length", [13, 14, 17])
def test_a_request_that_cannot_be_preempted_again_shares_no_window(windows, num_blocks, length):
    """Two requests with one prompt, in memory for hardly one, each preempted as often as allowed.
    Blocks that leave the window of one must be free then, because the other cannot be a victim.
    Their answers differ, so that they share no prefix again."""
    memory = CachedGroupedMemory(BlockPool(num_blocks + 1), 4, windows, 4)
    limits = {"max_num_batched_tokens": 4, "max_preemptions": 1, "max_model_len": 64}
    scheduler = Scheduler(kv_memory=memory, max_num_seqs=8, chunk_policy=ChunkToBudget(), **limits)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    requests = {name: Request(name, list(range(length)), params) for name in "ab"}
    for request in requests.values():
        scheduler.add_request(request)
    for _ in range(200):
        for name, request in requests.items():
            if request.num_preemptions == 0 and name in scheduler.running:
                scheduler.preempt(request)
        plan = scheduler.schedule()
        sampled = {}
        for request, start in zip(plan.scheduled_requests, plan.start_positions):
            name = request.request_id
            if start + plan.num_scheduled_tokens[name] == request.num_tokens:
                sampled[name] = [request.num_tokens + {"a": 1000, "b": 5000}[name]]
        scheduler.update_from_output(plan, StepOutput(token_ids=sampled))
        memory.check_invariants(scheduler.running.values())
        if not scheduler.has_unfinished_requests():
            break
    assert not scheduler.has_unfinished_requests() and memory.num_blocks_in_use == 0


def make_world(memory: GroupedKVMemory) -> World:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 5, "max_preemptions": 2}
    world = World(memory, policy="fcfs", **limits)
    world.runner = GroupedModelRunner(memory.block_size, memory.windows)
    return world


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_request_of_any_length_holds_only_the_blocks_of_its_window(window: int, block_size: int):
    """With chunks that begin anywhere. The bound is met, and the pool need not be larger."""
    step, length = 4, 60
    num_blocks = max_blocks(length, block_size, [window], step)
    memory = GroupedKVMemory(BlockPool(num_blocks + 1), block_size, [window], step)
    assert memory.capacity >= length
    highest = 0
    for first in range(1, step + 1):
        request = Request.from_tokens("a", [0] * length, 1)
        starts = [0, *range(first, length, step), length]
        for start, stop in pairwise(starts):
            request.num_computed_tokens = start
            assert memory.allocate_slots(request, stop - start)
            memory.check_invariants([request])
            held = memory.num_blocks_in_use
            seen = stop - max(0, start - window + 1)
            assert held >= -(-seen // block_size)
            highest = max(highest, held)
        memory.free(request)
        memory.check_invariants()
        assert memory.pool.num_free_blocks == num_blocks and not memory.pop_table_updates()
    assert num_blocks - 1 <= highest <= num_blocks


def test_the_example_of_the_page():
    """Blocks of 4 and a window of 6: which blocks are held, by their places in the table."""
    memory = GroupedKVMemory(BlockPool(6), 4, [6], 4)
    request, held = Request.from_tokens("a", [0] * 20, 1), []
    for start, stop in pairwise([0, 4, 8, 10, 11, 12, 13, 14]):
        request.num_computed_tokens = start
        assert memory.allocate_slots(request, stop - start)
        held.append([i for i, block_id in enumerate(memory.get_block_ids("a")) if block_id])
    assert held == [[0], [0, 1], [0, 1, 2], [1, 2], [1, 2], [1, 2, 3], [2, 3]]
    assert [(m.block_index, m.block_id) for m in memory.pop_table_updates()] == [(0, 0), (1, 0)]
    assert not memory.pop_table_updates()
    request.num_computed_tokens = 14
    assert memory.allocate_slots(request, 4)  # it gives up the third
    memory.clear()
    assert not memory.pop_table_updates()
    assert (max_window_blocks(1024, 16, 1), max_window_blocks(1024, 16, 2048)) == (65, 193)


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_reserved_blocks_are_never_allocated_to_others(window: int):
    """Another one asks for all there is, before each step."""
    step, length, size = 4, 50, 3
    whole = max_blocks(length, size, [None, window], step)
    memory = GroupedKVMemory(BlockPool(whole + 1), size, [None, window], step)
    one, other = Request.from_tokens("a", [0] * length, 1), Request.from_tokens("b", [0] * 99, 1)
    assert memory.allocate_slots(one, 3, length - 3)
    for start in range(3, length, step):
        while memory.allocate_slots(other, 1):
            other.num_computed_tokens += 1
        if len(memory.get_tables("a")[1]) * size < length:
            assert other.num_computed_tokens == 0, "it has got what was given up"
        one.num_computed_tokens = start
        assert memory.allocate_slots(one, min(step, length - start))
        memory.check_invariants([one, other])
    memory.free(one)
    one.num_computed_tokens = 0
    assert memory.allocate_slots(one, 1) and list(map(len, memory.get_tables("a"))) == [1, 1]


class InFours(ChunkToBudget):
    def num_tokens_to_schedule(self, request, num_uncomputed_tokens, budget, max_step_tokens):
        return min(num_uncomputed_tokens, budget, 4)


@pytest.mark.parametrize("num_missing", [0, 1])
def test_blocks_for_the_rest_of_a_chunked_prompt_are_kept_free_in_every_group(num_missing: int):
    """4 of 12 tokens have blocks, 2 in each group; the other 8 need 4 blocks in each. A new request
    needs 1 in each."""
    memory = GroupedKVMemory(BlockPool(1 + 4 + 8 + 2 - num_missing), 2, [None, 3], 8)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "watermark": 0.0}
    scheduler = Scheduler(kv_memory=memory, chunk_policy=InFours(), **limits)
    for name, length in (("cut", 12), ("new", 2)):
        scheduler.add_request(Request.from_tokens(name, [0] * length, 4))
    planned = scheduler.schedule().num_scheduled_tokens
    assert planned == ({"cut": 4} if num_missing else {"cut": 4, "new": 2})


def test_capacity_is_the_longest_that_fits_alone():
    for num_blocks in range(1, 40):
        for windows in ([None, 3], [3], [None, 2, 5], [4, 9]):
            memory = GroupedKVMemory(BlockPool(num_blocks + 1), 2, windows, 3)
            n = memory.capacity
            assert memory.num_blocks_needed(n + 1) > num_blocks or n > 10**6
            assert n == 0 or memory.num_blocks_needed(n) <= num_blocks


def test_a_refusal_gives_up_nothing_that_is_seen():
    memory = GroupedKVMemory(BlockPool(8), 2, [None, 3], 4)
    one, other = Request.from_tokens("a", [0] * 9, 1), Request.from_tokens("b", [0] * 9, 1)
    assert memory.allocate_slots(one, 4) and memory.allocate_slots(other, 2)
    before = memory.get_tables("a"), [*memory.pool.free_order()]
    one.num_computed_tokens = 3
    assert not memory.allocate_slots(one, 2)
    assert (memory.get_tables("a"), [*memory.pool.free_order()]) == before
    one.num_computed_tokens = 4
    assert memory.allocate_slots(one, 1), "its first block of the window is no longer seen"
    ((move,), tables) = memory.pop_table_updates(), memory.get_tables("a")
    assert (move.req_id, move.block_index, move.block_id, move.group) == ("a", 0, 0, 1)
    assert list(map(len, tables)) == [3, 3] and tables[1][0] == 0 and all(tables[0])
    memory.clear()
    memory.check_invariants()
    assert memory.pool.num_free_blocks == 7 and memory.get_tables("a") == ((), ())


def test_a_scheduler_sends_all_tables():
    memory = GroupedKVMemory(BlockPool(30), 2, [None, 3], 8)
    scheduler = Scheduler(2, 8, kv_memory=memory, watermark=0.0)
    scheduler.add_request(Request.from_tokens("a", [0] * 5, 3))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.block_ids == tuple(map(list, memory.get_tables("a"))) and len(new.block_ids) == 2


def test_can_allocate_counts_the_blocks_that_will_be_held():
    """A request of 20 tokens holds at most three blocks of 2, and a victim frees the blocks it
    holds."""
    memory = GroupedKVMemory(BlockPool(6), 2, [3], 2)
    one, victim = Request.from_tokens("a", [0] * 20, 1), Request.from_tokens("b", [0] * 20, 1)
    assert memory.can_allocate(one, 20, ComputedBlocks())
    for start in range(0, 6, 2):
        victim.num_computed_tokens = start
        assert memory.allocate_slots(victim, 2)
    assert list(map(bool, memory.get_block_ids("b"))) == [False, True, True]
    assert memory.can_allocate(one, 20, ComputedBlocks(), 2, victim)
    assert not memory.can_allocate(one, 20, ComputedBlocks(), 3, victim)
