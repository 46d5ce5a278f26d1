"""A policy of your own, in twenty lines: tenants take turns.

A tenant's n-th request is served after the (n - 1)-th of every other tenant, however many it sends
at the same time. `OWN_POLICY.md` explains it step by step.

See 04_scheduler/beyond/OWN_POLICY.md"""

from __future__ import annotations

from collections import Counter

from kv_memory import extra_keys_of
from policies import SchedulePolicy
from request import Request


class TakeTurns(SchedulePolicy):
    """Serve tenants in turn. `key` is called once, when a request arrives, so it can count."""

    name = "take-turns"

    def __init__(self) -> None:
        self._num_requests: Counter[str | int] = Counter()

    def key(self, request: Request) -> int:
        tenant = dict(extra_keys_of(request)).get("salt", "")
        self._num_requests[tenant] += 1
        return self._num_requests[tenant]
