"""Helpers for the tests of every scheduler: a memory, a loop, a step that preempts, views of a
plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from base_scheduler import SchedulerPlugin
from block_pool import BlockPool
from bounded_loops import as_long_as
from cached_kv_cache_manager import CachedKVCacheManager
from fake_model import FakeModelRunner
from forced_preemption import ForcedPreemption
from kv_memory import KeyedRequest, UncachedKVCacheManager
from kv_slots import PREFIX_CACHES
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from request import Request
from scheduler import Scheduler
from scheduler_interface import SchedulerOutput, StepOutput
from step_plan import PreemptiveSchedulerOutput


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


class SchedulerLoop:
    """A scheduler and a fake model; all invariants are checked after every step."""

    def __init__(self, scheduler: Scheduler | PrefillFirstScheduler, vocab_size: int = 50) -> None:
        self.scheduler = scheduler
        self.memory: Any = scheduler.kv_memory  # must have `check_invariants`
        self.runner = FakeModelRunner(scheduler.block_size, vocab_size)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, num_prompt: int, max_new_tokens: int = 8, **more: Any) -> Request:
        """Add a request whose prompt begins with its name, so that no two share a prefix. `more`
        are attributes that are set afterwards."""
        prompt = [ord(c) for c in name] + list(range(num_prompt - len(name)))
        request = KeyedRequest.from_tokens(name, prompt, max_new_tokens)
        for field, value in more.items():
            setattr(request, field, value)
        return self.take(request)

    def take(self, request: Request) -> Request:
        request.arrival_time = float(len(self.requests))
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def schedule(self) -> PreemptiveSchedulerOutput:
        output = self.scheduler.schedule()
        assert output.total_tokens <= self.scheduler.max_num_batched_tokens
        assert set(preempted_ids(output)).isdisjoint(output.num_scheduled_tokens)
        return output

    def execute(self, output: SchedulerOutput) -> StepOutput:
        return self.runner.execute(output).wait()

    def update(self, output: SchedulerOutput) -> None:
        sampled = self.execute(output)
        for result in self.scheduler.update_from_output(output, sampled):
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason:
                self.reasons[result.request_id] = result.finish_reason
        self.scheduler.check_invariants()
        self.memory.check_invariants(self.scheduler.running.values())

    def step(self) -> PreemptiveSchedulerOutput:
        output = self.schedule()
        self.update(output)
        return output

    def run(self, max_steps: int = 500) -> None:
        for _ in as_long_as(self.scheduler.has_unfinished_requests, max_steps):
            self.step()


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


def preempted_ids(output: PreemptiveSchedulerOutput) -> list[str]:
    return [request.request_id for request in output.preempted_requests]
