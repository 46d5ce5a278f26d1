"""Who is served first: the order of the waiting queue, one small class for each idea.

A policy answers one of two questions:

    key(request)       a number or a tuple; smaller is served first. Asked once, when the request
                       arrives: for what does not change while it waits.
    order(requests)    the requests, given in order of arrival, in the order of service. Asked anew
                       at every step (`looks_at_cache = True`): for what changes with the cache.

Ties are broken by order of arrival, always. What a policy cannot do is starve anybody: the queue
(`policy_queue.py`) serves whoever was overtaken too often.

To write your own, give a class a `key`, and hand an instance to the scheduler:

    class ShortestPromptFirst(SchedulePolicy):
        name = "shortest-prompt"

        def key(self, request: Request) -> int:
            return request.num_prompt_tokens

vLLM has the two policies below. SGLang's are in `beyond/sglang_policies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from request import Request


class SchedulePolicy:
    """Who is served first. Define `key`; or set `looks_at_cache` and define `order`."""

    name: ClassVar[str]  # what events and errors call it; by default the name of its class
    looks_at_cache: ClassVar[bool] = False
    keeps_preempted_first: ClassVar[bool] = True  # False: a preempted one goes where its key says
    max_requests_to_sort: int = 128  # `order` is not asked with more than these waiting

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    def key(self, request: Request) -> Any:
        """What the queue sorts by: the smallest is served first. Keys of one policy are of one
        type."""
        raise NotImplementedError(f"{type(self).__name__} must define key or order")

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """All of `requests`, which come in order of arrival, in the order of service."""
        return sorted(requests, key=self.key)


class FCFSPolicy(SchedulePolicy):
    """First come, first served: all are equal, so the order of arrival decides."""

    name = "fcfs"

    def key(self, request: Request) -> int:
        return 0


class PriorityPolicy(SchedulePolicy):
    """A lower `priority` number is more urgent. Equals are served in order of `arrival_time`; a
    preempted request waits with them."""

    name = "priority"
    keeps_preempted_first = False

    def key(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time)


POLICIES: dict[str, type[SchedulePolicy]] = {
    policy.name: policy for policy in (FCFSPolicy, PriorityPolicy)
}


def policy_named(
    name: str, known: Mapping[str, type[SchedulePolicy]] = POLICIES
) -> type[SchedulePolicy]:
    """Raises `ValueError` for a name that no policy has."""
    if not isinstance(name, str) or name not in known:
        allowed = ", ".join(repr(name) for name in known)
        instance = "an instance of SchedulePolicy"
        raise ValueError(f"policy must be {instance} or one of {allowed}, got {name!r}")
    return known[name]
