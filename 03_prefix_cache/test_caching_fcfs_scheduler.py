"""Chapter 2's scheduler with a cache, and a runner that knows only the plans: the log `plans.txt`.
Chapter 4 performs every interleaving."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from block_pool import BlockPool
from cache_checks import check_memory
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from kv_memory import SharingRunnerState, UncachedKVCacheManager
from kv_slots import PREFIX_CACHES, MakeCache, Runner
from scheduler_interface import NO_FINITE_LOGITS, SchedulerOutput, StepOutput
from step_log import Case, StepLog, StepLoop, cases_of, next_token


class CachingLoop(StepLoop):
    """Every position is written, and everything before it is read, as the plans say."""

    def __init__(
        self,
        make_cache: MakeCache | None,
        num_blocks: int = 40,
        block_size: int = 4,
        **limits: Any,
    ) -> None:
        self.runner = Runner(block_size)
        pool = BlockPool(num_blocks + 1)
        if make_cache is None:
            self.manager = UncachedKVCacheManager(pool, block_size)
        else:
            cache = make_cache(pool, block_size)
            self.manager = CachedKVCacheManager(pool, block_size, cache)
        super().__init__(CachingFCFSScheduler(self.manager, **limits))
        self.state = SharingRunnerState(4, num_blocks)
        self.aborted: set[str] = set()  # in the next step, after it was planned
        self.failing: set[str] = set()  # their KV of the next step is useless

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        self.state.apply(plan)
        names = plan.num_scheduled_tokens
        self.runner.tables = {name: self.state.block_ids(name) for name in names}
        for new in plan.scheduled_new_reqs:
            assert self.requests[new.req_id].num_cached_tokens == new.num_computed_tokens
        counts = plan.num_scheduled_tokens.values()
        rows = zip(plan.scheduled_requests, plan.start_positions, counts, strict=True)
        batch = [(request, start, start + num_tokens) for request, start, num_tokens in rows]
        for request_id in self.aborted & plan.num_scheduled_tokens.keys():
            self.scheduler.abort_request(request_id)
        self.runner.forward(batch, self.scheduler.requests)
        output = StepOutput()
        for request, start, stop in batch:
            if request.request_id in self.failing:
                output.errors[request.request_id] = NO_FINITE_LOGITS
                self.runner.spoil(request.request_id, start, stop)
            elif stop == request.num_tokens:
                output.token_ids[request.request_id] = [next_token(request.all_token_ids)]
        return output

    def check(self) -> None:
        super().check()
        check_memory(self.manager, self.scheduler.running.values())
        if self.manager.cache is not None:
            self.runner.check_cached(self.manager.cache)


class CachingLog(StepLog):
    """Adds moved table entries, failures, aborts of planned requests, and the blocks in use."""

    loop: CachingLoop

    def step(self, written: str) -> str:
        self.loop.aborted = set(re.findall(r"abort:(\w+)", written))
        self.loop.failing = set(re.findall(r"error:(\w+)", written))
        plan = self.loop.step()
        words = [self.describe(plan)]
        words += [f"move:{move.req_id}{move.block_index}" for move in plan.block_moves]
        words += [f"abort:{name}" for name in sorted(self.loop.aborted)]
        words += [f"error:{name}" for name in sorted(self.loop.failing)]
        if "#" in written:
            words.append(f"#{self.loop.manager.num_blocks_in_use}")
        return " ".join(words)

    def check_end(self) -> None:
        for name, reason in self.loop.reasons.items():
            expected = self.loop.continuation(self.loop.requests[name])
            assert self.loop.outputs[name] == ([] if reason == "error" else expected), name
        assert self.loop.manager.num_blocks_in_use == 0


@pytest.mark.net
@cases_of(Path(__file__).with_name("plans.txt"))
def test_plans(case: Case) -> None:
    options = dict(case.options)
    kinds = {None: None} if options.pop("cache", None) == "none" else PREFIX_CACHES
    for make_cache in kinds.values():
        CachingLog(CachingLoop(make_cache, **options)).perform(case)
