"""Servers over loopback in a thread of this process, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="not found: fastapi (pip install -e '.[test]')")

import http.client

import openai
import uvicorn
from fastapi import FastAPI

from common.engine import LLMEngine
from common.engine_config import EngineStats
from common.llm import LLM
from common.serve.app import ServeConfig, make_app
from common.serve.async_llm import AsyncLLM
from common.serve.ports import open_port
from common.serve.running import DrainingServer

SMALL = dict(num_blocks=400, dtype="float64", num_threads=1, compile=False)
# Too little memory for all: some are preempted.
TIGHT = dict(block_size=4, num_blocks=26, max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)
MODEL = "tiny"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
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


def events_of(content: bytes) -> list[Any]:
    """The events of a stream; `[DONE]` as None."""
    lines = content.decode().split("\n\n")
    assert lines.pop() == ""
    found = [line.removeprefix("data: ") for line in lines]
    return [None if line == "[DONE]" else json.loads(line) for line in found]


def is_idle(engine: LLMEngine) -> bool:
    engine.check_invariants()
    return not engine.has_unfinished_requests() and engine.stats().kv_blocks_in_use == 0


def fail_next(engine: LLMEngine, error: Exception | None = None, place: str = "core") -> None:
    """Make the next step raise `error`: in the runner ("core"), or while it changes the scheduler's
    and engine's state ("books")."""
    in_core = engine.core.runner, "execute"
    part, name = in_core if place == "core" else (engine, "_process_outputs")
    whole = getattr(part, name)

    def fail(*_: Any, **__: Any) -> Any:
        setattr(part, name, whole)
        raise error or MemoryError("no memory left")

    setattr(part, name, fail)


# -- tests that are coroutines


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    if name.startswith("test_") and inspect.iscoroutinefunction(obj):
        pytest.mark.usefixtures("loop")(obj)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    pyfuncitem.funcargs["loop"].run_until_complete(test(**arguments))
    return True


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of a file's coroutines, because an `AsyncLLM` belongs to one loop."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


# -- servers


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

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """`method(engine, *arguments)`, in the engine's thread."""
        called = self.llm.call(method, *arguments)
        return asyncio.run_coroutine_threadsafe(called, self.loop).result(60)

    def stats(self) -> EngineStats:
        return self.call(LLMEngine.stats)

    def connect(
        self, *parts: bytes, timeout: float = 20, receive_buffer: int | None = None
    ) -> socket.socket:
        """Return a connection on which `parts` have been sent."""
        found = socket.socket()
        if receive_buffer is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        found.settimeout(timeout)
        found.connect(("127.0.0.1", self.port))
        for part in parts:
            found.sendall(part)
        return found

    def client(self) -> openai.OpenAI:
        url = f"{self.url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def chats(self) -> Any:
        return self.client().chat.completions

    def http(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        over: http.client.HTTPConnection | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body. A body that is bytes is sent as it is. `over`: a connection that
        is kept; else a new one."""
        connection = over or self.http()
        sent = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, sent, kind | (headers or {}))
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            if over is None:
                connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, content = self.request("POST", path, body, headers)
        return status, json.loads(content)

    def events(self, path: str, body: Any) -> list[Any]:
        status, headers, content = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
        assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
        return events_of(content)

    @contextmanager
    def slowed(self, more_s: float = 0.05) -> Iterator[None]:
        """Make each step in this block take `more_s` longer."""

        def slow_down(engine: LLMEngine) -> None:
            step = engine.step
            engine.step = lambda: time.sleep(more_s) or step()

        self.call(slow_down)
        try:
            yield
        finally:
            self.call(lambda engine: delattr(engine, "step"))

    @contextmanager
    def aborts_one(self) -> Iterator[None]:
        """Check that in this block one request is aborted, and that none finishes."""
        before = self.stats()
        yield
        wait_for(self.is_idle)
        after = self.stats()
        assert after.num_aborted == before.num_aborted + 1
        assert after.num_finished == before.num_finished

    def is_idle(self) -> bool:
        return self.call(is_idle)


@contextmanager
def in_thread(
    server: uvicorn.Server, loop: asyncio.AbstractEventLoop | None = None
) -> Iterator[socket.socket]:
    """Run a server in another thread until the end of the block. Yields its listening socket."""
    listener = open_port("127.0.0.1", 0)
    loop = loop or asyncio.new_event_loop()

    def run() -> None:
        loop.run_until_complete(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        yield listener
    finally:
        server.should_exit = True
        thread.join(20)
        loop.close()


@contextmanager
def running(
    config: ServeConfig | None = None,
    max_waiting: int | None = None,
    **settings: Any,
) -> Iterator[Running]:
    with ExitStack() as stack:
        llm = AsyncLLM(max_waiting=max_waiting, **(SMALL | settings))
        stack.callback(llm.close)
        app, gate = make_app(llm, config or ServeConfig(MODEL))
        server = DrainingServer(llm, gate, 2.0)
        server.config.timeout_keep_alive = 1  # tests wait for it
        loop = asyncio.new_event_loop()
        listener = stack.enter_context(in_thread(server, loop))
        yield Running(llm, listener.getsockname()[1], loop, app, listener)


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """The one server of the session, where a test needs no other settings."""
    with running(ServeConfig(MODEL, chat_template=TEMPLATE)) as found:
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
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With a template, a folder of adapters and short answers."""
    root = tmp_path_factory.mktemp("adapters")
    config = ServeConfig(MODEL, chat_template=TEMPLATE, adapter_root=root)
    with running(config, max_model_len=64, max_loras=1) as found:
        yield found
        assert found.is_idle() and found.llm.death_reason is None


@pytest.fixture(scope="package")
def alone() -> Iterator[LLM]:
    """The reference for every answer."""
    llm = LLM(**SMALL)
    yield llm
    llm.close()
