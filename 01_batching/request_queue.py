"""The waiting queue, in order of service.

Every operation is O(1) here. A list's `pop(0)` shifts all entries and its `remove` searches: with
100,000 waiting requests that takes as long as the step. An `OrderedDict` by request id removes an
entry from the middle without touching the others.

Invariants: a request is in the queue at most once; iteration order is the order of service. (vLLM
and nano-vllm use a deque, SGLang sorts a list every step.)

See 01_batching/README.md#the-queue"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from request import Request


class RequestQueue:
    """First come, first served. Chapter 4 adds other orders of service."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add_request(self, request: Request) -> None:
        """Add a request in order of service. Raises `ValueError` if its id is in the queue."""
        if request.request_id in self._requests:
            raise ValueError(f"cannot add request {request.request_id!r}: already in the queue")
        self._requests[request.request_id] = request

    def peek_request(self) -> Request:
        """Return the next request. Raises `IndexError` if the queue is empty."""
        for request in self:
            return request
        raise IndexError("cannot take a request: the queue is empty")

    def pop_request(self) -> Request:
        """Remove the next request and return it. Raises `IndexError` if the queue is empty."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request from the middle. Raises `KeyError` if it is not in the queue."""
        if request not in self:
            raise KeyError(request.request_id)
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request
