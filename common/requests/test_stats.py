"""Rates of late, against sums over all that is remembered."""

from __future__ import annotations

import random
from itertools import accumulate

from common.requests.stats import RECENT_REQUESTS, RECENT_SECONDS, RecentCacheStats, Throughput


def test_the_hit_rate_of_late_is_that_of_the_last_thousand_requests() -> None:
    stats = RecentCacheStats()
    rng = random.Random(0)
    assert stats.recent_hit_rate == 0
    seen = [(rng.randint(1, 90), 0) for _ in range(30)]
    seen += [(n, rng.randint(0, n)) for n in (rng.randint(1, 90) for _ in range(2000))]
    for count, (num_tokens, num_hit) in enumerate(seen, 1):
        stats.record(num_tokens, num_hit)
        if count in (1, 30, 40, 999, 1000, 1001, 2030):
            recent = seen[max(0, count - RECENT_REQUESTS) : count]
            assert stats.recent_hit_rate == sum(h for _, h in recent) / sum(n for n, _ in recent)
    assert stats.hit_rate == sum(h for _, h in seen) / sum(n for n, _ in seen) != 0
    stats.clear_recent()
    assert stats.recent_hit_rate == 0 and stats.hit_rate > 0


def test_throughput_is_of_the_last_ten_seconds() -> None:
    rng = random.Random(1)
    ends = list(accumulate((rng.choice([0.1, 0.5, 2.5, 11.0]) for _ in range(300)), initial=5.0))
    start, *ends = ends
    tokens = [(rng.randint(0, 50), rng.randint(0, 9)) for _ in ends]
    rates = Throughput(start)
    totals = (0, 0)
    assert rates.per_second(start) == (0, 0)
    for step, (end, (num_prompt, num_output)) in enumerate(zip(ends, tokens)):
        totals = totals[0] + num_prompt, totals[1] + num_output
        rates.note(end, *totals)
        for now in (end, end + 3.0) if step % 3 else (end,):
            if step + 1 < len(ends) and now > ends[step + 1]:
                continue
            recent = [t for e, t in zip(ends, tokens) if now - RECENT_SECONDS < e <= end]
            seconds = min(now - start, RECENT_SECONDS)
            expected = tuple(sum(t[i] for t in recent) / seconds for i in (0, 1))
            assert rates.per_second(now) == expected
    assert len(rates._steps) < 120, "what is too old is forgotten"
    assert rates.per_second(ends[-1] + 11) == (0, 0)
