"""A scheduler over a manager with a cache, and a runner that knows only the plans."""

from __future__ import annotations

import random
from collections.abc import Sequence

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from kv_slots import MakeCache, Runner
from prefix_cache import KeyedRequest
from request import Request, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS, StepOutput


class Engine:
    """`CachingFCFSScheduler` and a runner that knows only the plans."""

    def __init__(self, make_cache: MakeCache, rng: random.Random) -> None:
        self.rng, self.block_size = rng, rng.choice([1, 2, 4])
        self.pool = BlockPool(rng.choice([8, 12, 30]) + 1)
        self.runner = Runner(self.block_size)
        self.cache = make_cache(self.pool, self.block_size)
        self.manager = self.make_manager()
        self.scheduler = CachingFCFSScheduler(
            self.manager,
            max_num_seqs=rng.choice([2, 4]),
            max_num_batched_tokens=rng.choice([14, 40]),
        )
        self.num_submitted = self.num_admitted = self.num_errors = 0

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
            request = KeyedRequest(f"r{self.num_submitted}", tokens, params, extra_keys=keys)
            if request.num_prompt_tokens + request.max_tokens - 1 <= self.manager.capacity:
                self.num_submitted += 1
                self.scheduler.add_request(request)
                submitted.append(request.request_id)
        return submitted

    def step(self) -> None:
        plan = self.scheduler.schedule()
        tables, cached = self.runner.tables, plan.scheduled_cached_reqs
        for request_id in plan.finished_req_ids:
            del tables[request_id]
        for new in plan.scheduled_new_reqs:
            (block_ids,) = new.block_ids
            tables[new.req_id] = list(block_ids)
            self.num_admitted += 1
        for request_id, news in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tables[request_id] += [block_id for block_ids in news for block_id in block_ids]
        self.runner.move_blocks(plan.block_moves)
        rows = zip(
            plan.scheduled_requests,
            plan.start_positions,
            plan.num_scheduled_tokens.values(),
            strict=True,
        )
        batch = [(request, start, start + num_tokens) for request, start, num_tokens in rows]
        for request, _, _ in batch:
            if self.rng.random() < 0.03:
                self.scheduler.abort_request(request.request_id)
        self.forward(batch)
        self.scheduler.update_from_output(plan, self._sample(batch))
        self.scheduler.check_invariants()
        self.manager.check_invariants(self.scheduler.running.values())
        self.runner.check_cached(self.cache)

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.runner.forward(batch, self.scheduler.requests)

    def _sample(self, batch: Sequence[tuple[Request, int, int]]) -> StepOutput:
        """Sample tokens; now and then a request's KV is useless, and it gets an error."""
        output = StepOutput()
        for request, start, stop in batch:
            if self.rng.random() < 0.05:
                output.errors[request.request_id] = NO_FINITE_LOGITS
                self.num_errors += request.request_id in self.scheduler.requests
                table = self.runner.tables[request.request_id]
                slots = [slot for block_id in table for slot in self.runner.slots(block_id)]
                self.runner.memory |= dict.fromkeys(slots[start:stop], "NaN")
            elif stop == request.num_tokens:
                output.token_ids[request.request_id] = [self.rng.randint(0, 1)]
        return output

    def serve_all(self) -> None:
        """Run until all requests finish. Checks that there is no deadlock: of the requests that
        wait for a block, or for memory, one always continues."""
        requests = self.scheduler.requests.values()
        max_steps = sum(request.num_prompt_tokens + request.max_tokens for request in requests)
        for _ in range(max_steps + 20):
            if self.scheduler.has_unfinished_requests():
                self.step()
        assert not self.scheduler.has_unfinished_requests(), "it hangs"
        assert self.manager.usage == 0 and not self.manager._states
        assert self.manager.reset_prefix_cache()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.cache.stats.num_requests == self.num_admitted, "each once"
