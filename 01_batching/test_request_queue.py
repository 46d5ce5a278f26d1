"""The waiting queue against a plain list, and the price of each of its operations."""

from __future__ import annotations

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import request_queue
from request import Request
from request_queue import (
    FCFSRequestQueue,
    RequestQueue,
    SchedulingPolicy,
    create_request_queue,
)


def make(request_id: str) -> Request:
    return Request.from_tokens(request_id, [1])


def ids(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


class QueueMachine(RuleBasedStateMachine):
    """Operations that every queue refuses. A subclass has `queue`, and `waiting`, the requests that
    should be in it."""

    queue: RequestQueue
    waiting: list[Request]

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[Request] = []  # were in the queue, and may come back
        self.num_made = 0

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_second_request_with_the_same_id_is_refused(self, data):
        twin = make(data.draw(st.sampled_from(self.waiting)).request_id)
        for operation in (self.queue.add_request, self.queue.prepend_request):
            with pytest.raises(ValueError, match="already in the queue"):
                operation(twin)
        with pytest.raises(KeyError):
            self.queue.remove_request(twin)  # it is not the one that waits

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def removing_a_stranger_is_refused(self, data):
        with pytest.raises(KeyError):
            self.queue.remove_request(data.draw(st.sampled_from(self.outside)))

    @precondition(lambda self: not self.waiting)
    @rule()
    def an_empty_queue_has_no_next(self):
        for operation in (self.queue.pop_request, self.queue.peek_request):
            with pytest.raises(IndexError):
                operation()


class QueueAgainstList(QueueMachine):
    """Every operation of the queue, also the refused ones, next to the same one on a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = create_request_queue("fcfs")
        self.model = self.waiting = []

    def _new(self) -> Request:
        self.num_made += 1
        return make(str(self.num_made))

    @rule()
    def add(self):
        request = self._new()
        self.queue.add_request(request)
        self.model.append(request)

    @rule()
    def prepend(self):
        request = self._new()
        self.queue.prepend_request(request)
        self.model.insert(0, request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data(), at_front=st.booleans())
    def come_back(self, data, at_front):
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        if at_front:
            self.queue.prepend_request(request)
            self.model.insert(0, request)
        else:
            self.queue.add_request(request)
            self.model.append(request)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self):
        request = self.queue.pop_request()
        assert request is self.model.pop(0)
        self.outside.append(request)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        request = data.draw(st.sampled_from(self.model))
        self.queue.remove_request(request)
        self.model.remove(request)
        self.outside.append(request)

    @invariant()
    def it_equals_the_list(self):
        assert [id(r) for r in self.queue] == [id(r) for r in self.model]
        assert len(self.queue) == len(self.model)
        assert bool(self.queue) == bool(self.model)
        assert not any(request in self.queue for request in self.outside)
        if self.model:
            assert self.queue.peek_request() is self.model[0]


TestQueueAgainstList = pytest.mark.net(QueueAgainstList.TestCase)
TestQueueAgainstList.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class CountingDict(collections.OrderedDict):
    """Counts what is asked of it, and every step of an iteration over it. All of them count
    together, so that a queue which rebuilds its dictionary is seen too."""

    num_operations = 0

    def __iter__(self):
        for key in super().__iter__():
            CountingDict.num_operations += 1
            yield key

    def keys(self):
        return iter(self)

    def values(self):
        return (self[key] for key in self)

    def items(self):
        return ((key, self[key]) for key in self)


def count(name: str) -> None:
    plain = getattr(collections.OrderedDict, name)

    def method(self, *args, **kwargs):
        CountingDict.num_operations += 1
        return plain(self, *args, **kwargs)

    setattr(CountingDict, name, method)


for _name in ("__setitem__", "__getitem__", "__delitem__", "__contains__", "get", "popitem"):
    count(_name)
count("move_to_end")


def cost_of_operations(monkeypatch, length: int) -> dict[str, int]:
    monkeypatch.setattr(request_queue, "OrderedDict", CountingDict)
    queue = FCFSRequestQueue()
    requests = [make(str(i)) for i in range(length)]
    for request in requests:
        queue.add_request(request)
    operations = {
        "add": lambda: queue.add_request(make("new")),
        "prepend": lambda: queue.prepend_request(make("front")),
        "peek": queue.peek_request,
        "remove from the middle": lambda: queue.remove_request(requests[length // 2]),
        "remove the last": lambda: queue.remove_request(requests[-1]),
        "pop": queue.pop_request,
        "len": lambda: len(queue),
        "bool": lambda: bool(queue),
    }
    cost = {}
    for name, operation in operations.items():
        CountingDict.num_operations = 0
        operation()
        cost[name] = CountingDict.num_operations
    return cost


def test_no_operation_costs_more_in_a_longer_queue(monkeypatch):
    """Counted, not timed: the operations on the dictionary below. An OrderedDict does each in O(1)
    because its entries are linked, so removing one from the middle moves no other."""
    short = cost_of_operations(monkeypatch, 4)
    assert short == cost_of_operations(monkeypatch, 1024)
    assert max(short.values()) <= 3, short


def test_a_preempted_request_goes_back_to_the_front():
    queue = create_request_queue(SchedulingPolicy.FCFS)
    a, b, c = make("a"), make("b"), make("c")
    for request in (a, b, c):
        queue.add_request(request)
    assert queue.pop_request() is a
    queue.remove_request(b)
    queue.prepend_request(a)
    queue.add_request(b)
    assert ids(queue) == ["a", "c", "b"]


def test_two_queues_share_nothing():
    """Trap 50."""
    one, other = create_request_queue("fcfs"), create_request_queue("fcfs")
    one.add_request(make("a"))
    assert len(one) == 1 and not other


@pytest.mark.parametrize("policy", ["lifo", "", None, 3])
def test_an_unknown_policy_is_an_error_that_names_the_known_ones(policy):
    with pytest.raises(ValueError, match=r"policy must .*'fcfs'"):
        create_request_queue(policy)
