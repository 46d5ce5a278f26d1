"""The live page: `GET /` is the watch page with a place to try prompts, `GET /events` its frames.

Frames are those of `common/events`, the lines that `LLMEngine.watch` writes; one server-sent event
holds the lines of one write. A stream begins with a `run` line and, unless the engine is as new, a
frame with its whole state. Another `run` line starts the stream again from scratch.

All viewers share one film: an engine has one watch, installed for the first viewer and removed
after the last. A later viewer must not end the film of the others, and the film is not stored here,
because it grows without bound. So each new viewer gets a separate beginning, a `run` line and a
frame with the whole current state, followed by the lines that all viewers get: these continue from
there wherever the film began. No engine state is kept here.

The engine's thread passes text to the loop and never waits. Up to `MAX_BEHIND` characters wait for
a viewer; then they are dropped, and the viewer starts again from the beginning when it reads next.

A viewer reads only the texts of its own requests: those sent with the same token, which the page
makes and sends with each request in a header. For the others it gets lengths (`hidden_frames.py`).
With an API key, a viewer that sends the key and no token reads everything.

See common/serve/README.md#seen-live"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from common.engine import LLMEngine
from common.events.event_page import put_together
from common.events.hidden_frames import hide_texts
from common.serve.async_llm import AsyncLLM
from common.serve.errors import ApiError, bad, to_json
from common.serve.gate import Gate
from common.serve.streams import EventStream

if TYPE_CHECKING:
    from common.events.frame_recorder import FrameRecorder

FILES = Path(__file__).parent / "live_page"
SCRIPTS = ("live.js", "playground_words.js", "playground.js", "live_caption.js", "live_start.js")
TITLE = ("The engine, live", "引擎实况")
POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # and the page's own
MAX_VIEWERS = 16
MAX_BEHIND = 1 << 20  # characters that a viewer has not read
AGAIN_S = 1.0  # between two beginnings for one viewer, because each costs the engine time
LOOK_S = 0.5  # how soon a stream without frames notices that the server is shut down
LONG_TEXT = 1 << 16  # characters; texts are hidden in a longer one outside the loop
TOKEN_HEADER = "X-Watch-Token"
TOKEN_LENGTHS = range(16, 129)


def watch_token(request: Request) -> str | None:
    """Return the token of a page, which is as secret as the texts that it opens. Raises
    `ApiError`."""
    token = request.headers.get(TOKEN_HEADER)
    if token is not None and len(token) not in TOKEN_LENGTHS:
        low = TOKEN_LENGTHS[0]
        high = TOKEN_LENGTHS[-1]
        raise bad(f"{TOKEN_HEADER} must have {low} to {high} characters, got {len(token)}")
    return token


class Viewer:
    """A viewer's unread text; belongs to the loop. `lags` is set at first, and after it read too
    slowly: it then needs a snapshot."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._size = 0
        self.lags = True
        self._is_full = asyncio.Event()

    def begin(self, text: str) -> None:
        self._texts = [text]
        self._size = 0
        self.lags = False
        self._is_full.set()

    def put(self, text: str) -> None:
        if self.lags:
            return
        self._size += len(text)
        self.lags = self._size > MAX_BEHIND
        if self.lags:
            self._texts.clear()
        else:
            self._texts.append(text)
        self._is_full.set()

    async def take(self) -> list[str]:
        """Return the unread texts; [] if none arrived within `LOOK_S` seconds."""
        with anyio.move_on_after(LOOK_S):
            await self._is_full.wait()
        self._is_full.clear()
        texts = self._texts
        self._texts = []
        self._size = 0
        return texts


class Sink(io.TextIOBase):
    """The text stream that the engine writes to, in its thread."""

    def __init__(self, engine_update: Callable[[str], None]) -> None:
        self._send_update = engine_update

    def write(self, text: str) -> int:
        self._send_update(text)
        return len(text)


class LivePage:
    """The routes `/` and `/events`."""

    def __init__(self, llm: AsyncLLM, gate: Gate) -> None:
        self.llm = llm
        self.gate = gate
        self.viewers: set[Viewer] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: FrameRecorder | None = None  # belongs to the engine's thread

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

    async def events(self, request: Request) -> Response:
        """Stream the frames to a new viewer. The gate has already checked the key."""
        token = watch_token(request)
        sees_all = self.gate.config.api_key is not None and token is None
        if (reason := self.llm.death_reason) is not None:
            raise ApiError(503, reason)
        if self.llm.config.events is not None:
            raise ApiError(
                409, "cannot show a live run: this engine already writes its events elsewhere"
            )
        if len(self.viewers) >= MAX_VIEWERS:
            raise ApiError(429, f"at most {MAX_VIEWERS} viewers can watch")
        events = self._events(None if sees_all else token or "")
        await anext(events)  # counts the viewer before another one can be accepted
        return EventStream(events)

    async def _events(self, token: str | None) -> AsyncIterator[bytes]:
        """Yield the event stream of one viewer, which may read the texts of requests with this
        `token`; None: of all requests."""
        viewer = Viewer()
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.viewers.add(viewer)
        again_at = loop.time()
        try:
            yield b""
            while not self._is_over():
                if viewer.lags:
                    await asyncio.sleep(again_at - loop.time())
                    again_at = loop.time() + AGAIN_S
                    await self.llm.call(self._begin, viewer)
                for text in await viewer.take():
                    if data := await self._shown(text, token):
                        yield data
        finally:
            self.viewers.discard(viewer)
            await self.llm.call(self._leave)

    async def _shown(self, text: str, token: str | None) -> bytes:
        if token is None:
            return server_sent(text)
        owners = self.llm.owners

        def may_read(request: str) -> bool:  # the `n` sequences of a prompt are named "request#i"
            return owners.get(request.partition("#")[0]) == token

        if len(text) < LONG_TEXT:
            return server_sent(text, may_read)
        return await asyncio.to_thread(server_sent, text, may_read)

    def _is_over(self) -> bool:
        is_shut_down = self.gate.is_draining and not self.llm.num_unfinished
        return is_shut_down or self.llm.death_reason is not None

    def _spread(self, text: str) -> None:
        for viewer in self.viewers:
            viewer.put(text)

    # -- in the engine's thread, between two steps

    @property
    def _film(self) -> FrameRecorder | None:
        """The engine's current film, or None."""
        return self._watch if self._watch is not None and self._watch.is_in else None

    def _begin(self, engine: LLMEngine, viewer: Viewer) -> None:
        film = self._film
        self._send_update(viewer.begin, "" if film is None else film.beginning())
        self._renew(engine)

    def _renew(self, engine: LLMEngine) -> None:
        """Start a film if there are viewers and none is running. Its first lines go to all."""
        if self.viewers and self._film is None:
            sink = Sink(lambda text: self._send_update(self._spread, text))
            self._watch = engine.watch(cast(TextIO, sink))

    def _leave(self, engine: LLMEngine) -> None:
        if not self.viewers and self._film is not None:
            engine.unwatch()

    def _send_update(self, take: Callable[[str], None], text: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(take, text)


def server_sent(lines: str, may_read: Callable[[str], bool] | None = None) -> bytes:
    """Return `lines` as one server-sent event, without the texts of requests that `may_read`
    denies. A lone surrogate is written as its JSON escape."""
    shown = [line.encode("utf-8", "backslashreplace") for line in lines.split("\n") if line]
    if may_read is not None:
        shown = [to_json(hide_texts(json.loads(line), may_read)) for line in shown]
    return b"".join(b"data: %b\n" % line for line in shown) + b"\n" if shown else b""
