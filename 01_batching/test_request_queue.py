"""The waiting queue against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from request import Request
from request_queue import RequestQueue


def make(request_id: str) -> Request:
    return Request.from_tokens(request_id, [1])


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
        with pytest.raises(ValueError, match="already in the queue"):
            self.queue.add_request(twin)
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
        self.queue = RequestQueue()
        self.waiting = []

    @rule(data=st.data(), is_new=st.booleans())
    def add(self, data, is_new):
        self.num_made += 1
        request = make(str(self.num_made))
        if self.outside and not is_new:
            request = data.draw(st.sampled_from(self.outside))
            self.outside.remove(request)
        self.queue.add_request(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take(self, data):
        index = data.draw(st.integers(0, len(self.waiting)))
        if index == len(self.waiting):
            request = self.queue.pop_request()
            assert request is self.waiting.pop(0)
        else:
            request = self.waiting.pop(index)
            self.queue.remove_request(request)
        self.outside.append(request)

    @invariant()
    def it_equals_the_list(self):
        assert [id(r) for r in self.queue] == [id(r) for r in self.waiting]
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)
        assert not any(request in self.queue for request in self.outside)
        if self.waiting:
            assert self.queue.peek_request() is self.waiting[0]


TestQueueAgainstList = pytest.mark.net(QueueAgainstList.TestCase)
TestQueueAgainstList.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
