"""Helpers for the tests of every scheduler: a memory, a loop, a step that preempts, views of a
plan, step logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from adapter_limit import MaxLoRAs
from base_scheduler import SchedulerPlugin
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from fake_model import FakeModelRunner, continuation
from forced_preemption import ForcedPreemption
from kv_memory import KeyedRequest, UncachedKVCacheManager
from kv_slots import PREFIX_CACHES
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepOutput
from step_log import StepLog, StepLoop
from unchunked import ChunkToBudget


def make_memory(
    cache: str | None,
    num_blocks: int,
    block_size: int,
    uncached: Callable[..., UncachedKVCacheManager] = UncachedKVCacheManager,
    cached: Callable[..., UncachedKVCacheManager] = CachedKVCacheManager,
) -> UncachedKVCacheManager:
    """A memory of `num_blocks` besides the null block; `cache` is a name in `PREFIX_CACHES`, or
    None."""
    pool = BlockPool(num_blocks + 1)
    if cache is None:
        return uncached(pool, block_size)
    return cached(pool, block_size, PREFIX_CACHES[cache](pool, block_size))


class SchedulerLoop(StepLoop):
    """A scheduler and a fake model with a KV memory; all invariants are checked after every
    step."""

    vocab_size = 50

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.num_taken = 0
        self.num_scheduled_tokens = 0
        self.memory: Any = scheduler.kv_memory  # must have `check_invariants`
        self.runner: Any = FakeModelRunner(self.memory.block_size, self.vocab_size)

    def add(self, name: str, num_prompt: int, max_new_tokens: int = 8, **more: Any) -> Request:
        """Add a request whose prompt begins with its name, so that no two share a prefix. `more`
        are attributes that are set afterwards."""
        prompt = [ord(c) for c in name] + list(range(num_prompt - len(name)))
        request = KeyedRequest.from_tokens(name, prompt, max_new_tokens)
        for name_of_field, value in more.items():
            setattr(request, name_of_field, value)
        return self.take(request)

    def take(self, request: Request) -> Request:
        self.num_taken += 1
        request.arrival_time = float(len(self.requests))
        return super().take(request)

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        self.num_scheduled_tokens += plan.total_num_scheduled_tokens
        assert set(preempted_ids(plan)).isdisjoint(plan.num_scheduled_tokens)
        cached = plan.scheduled_cached_reqs
        assert cached.resumed_req_ids <= set(cached.req_ids), "a new request did not resume"
        return plan

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        return self.runner.execute(plan).wait()

    def check(self) -> None:
        super().check()
        self.memory.check_invariants(self.scheduler.running.values())

    def continuation(self, request: Request) -> list[int]:
        """All tokens of an uninterrupted run, to the first one that ends it."""
        tokens = continuation(request.prompt_token_ids, request.max_tokens, self.vocab_size)
        ends = (i for i, token in enumerate(tokens, 1) if token in request.end_ids)
        return tokens[: next(ends, None)]

    def check_account(self, num_discarded: int = 0) -> None:
        """Each token but a request's last was computed once, and again if preemption lost it,
        unless it was cached."""
        assert self.scheduler.get_request_counts() == (0, 0)
        if len(self.finished) == self.num_taken:  # none was aborted
            num_needed = sum(r.num_tokens - 1 - r.num_cached_tokens for r in self.finished)
            num_needed += self.scheduler.num_recomputed_tokens
            assert self.num_scheduled_tokens == num_needed + num_discarded


@contextmanager
def preempting(scheduler: PreemptiveScheduler) -> Iterator[None]:
    """Within this context, each step preempts the last admitted request that is not pinned."""
    plugins = scheduler.plugins
    scheduler.set_plugins([*plugins, ForcedPreemption(1, spares_pinned=True)])
    yield
    scheduler.set_plugins(plugins)


def make_scheduler(
    kind: Callable[..., Any],
    preempt_every: int | None = None,
    plugins: Sequence[SchedulerPlugin] = (),
    **options: Any,
) -> Any:
    """Make a scheduler; with `preempt_every`, requests are preempted now and then."""
    forced: list[SchedulerPlugin] = []
    if preempt_every is not None:
        forced = [ForcedPreemption(preempt_every, kind is PrefillFirstScheduler)]
    return kind(plugins=[*plugins, *forced], **options)


def scheduled_tokens(output: SchedulerOutput) -> dict[str, int]:
    return dict(output.num_scheduled_tokens)


def preempted_ids(output: SchedulerOutput) -> list[str]:
    return [request.request_id for request in getattr(output, "preempted_requests", ())]


# -- step logs; `plans.txt` says how to read them


class ChunksOf(ChunkToBudget):
    """Cuts every prompt into chunks of at most `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def num_tokens_to_schedule(
        self,
        request: Request,
        num_uncomputed_tokens: int,
        budget: int,
        max_step_tokens: int,
    ) -> int:
        return min(num_uncomputed_tokens, budget, self.size)


def make_loop(
    kind: Callable[..., Any],
    *,
    cache: str | None = None,
    num_blocks: int = 100,
    block_size: int = 4,
    max_loras: int | None = None,
    chunk: int | None = None,
    plugins: Sequence[SchedulerPlugin] = (),
    **options: Any,
) -> SchedulerLoop:
    """Make a loop from the options of a case. Other options are the scheduler's."""
    if kind is Scheduler:
        options = {"watermark": 0.0} | options
    if max_loras is not None:
        plugins = [*plugins, MaxLoRAs(max_loras)]
    if chunk is not None:
        options["chunk_policy"] = ChunksOf(chunk)
    memory = make_memory(cache, num_blocks, block_size)
    return SchedulerLoop(make_scheduler(kind, kv_memory=memory, plugins=plugins, **options))


class SchedulerLog(StepLog):
    """Adds adapters, tenants (`$x`), preemption, and the reason why admission stopped."""

    loop: SchedulerLoop

    def make_request(self, word: str) -> Request:
        word, _, tenant = word.partition("$")
        word, _, adapter = word.partition("@")
        request = super().make_request(word)
        assert isinstance(request, KeyedRequest)
        keys = (("lora", adapter), ("salt", tenant))
        request.extra_keys = tuple(key for key in keys if key[1])
        return request

    def new_request(self, name: str, prompt: list[int], max_tokens: int, priority: int) -> Request:
        return KeyedRequest.from_tokens(name, prompt, max_tokens, priority)

    def step(self, written: str) -> str:
        """Run a step; after "force", one that preempts. A reader who writes `#a5` wants to know
        how many blocks a holds."""
        is_forced = written.startswith("force ")
        with preempting(self.loop.scheduler) if is_forced else nullcontext():
            plan = self.loop.step()
        words = ["force"] if is_forced else []
        words.append(self.describe(plan))
        for name in re.findall(r"#([a-z]+)\d", written):
            words.append(f"#{name}{len(self.loop.memory.get_block_ids(name))}")
        return " ".join(words)

    def describe(self, plan: SchedulerOutput) -> str:
        words = [super().describe(plan)]
        words += [f"!{name}" for name in preempted_ids(plan)]
        waiting = [request.request_id for request in self.loop.scheduler.waiting]
        if plan.preempted_requests and len(waiting) > 1:
            words.append(f"({' '.join(waiting)})")
        if plan.admission_stop is not None:
            words.append(f"|{' '.join(plan.admission_stop)}".rstrip())
        return " ".join(words)

    def check_end(self) -> None:
        """Check tokens, memory, and the account of computed tokens."""
        super().check_end()
        assert self.loop.memory.num_blocks_in_use == 0
        self.loop.check_account()
