"""Real clients over loopback: the `openai` package, and some that leave."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import openai
import pytest

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER
from common.llm import LLM, SamplingParams
from common.serve.app import ServeConfig
from common.serve.conftest import MODEL, Running, running
from common.serve.gate import GateConfig
from common.serve.ports import open_port
from scheduler_interface import SchedulerOutput

PROMPT = "def fibonacci(n):\n    if n"
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}


def client(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def wait_for(is_so: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_sixty_four_streams_at_once_say_what_generate_says(server: Running, alone: LLM) -> None:
    prompts = [f"{PROMPT} == {i}:" for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [o.outputs[0].text for o in alone.generate(prompts, params, use_tqdm=False)]

    async def all_of_them() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as one:

            async def read(prompt: str) -> str:
                how: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "stream": True}
                stream = await one.completions.create(model=MODEL, prompt=prompt, **how)
                return "".join([piece.choices[0].text async for piece in stream])

            return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_of_them()) == expected


def test_three_hundred_requests_one_after_another(server: Running) -> None:
    """Over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for i in range(300):
        sent = json.dumps({"prompt": [i + 10, 20], "max_tokens": 1})
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["usage"]["completion_tokens"] == 1
    connection.close()
    assert server.is_idle()


def test_a_chat_of_the_openai_client(template_server: Running) -> None:
    one = client(template_server)
    messages: Any = [{"role": "system", "content": "short"}, {"role": "user", "content": "a"}]
    how: dict[str, Any] = {"max_completion_tokens": 9, "temperature": 0, "logprobs": True}
    whole = one.chat.completions.create(model=MODEL, messages=messages, top_logprobs=2, **how)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spoken = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spoken.decode() == choice.message.content and len(choice.logprobs.content) == 9
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    with one.chat.completions.create(model=MODEL, messages=messages, stream=True, **how) as pieces:
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == choice.message.content


def test_a_chat_without_a_limit_may_use_the_room_that_is_left(template_server: Running) -> None:
    _, answer = template_server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "temperature": 0},
    )
    most = template_server.llm.max_model_len
    assert answer["usage"]["total_tokens"] == most
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_clients_exceptions_are_those_it_has_for_them(server: Running) -> None:
    one = client(server)
    with pytest.raises(openai.NotFoundError):
        one.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        one.completions.create(model=MODEL, prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="at most") as caught:
        one.completions.create(model=MODEL, prompt=[1] * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert [model.id for model in one.models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_ends_its_request(server: Running, stream: bool) -> None:
    def num_running(engine: LLMEngine) -> int:
        return engine.stats().num_running

    sent = json.dumps({**LONG, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(sent), sent)
        )
        wait_for(lambda: server.call(num_running) > 0)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    before = server.call(lambda engine: engine.stats().num_finished)
    wait_for(server.is_idle, 5)
    assert server.call(lambda engine: engine.stats().num_finished) == before, "it was aborted"


def test_a_slow_reader_holds_up_nobody(server: Running) -> None:
    sent = json.dumps({**LONG, "stream": True, "logprobs": 5}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(sent), sent)
        )
        assert connection.recv(1)
        status, answer = server.post("/v1/completions", {**LONG, "max_tokens": 5})
        assert status == 200 and answer["usage"]["completion_tokens"] == 5
        assert connection.recv(1)
    wait_for(server.is_idle, 20)


def test_a_step_that_fails_is_told_to_whom_it_concerns(server: Running) -> None:
    """A runner that fails once: the requests in that step get a 500, the next one its answer."""

    def break_once(engine: LLMEngine) -> None:
        runner = engine.core.runner
        whole = runner.execute

        def execute(plan: SchedulerOutput) -> Any:
            runner.execute = whole
            raise MemoryError("no memory left")

        runner.execute = execute

    before = server.call(lambda engine: engine.stats().num_finished)
    server.call(break_once)
    status, answer = server.post("/v1/completions", LONG)
    assert status == 500 and "no memory left" in answer["error"]["message"]
    assert server.request("GET", "/health")[0] == 200
    assert server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
    assert server.call(lambda engine: engine.stats().num_finished) == before + 1
    server.call(break_once)
    *pieces, done = server.events("/v1/completions", LONG)
    assert done is None and "no memory left" in pieces[-1]["error"]["message"]


def test_a_dead_engine_is_said_to_be_dead() -> None:
    with running() as found:

        def break_for_good(engine: LLMEngine) -> None:
            def step() -> Any:
                error = RuntimeError("a rank is gone")
                error.is_final = True  # pyright: ignore[reportAttributeAccessIssue]
                raise error

            engine.core.step = step

        found.call(break_for_good)
        assert found.post("/v1/completions", LONG)[0] == 500
        for _ in range(2):
            status, answer = found.post("/v1/completions", LONG)
            assert status == 500 and "a rank is gone" in answer["error"]["message"]
        assert found.request("GET", "/health")[0] == 503


def test_a_full_queue_is_said_at_once() -> None:
    with running(max_waiting=1, max_num_seqs=1) as found:
        connections = []
        for _ in range(2):
            sent = json.dumps(LONG).encode()
            connection = socket.create_connection(("127.0.0.1", found.port))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(sent), sent)
            )
            connections.append(connection)
        wait_for(lambda: found.call(lambda e: sum(e.core.get_request_counts())) == 2)
        status, headers, content = found.request("POST", "/v1/completions", LONG)
        assert status == 429 and int(headers["retry-after"]) > 0, content
        for connection in connections:
            connection.close()
        wait_for(found.is_idle)
        assert found.post("/v1/completions", {**LONG, "max_tokens": 1})[0] == 200


def test_the_gate() -> None:
    gate = GateConfig(api_key="secret", max_body_bytes=1000, body_seconds=0.5)
    with running(ServeConfig(MODEL, gate)) as found:
        key = {"Authorization": "Bearer secret"}
        small = {"prompt": "x", "max_tokens": 1}
        assert found.request("GET", "/health")[0] == 200
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer secre"}, 401),
            ({"Authorization": "secret"}, 401),
            (key, 200),
            (key | {"Origin": "http://evil.example"}, 403),
            (key | {"Origin": "null"}, 403),
            (key | {"Origin": f"http://127.0.0.1:{found.port}"}, 200),
            (key | {"Host": "evil.example"}, 403),
            (key | {"Host": f"localhost:{found.port}"}, 200),
            (key | {"Content-Type": "text/plain"}, 415),
            (key | {"Content-Type": "application/json; charset=utf-8"}, 200),
        ):
            got, _, content = found.request("POST", "/v1/completions", small, headers)
            assert got == status, (headers, content)
        assert found.request("GET", "/metrics")[0] == 401
        large = {"prompt": "x" * 2000}
        assert found.request("POST", "/v1/completions", large, key)[0] == 413
        for length, status in ((b"999999999999", b"413"), (b"50", b"408")):
            with socket.create_connection(("127.0.0.1", found.port), timeout=20) as connection:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %b\r\n\r\n{" % length
                )
                assert connection.recv(12) == b"HTTP/1.1 " + status
        _, headers, _ = found.request("POST", "/v1/completions", small, key)
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_slow_headers_time_out(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serve.running.HEADER_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        begin = time.monotonic()
        assert connection.recv(100) == b"" and time.monotonic() - begin < 4


def test_adapters_are_models(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(SHIPPED_ADAPTER)
    root = SHIPPED_ADAPTER.parent
    with running(ServeConfig(MODEL, adapter_root=root), max_loras=2) as found:
        load = {"lora_name": "tests", "lora_path": SHIPPED_ADAPTER.name}
        fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        plain = found.post("/v1/completions", fields | {"model": MODEL})[1]
        assert found.post("/v1/completions", fields | {"model": "tests"})[0] == 404
        assert found.request("POST", "/v1/load_lora_adapter", load)[0] == 200
        models = json.loads(found.request("GET", "/v1/models")[2])["data"]
        assert [m["id"] for m in models] == [MODEL, "tests"] and models[1]["parent"] == MODEL
        other = found.post("/v1/completions", fields | {"model": "tests"})[1]
        assert other["choices"][0]["text"] != plain["choices"][0]["text"]
        for path in ("../..", "/etc", "nothing"):
            wrong = {"lora_name": "x", "lora_path": path}
            assert found.post("/v1/load_lora_adapter", wrong)[0] in (403, 404)
        assert found.request("POST", "/v1/unload_lora_adapter", {"lora_name": "tests"})[0] == 200
        assert found.post("/v1/completions", fields | {"model": "tests"})[0] == 404
    with running(max_loras=2) as found:
        assert found.post("/v1/load_lora_adapter", load)[0] == 403


# -- the command


@pytest.fixture
def command(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen, int]]:
    settings = ["--num-blocks", "300", "--num-threads", "1", "--drain-seconds", request.param]
    process = subprocess.Popen(
        [sys.executable, "-m", "common.serve", "--port", "0", *settings],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    while "is served at" not in said:
        said = process.stderr.readline()
        assert said, "it has ended"
    match = re.search(r":(\d+)/v1", said)
    assert match is not None and "watch it" in process.stderr.readline()
    assert "curl" in process.stderr.readline()
    yield process, int(match[1])
    process.kill()
    process.wait()


@pytest.mark.parametrize("command", ["60"], indirect=True)
def test_a_signal_lets_those_who_run_finish(command: tuple[subprocess.Popen, int]) -> None:
    process, port = command
    one = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    stream = one.completions.create(model=MODEL, prompt="x", max_tokens=30, stream=True)
    pieces = iter(stream)
    next(pieces)
    process.send_signal(signal.SIGTERM)
    rest = list(pieces)
    assert rest[-1].choices[0].finish_reason in ("length", "stop")
    assert process.wait(30) == 0


@pytest.mark.parametrize("command", ["1"], indirect=True)
def test_and_those_who_take_too_long_get_an_error(command: tuple[subprocess.Popen, int]) -> None:
    process, port = command
    one = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    how: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    streams = [
        iter(one.completions.create(model=MODEL, prompt=f"{i}", stream=True, **how))
        for i in range(8)
    ]
    next(streams[0])
    process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shut down"):
        while True:
            next(streams[0])
    with pytest.raises(openai.InternalServerError, match="no new requests"):
        one.completions.create(model=MODEL, prompt="x")
    assert process.wait(30) == 3


def test_no_piece_waits_for_another() -> None:
    """What a connection's transport is told about its socket: 40 ms of delay for each answer."""

    async def has_no_delay() -> int:
        found = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                own = transport.get_extra_info("socket")
                found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = open_port("127.0.0.1", 0)
        made = await asyncio.get_running_loop().create_server(Protocol, sock=listener)
        async with made:
            _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            try:
                return await found
            finally:
                writer.close()

    assert asyncio.run(has_no_delay())


def test_a_port_in_use_is_a_sentence(server: Running) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "common.serve", "--port", str(server.port)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert found.returncode == 2 and found.stderr.count("\n") == 1
    assert f"port {server.port} of 127.0.0.1 can not be had: Address already" in found.stderr


def test_kv_events_of_a_server_are_heard() -> None:
    """By a reader that has only the address which the server prints."""
    pytest.importorskip("zmq")
    from common.serve.kv_listen import listen

    settings = ["--num-blocks", "300", "--num-threads", "1", "--kv-events", "tcp://127.0.0.1:*"]
    process = subprocess.Popen(
        [sys.executable, "-m", "common.serve", "--port", "0", *settings],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = ""
        while "is served at" not in said:
            said += process.stderr.readline()
            assert process.poll() is None, said
        address, port = re.search(r"are at (\S+)", said), re.search(r":(\d+)/v1", said)
        assert address is not None and port is not None
        heard = listen(address[1])
        one = openai.OpenAI(base_url=f"http://127.0.0.1:{port[1]}/v1", api_key="x", max_retries=0)
        event = None
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(next, heard)
            for i in range(300):  # until the reader is connected
                one.completions.create(model=MODEL, prompt=[i + 5] * 40, max_tokens=1)
                if wait([coming], 0.1).done:
                    event = coming.result()[1]
                    break
        assert event is not None and event["type"] in ("BlockStored", "AllBlocksCleared")
        assert len(event.get("token_ids", ())) % 16 == 0
    finally:
        process.terminate()
        assert process.wait(30) == 0
