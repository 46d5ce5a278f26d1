"""Malformed requests: each gets an error, with no other effect."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from common.serve import large_json
from common.serve.conftest import HEAD, HEALTH, Running, posted, running, wait_for
from common.serve.large_json import LARGE
from common.serve.running import (
    CHUNK_BYTES,
    HEADER_SECONDS,
    READ_BYTES,
    SPARE_CHUNKS,
    PatientProtocol,
)

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


def test_a_chat_that_must_be_too_long_is_not_rendered(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = server.app.state.server.chat
    rendered = list[int]()
    text = chat.text
    monkeypatch.setattr(chat, "text", lambda m, *args: rendered.append(len(m)) or text(m, *args))
    long = "x" * 64 * int(server.llm._max_token_bytes)
    parts = [{"type": "text", "text": part} for part in (long[:99], long)]
    for content, num in ("x", 64), (long, 1), (parts, 1):
        body = CHAT | {"messages": [{"role": "user", "content": content}] * num}
        for path in "/v1/chat/completions", "/v1/chat/completions/render":
            _, answer = server.post(path, body)
            assert answer["error"]["code"] == "context_length_exceeded" and rendered == []
        assert server.post("/v1/chat/completions", body | {"truncate_prompt_tokens": 9})[0] == 200
        assert rendered.pop() == num


def test_large_json_is_neither_read_nor_made_in_the_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 87. Large content is built a few entries at a time in its thread, too: its encoder holds
    Python's lock."""
    made, read = list[tuple[bool, int]](), list[tuple[bool, int]]()
    encode = large_json._encode
    parsed = large_json._parsed
    is_aside = lambda: threading.current_thread().name.startswith("large")  # noqa: E731
    note = lambda text: made.append((is_aside(), len(text))) or text  # noqa: E731
    monkeypatch.setattr(large_json, "_encode", lambda content: note(encode(content)))
    told = lambda kind, data: read.append((is_aside(), len(data))) or parsed(kind, data)  # noqa: E731
    monkeypatch.setattr(large_json, "_parsed", told)
    path = "/v1/completions"
    wide = {"max_tokens": 50, "ignore_eos": True, "n": 5}
    sixty = {"prompt": [[5] * 60] * 20, "max_tokens": 1}
    for place, body in (
        (path, sixty | {"prompt_logprobs": 20}),
        (path, sixty | {"echo": True, "logprobs": 20}),
        ("/v1/chat/completions", CHAT | wide | {"logprobs": True, "top_logprobs": 20}),
        ("/tokenize", {"prompt": "x " * 20_000, "return_token_strs": True}),
        ("/v1/completions/render", {"prompt": [[5, 6, 7] * 20] * 1000}),
    ):
        made.clear()
        assert server.post(place, body)[0] == 200, place
        aside = [size for is_aside, size in made if is_aside]
        assert sum(aside) > LARGE / 4 > sum(size for _, size in made) - sum(aside), place
        assert max(aside) < (1_000_000 if place == "/tokenize" else 50_000), place
    server.events(path, sixty | {"echo": True, "logprobs": 20})
    assert len(server.post("/detokenize", {"tokens": [5] * 300_000})[1]["prompt"]) >= 300_000
    assert all(size <= LARGE or is_aside for is_aside, size in read + made)


def test_nothing_is_kept_of_a_body(server: Running) -> None:
    """Trap 87. Of 4 MB that mean nothing 14 were kept as long as the request lived."""
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "other": "z"}
    body["metadata"] = {"x": "y" * 4_000_000}
    tracemalloc.start()
    try:
        for stream in (False, True):
            before = tracemalloc.get_traced_memory()[0]
            with server.slowed(), server.connect(posted(body | {"stream": stream})):
                wait_for(lambda: server.stats().num_running)
                assert tracemalloc.get_traced_memory()[0] - before < 2_000_000, stream
            wait_for(server.is_idle)
    finally:
        tracemalloc.stop()


def chunked(num_bytes: int, chunk_bytes: int) -> bytes:
    """A request of so many bytes in chunks, the last on its connection."""
    body = SMALL[:-1] + b',"user":"%b"}' % (b"u" * (num_bytes - len(SMALL) - 10))
    chunks = [body[i : i + chunk_bytes] for i in range(0, len(body), chunk_bytes)]
    return LAST_CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in [*chunks, b""])


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
    # its end is where two proxies may see it in different places, so it is the last
    ([BOTH + b"0\r\n\r\n" + LAST], [400]),
    ([EXPECTS, SMALL], [100, 200]),
    # h11 parses all that was read in one go: seconds for 256 KB of small chunks or headers
    ([chunked(SPARE_CHUNKS, 1)], [200]),
    ([chunked(SPARE_CHUNKS + 9, 1)], [413]),
    ([chunked(CHUNK_BYTES * 2 * SPARE_CHUNKS, CHUNK_BYTES)], [200]),
    ([chunked(CHUNK_BYTES // 2 * (2 * SPARE_CHUNKS + 9), CHUNK_BYTES // 2)], [413]),
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


def test_what_comes_back_for_bytes(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = list[int]()
    hear = PatientProtocol.data_received
    counted = lambda protocol, data: sizes.append(len(data)) or hear(protocol, data)  # noqa: E731
    monkeypatch.setattr(PatientProtocol, "data_received", counted)
    for parts, statuses in RAW:
        is_wrong = statuses == [4]
        num_requests = server.llm._num_requests
        found = send_raw(server, *parts, ends=is_wrong, silence_s=0.3 if is_wrong else 60)
        numbers = [*map(int, re.findall(rb"HTTP/1\.\d (\d+)", found))]
        is_right = not found or numbers[0] // 100 == 4 if is_wrong else numbers == statuses
        assert is_right, (parts[0][:200], found[:200])
        assert not is_wrong or server.llm._num_requests == num_requests
    # The answer has begun when the rest of the body turns out to be nonsense.
    head = WRONG.replace(b"Content-Length: 29", b"Transfer-Encoding: chunked").split(b"{")[0]
    with server.connect(head, timeout=HEADER_SECONDS / 2) as one:
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 415")
        one.sendall(b"xyz\r\n")
        while one.recv(1 << 16):
            pass
    assert "Fatal error" not in caplog.text and 0 < max(sizes) <= READ_BYTES
    status, headers, _ = server.request("HEAD", "/v1/models")
    assert status == 405 and headers["allow"] == "GET"


HALVES = [  # each after an answer, or at once
    (b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"),
    (WHOLE, b"POST /v1/comp"),
    (WHOLE.replace(b"json", b"text").replace(b": 29", b": 99"), b"x" * 20),
    (b"", b""),
]


def test_a_client_that_sends_half_a_request_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the timer of headers, not of connections kept; also who sends nothing, or keeps sending
    what was refused."""
    monkeypatch.setattr("common.serve.running.HEADER_SECONDS", 0.3)
    for first, second in HALVES:
        with server.connect(first, timeout=4) as one:
            assert not first or one.recv(1 << 16).startswith(b"HTTP/1.1")
            one.sendall(second)
            while one.recv(1 << 16):
                pass
    endless = HEAD + b"Content-Length: %d\r\n\r\n" % 10**12
    with server.connect(endless, timeout=4) as other, pytest.raises(ConnectionError):
        while True:
            other.sendall(b"x" * (1 << 18))


def test_a_client_read_late_is_kept(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of forty simultaneous connections is served later than its time limit to send."""
    hear = PatientProtocol.data_received
    hear_slowly = lambda protocol, data: time.sleep(0.02) or hear(protocol, data)  # noqa: E731
    monkeypatch.setattr("common.serve.running.HEADER_SECONDS", 0.2)
    monkeypatch.setattr("common.serve.running.FEW", 4)
    monkeypatch.setattr(PatientProtocol, "data_received", hear_slowly)
    with ExitStack() as stack:
        crowd = [stack.enter_context(server.connect(HEALTH)) for _ in range(40)]
        assert all(one.recv(1 << 16).startswith(b"HTTP/1.1 200") for one in crowd)


def test_a_client_that_reads_nothing_delays_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serve.running.LAST_WORDS_SECONDS", 0.2)
    sent = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True, "logprobs": 20}
    with ExitStack() as stack, running() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stack.enter_context(server.connect(posted(sent), receive_buffer=4096))
        wait_for(lambda: server.stats().num_finished)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10 and not asyncio.all_tasks(server.loop)
