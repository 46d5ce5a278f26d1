"""Streamed and long-running responses, and clients that disconnect before the end.

See common/serve/README.md#the-way-of-one-request"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.serve.deltas import RequestDelta

T = TypeVar("T")
Deltas = AsyncIterator[RequestDelta]
CLIENT_DISCONNECTED = Response(status_code=499)  # nginx's status for it; no client reads it


async def listen_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, awaitable: Awaitable[T]) -> T | None:
    """Return the result of `awaitable`. If the client disconnects first, cancel it and return
    None."""
    watcher = asyncio.ensure_future(listen_for_disconnect(receive))
    work = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        await _end([watcher, work])


async def accepted(requests: Sequence[Deltas]) -> list[RequestDelta]:
    """Return the first delta of each request. Raises the error of a request that is refused."""
    first_deltas = await asyncio.gather(*map(anext, requests), return_exceptions=True)
    for first in first_deltas:
        if isinstance(first, BaseException):
            raise first
    return [first for first in first_deltas if isinstance(first, RequestDelta)]


async def close_all(requests: Sequence[AsyncIterator[Any]]) -> None:
    for request in requests:
        await request.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def gathered(
    first_deltas: list[RequestDelta], requests: Sequence[Deltas]
) -> list[RequestDelta]:
    """Return each request's deltas merged into one. If one request fails, the others are ended."""
    async for i, delta in merged(requests):
        first_deltas[i].extend(delta)
    return first_deltas


async def merged(requests: Sequence[Deltas]) -> AsyncIterator[tuple[int, RequestDelta]]:
    """Yield the deltas of all requests as they arrive, each with its request's index."""
    if len(requests) == 1:
        async for delta in requests[0]:
            yield 0, delta
        return
    # A slow reader holds back one delta; later ones are merged in the request's mailbox.
    queue = asyncio.Queue[tuple[int, RequestDelta | Exception | None]](1)

    async def pump(i: int, request: Deltas) -> None:
        try:
            async for delta in request:
                await queue.put((i, delta))
            await queue.put((i, None))
        except Exception as error:  # only `_end` cancels; an interrupt stops the event loop itself
            await queue.put((i, error))

    tasks = [asyncio.ensure_future(pump(i, request)) for i, request in enumerate(requests)]
    num_unfinished = len(tasks)
    try:
        while num_unfinished:
            i, delta = await queue.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                num_unfinished -= 1
            else:
                yield i, delta
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events. At its end, however caused, `events` and the underlying
    `requests` are closed, because a generator that never started does not run its `finally`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], requests: Sequence[Deltas] = ()) -> None:
        super().__init__()
        self.events = events
        self.requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await unless_disconnected(receive, self._send_all(send))
        finally:
            await close_all([self.events, *self.requests])

    async def _send_all(self, send: Send) -> None:
        async for data in self.events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
