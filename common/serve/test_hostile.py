"""Malformed requests: each gets an error, with no other effect."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

from common.serve import large_json
from common.serve.app import ServeConfig
from common.serve.conftest import HEAD, HEALTH, MODEL, TEMPLATE, Running, posted, running, wait_for
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


LARGE_NUMBERS: list[dict[str, Any]] = [
    *({"top_k": HUGE}, {"max_tokens": HUGE}, {"priority": HUGE}, {"prompt": [5] * 63}),
    {"stop_token_ids": [*range(1000)]},
    {"prompt": [5] * 99, "truncate_prompt_tokens": 9},
    {"top_k": HUGE, "min_tokens": HUGE, "max_tokens": HUGE, "seed": 2**62, "stop": "e"},
]


def test_numbers_that_are_only_large_are_taken(server: Running) -> None:
    for fields in LARGE_NUMBERS:
        status, answer = server.post(*completion(**fields))
        assert status == 200, fields
    assert answer["usage"]["total_tokens"] == 64


# -- trap 87: one legal body that works while every client waits


def test_a_body_that_would_take_too_long_is_refused_by_name(server: Running) -> None:
    """Trap 87."""
    many = [[i, 5] for i in range(1024)]
    wide = {"max_tokens": 60, "n": 128, "logprobs": 20}
    for name, fields in (
        ("bad_words", {"bad_words": ["y" * 65_000, "z" * 600]}),
        ("stop", {"stop": "y" * 65_537}),
        ("stop_token_ids", {"stop_token_ids": [5] * 1025}),
        ("cache_salt", {"cache_salt": "y" * 2000}),
        ("logprobs", {"prompt": many[:14]} | wide),
        ("prompt_logprobs", {"prompt": [[5] * 60] * 14, "n": 128, "prompt_logprobs": 20}),
        ("echo", {"prompt": [[5] * 60] * 14, "n": 128, "logprobs": 20, "echo": True}),
    ):
        status, answer = server.post(*completion(**fields))
        assert (status, answer["error"]["param"]) == (400, name), (name, answer)
        assert name in answer["error"]["message"]
    assert server.post(*completion(prompt=many[:6], n=2, max_tokens=60, logprobs=20))[0] == 200
    assert server.post(*completion(bad_words=["y" * 65_000]))[0] == 200
    for string in b'"x"', rb'"\\"', rb'"\\\""':  # with one and two escaped characters
        for num, expected in (60_000, 200), (66_000, 413):
            strings = b'{"prompt":"x","max_tokens":1,"y":[%b]}' % b",".join([string] * num)
            status, answer = server.post("/v1/completions", strings)
            assert status == expected, (string, answer)
    assert "at most 65536 strings" in answer["error"]["message"]


def test_more_sequences_than_one_request_may_have_are_refused_by_name() -> None:
    """Trap 87. It would occupy the whole queue, and a 429 would be retried forever."""
    with running(max_waiting=5, max_num_seqs=2, max_model_len=64) as found:
        for fields, name in (({"prompt": ["x"] * 6}, "prompt"), ({"n": 6}, "n")):
            status, answer = found.post(*completion(**fields))
            assert (status, answer["error"]["param"]) == (400, name)
            assert "must be <= 5" in answer["error"]["message"]
        assert found.post(*completion(n=5))[0] == 200
        long = posted({"prompt": "x", "n": 3, "max_tokens": 60, "ignore_eos": True})
        with found.slowed(), found.connect(long), found.connect(long):
            wait_for(lambda: found.llm.num_unfinished == 2)
            with closing(found.http()) as other:
                for _ in range(2):  # over one connection: nothing is wrong with it
                    path, sent = completion(n=2)  # sequences are counted
                    status, headers, _ = found.request("POST", path, sent, over=other)
                    assert status == 429 and int(headers["retry-after"]) > 0
        wait_for(found.is_idle)
        assert found.post(*completion(n=2))[0] == 200


class Encoder:
    """A tokenizer's backend that says when it works."""

    def __init__(self, backend: Any, on_encode: Callable[[], Any]) -> None:
        self._backend, self._on_encode = backend, on_encode

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in ("encode", "encode_batch", "encode_batch_fast"):
            return found
        return lambda *args, **options: (self._on_encode(), found(*args, **options))[1]


def test_the_engines_thread_makes_no_token_ids(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 87."""
    tokenizer, threads = server.llm.tokenizer, set[str]()
    backend = Encoder(tokenizer.backend, lambda: threads.add(threading.current_thread().name))
    monkeypatch.setattr(tokenizer, "backend", backend)
    words = ["y" * 30_000, "return", " def"]
    assert server.post(*completion(bad_words=words, prompt=["a", "b" * 5000]))[0] == 400
    assert server.post(*completion(bad_words=words, prompt=["a", "b"]))[0] == 200
    assert threads and "engine" not in threads


def test_texts_of_disconnected_clients_occupy_no_thread(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, texts, may_go = server.llm.tokenizer, list[int](), threading.Event()
    backend = Encoder(tokenizer.backend, lambda: texts.append(0) or may_go.wait(20))
    monkeypatch.setattr(tokenizer, "backend", backend)
    gate = server.app.state.server.live.gate
    with ExitStack() as stack:
        for i in range(20):
            body = {"prompt": f"{i}" * 5000, "truncate_prompt_tokens": 5, "max_tokens": 1}
            stack.enter_context(server.connect(posted(body)))
        wait_for(lambda: gate.num_posts == 20)
        assert server.post("/detokenize", {"tokens": [5]})[0] == 200, "it needs a thread, too"
    try:
        wait_for(lambda: not gate.num_posts, 5)
    finally:
        may_go.set()
    assert len(texts) == 1, "one turn for each client"


def test_a_chat_that_must_be_too_long_is_not_rendered(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, rendered = server.app.state.server.chat, list[int]()
    text = chat.text
    monkeypatch.setattr(chat, "text", lambda m, *args: rendered.append(len(m)) or text(m, *args))
    long = "x" * 64 * int(server.llm._max_token_bytes)
    parts = [{"type": "text", "text": long[:99]}, {"type": "text", "text": long}]
    for content, num in ("x", 64), (long, 1), (parts, 1):
        messages = [{"role": "user", "content": content}] * num
        for path in "/v1/chat/completions", "/v1/chat/completions/render":
            status, answer = server.post(path, CHAT | {"messages": messages})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert rendered == []
        cut = CHAT | {"messages": messages, "truncate_prompt_tokens": 9}
        assert server.post("/v1/chat/completions", cut)[0] == 200
        assert rendered.pop() == num


def test_large_json_is_neither_read_nor_made_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 87. Large content is built a few entries at a time in its thread, too: its encoder holds
    Python's lock."""
    made, read = list[tuple[str, int]](), list[tuple[str, int]]()
    encode, parsed = large_json._encode, large_json._parsed

    def encoded(content: Any) -> str:
        text = encode(content)
        made.append((threading.current_thread().name, len(text)))
        return text

    def told_too(kind: Any, data: bytes) -> Any:
        read.append((threading.current_thread().name, len(data)))
        return parsed(kind, data)

    monkeypatch.setattr(large_json, "_encode", encoded)
    monkeypatch.setattr(large_json, "_parsed", told_too)
    ids, path, wide = [5, 6, 7] * 200, "/v1/completions", {"logprobs": 20, "max_tokens": 60}
    wide["ignore_eos"] = True
    with running(ServeConfig(MODEL, chat_template=TEMPLATE), max_waiting=1000) as found:
        echo = wide | {"prompt": [ids] * 2, "echo": True, "max_tokens": 1}
        for place, body in (
            (path, {"prompt": [ids] * 2, "prompt_logprobs": 20, "max_tokens": 1}),
            (path, echo),
            ("/v1/chat/completions", CHAT | wide | {"logprobs": True, "top_logprobs": 20, "n": 5}),
            ("/tokenize", {"prompt": "x " * 20_000, "return_token_strs": True}),
            ("/v1/completions/render", {"prompt": [ids] * 400}),
        ):
            made.clear()
            status, answer = found.post(place, body)
            assert status == 200 and answer, place
            aside = [size for thread, size in made if thread.startswith("large")]
            assert sum(aside) > LARGE / 4 > sum(size for _, size in made) - sum(aside), place
            assert max(aside) < (1_000_000 if place == "/tokenize" else 50_000), place
        made.clear()
        assert len(found.events(path, echo)[0]["choices"][0]["logprobs"]["tokens"]) >= 600
        here = [size for thread, size in made if not thread.startswith("large")]
        assert max(here, default=0) <= LARGE
        detokenized = found.post("/detokenize", {"tokens": [5] * 300_000})[1]["prompt"]
        assert len(detokenized) >= 300_000
    for thread, size in read:
        assert size <= LARGE or thread.startswith("large"), size


def test_nothing_is_kept_of_a_body(server: Running) -> None:
    """Trap 87. Of 4 MB that mean nothing 14 were kept as long as the request lived."""
    body = {"prompt": "x", "max_tokens": 50, "metadata": {"x": "y" * 4_000_000}, "other": "z"}
    server.post(*completion())
    tracemalloc.start()
    try:
        for stream in (False, True):
            before = tracemalloc.get_traced_memory()[0]
            sent = body | {"stream": stream, "ignore_eos": True}
            with server.slowed(), server.connect(posted(sent)):
                wait_for(lambda: server.stats().num_running)
                kept = tracemalloc.get_traced_memory()[0] - before
            assert kept < 2_000_000, (stream, kept)
            wait_for(server.is_idle)
    finally:
        tracemalloc.stop()


def test_bytes_that_are_not_http_are_refused(server: Running) -> None:
    rng = random.Random(5)
    many = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 90) for i in range(2000))
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    length = HEAD + b"Content-Length: "
    for sent in (
        *(rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n" for _ in range(9)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no host
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\n" + many + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        chunked + b"ffffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        chunked + b"-1\r\n{}\r\n0\r\n\r\n",
        chunked + b"2\r\n{}{}{}\r\n0\r\n\r\n",
        chunked + b"xyz\r\n{}\r\n0\r\n\r\n",
        length + b"-5\r\n\r\n{}",
        length + b"5, 6\r\n\r\n{}",
        length + b"5\r\nContent-Length: 6\r\n\r\n{}",
        length + b"5\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        length + b"2\r\n\r\n{}",
        length + b"2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
        WHOLE.replace(b"POST", b"PUT"),
        WHOLE.replace(b"localhost", b"evil.example"),
        WHOLE.replace(b"HTTP/1.1\r\nHost: localhost", b"HTTP/1.0"),
    ):
        found = send_raw(server, sent, ends=b"HTTP" not in sent)
        assert found == b"" or found.startswith(b"HTTP/1.1 4"), (sent[:200], found[:200])
    num_requests = server.llm._num_requests
    assert send_raw(server, length + b"50\r\n\r\n" + SMALL, ends=True) == b""
    assert server.is_idle() and server.llm._num_requests == num_requests


def test_two_requests_at_once_and_other_ways_to_ask(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    last = WHOLE.replace(b"Host", b"Connection: close\r\nHost")

    def answered(*parts: bytes) -> bytes:
        return send_raw(server, *parts, silence_s=60)

    assert answered(WHOLE * 2 + last).count(b"HTTP/1.1 200") == 3
    # A body that was refused is passed over, and what comes after it is answered.
    wrong = WHOLE.replace(b"application/json", b"text/plain")
    found = answered(wrong, last)
    assert found.startswith(b"HTTP/1.1 415") and found.count(b"HTTP/1.1 200") == 1
    # The answer has begun when the rest of the body turns out to be nonsense.
    head = wrong.replace(b"Content-Length: 29", b"Transfer-Encoding: chunked").split(b"{")[0]
    with server.connect(head, timeout=HEADER_SECONDS / 2) as one:
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 415")
        one.sendall(b"xyz\r\n")
        while one.recv(1 << 16):
            pass
    assert "Fatal error" not in caplog.text
    # Its end is where two proxies may see it in different places, so it is the last.
    both = WHOLE.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost").split(b"{")[0]
    found = answered(both + b"0\r\n\r\n" + last)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1 ") == 1
    head, body = last.replace(b"Host", b"Expect: 100-continue\r\nHost").split(b"\r\n\r\n")
    found = answered(head + b"\r\n\r\n", body)
    assert found.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in found
    found = answered(WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert found.startswith(b"HTTP/1.1 200") and b"text_completion" in found
    sizes = b"1d\r\n" + SMALL + b"\r\n0\r\n\r\n"
    assert b" 200 " in answered(
        last.split(b"Content-L")[0] + b"Transfer-Encoding: chunked\r\n\r\n" + sizes
    )
    for method in ("HEAD", "OPTIONS", "DELETE", "TRACE"):
        status, headers, _ = server.request(method, "/v1/models")
        assert status == 405 and headers["allow"] == "GET", method


def test_neither_small_chunks_nor_many_headers_delay_other_clients(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h11 parses all that was read in one go: seconds for 256 KB of either."""
    sizes, hear = list[int](), PatientProtocol.data_received

    def counted(protocol: PatientProtocol, data: bytes) -> None:
        sizes.append(len(data))
        hear(protocol, data)

    monkeypatch.setattr(PatientProtocol, "data_received", counted)
    head = HEAD.replace(b"Host", b"Connection: close\r\nHost")
    for chunk_bytes, num, status in (
        (1, SPARE_CHUNKS, 200),
        (1, SPARE_CHUNKS + 9, 413),
        (CHUNK_BYTES, 2 * SPARE_CHUNKS, 200),
        (CHUNK_BYTES // 2, 2 * SPARE_CHUNKS + 9, 413),
    ):
        body = SMALL[:-1] + b',"user":"%b"}' % (b"u" * (chunk_bytes * num - len(SMALL) - 10))
        chunks = [body[i : i + chunk_bytes] for i in range(0, len(body), chunk_bytes)]
        sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\n\r\n"
        found = send_raw(server, sent, silence_s=60)
        assert found.startswith(b"HTTP/1.1 %d" % status), (chunk_bytes, num, found[:300])
        content = json.loads(found.split(b"\r\n\r\n")[1])
        assert status == 200 or "chunks" in content["error"]["message"]
    many = b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 50_000 + b"\r\n"
    assert send_raw(server, many)[:12] in (b"HTTP/1.1 400", b"")
    assert 0 < max(sizes) <= READ_BYTES


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"", b""),
        (b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"),
        (WHOLE, b"POST /v1/comp"),
        (WHOLE.replace(b"json", b"text").replace(b": 29", b": 99"), b"x" * 20),
    ],
    ids=["nothing", "half", "half of a second request", "half of a body that was refused"],
)
def test_a_client_that_sends_half_a_request_is_cut_off(
    server: Running, first: bytes, second: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the timer of headers, not of connections kept; also who keeps sending what was refused."""
    monkeypatch.setattr("common.serve.running.HEADER_SECONDS", 0.3)
    endless = HEAD + b"Content-Length: %d\r\n\r\n" % 10**12
    with server.connect(first, timeout=4) as one, server.connect(endless, timeout=4) as other:
        if first:
            assert one.recv(1 << 16).startswith(b"HTTP/1.1")
        one.sendall(second)
        while one.recv(1 << 16):
            pass
        with pytest.raises(ConnectionError):
            while True:
                other.sendall(b"x" * (1 << 18))


def test_a_client_read_late_is_kept(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of forty simultaneous connections is served later than its time limit to send."""
    hear = PatientProtocol.data_received

    def hear_slowly(protocol: PatientProtocol, data: bytes) -> None:
        time.sleep(0.02)
        hear(protocol, data)

    monkeypatch.setattr("common.serve.running.HEADER_SECONDS", 0.2)
    monkeypatch.setattr("common.serve.running.FEW", 4)
    monkeypatch.setattr(PatientProtocol, "data_received", hear_slowly)
    with ExitStack() as stack:
        crowd: list[socket.socket] = []
        for _ in range(40):
            crowd.append(stack.enter_context(server.connect(HEALTH)))
        assert all(one.recv(1 << 16).startswith(b"HTTP/1.1 200") for one in crowd)


def test_a_client_that_reads_nothing_delays_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serve.running.LAST_WORDS_SECONDS", 0.2)
    sent = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with ExitStack() as stack, running() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        content = posted(sent | {"logprobs": 20})
        stack.enter_context(server.connect(content, receive_buffer=4096))
        wait_for(lambda: server.stats().num_finished)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10 and not asyncio.all_tasks(server.loop)
