"""A waiting queue in any order of service, without starvation.

The queue has chapter 1's interface. A policy (`policies.py`) decides which request is next, after
two groups that take precedence:

    | preempted, the last one first | aged, in order of arrival | the rest, as the policy says |

A preempted request was already scheduled once. It lost its KV, and part of that may still be
cached, so it goes first. (Under `priority` it is sorted by its priority.)

A request has *aged* when as many requests have left the queue as waited when it arrived, and
`max_overtakes` more. So the oldest request ages when `max_overtakes` later arrivals have left, and
the others in order of arrival after it: looking at the oldest finds them. As long as requests are
served from the front of the queue, this gives two bounds:

    At most `max_overtakes` later arrivals are served before a request.
    So the requests served before it are at most `max_overtakes`, plus those that waited when it
    arrived, plus those that were preempted and put in front.

The bounds hold for every policy and every stream of new requests. A preempted request that is
sorted by its key counts as a new one. `max_overtakes=None` switches ageing off, 0 means first come,
first served.

Iteration yields what `pop_request` would return: each request it yields counts as having left the
queue, for the requests after it. So a step that admits many requests keeps the bound as well. (A
cache-aware policy is called once for the whole iteration, and at every `pop_request`.)

Invariants: a request is in the queue once, either in front or as an entry; entries are in order of
arrival. vLLM (0.33) and SGLang (0.5.23) bound overtaking only under FCFS; SGLang's `hrrn` favours
requests that have waited long.

See 04_scheduler/README.md#the-order-of-service"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from policies import SchedulePolicy
from request import Request
from request_queue import RequestQueue


class _QueueEntry(NamedTuple):
    """An entry of the queue. Entries compare by the first three fields. Numbers are unique, so the
    other fields are never compared."""

    is_behind: bool  # False: preempted, and in front
    key: Any  # None: not sorted by a key
    number: int  # in order of arrival; negative for a preempted request, the last one first
    num_before: int  # how many requests had left the queue or waited when it arrived
    request: Request


class PolicyQueue(RequestQueue):
    """A `RequestQueue` in the order of `policy`. Adding and removing are O(log n), the first k
    requests O(k); with a cache-aware policy, O(n log n) and n cache lookups."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None = 1000) -> None:
        self.policy = policy
        self.max_overtakes = max_overtakes
        self._entries: OrderedDict[str, _QueueEntry] = OrderedDict()  # in order of arrival
        self._sorted = SortedList()  # the same entries
        self._numbers = count(1)
        self._num_dequeued = 0

    # -- add and remove

    def add_request(self, request: Request) -> None:
        self._insert(request, next(self._numbers), is_behind=True)

    def prepend_request(self, request: Request) -> None:
        """Add a preempted request: at the front or, if the policy says so, before its equals."""
        self._insert(request, -next(self._numbers), is_behind=not self.policy.preempted_first)

    def _insert(self, request: Request, number: int, is_behind: bool) -> None:
        if request.request_id in self._entries:
            raise ValueError(f"cannot add request {request.request_id!r}: already in the queue")
        has_key = is_behind and not self.policy.is_cache_aware
        key = self.policy.key(request) if has_key else None
        num_before = self._num_dequeued + len(self)
        entry = _QueueEntry(is_behind, key, number, num_before, request)
        self._sorted.add(entry)
        self._entries[request.request_id] = entry

    def remove_request(self, request: Request) -> None:
        if request not in self:
            raise KeyError(request.request_id)
        self._sorted.remove(self._entries.pop(request.request_id))
        self._num_dequeued += 1

    def clear(self) -> None:
        """Rebuild the sorted order from the entries, after a call that was interrupted."""
        self._sorted = SortedList(self._entries.values())

    # -- order of service

    def key_of(self, request: Request) -> Any:
        """The key that the policy returned when the request arrived; None for a request that is not
        in the queue, or not sorted by a key."""
        entry = self._entries.get(request.request_id)
        return None if entry is None else entry.key

    def is_aged(self, request: Request, num_leaving: int = 0) -> bool:
        """Whether no other request may overtake this one any longer, after `num_leaving` others
        will have left. True for preempted requests in front as well. Raises `KeyError` if the
        request is not in the queue."""
        entry = self._entries[request.request_id]
        return not entry.is_behind or self._has_aged(entry, num_leaving)

    def _has_aged(self, entry: _QueueEntry, num_leaving: int) -> bool:
        num_overtakes = self._num_dequeued + num_leaving - entry.num_before
        return self.max_overtakes is not None and num_overtakes >= self.max_overtakes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        entry = self._entries.get(request.request_id)
        return entry is not None and entry.request is request

    def __iter__(self) -> Iterator[Request]:
        """Yield requests in the order of service. The queue must not change meanwhile."""
        given: set[str] = set()
        for entry in self._sorted:
            if entry.is_behind:
                break
            given.add(entry.request.request_id)
            yield entry.request
        by_policy = iter(self._policy_order())
        for oldest in self._entries.values():
            while oldest.request.request_id not in given:
                has_aged = self._has_aged(oldest, len(given))
                request = oldest.request if has_aged else next(by_policy)
                if request.request_id not in given:
                    given.add(request.request_id)
                    yield request

    def _policy_order(self) -> Iterable[Request]:
        """All requests behind the preempted ones in the policy's order, aged ones included. A
        cache-aware policy orders the first `max_requests_to_sort` or, if it `sorts_all_or_none` and
        more than that wait (preempted ones count), none."""
        requests = (entry.request for entry in self._sorted if entry.is_behind)
        max_to_sort = self.policy.max_requests_to_sort
        is_too_long = self.policy.sorts_all_or_none and len(self) > max_to_sort
        if not self.policy.is_cache_aware or is_too_long:
            return requests
        first = list(islice(requests, max_to_sort))
        return chain(self.policy.order(first), requests)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queue is inconsistent. O(n log n)."""
        assert sorted(self._entries.values()) == list(self._sorted), "the two orders differ"
        before = [entry.num_before for entry in self._entries.values()]
        assert before == sorted(before), "entries are not in order of arrival"
