"""A disconnect at any point of an answer: every generator is closed, and every request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from common.serve.deltas import CompletionDelta, RequestDelta
from common.serve.engine_loop import EngineError
from common.serve.streams import (
    HEARTBEAT,
    EventStream,
    accepted,
    close_all,
    gathered,
    merged,
    unless_disconnected,
    within,
)


class Source:
    """A request of which one delta comes at once, and the next when `go` is set."""

    def __init__(self, error: Exception | None = None, waits_first: bool = False) -> None:
        self.is_open, self.go = False, asyncio.Event()
        self.error, self.waits_first = error, waits_first
        self.deltas = self._deltas()

    async def _deltas(self) -> AsyncIterator[RequestDelta]:
        self.is_open = True
        try:
            if self.waits_first:
                await self.go.wait()
            yield RequestDelta("x", prompt_token_ids=[1])
            if self.error is not None:
                raise self.error
            await self.go.wait()
            yield RequestDelta("x", {0: CompletionDelta(0, "a", [1])}, finished=True)
        finally:
            await asyncio.sleep(0)
            self.is_open = False


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def leaves() -> Message:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def cancelled(awaitable: Any) -> None:
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", ["accepted", "gathered", "merged"])
@pytest.mark.parametrize("fails", [True, False])
async def test_one_that_fails_or_is_cancelled_ends_the_others(way: str, fails: bool) -> None:
    """At each wait."""
    last = Source(EngineError("broken") if fails else None, waits_first=way == "accepted")
    pair = [Source(), last]
    requests = [source.deltas for source in pair]

    async def awaited() -> None:
        try:
            if way == "accepted" and not fails:
                await unless_disconnected(never, accepted(requests))
            first_outputs = await accepted(requests)
            if way == "gathered":
                await gathered(first_outputs, requests)
            async for _ in merged(requests):
                pass
        finally:
            await close_all(requests)

    if fails:
        asyncio.get_running_loop().call_later(0.01, last.go.set)
        pair[0].go.set()
        with pytest.raises(EngineError, match="broken"):
            await awaited()
    else:
        await cancelled(awaited())
    assert not any(source.is_open for source in pair)
    slow = Source(waits_first=True)
    assert await unless_disconnected(leaves, accepted([slow.deltas])) is None and not slow.is_open


@pytest.mark.parametrize("heartbeat_s", [None, 0.001])
@pytest.mark.parametrize("ending", ["leaves", "cancelled", "head", "at once"])
async def test_a_stream_is_closed_however_it_ends(heartbeat_s: float | None, ending: str) -> None:
    """Its reader reads nothing: it waits in the middle of sending."""
    source, is_closed = Source(), False
    await anext(source.deltas)

    async def events() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            yield b"first"
            async for _ in source.deltas:
                yield b"more"
        finally:
            await asyncio.sleep(0)
            is_closed = True

    async def send(message: Message) -> None:
        is_head = message["type"] == "http.response.start"
        if is_head and ending == "head":
            raise OSError
        if not is_head and (heartbeat_s is None or message["body"] != b"first"):
            await asyncio.Event().wait()

    async def at_once() -> Message:
        return {"type": "http.disconnect"}

    receive = {"leaves": leaves, "at once": at_once}.get(ending, never)
    call = EventStream(events(), heartbeat_s, [source.deltas])({}, receive, send)
    if ending == "cancelled":
        await cancelled(call)
    elif ending == "head":
        with pytest.raises(OSError):
            await call
    else:
        await call
    assert not source.is_open and (is_closed or ending == "head")


async def test_a_stream_that_is_silent_says_that_it_is_there() -> None:
    source, sent = Source(), list[bytes | None]()
    await anext(source.deltas)

    async def events() -> AsyncIterator[bytes]:
        async for _ in source.deltas:
            yield b"late"

    async def send(message: Message) -> None:
        sent.append(message.get("body"))
        if sent.count(HEARTBEAT) == 2:
            source.go.set()

    stream = EventStream(events(), 0.001, [source.deltas])
    await asyncio.wait_for(stream({}, never, send), 20)
    assert sent[:3] == [None, HEARTBEAT, HEARTBEAT] and sent[-2:] == [b"late", b""]


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_cancellation_that_comes_with_the_result_is_not_ignored(num_turns: int) -> None:
    """Otherwise a viewer that leaves as an update arrives is never forgotten."""
    has_result = asyncio.Event()
    task = asyncio.ensure_future(within(60, has_result.wait()))
    await asyncio.sleep(0.01)
    has_result.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task is True and num_turns > 2
