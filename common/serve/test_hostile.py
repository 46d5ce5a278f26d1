"""Malformed requests: each gets an error, with no other effect."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from common.serve.conftest import HEAD, Running, posted, running, wait_for

HUGE = 10**400
SMALL = b'{"prompt":"x","max_tokens":1}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(SMALL), SMALL)
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture
def server(short: Running) -> Running:
    return short


def send_raw(server: Running, *parts: bytes, ends: bool = False, silence_s: float = 0.3) -> bytes:
    """All that comes back on one connection, until its end or some silence."""
    found = b""
    with server.connect(timeout=max(3, silence_s)) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                found += data
                connection.settimeout(silence_s)
        except OSError:  # it was closed, or there is nothing more
            pass
    return found


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "x", "max_tokens": 2} | fields


def test_more_sequences_than_one_request_may_have_are_refused_by_name(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 87. It would occupy the whole queue, and a 429 would be retried forever."""
    monkeypatch.setattr(server.llm, "max_per_request", 5)
    most = 7 - server.llm.config.max_num_seqs  # of seven, that run or wait
    monkeypatch.setattr(server.llm._engine_loop, "_max_waiting", most)
    for fields, name in (({"prompt": ["x"] * 6}, "prompt"), ({"n": 6}, "n")):
        status, answer = server.post(*completion(**fields))
        assert (status, answer["error"]["param"]) == (400, name)
        assert "must be <= 5" in answer["error"]["message"]
    assert server.post(*completion(n=5))[0] == 200
    long = posted({"prompt": "x", "n": 3, "max_tokens": 60, "ignore_eos": True})
    path, sent = completion(n=2)  # sequences are counted
    with server.slowed(), server.connect(long), server.connect(long):
        wait_for(lambda: server.llm.num_unfinished == 2)
        with closing(server.http()) as other:
            for _ in range(2):  # over one connection: nothing is wrong with it
                status, headers, _ = server.request("POST", path, sent, over=other)
                assert status == 429 and int(headers["retry-after"]) > 0
    wait_for(server.is_idle)
    assert server.post(path, sent)[0] == 200


class Encoder:
    """A tokenizer's backend that says when it works."""

    def __init__(self, backend: Any, on_encode: Callable[[], Any]) -> None:
        self._backend = backend
        self._on_encode = on_encode

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not name.startswith("encode"):
            return found
        return lambda *args, **options: (self._on_encode(), found(*args, **options))[1]


def test_texts_are_not_the_engines_work_and_of_disconnected_clients_no_ones(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 87."""
    tokenizer = server.llm.tokenizer
    threads = list[str]()
    may_go = threading.Event()
    thread = lambda: threading.current_thread().name  # noqa: E731
    backend = Encoder(tokenizer.backend, lambda: threads.append(thread()) or may_go.wait(20))
    monkeypatch.setattr(tokenizer, "backend", backend)
    gate = server.app.state.server.live.gate
    sent = {"truncate_prompt_tokens": 5, "max_tokens": 1}
    with ExitStack() as clients:
        for i in range(20):
            clients.enter_context(server.connect(posted(sent | {"prompt": f"{i}" * 5000})))
        wait_for(lambda: gate.num_posts == 20)
        assert server.post("/detokenize", {"tokens": [5]})[0] == 200, "it needs a thread, too"
    try:
        wait_for(lambda: not gate.num_posts, 5)
    finally:
        may_go.set()
    assert len(threads) == 1, "one turn for each client"
    assert server.post(*completion(bad_words=["return", " def"], prompt=["a", "b"]))[0] == 200
    assert len(threads) > 1 and "engine" not in threads


GET = b"GET /health HTTP/1.1\r\n"
LENGTH, CHUNKED = HEAD + b"Content-Length: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = WHOLE.replace(b"Host", b"Connection: close\r\nHost")
LAST_CHUNKED = CHUNKED.replace(b"Host", b"Connection: close\r\nHost")
WRONG = WHOLE.replace(b"application/json", b"text/plain")
BOTH = WHOLE.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost").split(b"{")[0]
EXPECTS = LAST.replace(b"Host", b"Expect: 100-continue\r\nHost").split(b"{")[0]
RANDOM = random.Random(5)
# What is sent on one connection, and the statuses that come back; one of 4 is any refusal, which
# may be the end of the connection only.
RAW: list[tuple[list[bytes], list[int]]] = [
    ([WHOLE * 2 + LAST], [200] * 3),
    ([WRONG, LAST], [415, 200]),  # what comes after a body that was refused is answered
    ([EXPECTS, SMALL], [100, 200]),
    ([GET + b"Host: a\r\n" + b"a:b\r\n" * 50_000 + b"\r\n"], [4]),
    *(([RANDOM.randbytes(RANDOM.randrange(1, 3000)) + b"\r\n\r\n"], [4]) for _ in range(9)),
    ([b"GET / HTTP/9.9\r\n\r\n"], [4]),
    ([GET + b"\r\n"], [4]),  # no host
    ([GET + b"Host: a\r\nHost: b\r\n\r\n"], [4]),
    ([b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], [4]),
    *(([CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n"], [4]) for size in (b"f" * 20, b"-1", b"xyz")),
    *(([LENGTH + wrong + b"\r\n\r\n{}"], [4]) for wrong in (b"-5", b"5, 6", b"2")),
    ([LENGTH + b"5\r\nContent-Length: 6\r\n\r\n{}"], [4]),
    ([LENGTH + b"5\r\nTransfer-Encoding: gzip\r\n\r\n{}"], [4]),
    ([LENGTH + b"50\r\n\r\n" + SMALL, b""], [4]),  # and no more
    ([WHOLE.replace(b"POST", b"PUT")], [4]),
    ([WHOLE.replace(b"HTTP/1.1\r\nHost: localhost", b"HTTP/1.0")], [4]),
]


def test_what_comes_back_for_bytes(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for parts, statuses in RAW:
        is_wrong = statuses == [4]
        num_requests = server.llm._num_requests
        found = send_raw(server, *parts, ends=is_wrong, silence_s=0.3 if is_wrong else 60)
        numbers = [*map(int, re.findall(rb"HTTP/1\.\d (\d+)", found))]
        is_right = not found or numbers[0] // 100 == 4 if is_wrong else numbers == statuses
        assert is_right, (parts[0][:200], found[:200])
        assert not is_wrong or server.llm._num_requests == num_requests
    assert "Fatal error" not in caplog.text
    status, headers, _ = server.request("HEAD", "/v1/models")
    assert status == 405 and headers["allow"] == "GET"


def test_a_client_that_reads_nothing_delays_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serve.running.LAST_WORDS_SECONDS", 0.2)
    sent = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True, "logprobs": 20}
    with ExitStack() as stack, running() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stack.enter_context(server.connect(posted(sent), receive_buffer=4096))
        wait_for(lambda: server.stats().num_finished)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10 and not asyncio.all_tasks(server.loop)
