"""Scheduling policies: the order in which waiting requests are served, one small class per policy.

A policy defines one of two methods:

    key(request)       a number or a tuple; the smallest is served first. Called once, when the
                       request arrives, so it suits properties that do not change while it waits.
    order(requests)    the requests, given in order of arrival, in the order of service. Called at
                       every step (`is_cache_aware = True`): for what changes with the cache.

Ties are broken by order of arrival. No policy can starve a request, because the queue
(`policy_queue.py`) serves a request that has been overtaken too often.

To write your own policy, give a class a `key`. Pass an instance to the scheduler or, if a module
`mine` has the class, `policy="mine:ShortestPromptFirst"`:

    class ShortestPromptFirst(SchedulePolicy):
        def key(self, request: Request) -> int:
            return request.num_prompt_tokens

vLLM has the two policies below. SGLang's are in `beyond/sglang_policies.py`.

See 04_scheduler/README.md#the-order-of-service"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, ClassVar

from request import Request


class SchedulePolicy:
    """An order of service. Define `key`; or set `is_cache_aware` and define `order`."""

    name: ClassVar[str]  # shown in events and errors; the name of the class by default
    is_cache_aware: ClassVar[bool] = False
    preempted_first: ClassVar[bool] = True  # False: sorted by its key again
    max_requests_to_sort: int = 128  # of the waiting requests, `order` gets the first
    sorts_all_or_none: ClassVar[bool] = False  # True: if more wait, all are in order of arrival

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    def key(self, request: Request) -> Any:
        """The sort key of a request: the smallest is served first. All keys of one policy have one
        type."""
        raise NotImplementedError(f"{type(self).__name__} must define key or order")

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Return all of `requests`, which are in order of arrival, in the order of service."""
        return sorted(requests, key=self.key)


class FCFSPolicy(SchedulePolicy):
    """First come, first served: all keys are equal, so the order of arrival decides."""

    name = "fcfs"

    def key(self, request: Request) -> int:
        return 0


class PriorityPolicy(SchedulePolicy):
    """A lower `priority` number is more urgent. Equal priorities are served in order of
    `arrival_time`; a preempted request is sorted among them."""

    name = "priority"
    preempted_first = False

    def key(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time)


POLICIES: dict[str, type[SchedulePolicy]] = {
    policy.name: policy for policy in (FCFSPolicy, PriorityPolicy)
}


def get_policy(
    name: str, known: Mapping[str, type[SchedulePolicy]] = POLICIES
) -> type[SchedulePolicy]:
    """The policy class with this name, or at this place: "module:Class". Raises `ValueError` if
    there is none."""
    if name in known:
        return known[name]
    found: object = None
    with suppress(ImportError, AttributeError, ValueError):
        found = resolve_name(name) if isinstance(name, str) and ":" in name else None
    if isinstance(found, type) and issubclass(found, SchedulePolicy):
        return found
    allowed = ", ".join(map(repr, known))
    raise ValueError(
        "policy must be an instance of SchedulePolicy, 'module:Class' of such a class or one of "
        f"{allowed}, got {name!r}"
    )
