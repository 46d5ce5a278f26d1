"""What a scheduler tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """The state right now, and totals since the scheduler was made. `stats["num_running"]` works
    too."""

    num_waiting: int = 0  # preempted ones included
    num_running: int = 0
    num_preempted: int = 0  # of those waiting
    total_scheduled: int = 0  # requests in a plan, counted in every step
    total_scheduled_tokens: int = 0
    total_admitted: int = 0  # each request once
    total_finished: int = 0
    total_aborted: int = 0
    total_preempted: int = 0
    total_cached_tokens: int = 0  # of these the request computed nothing at its first admission
    total_recomputed_tokens: int = 0  # lost by preemption, less what was then found in the cache
    kv_cache_usage: float = 0.0  # share of the KV memory that requests hold
    prefix_cache_hit_rate: float = 0.0

    def __getitem__(self, name: str) -> int | float:
        return getattr(self, name)
