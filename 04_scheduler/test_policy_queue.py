"""The queue against a naive one that looks at every request each time; its bound; its price."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from policies import FCFSPolicy, SchedulePolicy
from policy_queue import PolicyQueue
from request import Request
from scheduler_steps import make_memory
from sglang_policies import POLICIES, policy_by_name
from test_request_queue import QueueMachine


def make(request_id: str, priority: int = 0, time: float = 0.0, num_new: int = 16) -> Request:
    return Request.from_tokens(request_id, [1], num_new, priority, time)


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def fill(queue: PolicyQueue, names: Iterable[str]) -> list[Request]:
    requests = [make(name) for name in names]
    for request in requests:
        queue.add_request(request)
    return requests


# against a naive queue


class LivePolicy(SchedulePolicy):
    """Ranks that change while requests wait, as cached prefixes do."""

    name = "live"
    is_cache_aware = True
    max_requests_to_sort = 6

    def __init__(self, sorts_all_or_none: bool = False) -> None:
        self.sorts_all_or_none = sorts_all_or_none
        self.ranks: dict[str, int] = {}

    def order(self, requests: Sequence[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: self.ranks.get(request.request_id, 0))


@dataclass(eq=False)
class Entry:
    request: Request
    key: object  # the policy's, when it arrived
    arrival: int
    tie: int  # between equal keys: order of arrival, but a preempted request is before its equals
    num_before: int  # requests that had left the queue or waited when it arrived
    is_in_front: bool
    num_overtakes: int = 0  # by requests that arrived later and were served before it


class NaiveQueue:
    """The rule itself: the next request, by looking at every one."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None) -> None:
        self.policy = policy
        self.max_overtakes = max_overtakes
        self.entries: list[Entry] = []
        self.num_dequeued = self.num_arrived = 0

    def enqueue(self, request: Request, is_preempted: bool) -> None:
        self.num_arrived += 1
        n = self.num_arrived
        front = is_preempted and self.policy.name != "priority"
        num_before = self.num_dequeued + len(self.entries)
        key = None if self.policy.is_cache_aware else self.policy.key(request)
        self.entries.append(Entry(request, key, n, -n if is_preempted else n, num_before, front))

    def remove(self, request: Request) -> Entry:
        (removed,) = [entry for entry in self.entries if entry.request is request]
        self.entries.remove(removed)
        self.num_dequeued += 1
        return removed

    def has_aged(self, entry: Entry, num_dequeued: int) -> bool:
        bound = self.max_overtakes
        return bound is not None and num_dequeued - entry.num_before >= bound

    def next(self, entries: list[Entry], num_dequeued: int, sorted_ids: Sequence[str]) -> Entry:
        if front := [entry for entry in entries if entry.is_in_front]:
            return max(front, key=lambda entry: entry.arrival)
        if aged := [entry for entry in entries if self.has_aged(entry, num_dequeued)]:
            return min(aged, key=lambda entry: entry.arrival)
        if not self.policy.is_cache_aware:
            return min(entries, key=lambda entry: (entry.key, entry.tie))
        found = [e for e in entries if e.request.request_id in sorted_ids] or entries
        rank = self.policy.ranks.get if found is not entries else lambda *_: 0
        return min(found, key=lambda entry: (rank(entry.request.request_id, 0), entry.tie))

    def in_order(self) -> list[Request]:
        entries = list(self.entries)
        num_dequeued = self.num_dequeued
        result = []
        by_arrival = ids(entry.request for entry in entries if not entry.is_in_front)
        limit = self.policy.max_requests_to_sort
        is_too_long = self.policy.sorts_all_or_none and len(entries) > limit
        while entries:
            entry = self.next(entries, num_dequeued, by_arrival[: 0 if is_too_long else limit])
            entries.remove(entry)
            num_dequeued += 1
            result.append(entry.request)
        return result


class QueueAgainstNaiveQueue(QueueMachine):
    """Every operation, also the refused ones, next to the same one on the naive queue."""

    @initialize(
        name=st.sampled_from(("fcfs", "priority", "lof", "random", "live", "live or none")),
        max_overtakes=st.sampled_from((None, 0, 1, 2, 5, 8)),
    )
    def choose(self, name, max_overtakes):
        is_live = name.startswith("live")
        self.policy = LivePolicy(name != "live") if is_live else policy_by_name(name, seed=3)
        self.queue = PolicyQueue(self.policy, max_overtakes)
        self.model = NaiveQueue(self.policy, max_overtakes)

    @property
    def waiting(self) -> list[Request]:
        return [entry.request for entry in self.model.entries]

    def _enqueue(self, request: Request, is_preempted: bool) -> None:
        (self.queue.prepend_request if is_preempted else self.queue.add_request)(request)
        self.model.enqueue(request, is_preempted)

    def _take_out(self, request: Request, is_served: bool = True) -> None:
        served = self.model.remove(request)
        self.outside.append(request)
        if is_served and not served.is_in_front:
            for entry in self.model.entries:
                entry.num_overtakes += not entry.is_in_front and entry.arrival < served.arrival

    @rule(
        priority=st.integers(-1, 1),
        time=st.sampled_from((0.0, 1.0)),
        num_new=st.integers(1, 3),
        is_preempted=st.booleans(),
        num=st.integers(1, 4),
    )
    def new_requests(self, priority, time, num_new, is_preempted, num):
        for _ in range(num):
            self.num_made += 1
            self._enqueue(make(str(self.num_made), priority, time, num_new), is_preempted)

    @precondition(lambda self: self.outside)
    @rule(data=st.data(), is_preempted=st.booleans())
    def come_back(self, data, is_preempted):
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        self._enqueue(request, is_preempted)

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self):
        expected = self.model.in_order()[0]
        assert self.queue.pop_request() is expected
        self._take_out(expected)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def serve_some_as_a_step_does(self, data):
        num = data.draw(st.integers(1, len(self.waiting)))
        served = [request for request, _ in zip(self.queue, range(num))]
        assert served == self.model.in_order()[:num]
        for request in served:
            self.queue.remove_request(request)
            self._take_out(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        self.queue.remove_request(request)
        self._take_out(request, is_served=False)

    @precondition(lambda self: self.waiting and self.policy.name == "live")
    @rule(data=st.data(), rank=st.integers(-2, 2))
    def the_cache_changes(self, data, rank):
        self.policy.ranks[data.draw(st.sampled_from(self.waiting)).request_id] = rank

    @precondition(lambda self: self.waiting and self.policy.name != "live")
    @rule(data=st.data())
    def a_key_is_asked_once(self, data):
        """A later change does not move a request, and does not lose it."""
        request = data.draw(st.sampled_from(self.waiting))
        before = request.priority, request.max_tokens
        request.priority = 99
        request.max_tokens = 99
        assert ids(self.queue) == self.order_before
        self.queue.check_invariants()
        request.priority, request.max_tokens = before

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def a_stranger_has_no_age(self, data):
        with pytest.raises(KeyError):
            self.queue.is_aged(data.draw(st.sampled_from(self.outside)))

    @invariant()
    def it_equals_the_naive_queue(self):
        if not hasattr(self, "queue"):
            return
        self.queue.check_invariants()
        expected = self.model.in_order()
        self.order_before = ids(expected)
        for _ in range(2):  # looking changes nothing
            assert ids(self.queue) == self.order_before
            assert not expected or self.queue.peek_request() is expected[0]
        assert len(self.queue) == len(expected) and bool(self.queue) == bool(expected)
        for entry in self.model.entries:
            is_aged = entry.is_in_front or self.model.has_aged(entry, self.model.num_dequeued)
            assert self.queue.is_aged(entry.request) == is_aged
            bound = self.model.max_overtakes
            assert bound is None or entry.num_overtakes <= bound, "the bound of `nobody starves`"


TestQueueAgainstNaiveQueue = pytest.mark.net(QueueAgainstNaiveQueue.TestCase)
TestQueueAgainstNaiveQueue.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)


# the price


class CountingKey:
    """A key whose comparison is a line of Python, so `lines_run` counts it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: CountingKey) -> bool:
        return self.value < other.value


class CountingPolicy(SchedulePolicy):
    name = "counting"

    def key(self, request: Request) -> CountingKey:
        return CountingKey(int(request.request_id) * 7919 % 1_000_003)


def lines_run(operation: Callable[..., object], *arguments: object) -> int:
    """Lines of Python that an operation runs, those of `sortedcontainers` included."""
    num_lines = 0
    before = sys.gettrace()

    def count(_: object, event: str, __: object) -> Callable:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    sys.settrace(count)
    try:
        operation(*arguments)
    finally:
        sys.settrace(before)
    return num_lines


COSTS = [
    lambda queue, requests: queue.add_request(make("8192")),
    lambda queue, requests: queue.prepend_request(make("8192")),
    lambda queue, requests: queue.remove_request(requests[5]),
    lambda queue, requests: queue.remove_request(requests[0]),
    lambda queue, requests: queue.remove_request(requests[-1]),
    lambda queue, requests: [queue.pop_request(), queue.pop_request()],
    lambda queue, requests: queue.peek_request(),
    lambda queue, requests: queue.is_aged(requests[3]),
    lambda queue, requests: [*zip(range(10), queue)],
]


@pytest.mark.net
@pytest.mark.parametrize("operation", COSTS)
def test_an_operation_costs_a_logarithm_of_the_length(operation):
    """Counted, not timed. Half of the requests are aged."""
    costs = []
    for length in (16, 8192):
        queue = PolicyQueue(CountingPolicy(), max_overtakes=1)
        requests = fill(queue, map(str, range(length // 2)))
        queue.remove_request(requests.pop(7))  # one has left, so all earlier requests are aged
        requests += fill(queue, map(str, range(length // 2, length)))
        queue.prepend_request(make("preempted"))
        costs.append(lines_run(operation, queue, requests))
    assert costs[1] <= costs[0] + 8 * log2(8192 / 16), costs


# policies by name, and refusals


def test_a_policy_is_made_by_name():
    assert list(POLICIES) == ["fcfs", "priority", "lof", "random", "lpm", "lpm-first", "dfs-weight"]
    memory = make_memory("hash", 10, 8)
    for name, kind in POLICIES.items():
        policy = policy_by_name(name, memory, seed=5)
        assert type(policy) is kind and policy.name == name
        if policy.is_cache_aware:
            assert policy.find_cached_blocks == memory.find_cached_blocks
            assert policy.block_size == 8
            assert (policy.max_requests_to_sort, policy.sorts_all_or_none) == (128, name == "lpm")
    assert policy_by_name("random", seed=5).seed == 5


@pytest.mark.parametrize("policy", ["lifo", "random:Random", "request:Request"])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ValueError, match=r"policy must .*'fcfs', 'priority', .*'dfs-weight'"):
        policy_by_name(policy)


def test_an_empty_queue_has_no_next():
    for operation in (
        PolicyQueue(FCFSPolicy()).peek_request,
        PolicyQueue(FCFSPolicy()).pop_request,
    ):
        with pytest.raises(IndexError):
            operation()
