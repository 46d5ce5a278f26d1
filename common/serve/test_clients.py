"""Real clients over loopback: the `openai` package, and some that leave."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import msgpack
import openai
import pytest
import zmq

from common.engine_config import SHIPPED_ADAPTER
from common.llm import LLM, SamplingParams
from common.serve.__main__ import main as command
from common.serve.conftest import MODEL, Running, fail_next, posted, running, wait_for
from common.serve.kv_wire import Event
from common.serve.ports import open_port
from common.tests.forked import Forked, start_program


def listen(endpoint: str) -> Iterator[Event]:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe("")
    while True:
        yield from msgpack.unpackb(socket.recv_multipart()[2])[1]


PROMPT = "def fibonacci(n):\n    if n"
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}


def test_sixty_four_concurrent_streams_equal_generate(server: Running, alone: LLM) -> None:
    prompts = [f"{PROMPT} == {i}:" for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [o.outputs[0].text for o in alone.generate(prompts, params, use_tqdm=False)]

    async def all_of_them() -> list[str]:
        fields: Any = dict(model=MODEL, max_tokens=10, temperature=0, stream=True)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as one:

            async def read(prompt: str) -> str:
                chunks = await one.completions.create(prompt=prompt, **fields)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_of_them()) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the collector comes by: `made` keeps what was not closed."""
    made = []
    generate = server.llm.generate

    def kept(ids: list[int], *arguments: Any, **options: Any) -> Any:
        made.append(generate([10**9] if ids == [7] else ids, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(server.llm, "generate", kept)
    sent = LONG | {"stream": stream}
    for prompt, num_made in ([[5], [10**9]], 0), ([[5], [7]], 2):  # before any of them is queued
        assert server.post("/v1/completions", sent | {"prompt": prompt})[0] == 400
        assert len(made) == num_made
    with server.aborts_one(), server.connect(posted(sent)) as connection:
        wait_for(lambda: server.stats().num_running)
        assert not stream or connection.recv(100).startswith(b"HTTP/1.1 200")
    assert len(made) == 3 and not any(one.ag_frame for one in made)


def test_a_slow_reader_delays_no_other(server: Running) -> None:
    sent = posted({**LONG, "stream": True, "logprobs": 5})
    with server.connect(sent, receive_buffer=4096) as connection:
        assert connection.recv(1)
        status, answer = server.post("/v1/completions", {**LONG, "max_tokens": 5})
        assert status == 200 and answer["usage"]["completion_tokens"] == 5
        assert connection.recv(1)
    wait_for(server.is_idle, 20)


def test_a_failed_step_ends_its_requests(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A runner that fails once: the requests in that step get a 500, the next one its answer."""
    server.call(fail_next)
    status, answer = server.post("/v1/completions", LONG)
    assert status == 500 and answer["error"]["message"].endswith("has failed: MemoryError")
    assert server.request("GET", "/health")[0] == 200
    assert "ASGI" not in caplog.text, "the step's fault, not the route's"
    server.call(fail_next)
    *chunks, done = server.events("/v1/completions", LONG)
    assert done is None and "failed: MemoryError" in chunks[-1]["error"]["message"]


def test_a_dead_engine_is_said_to_be_dead() -> None:
    """Trap 86: not by what the exception says."""
    error = RuntimeError("a rank is gone")
    error.is_final = True  # pyright: ignore[reportAttributeAccessIssue]
    with running() as found, ThreadPoolExecutor(1) as pool:
        key = found.app.state.server.live.gate.config.events_key
        own = {"Authorization": f"Bearer {key}"}
        film = pool.submit(found.request, "GET", "/events", None, own)
        wait_for(lambda: found.app.state.server.live.viewers)
        found.call(fail_next, error)
        found.post("/v1/completions", LONG)
        assert film.result(20)[0] == 200, "whoever watched it is told"
        for asked in "POST /v1/completions", "GET /events", "GET /health":
            status, _, content = found.request(*asked.split(), LONG, own)
            stopped = "the engine has stopped: RuntimeError"
            assert (status, json.loads(content)["error"]["message"]) == (503, stopped), asked


def test_a_tier_without_a_place_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "kv")
    flag = json.dumps({"host_blocks": 2, "disk_blocks": 30, "disk_path": place})
    assert command(["--port=0", "--num-blocks=20", "--kv-tiers", flag]) == 2
    assert "Not a directory" in capsys.readouterr().err.splitlines()[-1]


def test_adapters_are_models(server: Running, short: Running) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    sent = {"lora_name": "tests", "lora_path": SHIPPED_ADAPTER.name}
    copytree(SHIPPED_ADAPTER, short.app.state.server.config.adapter_root / SHIPPED_ADAPTER.name)

    def text(model: str) -> str | None:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "model": model}
        status, answer = short.post("/v1/completions", body)
        return answer["choices"][0]["text"] if status == 200 else None

    assert text("tests") is None and short.post(load, sent | {"lora_name": MODEL})[0] == 400
    assert short.request("POST", load, sent)[0] == 200
    models = json.loads(short.request("GET", "/v1/models")[2])["data"]
    assert [m["id"] for m in models] == [MODEL, "tests"] and models[1]["parent"] == MODEL
    assert text("tests") not in (None, text(MODEL))
    assert [short.request("POST", unload, sent)[0] for _ in range(2)] == [200, 404]
    assert text("tests") is None
    for path in load, unload:  # where no folder is named
        assert server.request("POST", path, sent)[0] == 404


# -- the command


@contextmanager
def serving(*settings: str) -> Iterator[tuple[Forked, str]]:
    """The command, when all is ready, and what it has said until then."""
    command = ["common.serve", "--port", "0", "--num-blocks", "300", *settings]
    process, stderr = start_program(*command, VLLM_API_KEY="")  # none
    try:
        log = ""
        while "no --api-key: " not in log:
            log += stderr.readline()
            assert process.poll() is None, log
        assert "watch it" in log
        yield process, log
    finally:
        process.kill()
        stderr.close()


def client_of(log: str) -> openai.OpenAI:
    (url,) = re.findall(r"is served at (\S+)", log)
    return openai.OpenAI(base_url=url, api_key="x", max_retries=0)


def test_after_a_signal_what_ends_in_time_is_whole_and_the_rest_gets_an_error() -> None:
    fields: Any = dict(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
    with serving("--drain-seconds", "2") as (process, log), closing(client_of(log)) as one:

        def stream(num: int) -> Iterator[Any]:
            return iter(one.completions.create(max_tokens=num, stream=True, **fields))

        long = [stream(2000) for _ in range(8)]
        short = stream(20)
        next(short)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="no new requests") as caught:
            while True:  # until the signal is heard
                one.completions.create(max_tokens=1, **fields)
        assert caught.value.response.headers["retry-after"]
        assert [*short][-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIError, match="shut down"):
            while True:
                next(long[0])
        one.close()
        assert process.wait(120) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
async def test_no_piece_waits_for_another(host: str) -> None:
    """With Nagle's algorithm each answer is delayed by 40 ms."""
    loop = asyncio.get_running_loop()
    found = loop.create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            found.set_result(transport.get_extra_info("socket"))

    try:
        listener = open_port(host, 0)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    async with await loop.create_server(Protocol, sock=listener):
        with socket.create_connection((host, listener.getsockname()[1])):
            assert (await found).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_interrupt_while_it_loads_is_no_traceback() -> None:
    process, stderr = start_program("common.serve", "--port", "0")
    with stderr:
        assert "loading" in stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in stderr.read()
        assert process.wait(60) == 130


def test_kv_events_of_a_server_are_heard() -> None:
    """By a reader that has only the address which the server prints."""
    with (
        serving("--kv-events", "tcp://127.0.0.1:*") as (process, log),
        ThreadPoolExecutor(1) as pool,
    ):
        (address,) = re.findall(r"are at (\S+)", log)
        assert "anyone who can reach it reads the token ids" in log
        one, heard = client_of(log), listen(address)

        def hear(kind: str) -> Event:
            return next(event for event in heard if event["type"] == kind)

        coming = pool.submit(hear, "BlockStored")
        for i in range(300):  # until the reader is connected
            one.completions.create(model=MODEL, prompt=[i + 5] * 40, max_tokens=1)
            if wait([coming], 0.1).done:
                break
        assert len(coming.result(1)["token_ids"]) % 16 == 0
        process.send_signal(signal.SIGTERM)
        assert pool.submit(hear, "AllBlocksCleared").result(120)
        assert process.wait(120) == 0
