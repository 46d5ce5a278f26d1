"""What a scheduler is told, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_model_len` bounds prompt plus outputs. Raises `ValueError` for limits below 1."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    max_model_len: int | None = None
    max_preemptions: int = 3

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be an integer >= 1")


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
    total_rejected_drafts: int = 0
    kv_cache_usage: float = 0.0  # share of the KV memory that requests hold
    prefix_cache_hit_rate: float = 0.0

    def __getitem__(self, name: str) -> int | float:
        return getattr(self, name)
