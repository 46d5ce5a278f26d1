"""Chapter 1's scheduler over blocks: its state machine and its mirror, and what memory adds."""

from __future__ import annotations

import random
from pathlib import Path

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
from scheduler_interface import NewRequestData, SchedulerOutput
from step_log import Case, StepLog, StepLoop, cases_of
from test_fcfs_scheduler import FCFSMachine, MirrorRunner, make


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


TestPagedFCFSMachine = pytest.mark.net(PagedFCFSMachine.TestCase)
TestPagedFCFSMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.net
@cases_of(Path(__file__).with_name("plans.txt"))
def test_plans(case: Case) -> None:
    scheduler = PagedFCFSScheduler(memory_of(8), **case.options)
    StepLog(StepLoop(scheduler)).perform(case)


# -- what the runner keeps of it


@pytest.mark.net
@pytest.mark.parametrize("seed", range(8))
def test_columns_hold_what_was_sent(seed):
    """Against lists: tokens overlay those that are known from any output or prompt token on, and
    later ones are dropped; blocks are appended, or replace the table of a request that resumes;
    rows are reused, and grow when they run out. Chapter 1's state agrees on the tokens."""
    rng = random.Random(seed)
    states = RunnerState(), PagedRunnerState(max_num_seqs=2, max_blocks_per_request=40)
    tokens: dict[str, list[int]] = {}
    tables: dict[str, list[int]] = {}

    def numbers(below: int) -> list[int]:
        return [rng.randrange(10**6) for _ in range(rng.randrange(below))]

    for number in range(60):
        plan = SchedulerOutput()
        changes = plan.scheduled_cached_reqs
        for name in sorted(tokens):
            if rng.random() < 0.1:
                plan.finished_req_ids.add(name)
                del tokens[name], tables[name]
            elif rng.random() < 0.6:
                start = rng.randint(0, len(tokens[name]))  # of what is sent, no gap before it
                sent = tokens[name][start:3] + numbers(4)  # a prompt is sent as it was
                blocks = numbers(3)
                is_whole = rng.random() < 0.2
                if is_whole:
                    changes.resumed_req_ids.add(name)
                tokens[name] = tokens[name][:start] + sent
                tables[name] = tables[name] * (not is_whole) + blocks
                changes.req_ids.append(name)
                changes.new_token_ids.append(sent)
                changes.num_output_tokens.append(len(tokens[name]) - 3)
                changes.num_computed_tokens.append(0)
                changes.new_block_ids.append((blocks,) if blocks or is_whole else ())
        if len(tokens) < 7:
            name = str(rng.choice([i for i in range(9) if str(i) not in tokens]))
            tokens[name] = [number, 1, 2]
            tables[name] = numbers(2)
            params = make(name, 1).sampling_params
            new = NewRequestData(name, list(tokens[name]), params, 0, (list(tables[name]),))
            plan.scheduled_new_reqs.append(new)
        for state in states:
            state.apply(plan)
            assert {name: r.tokens(0, 99) for name, r in state.requests.items()} == tokens
        (_, columns) = states
        assert {name: columns.block_ids(name) for name in columns.requests} == tables
