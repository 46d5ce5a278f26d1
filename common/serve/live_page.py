"""The live page: `GET /` is the watch page with a place to try prompts, `GET /events` its frames.

Frames are those of `common/events`, the lines that `LLMEngine.watch` writes; one server-sent event
holds the lines of one write. A stream begins with a `run` line and, unless the engine is as new, a
frame with its whole state. Another `run` line starts the stream again from scratch.

All viewers share one film: an engine has one watch, installed for the first viewer and removed
after the last. A later viewer must not end the film of the others, and the film is not stored here,
because it grows without bound. So each new viewer gets a separate beginning, a `run` line and a
frame with the whole current state, followed by the lines that all viewers get: these continue from
there wherever the film began. No engine state is kept here.

The engine's thread passes text to the loop and never waits. Up to `MAX_BEHIND` texts wait for a
viewer; then its stream ends, and the page asks for another one, which begins with the state at that
time.

The events have all users' prompts and answers, so they need the key in the address that the
server prints, also where there is an API key.

See common/serve/README.md#seen-live"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import anyio
from starlette.responses import HTMLResponse, Response

from common.engine import LLMEngine
from common.events.event_page import put_together
from common.serve.async_llm import AsyncLLM
from common.serve.errors import ApiError
from common.serve.gate import Gate
from common.serve.streams import EventStream

if TYPE_CHECKING:
    from common.events.frame_recorder import FrameRecorder

FILES = Path(__file__).parent / "live_page"
SCRIPTS = ("live.js", "playground_words.js", "playground.js", "live_caption.js", "live_start.js")
TITLE = ("The engine, live", "引擎实况")
POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # and the page's own
MAX_VIEWERS = 16
MAX_BEHIND = 200  # texts, about two for each step, that a viewer has not read
LOOK_S = 0.5  # how soon a stream without frames notices that the server is shut down


Viewer = asyncio.Queue  # of unread texts; belongs to the loop


class Sink(io.TextIOBase):
    """The text stream that the engine writes to, in its thread."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send

    def write(self, text: str) -> int:
        self._send(text)
        return len(text)


class LivePage:
    """The routes `/` and `/events`."""

    def __init__(self, llm: AsyncLLM, gate: Gate) -> None:
        self.llm = llm
        self.gate = gate
        self.viewers: set[Viewer] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._film: FrameRecorder | None = None  # belongs to the engine's thread

    # -- the page

    async def page(self) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": POLICY})

    @cached_property
    def _page(self) -> str:
        return put_together(
            TITLE[0],
            {"is_live": True, "title": TITLE},
            starts=[FILES / name for name in SCRIPTS],
            styles=[FILES / "live.css"],
            policy="; connect-src 'self'",
        )

    # -- the frames

    async def events(self) -> Response:
        """Stream the frames to a new viewer. The gate has already checked the key."""
        if (reason := self.llm.death_reason) is not None:
            raise ApiError(503, reason)
        if self.llm.config.events is not None:
            raise ApiError(
                409, "cannot show a live run: this engine already writes its events elsewhere"
            )
        if len(self.viewers) >= MAX_VIEWERS:
            raise ApiError(429, f"at most {MAX_VIEWERS} viewers can watch")
        events = self._events()
        await anext(events)  # counts the viewer before another one can be accepted
        return EventStream(events)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the event stream of one viewer."""
        viewer = Viewer(MAX_BEHIND)
        self._loop = asyncio.get_running_loop()
        self.viewers.add(viewer)
        try:
            yield b""
            await self.llm.call(self._begin, viewer)
            while viewer in self.viewers and not self._is_over():
                text = ""
                with anyio.move_on_after(LOOK_S):
                    text = await viewer.get()
                yield server_sent(text)
        finally:
            self.viewers.discard(viewer)
            await self.llm.call(self._leave)

    def _is_over(self) -> bool:
        is_shut_down = self.gate.is_draining and not self.llm.num_unfinished
        return is_shut_down or self.llm.death_reason is not None

    def _spread(self, text: str) -> None:
        for viewer in list(self.viewers):
            if viewer.full():
                self.viewers.discard(viewer)  # its stream ends
            else:
                viewer.put_nowait(text)

    def _put_first(self, viewer: Viewer, text: str) -> None:
        while not viewer.empty():  # lines that came before the beginning
            viewer.get_nowait()
        viewer.put_nowait(text)

    # -- in the engine's thread, between two steps

    def _begin(self, engine: LLMEngine, viewer: Viewer) -> None:
        """Send the viewer the beginning of the film. Its first viewer starts it: its lines go to
        all."""
        text = "" if self._film is None else self._film.beginning()
        self._send_update(partial(self._put_first, viewer), text)
        if self._film is None and self.viewers:
            sink = Sink(lambda text: self._send_update(self._spread, text))
            self._film = engine.watch(cast(TextIO, sink))

    def _leave(self, engine: LLMEngine) -> None:
        if self._film is not None and not self.viewers:
            engine.unwatch()
            self._film = None

    def _send_update(self, take: Callable[[str], None], text: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(take, text)


def server_sent(lines: str) -> bytes:
    """Return `lines` as one server-sent event. A lone surrogate is written as its JSON escape."""
    shown = [line.encode("utf-8", "backslashreplace") for line in lines.split("\n") if line]
    return b"".join(b"data: %b\n" % line for line in shown) + b"\n" if shown else b""
