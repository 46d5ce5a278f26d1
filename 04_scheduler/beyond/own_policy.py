"""A policy of your own, in twenty lines: tenants take turns.

A tenant's n-th request is served after everybody's (n - 1)-th, however many it sends at once.
`OWN_POLICY.md` walks through it.
"""

from __future__ import annotations

from collections import Counter

from kv_memory import extra_keys_of
from policies import SchedulePolicy
from request import Request


class TakeTurns(SchedulePolicy):
    """`key` is asked once, when a request arrives: that is where to count."""

    name = "take-turns"

    def __init__(self) -> None:
        self._num_requests: Counter[str | int] = Counter()

    def key(self, request: Request) -> int:
        tenant = dict(extra_keys_of(request)).get("salt", "")
        self._num_requests[tenant] += 1
        return self._num_requests[tenant]
