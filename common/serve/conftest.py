"""Servers over loopback, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import http.client

from fastapi import FastAPI

from common.engine import LLMEngine
from common.llm import LLM
from common.serve.app import ServeConfig, make_app
from common.serve.async_llm import AsyncLLM
from common.serve.ports import open_port
from common.serve.running import DrainingServer, little_settings, make_event_loop

SMALL = dict(num_blocks=400, dtype="float64", num_threads=1, compile=False)
# Too little memory for all: some are preempted.
TIGHT = dict(block_size=4, num_blocks=26, max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)
MODEL = "tiny"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def posted(body: Any) -> bytes:
    """A request, as it is on the wire."""
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


def wait_for(is_so: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@dataclass
class Running:
    llm: AsyncLLM
    port: int
    loop: asyncio.AbstractEventLoop
    app: FastAPI
    listener: socket.socket

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: Callable[[LLMEngine], Any]) -> Any:
        """`method(engine)`, in the engine's thread."""
        return asyncio.run_coroutine_threadsafe(self.llm.call(method), self.loop).result(60)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body. A body that is bytes is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, sent, kind | (headers or {}))
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, content = self.request("POST", path, body, headers)
        return status, json.loads(content)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; `[DONE]` as None."""
        status, headers, content = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        lines = content.decode().split("\n\n")
        assert lines.pop() == ""
        found = [line.removeprefix("data: ") for line in lines]
        return [None if line == "[DONE]" else json.loads(line) for line in found]

    def is_idle(self) -> bool:
        def look(engine: LLMEngine) -> bool:
            engine.check_invariants()
            return not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0

        return self.call(look)


@contextmanager
def running(
    config: ServeConfig | None = None,
    max_waiting: int | None = None,
    *,
    has_little: bool = False,
    **settings: Any,
) -> Iterator[Running]:
    with ExitStack() as stack:
        llm = AsyncLLM(max_waiting=max_waiting, **(SMALL | settings))
        stack.callback(llm.close)
        little = AsyncLLM(**(SMALL | little_settings(settings))) if has_little else None
        if little is not None:
            stack.callback(little.close)
        app, gate = make_app(llm, config or ServeConfig(MODEL), little)
        server = DrainingServer(llm, gate, 2.0, little)
        server.config.timeout_keep_alive = 1  # tests wait for it
        listener = open_port("127.0.0.1", 0)
        loop = make_event_loop()

        def run() -> None:
            loop.run_until_complete(server.serve(sockets=[listener]))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(20)
            loop.close()

        stack.callback(end)
        found = Running(llm, listener.getsockname()[1], loop, app, listener)
        while True:
            try:
                with urllib.request.urlopen(f"{found.url}/health", timeout=10):
                    break
            except OSError:
                assert thread.is_alive()
        yield found


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running() as found:
        yield found
        assert found.is_idle()


@pytest.fixture(scope="package")
def tight() -> Iterator[Running]:
    with running(**TIGHT) as found:
        # A small system buffer for a connection, so that a client that does not read is soon
        # noticed.
        found.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        yield found
        assert found.is_idle()


@pytest.fixture(scope="package")
def alone() -> Iterator[LLM]:
    """The reference for every answer."""
    llm = LLM(**SMALL)
    yield llm
    llm.close()


@pytest.fixture(scope="package")
def template_server() -> Iterator[Running]:
    with running(ServeConfig(MODEL, chat_template=TEMPLATE), max_model_len=200) as found:
        yield found
        assert found.is_idle()
