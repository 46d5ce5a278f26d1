"""The waiting queue, in order of service.

Every operation is O(1) here. A list's `pop(0)` shifts all entries and its `remove` searches: with
100,000 waiting requests that takes as long as the step. An `OrderedDict` by request id removes an
entry from the middle without touching the others.

Invariants: a request is in the queue at most once; iteration order is the order of service. (vLLM
and nano-vllm use a deque, SGLang sorts a list every step.)

See 01_batching/README.md#the-queue"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

from request import Request


class SchedulingPolicy(str, Enum):
    FCFS = "fcfs"  # chapter 4 adds priority and cache-aware orders of service


class RequestQueue(ABC):
    """The interface of a waiting queue. Iterating changes nothing.

    add_request(r)      add it in order of service  ValueError: its id is in the queue
    prepend_request(r)  put it at the front         the same
    peek_request()      return the next one         IndexError: the queue is empty
    pop_request()       remove the next one         the same
    remove_request(r)   remove it from the middle   KeyError: it is not in the queue
    """

    @abstractmethod
    def add_request(self, request: Request) -> None: ...
    @abstractmethod
    def prepend_request(self, request: Request) -> None: ...
    @abstractmethod
    def pop_request(self) -> Request: ...
    @abstractmethod
    def remove_request(self, request: Request) -> None: ...
    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...
    @abstractmethod
    def __contains__(self, request: object) -> bool: ...

    def in_order(self) -> Iterator[Request]:
        """Iterate in the order of service, even if a debug switch changes the order of
        `__iter__`."""
        return iter(self)

    def peek_request(self) -> Request:
        for request in self:
            return request
        raise IndexError("cannot take a request: the queue is empty")

    def __bool__(self) -> bool:
        return len(self) > 0


class FCFSRequestQueue(RequestQueue):
    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(f"cannot add request {request.request_id!r}: already in the queue")
        self._requests[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)
        self._requests.move_to_end(request.request_id, last=False)

    def pop_request(self) -> Request:
        if not self._requests:
            raise IndexError("cannot take a request: the queue is empty")
        return self._requests.popitem(last=False)[1]

    def remove_request(self, request: Request) -> None:
        if self._requests.get(request.request_id) is not request:
            raise KeyError(request.request_id)
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.request_id) is request


def create_request_queue(policy: SchedulingPolicy | str) -> RequestQueue:
    """The queue for a policy. Raises `ValueError` for an unknown policy."""
    if policy != SchedulingPolicy.FCFS:
        raise ValueError(f"policy must be {SchedulingPolicy.FCFS.value!r}, got {policy!r}")
    return FCFSRequestQueue()
