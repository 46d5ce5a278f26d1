"""Chapter 4's scheduler over tables in groups: every interleaving of small runs, with a model that
looks at what it reads in each group."""

from __future__ import annotations

import pytest

import test_scheduler_runs as runs
from block_pool import BlockPool
from cache_checks import check_memory
from fake_model import FakeModelRunner
from grouped_kv_memory import GroupedKVMemory
from kv_memory import SharingRunnerState
from request import Request
from scheduler import Scheduler
from scheduler_interface import StepOutput
from unchunked import ChunkToBudget


class Checked(runs.AnswersAreChecked, GroupedKVMemory):
    checks_all = True


class GroupedModelRunner(FakeModelRunner):
    """The first group sees everything and makes the tokens. In the others each query must find, in
    the slots of its window, what was written for these very positions of its own request."""

    def __init__(self, block_size: int, windows: list[int | None]) -> None:
        super().__init__(block_size, runs.VOCAB, SharingRunnerState(4, 64, len(windows)))
        self.windows = windows

    def _compute(self, req_id, tokens, start, stop, written):
        predicted = super()._compute(req_id, tokens, start, stop, written)
        size = self.block_size
        for group, window in enumerate(self.windows[1:], 1):
            block_ids = self.state.block_ids(req_id, group=group)
            slots = [block_ids[p // size] * size + p % size for p in range(stop)]
            assert written.isdisjoint(slots[start:])
            written.update(slots[start:])
            for position in range(start, stop):
                self._kv[slots[position]] = hash((group, *tokens[: position + 1]))
            for query in range(start, stop):
                for seen in range(max(0, query - window + 1), query + 1):
                    expected = hash((group, *tokens[: seen + 1]))
                    assert self._kv.get(slots[seen]) == expected, (req_id, query, seen)
        return predicted


SHARING = [([0, 1, 1, 0, 2], 4, 1), ([0, 1, 1, 3], 4, 0), ([2, 1], 5, 1)]


@pytest.mark.net
@pytest.mark.parametrize(
    ("has_cache", "windows", "num_blocks", "share"),
    [
        (False, [None, 3], 9, 1),
        (True, [None, 4], 10, 0.85),
        pytest.param(False, [None, 3], 11, 1, marks=pytest.mark.slow),
        pytest.param(False, [None, 2, 4], 14, 1, marks=pytest.mark.slow),
        pytest.param(True, [None, 4], 10, 1, marks=pytest.mark.slow),
        pytest.param(True, [None, 3], 13, 1, marks=pytest.mark.slow),
        pytest.param(True, [None, 2, 4], 16, 1, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_of_three_requests(has_cache, windows, num_blocks, share):
    memory = Checked(BlockPool(num_blocks + 1), 2, windows, 5, has_cache)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 5, "max_preemptions": 2}
    world = runs.World(memory, policy="fcfs", **limits)
    world.runner = GroupedModelRunner(memory.block_size, memory.windows)
    runs.explore(world, SHARING if has_cache else runs.PROMPTS, share)


@pytest.mark.parametrize(
    ("windows", "num_blocks"), [([5], 5), ([5], 6), ([None, 5], 18), ([None, 5], 22)]
)
@pytest.mark.parametrize("length", [13, 14, 17])
def test_a_request_that_cannot_be_preempted_again_shares_no_window(windows, num_blocks, length):
    """Two requests with one prompt, in memory for hardly one, each preempted as often as allowed.
    Blocks that leave the window of one must be free then, because the other cannot be a victim.
    Their answers differ, so that they share no prefix again."""
    memory = GroupedKVMemory(BlockPool(num_blocks + 1), 4, windows, 4, has_cache=True)
    limits = {"max_num_batched_tokens": 4, "max_preemptions": 1, "max_model_len": 64}
    scheduler = Scheduler(kv_memory=memory, max_num_seqs=8, chunk_policy=ChunkToBudget(), **limits)
    requests = [Request.from_tokens(name, list(range(length)), 20) for name in "ab"]
    for request in requests:
        scheduler.add_request(request)
    for _ in range(200):
        for request in requests:
            if request.num_preemptions == 0 and request.request_id in scheduler.running:
                scheduler.preempt(request)
        plan = scheduler.schedule()
        sampled = {
            request.request_id: [request.num_tokens + {"a": 1000, "b": 5000}[request.request_id]]
            for request in plan.scheduled_requests
            if request.num_computed_tokens == request.num_tokens
        }
        scheduler.update_from_output(plan, StepOutput(token_ids=sampled))
        check_memory(memory, scheduler.running.values())
    assert not scheduler.has_unfinished_requests() and memory.num_blocks_in_use == 0
