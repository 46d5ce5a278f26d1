"""A waiting queue in any order, in which nobody starves.

The queue has chapter 1's interface. A policy (`policies.py`) says who is next, with two exceptions
that stand before it:

    | preempted, the last one first | aged, in order of arrival | the rest, as the policy says |

A preempted request had its turn already. Its KV was taken, part of it may still be in the cache, so
it goes first. (Under `priority` it goes where its priority says.)

A request is *aged* when `max_overtakes` others have left the queue since it arrived. Who came
earlier ages earlier, so the aged are the front of the order of arrival, and to find them is to look
at the oldest. From this follows, as long as requests are served from the front of the queue:

    Of those who came later, at most `max_overtakes` are served before it.
    So before it are served at most `max_overtakes`, plus those who waited when it came, plus those
    who were preempted and put in front.

That holds for every policy and every stream of newcomers. A preempted request that goes to its
place counts as a newcomer. `max_overtakes=None` switches ageing off, 0 is first come, first served.

Iteration hands out what `pop_request` would: each request it gives counts as gone for those behind
it. So a step that serves many at once keeps the bound as well. (A policy that looks at the cache is
asked once for the whole iteration, and at every `pop_request`.)

Invariants: a request is in the queue once, in front or at a place; places are in order of arrival.
vLLM and SGLang bound nothing: an unlucky request waits as long as luckier ones arrive.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from sortedcontainers import SortedList

from policies import SchedulePolicy
from request import Request
from request_queue import RequestQueue


class _Place(NamedTuple):
    """Compares by key, then by number. Numbers differ, so it never comes to the rest."""

    key: Any
    number: int  # in order of arrival; below 0 for a preempted one: it stands before its equals
    num_left: int  # how many had left the queue when it came
    request: Request


class PolicyQueue(RequestQueue):
    """A `RequestQueue` in the order of `policy`. Adding and taking out are O(log n), the first k
    requests O(k); with a policy that looks at the cache, O(n log n) and n look-ups. Raises
    `ValueError` if `max_overtakes` is neither None nor an integer >= 0."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None = 1000) -> None:
        is_integer = isinstance(max_overtakes, int) and not isinstance(max_overtakes, bool)
        if max_overtakes is not None and not (is_integer and max_overtakes >= 0):
            raise ValueError(f"max_overtakes must be None or >= 0, got {max_overtakes!r}")
        self.policy = policy
        self.max_overtakes = max_overtakes
        self._front: OrderedDict[str, Request] = OrderedDict()  # the last one is served first
        self._places: OrderedDict[str, _Place] = OrderedDict()  # in order of arrival
        self._sorted = SortedList()  # the same places, by key
        self._numbers = count(1)
        self._num_left = 0

    # -- in and out

    def add_request(self, request: Request) -> None:
        self._check_is_new(request)
        self._put_at_its_place(request, next(self._numbers))

    def prepend_request(self, request: Request) -> None:
        self._check_is_new(request)
        if self.policy.keeps_preempted_first:
            self._front[request.request_id] = request
        else:
            self._put_at_its_place(request, -next(self._numbers))

    def _check_is_new(self, request: Request) -> None:
        if request.request_id in self._front or request.request_id in self._places:
            raise ValueError(f"cannot add request {request.request_id!r}: already in the queue")

    def _put_at_its_place(self, request: Request, number: int) -> None:
        # Without a key of their own all are equal: the order of arrival is left.
        key = 0 if self.policy.looks_at_cache else self.policy.key(request)
        place = _Place(key, number, self._num_left, request)
        self._sorted.add(place)
        self._places[request.request_id] = place

    def remove_request(self, request: Request) -> None:
        request_id = request.request_id
        if self._front.get(request_id) is request:
            del self._front[request_id]
        elif request_id in self._places and self._places[request_id].request is request:
            self._sorted.remove(self._places.pop(request_id))
        else:
            raise KeyError(request_id)
        self._num_left += 1

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def begin_anew(self) -> None:
        """The two orders have one content again, whatever a call that was interrupted has left."""
        self._sorted = SortedList(self._places.values())

    # -- who is next

    def key_of(self, request: Request) -> Any:
        """What the policy said when it came; None for one that has no place by it."""
        place = self._places.get(request.request_id)
        return None if place is None or self.policy.looks_at_cache else place.key

    def is_aged(self, request: Request) -> bool:
        """Must nobody overtake it any more? True of preempted ones in front, too. Raises `KeyError`
        if it is not in the queue."""
        if request.request_id in self._front:
            return True
        return self._has_aged(self._places[request.request_id], self._num_left)

    def _has_aged(self, place: _Place, num_left: int) -> bool:
        return self.max_overtakes is not None and num_left - place.num_left >= self.max_overtakes

    def __len__(self) -> int:
        return len(self._front) + len(self._places)

    def __contains__(self, request: object) -> bool:
        if not isinstance(request, Request):
            return False
        place = self._places.get(request.request_id)
        return self._front.get(request.request_id) is request or (
            place is not None and place.request is request
        )

    def __iter__(self) -> Iterator[Request]:
        """Raises `RuntimeError` if the queue is changed before the iteration is over."""
        before = (self._num_left, len(self))
        for request in self.in_order():
            yield request
            if (self._num_left, len(self)) != before:
                raise RuntimeError("cannot iterate: the queue has changed")

    def in_order(self) -> Iterator[Request]:
        yield from reversed(self._front.values())
        num_left = self._num_left + len(self._front)
        by_policy = iter(self._policy_order())
        given: set[str] = set()
        for oldest in self._places.values():
            while oldest.request.request_id not in given:
                has_aged = self._has_aged(oldest, num_left + len(given))
                request = oldest.request if has_aged else next(by_policy)
                if request.request_id not in given:
                    given.add(request.request_id)
                    yield request

    def _policy_order(self) -> Iterable[Request]:
        """All who have a place, aged ones included."""
        if self.policy.looks_at_cache and len(self) <= self.policy.max_requests_to_sort:
            return self._order_of_now()
        return (place.request for place in self._sorted)

    def _order_of_now(self) -> Iterable[Request]:
        ordered = self.policy.order([place.request for place in self._sorted])
        if sorted(r.request_id for r in ordered) != sorted(self._places):
            raise ValueError(f"policy {self.policy.name!r}: order must return each request once")
        return ordered

    # -- checks

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the queue contradicts itself. O(n log n)."""
        assert self._front.keys().isdisjoint(self._places), "preempted, and sorted"
        assert sorted(self._places.values()) == list(self._sorted), "the two orders differ"
        ages = [place.num_left for place in self._places.values()]
        assert ages == sorted(ages), "entries are not in order of arrival"
        assert not ages or ages[-1] <= self._num_left, "an entry counts too many departures"
        for request_id, place in self._places.items():
            assert place.request.request_id == request_id, place


class ShuffledQueue(PolicyQueue):
    """A debug switch: those who wait are asked in a random order, which changes nobody's tokens."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None, seed: int) -> None:
        super().__init__(policy, max_overtakes)
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Request]:
        requests = list(super().__iter__())
        self._random.shuffle(requests)
        return iter(requests)
