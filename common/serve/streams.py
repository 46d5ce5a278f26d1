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


async def unless_disconnected(receive: Receive, awaitable: Awaitable[T]) -> T | None:
    """Return the result of `awaitable`. If the client disconnects first, cancel it and return
    None."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnect())
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


async def gathered(deltas: AsyncIterator[tuple[int, RequestDelta]]) -> list[RequestDelta]:
    """Return each request's deltas merged into one. If one request fails, the others are ended."""
    totals: dict[int, RequestDelta] = {}
    async for i, delta in deltas:
        if i in totals:
            totals[i].extend(delta)
        else:
            totals[i] = delta
    return [totals[i] for i in range(len(totals))]


async def merged(
    first_deltas: list[RequestDelta], requests: Sequence[Deltas]
) -> AsyncIterator[tuple[int, RequestDelta]]:
    """Yield the deltas of all requests as they arrive, each with its request's index."""
    for i, first in enumerate(first_deltas):
        yield i, first
    if len(requests) == 1:
        async for delta in requests[0]:
            yield 0, delta
        return
    tasks = {asyncio.ensure_future(anext(one, None)): i for i, one in enumerate(requests)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = tasks.pop(task)
                if (delta := task.result()) is not None:
                    tasks[asyncio.ensure_future(anext(requests[i], None))] = i
                    yield i, delta
    finally:
        await _end([*tasks])


async def _end(tasks: Sequence[asyncio.Future]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events. At its end, however caused, `events` and the underlying
    `requests` are closed, because a generator that never started does not run its `finally`.

    Starlette's own streams cancel with anyio's scopes, in which no `finally` can wait."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], requests: Sequence[AsyncIterator[Any]] = ()
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.generators = [events, *requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await unless_disconnected(receive, self._send_all(send))
        finally:
            await close_all(self.generators)

    async def _send_all(self, send: Send) -> None:
        async for data in self.generators[0]:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
