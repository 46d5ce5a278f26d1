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

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from policies import SchedulePolicy
from request import Request, RequestStatus
from request_queue import RequestQueue


class _QueueEntry(NamedTuple):
    """An entry of the queue. Entries compare by key, then by number. Numbers are unique, so the
    other fields are never compared."""

    key: Any
    # In order of arrival; negative for a preempted request, so that it precedes equal keys.
    number: int
    num_before: int  # how many requests had left the queue or waited when it arrived
    request: Request


class PolicyQueue(RequestQueue):
    """A `RequestQueue` in the order of `policy`. Adding and removing are O(log n), the first k
    requests O(k); with a cache-aware policy, O(n log n) and n cache lookups. Raises `ValueError` if
    `max_overtakes` is neither None nor an integer >= 0."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None = 1000) -> None:
        is_integer = isinstance(max_overtakes, int) and not isinstance(max_overtakes, bool)
        if max_overtakes is not None and not (is_integer and max_overtakes >= 0):
            raise ValueError(f"max_overtakes must be None or >= 0, got {max_overtakes!r}")
        self.policy = policy
        self.max_overtakes = max_overtakes
        # Preempted requests. The last one is served first.
        self._preempted: OrderedDict[str, Request] = OrderedDict()
        self._entries: OrderedDict[str, _QueueEntry] = OrderedDict()  # in order of arrival
        self._sorted = SortedList()  # the same entries, by key
        self._numbers = count(1)
        self._num_dequeued = 0

    # -- add and remove

    def add_request(self, request: Request) -> None:
        self._check_is_new(request)
        self._insert_in_order(request, next(self._numbers))

    def prepend_request(self, request: Request) -> None:
        self._check_is_new(request)
        if self.policy.preempted_first:
            self._preempted[request.request_id] = request
        else:
            self._insert_in_order(request, -next(self._numbers))

    def _check_is_new(self, request: Request) -> None:
        if request.request_id in self._preempted or request.request_id in self._entries:
            raise ValueError(f"cannot add request {request.request_id!r}: already in the queue")

    def _insert_in_order(self, request: Request, number: int) -> None:
        # A cache-aware policy has no keys. With equal keys, the order of arrival remains.
        key = 0 if self.policy.is_cache_aware else self.policy.key(request)
        entry = _QueueEntry(key, number, self._num_dequeued + len(self), request)
        self._sorted.add(entry)
        self._entries[request.request_id] = entry

    def remove_request(self, request: Request) -> None:
        request_id = request.request_id
        if self._preempted.get(request_id) is request:
            del self._preempted[request_id]
        elif request_id in self._entries and self._entries[request_id].request is request:
            self._sorted.remove(self._entries.pop(request_id))
        else:
            raise KeyError(request_id)
        self._num_dequeued += 1

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def clear(self) -> None:
        """Rebuild the sorted order from the entries, after a call that was interrupted."""
        self._sorted = SortedList(self._entries.values())

    # -- order of service

    def key_of(self, request: Request) -> Any:
        """The key that the policy returned when the request arrived; None for a request that is not
        sorted by a key."""
        entry = self._entries.get(request.request_id)
        return None if entry is None or self.policy.is_cache_aware else entry.key

    def is_aged(self, request: Request, num_leaving: int = 0) -> bool:
        """Whether no other request may overtake this one any longer, after `num_leaving` others
        will have left. True for preempted requests in front as well. Raises `KeyError` if the
        request is not in the queue."""
        if request.request_id in self._preempted:
            return True
        return self._has_aged(self._entries[request.request_id], self._num_dequeued + num_leaving)

    def _has_aged(self, entry: _QueueEntry, num_dequeued: int) -> bool:
        return (
            self.max_overtakes is not None and num_dequeued - entry.num_before >= self.max_overtakes
        )

    def __len__(self) -> int:
        return len(self._preempted) + len(self._entries)

    def __contains__(self, request: object) -> bool:
        if not isinstance(request, Request):
            return False
        entry = self._entries.get(request.request_id)
        return self._preempted.get(request.request_id) is request or (
            entry is not None and entry.request is request
        )

    def __iter__(self) -> Iterator[Request]:
        """Yield requests in the order of service. Raises `RuntimeError` if the queue is changed
        before the iteration ends."""
        before = (self._num_dequeued, len(self))
        for request in self.in_order():
            yield request
            if (self._num_dequeued, len(self)) != before:
                raise RuntimeError("cannot iterate: the queue has changed")

    def in_order(self) -> Iterator[Request]:
        yield from reversed(self._preempted.values())
        num_dequeued = self._num_dequeued + len(self._preempted)
        by_policy = iter(self._policy_order())
        given: set[str] = set()
        for oldest in self._entries.values():
            while oldest.request.request_id not in given:
                has_aged = self._has_aged(oldest, num_dequeued + len(given))
                request = oldest.request if has_aged else next(by_policy)
                if request.request_id not in given:
                    given.add(request.request_id)
                    yield request

    def _policy_order(self) -> Iterable[Request]:
        """All requests with an entry, in the policy's order, aged ones included. A cache-aware
        policy orders the first `max_requests_to_sort` or, if it `sorts_all_or_none` and more than
        that wait (preempted ones count), none."""
        requests = (entry.request for entry in self._sorted)
        max_to_sort = self.policy.max_requests_to_sort
        is_too_long = self.policy.sorts_all_or_none and len(self) > max_to_sort
        if not self.policy.is_cache_aware or is_too_long:
            return requests
        first = list(islice(requests, max_to_sort))
        ordered = self.policy.order(first)
        if sorted(r.request_id for r in ordered) != sorted(r.request_id for r in first):
            raise ValueError(f"policy {self.policy.name!r}: order must return each request once")
        return chain(ordered, requests)

    # -- checks

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queue is inconsistent. O(n log n)."""
        assert self._preempted.keys().isdisjoint(self._entries), "preempted, and sorted"
        assert sorted(self._entries.values()) == list(self._sorted), "the two orders differ"
        before = [entry.num_before for entry in self._entries.values()]
        assert before == sorted(before), "entries are not in order of arrival"
        num_before = self._num_dequeued + len(self)
        assert not before or before[-1] <= num_before, "an entry counts too many requests"
        for request_id, entry in self._entries.items():
            assert entry.request.request_id == request_id, entry


# To try all of a long queue would take longer than the step.
MAX_TRIED = 1024  # waiting requests in a step
MAX_SKIPPED = 128  # after a lookup; and as many again whose KV is not being loaded


class Candidates:
    """The waiting requests that a step tries to admit, in the order of service. The scheduler
    counts in `num_skipped` those that are not ready after a lookup.

    Requests that would not start sooner if they were tried are passed, even aged ones. Only a
    lookup shows whether KV has been loaded, so some of the requests that wait for it are tried."""

    def __init__(self, queue: PolicyQueue) -> None:
        self._queue = queue
        self.num_tried = 0
        self.num_skipped = 0

    @property
    def are_enough(self) -> bool:
        return self.num_tried == MAX_TRIED or self.num_skipped == 2 * MAX_SKIPPED

    def __iter__(self) -> Iterator[Request]:
        for request in self._queue:
            is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            is_passed = is_loading and self.num_skipped >= MAX_SKIPPED
            if is_passed or request.status == RequestStatus.WAITING_FOR_GRAMMAR:
                continue
            self.num_tried += 1
            yield request


class ShuffledQueue(PolicyQueue):
    """A debug switch: waiting requests are tried in random order, which must not change any
    request's tokens."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None, seed: int) -> None:
        super().__init__(policy, max_overtakes)
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Request]:
        requests = list(super().__iter__())
        self._random.shuffle(requests)
        return iter(requests)
