"""Recent statistics, which engines log in addition to their totals: hit rate and throughput.

See common/README.md"""

from __future__ import annotations

from collections import deque

from prefix_cache import CacheStats

RECENT_REQUESTS = 1000
RECENT_SECONDS = 10.0


class RecentCacheStats(CacheStats):
    """Totals, and the hit rate of the last `RECENT_REQUESTS` requests."""

    def __init__(self) -> None:
        super().__init__()
        self._recent = deque[tuple[int, int]]()
        self._num_tokens = self._num_hit = 0  # of the recent requests

    def record(self, num_tokens: int, num_hit: int) -> None:
        super().record(num_tokens, num_hit)
        self._count(num_tokens, num_hit)
        self._recent.append((num_tokens, num_hit))
        if len(self._recent) > RECENT_REQUESTS:
            num_tokens, num_hit = self._recent.popleft()
            self._count(-num_tokens, -num_hit)

    def _count(self, num_tokens: int, num_hit: int) -> None:
        self._num_tokens += num_tokens
        self._num_hit += num_hit

    def clear_recent(self) -> None:
        """Clear the recent counts, because the prefix cache was cleared."""
        self._recent.clear()
        self._num_tokens = self._num_hit = 0

    @property
    def recent_hit_rate(self) -> float:
        return self._num_hit / max(self._num_tokens, 1)


class Throughput:
    """Tokens a second over the last `RECENT_SECONDS`. Times in seconds of `time.monotonic()`."""

    def __init__(self, now: float) -> None:
        self.start = now
        # Steps: end time, and totals at that time. The first entry is the newest that is too old.
        self._steps = deque([(now, 0, 0)])

    def note(self, now: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Record the totals since the start, after a step."""
        self._steps.append((now, num_prompt_tokens, num_output_tokens))
        self._drop_old(now)

    def per_second(self, now: float) -> tuple[float, float]:
        """Return the throughput of prompt tokens and of output tokens."""
        self._drop_old(now)
        (_, *before) = self._steps[0]
        (_, *since) = self._steps[-1]
        seconds = max(min(now - self.start, RECENT_SECONDS), 1e-9)
        return (since[0] - before[0]) / seconds, (since[1] - before[1]) / seconds

    def _drop_old(self, now: float) -> None:
        while len(self._steps) > 1 and self._steps[1][0] <= now - RECENT_SECONDS:
            self._steps.popleft()
