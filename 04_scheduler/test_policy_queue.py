"""The queue against a naive one that looks at every request each time; its bound; its price."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from sortedcontainers import SortedList

import policy_queue
from policies import FCFSPolicy, SchedulePolicy
from policy_queue import PolicyQueue
from request import Request
from request_queue import SchedulingPolicy
from sglang_policies import (
    POLICIES,
    DFSWeight,
    LongestPrefixMatch,
    LongestPrefixMatchOfFirst,
    make_policy,
)
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


def create_queue(policy, find_cached_blocks=None, max_overtakes=1000, **options) -> PolicyQueue:
    if not isinstance(policy, SchedulePolicy):
        policy = make_policy(policy, find_cached_blocks, **options)
    return PolicyQueue(policy, max_overtakes)


# against a naive queue


class LivePolicy(SchedulePolicy):
    """Ranks that change while requests wait, as cached prefixes do."""

    name = "live"
    is_cache_aware = True
    max_requests_to_sort = 6

    def __init__(self) -> None:
        self.ranks: dict[str, int] = {}

    def order(self, requests: Sequence[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: self.ranks.get(request.request_id, 0))


@dataclass(eq=False)
class Entry:
    request: Request
    arrival: int
    tie: int  # between equal keys: order of arrival, but a preempted request is before its equals
    num_before: int  # requests that had left the queue or waited when it arrived
    is_in_front: bool
    num_overtakes: int = 0  # by requests that arrived later and were served before it


class NaiveQueue:
    """The rule itself: the next request, by looking at every one."""

    def __init__(self, policy: SchedulePolicy, max_overtakes: int | None) -> None:
        self.policy, self.max_overtakes = policy, max_overtakes
        self.entries: list[Entry] = []
        self.num_dequeued = self.num_arrived = 0

    def enqueue(self, request: Request, is_preempted: bool) -> None:
        self.num_arrived += 1
        n, front = self.num_arrived, is_preempted and self.policy.name != "priority"
        num_before = self.num_dequeued + len(self.entries)
        self.entries.append(Entry(request, n, -n if is_preempted else n, num_before, front))

    def remove(self, request: Request) -> Entry:
        (removed,) = [entry for entry in self.entries if entry.request is request]
        self.entries.remove(removed)
        self.num_dequeued += 1
        return removed

    def key(self, request: Request, sorted_ids: Sequence[str]) -> object:
        match self.policy.name:
            case "fcfs":
                return 0
            case "priority":
                return (request.priority, request.arrival_time)
            case "lof":
                return -request.max_tokens
            case "random":
                return self.policy.key(request)
            case "live":
                is_sorted = request.request_id in sorted_ids
                return (not is_sorted, is_sorted and self.policy.ranks.get(request.request_id, 0))

    def has_aged(self, entry: Entry, num_dequeued: int) -> bool:
        bound = self.max_overtakes
        return bound is not None and num_dequeued - entry.num_before >= bound

    def next(self, entries: list[Entry], num_dequeued: int, sorted_ids: Sequence[str]) -> Entry:
        if front := [entry for entry in entries if entry.is_in_front]:
            return max(front, key=lambda entry: entry.arrival)
        if aged := [entry for entry in entries if self.has_aged(entry, num_dequeued)]:
            return min(aged, key=lambda entry: entry.arrival)
        return min(entries, key=lambda entry: (self.key(entry.request, sorted_ids), entry.tie))

    def in_order(self) -> list[Request]:
        entries, num_dequeued, result = list(self.entries), self.num_dequeued, []
        by_arrival = [entry.request for entry in entries if not entry.is_in_front]
        sorted_ids = ids(by_arrival[: getattr(self.policy, "max_requests_to_sort", 0)])
        while entries:
            entry = self.next(entries, num_dequeued, sorted_ids)
            entries.remove(entry)
            num_dequeued += 1
            result.append(entry.request)
        return result


class QueueAgainstNaiveQueue(QueueMachine):
    """Every operation, also the refused ones, next to the same one on the naive queue."""

    @initialize(
        name=st.sampled_from(("fcfs", "priority", "lof", "random", "live")),
        max_overtakes=st.sampled_from((None, 0, 1, 2, 5, 8)),
    )
    def choose(self, name, max_overtakes):
        policy = LivePolicy() if name == "live" else name
        self.queue = create_queue(policy, seed=3, max_overtakes=max_overtakes)
        self.policy = self.queue.policy
        self.model = NaiveQueue(self.policy, max_overtakes)

    @property
    def waiting(self) -> list[Request]:
        return [entry.request for entry in self.model.entries]

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
            request = make(str(self.num_made), priority, time, num_new)
            enqueue = self.queue.prepend_request if is_preempted else self.queue.add_request
            enqueue(request)
            self.model.enqueue(request, is_preempted)

    @precondition(lambda self: self.outside)
    @rule(data=st.data(), is_preempted=st.booleans())
    def come_back(self, data, is_preempted):
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        enqueue = self.queue.prepend_request if is_preempted else self.queue.add_request
        enqueue(request)
        self.model.enqueue(request, is_preempted)

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
        request.priority, request.max_tokens = 99, 99
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
        assert ids(self.queue) == self.order_before
        assert len(self.queue) == len(expected) and bool(self.queue) == bool(expected)
        if expected:
            assert self.queue.peek_request() is expected[0]
        for entry in self.model.entries:
            is_aged = entry.is_in_front or self.model.has_aged(entry, self.model.num_dequeued)
            assert self.queue.is_aged(entry.request) == is_aged
            bound = self.model.max_overtakes
            assert bound is None or entry.num_overtakes <= bound, "the bound of `nobody starves`"


TestQueueAgainstNaiveQueue = pytest.mark.net(QueueAgainstNaiveQueue.TestCase)
TestQueueAgainstNaiveQueue.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)


# looking, and changing


def test_looking_changes_nothing_and_two_queues_share_nothing():
    """Trap 50."""
    queue, other = create_queue("random"), create_queue("random")
    fill(queue, "abcdef")
    order = ids(queue)
    for _ in range(2):
        assert queue.peek_request().request_id == order[0]
        assert ids(queue) == order
    assert not other and ids(other) == []
    fill(other, "fedcba")
    assert ids(other) == order  # a draw depends on the id alone


@pytest.mark.parametrize(
    "change",
    [
        lambda queue, request: queue.add_request(make("new")),
        lambda queue, request: queue.prepend_request(make("new")),
        lambda queue, request: queue.remove_request(request),
    ],
)
def test_to_change_it_while_it_is_iterated_is_an_error(change):
    queue = create_queue("priority")
    fill(queue, "abc")
    with pytest.raises(RuntimeError, match="cannot iterate"):
        for request in queue:
            change(queue, request)


# policies that are asked at every step


@pytest.mark.parametrize("kind", [LongestPrefixMatch, LongestPrefixMatchOfFirst, DFSWeight])
@pytest.mark.sample
@pytest.mark.parametrize("limit", [0, 5, 128])
def test_of_more_than_can_be_sorted_the_first_are_or_with_lpm_none(kind, limit):
    queries: list[str] = []

    def find(request: Request) -> list[int]:
        queries.append(request.request_id)
        return list(range(int(request.request_id)))  # who came last has most

    kwargs = {} if limit == 128 else {"max_requests_to_sort": limit}
    queue = PolicyQueue(kind(find, **kwargs))
    names = [str(i) for i in range(limit)]
    fill(queue, names)
    assert ids(queue) == names[::-1] and queries == names
    queries.clear()
    (newest,) = fill(queue, [str(limit)])
    is_lpm = kind is LongestPrefixMatch
    first = names if is_lpm else names[::-1]
    assert ids(queue) == [*first, str(limit)] and queries == ([] if is_lpm else names)
    queue.remove_request(newest)
    assert ids(queue) == names[::-1]
    queue.prepend_request(newest)  # preempted ones are not sorted, but they wait
    assert ids(queue) == [str(limit), *first]


@pytest.mark.parametrize("wrong", [lambda r: r[1:], lambda r: [*r, r[0]], lambda r: r[:1] * len(r)])
def test_a_policy_that_loses_or_doubles_requests_is_an_error(wrong):
    class Wrong(LivePolicy):
        def order(self, requests):
            return wrong(list(requests))

    queue = PolicyQueue(Wrong())
    fill(queue, "abc")
    with pytest.raises(ValueError, match="'Wrong': order must return each request once"):
        queue.peek_request()


# the price


class CountingKey(int):
    """Counts how often it is compared."""

    num_compared = 0


def count_comparison(name: str) -> Callable:
    plain = getattr(int, name)

    def compare(self: int, other: int) -> bool:
        CountingKey.num_compared += 1
        return plain(self, other)

    return compare


for _name in ("__lt__", "__gt__", "__le__", "__ge__", "__eq__"):
    setattr(CountingKey, _name, count_comparison(_name))


class CountingPolicy(SchedulePolicy):
    name = "counting"
    num_asked = 0

    def key(self, request: Request) -> CountingKey:
        self.num_asked += 1
        return CountingKey(int(request.request_id) * 7919 % 1_000_003)


class CountingValues:
    def __init__(self, values: Iterable) -> None:
        self.values = values

    def __iter__(self):
        yield from map(count_step, self.values)

    def __reversed__(self):
        yield from map(count_step, reversed(self.values))


class CountingDict(OrderedDict):
    """Counts the entries that an iteration goes through; those of all dictionaries and lists
    together, so that a queue which rebuilds one is seen too."""

    num_steps = 0

    def values(self):
        return CountingValues(super().values())

    def __iter__(self):
        return map(count_step, super().__iter__())


class CountingList(SortedList):
    def __iter__(self):
        return map(count_step, super().__iter__())


def count_step(entry: object) -> object:
    CountingDict.num_steps += 1
    return entry


def cost_of(operation: Callable[[], object]) -> tuple[int, int]:
    """Comparisons of keys, and entries gone through."""
    CountingKey.num_compared = CountingDict.num_steps = 0
    operation()
    return CountingKey.num_compared, CountingDict.num_steps


def first(queue: PolicyQueue, num: int) -> list[Request]:
    return [request for request, _ in zip(queue, range(num))]


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(policy_queue, "OrderedDict", CountingDict)
    monkeypatch.setattr(policy_queue, "SortedList", CountingList)


@pytest.mark.net
@pytest.mark.parametrize("length", [16, 8192])
def test_adding_and_taking_out_cost_a_logarithm(counted, length):
    """Counted, not timed. In a list of 8,192 to search would be 8,192."""
    queue = PolicyQueue(CountingPolicy())
    requests = fill(queue, [str(i) for i in range(length)])
    operations = {
        "add": lambda: queue.add_request(make(str(length))),
        "remove from the middle": lambda: queue.remove_request(requests[length // 2]),
        "remove the oldest": lambda: queue.remove_request(requests[0]),
        "remove the newest": lambda: queue.remove_request(requests[-1]),
        "prepend": lambda: queue.prepend_request(requests[0]),
        "pop the preempted": queue.pop_request,
        "pop": queue.pop_request,
        "peek": queue.peek_request,
        "len": lambda: len(queue),
        "is_aged": lambda: queue.is_aged(requests[3]),
    }
    for name, operation in operations.items():
        num_compared, num_steps = cost_of(operation)
        assert num_compared <= 4 * log2(length) + 8, (name, num_compared)
        assert num_steps <= 2, (name, num_steps)  # the oldest, and the first of the policy
    assert queue.policy.num_asked == length + 1  # once a request; not in front
    assert cost_of(lambda: sorted(queue._sorted))[0] >= len(queue) - 1, "it does count"


@pytest.mark.net
@pytest.mark.parametrize("num_aged", [0, 1000])
@pytest.mark.parametrize("num_preempted", [0, 3])
def test_to_see_the_first_ones_costs_as_much_as_one_sees(counted, num_aged, num_preempted):
    queue = PolicyQueue(CountingPolicy(), max_overtakes=1)
    fill(queue, [str(i) for i in range(num_aged)])
    if num_aged:
        queue.pop_request()  # one has left, so all earlier requests are aged
    fill(queue, [str(i) for i in range(num_aged, 4000)])
    for i in range(num_preempted):
        queue.prepend_request(make(f"p{i}"))
    for num in (1, 10, 100):
        num_compared, num_steps = cost_of(lambda num=num: first(queue, num))
        assert num_compared == 0
        assert num <= num_steps <= 3 * num + 3, (num, num_steps)


# policies by name


def test_a_policy_is_made_by_name():
    assert list(POLICIES) == ["fcfs", "priority", "lof", "random", "lpm", "lpm-first", "dfs-weight"]
    for name, kind in POLICIES.items():
        policy = make_policy(name, list, block_size=8, seed=5)
        assert type(policy) is kind and policy.name == name
        if policy.is_cache_aware:
            assert policy.find_cached_blocks is list and policy.block_size == 8
    assert make_policy("random", seed=5).seed == 5
    assert isinstance(make_policy(SchedulingPolicy.FCFS), FCFSPolicy)  # chapter 1's name


UNKNOWN = r"policy must .*'fcfs', 'priority', .*'dfs-weight'"
BOUND = "max_overtakes must be None or >= 0"


@pytest.mark.parametrize("policy", ["lifo", None, ["fcfs"], FCFSPolicy])
def test_an_unknown_policy_is_an_error_that_names_the_known_ones(policy):
    with pytest.raises(ValueError, match=UNKNOWN):
        create_queue(policy)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: create_queue("lpm"), r"find_cached_blocks must be .*'lpm'"),
        (lambda: create_queue("dfs-weight"), r"find_cached_blocks must be .*'dfs-weight'"),
        (lambda: PolicyQueue(FCFSPolicy(), -1), BOUND),
        (lambda: PolicyQueue(FCFSPolicy(), 1.5), BOUND),
        (lambda: PolicyQueue(FCFSPolicy(), True), BOUND),
    ],
)
def test_what_a_queue_refuses(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


def test_a_policy_that_fails_leaves_the_queue_as_it_was():
    queue = PolicyQueue(CountingPolicy())
    fill(queue, "21")
    with pytest.raises(ValueError, match="invalid literal"):
        queue.add_request(make("x"))
    assert ids(queue) == ["1", "2"] and len(queue) == 2
    queue.check_invariants()


@pytest.mark.parametrize(
    "damage",
    [
        lambda queue: queue._preempted.update(a=queue.peek_request()),
        lambda queue: queue._sorted.pop(),
        lambda queue: queue._entries.pop("a"),
        lambda queue: queue._entries.move_to_end("a"),
        lambda queue: setattr(queue, "_num_dequeued", -1),
        lambda queue: setattr(queue.peek_request(), "request_id", "other"),
    ],
)
def test_a_queue_that_contradicts_itself_is_found_out(damage):
    queue = create_queue("fcfs")
    fill(queue, "ax")
    queue.remove_request(next(r for r in queue if r.request_id == "x"))
    fill(queue, "bc")
    queue.check_invariants()
    damage(queue)
    with pytest.raises(AssertionError):
        queue.check_invariants()
