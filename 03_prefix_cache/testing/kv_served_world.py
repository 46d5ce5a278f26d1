"""A scheduler over a manager with a cache, and a runner that knows only the plans: by a log
(`plans.txt`), or at random."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from kv_memory import UncachedKVCacheManager
from kv_slots import MakeCache, Runner
from prefix_cache import KeyedRequest
from request import Request, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS, SchedulerOutput, StepOutput
from step_log import StepLog, StepLoop, next_token

Batch = Sequence[tuple[Request, int, int]]  # a request, and the positions [start, stop)


class CachingLoop(StepLoop):
    """Every position is written, and everything before it is read, as the plans say."""

    def __init__(self, manager: UncachedKVCacheManager, runner: Runner, **limits: Any) -> None:
        super().__init__(CachingFCFSScheduler(manager, **limits))
        self.manager, self.runner = manager, runner
        self.outputs = defaultdict(list)  # some tests add requests to the scheduler itself
        self.aborted: set[str] = set()  # in the next step, after it was planned
        self.failing: set[str] = set()  # their KV of the next step is useless

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        tables, cached = self.runner.tables, plan.scheduled_cached_reqs
        for request_id in plan.finished_req_ids:
            del tables[request_id]
        for new in plan.scheduled_new_reqs:
            (block_ids,) = new.block_ids
            tables[new.req_id] = list(block_ids)
        for request_id, news in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tables[request_id] += [block_id for block_ids in news for block_id in block_ids]
        self.runner.move_blocks(plan.block_moves)
        counts = plan.num_scheduled_tokens.values()
        rows = zip(plan.scheduled_requests, plan.start_positions, counts, strict=True)
        batch = [(request, start, start + num_tokens) for request, start, num_tokens in rows]
        for request_id in self.aborted & plan.num_scheduled_tokens.keys():
            self.scheduler.abort_request(request_id)
        self.runner.forward(batch, self.scheduler.requests)
        return self.sample(batch)

    def sample(self, batch: Batch) -> StepOutput:
        output = StepOutput()
        for request, start, stop in batch:
            if request.request_id in self.failing:
                output.errors[request.request_id] = NO_FINITE_LOGITS
                self.runner.spoil(request.request_id, start, stop)
            elif stop == request.num_tokens:
                output.token_ids[request.request_id] = [self.next_token(request)]
        return output

    def next_token(self, request: Request) -> int:
        return next_token(request.all_token_ids)

    def check(self) -> None:
        super().check()
        self.manager.check_invariants(self.scheduler.running.values())
        if self.manager.cache is not None:
            self.runner.check_cached(self.manager.cache)


class CachingLog(StepLog):
    """Adds moved table entries, failures, aborts of planned requests, and the blocks in use."""

    loop: CachingLoop

    def step(self, written: str) -> str:
        self.loop.aborted = set(re.findall(r"abort:(\w+)", written))
        self.loop.failing = set(re.findall(r"error:(\w+)", written))
        plan = self.loop.step()
        for new in plan.scheduled_new_reqs:
            assert self.loop.requests[new.req_id].num_cached_tokens == new.num_computed_tokens
        words = [self.describe(plan)]
        words += [f"move:{move.req_id}{move.block_index}" for move in plan.block_moves]
        words += [f"abort:{name}" for name in sorted(self.loop.aborted)]
        words += [f"error:{name}" for name in sorted(self.loop.failing)]
        if "#" in written:
            words.append(f"#{self.loop.manager.num_blocks_in_use}")
        return " ".join(words)

    def check_end(self) -> None:
        for name, reason in self.loop.reasons.items():
            assert (reason == "error") == (self.loop.outputs[name] == []), name
            if reason != "error":
                request = self.loop.requests[name]
                assert self.loop.outputs[name] == self.loop.continuation(request), name
        assert self.loop.manager.num_blocks_in_use == 0


class Engine(CachingLoop):
    """Requests that resemble each other arrive at random; some are aborted, and some fail."""

    manager: CachedKVCacheManager

    def __init__(self, make_cache: MakeCache, rng: random.Random) -> None:
        self.rng, self.block_size = rng, rng.choice([1, 2, 4])
        self.pool = BlockPool(rng.choice([8, 12, 30]) + 1)
        self.runner = Runner(self.block_size)
        self.cache = make_cache(self.pool, self.block_size)
        super().__init__(
            self.make_manager(),
            self.runner,
            max_num_seqs=rng.choice([2, 4]),
            max_num_batched_tokens=rng.choice([14, 40]),
        )
        self.num_admitted = 0

    def make_manager(self) -> CachedKVCacheManager:
        return CachedKVCacheManager(self.pool, self.block_size, self.cache)

    def submit(self) -> list[str]:
        """Add one request, or two or three with one prompt. Returns their ids."""
        num_alike = self.rng.choice([1, 1, 2, 3])
        head = self.rng.choice([[], [0] * 4, [0] * 5, [0, 1] * 3])
        tokens = head + [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 5))]
        submitted: list[str] = []
        for _ in range(num_alike):
            params = SamplingParams(
                temperature=0, max_tokens=self.rng.randint(1, 4), ignore_eos=True
            )
            keys = (("salt", "s"),) if self.rng.random() < 0.2 else ()
            request = KeyedRequest(f"r{len(self.requests)}", tokens, params, extra_keys=keys)
            if request.num_prompt_tokens + request.max_tokens - 1 <= self.manager.capacity:
                submitted.append(self.take(request).request_id)
        return submitted

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        self.num_admitted += len(plan.scheduled_new_reqs)
        self.aborted = {r for r in plan.num_scheduled_tokens if self.rng.random() < 0.03}
        self.failing = {r for r in plan.num_scheduled_tokens if self.rng.random() < 0.05}
        return super().execute(plan)

    def next_token(self, request: Request) -> int:
        return self.rng.randint(0, 1)

    def serve_all(self) -> None:
        """Run until all requests finish. Checks that there is no deadlock: of the requests that
        wait for a block, or for memory, one always continues."""
        requests = self.scheduler.requests.values()
        self.run(sum(request.num_prompt_tokens + request.max_tokens for request in requests) + 20)
        assert self.manager.usage == 0 and not self.manager._states
        assert self.manager.reset_prefix_cache()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.cache.stats.num_requests == self.num_admitted, "each once"
