"""Real clients over loopback: the `openai` package, and some that leave."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from functools import partialmethod
from typing import Any

import openai
import pytest

from common.engine import LLMEngine
from common.engine_config import SHIPPED_ADAPTER
from common.llm import LLM, SamplingParams
from common.serve.app import ServeConfig
from common.serve.conftest import (
    HEALTH,
    MODEL,
    Running,
    fail_next,
    posted,
    running,
    wait_for,
)
from common.serve.kv_wire import Event
from common.serve.ports import open_port
from common.serve.running import FEW, PatientProtocol
from common.tests.forked import Forked, start_program

PROMPT = "def fibonacci(n):\n    if n"
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}


def client(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def test_sixty_four_concurrent_streams_equal_generate(server: Running, alone: LLM) -> None:
    prompts = [f"{PROMPT} == {i}:" for i in range(64)]
    params = SamplingParams(temperature=0, max_tokens=10)
    expected = [o.outputs[0].text for o in alone.generate(prompts, params, use_tqdm=False)]

    async def all_of_them() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as one:

            async def read(prompt: str) -> str:
                fields: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "stream": True}
                stream = await one.completions.create(model=MODEL, prompt=prompt, **fields)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_of_them()) == expected


def test_three_hundred_requests_one_after_another(server: Running) -> None:
    """Over one connection."""
    with closing(server.http()) as connection:
        for i in range(300):
            sent = {"prompt": [i + 10, 20], "max_tokens": 1}
            content = server.request("POST", "/v1/completions", sent, over=connection)[2]
            assert json.loads(content)["usage"]["completion_tokens"] == 1
    assert server.is_idle()


def test_a_chat_of_the_openai_client(template_server: Running) -> None:
    one = client(template_server)
    messages: Any = [{"role": "system", "content": "short"}, {"role": "user", "content": "a"}]
    fields: dict[str, Any] = {"max_completion_tokens": 9, "temperature": 0, "logprobs": True}
    whole = one.chat.completions.create(model=MODEL, messages=messages, top_logprobs=2, **fields)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spoken = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spoken.decode() == choice.message.content and len(choice.logprobs.content) == 9
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    with one.chat.completions.create(
        model=MODEL, messages=messages, stream=True, **fields
    ) as chunks:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_a_chat_without_a_limit_may_use_the_room_that_is_left(template_server: Running) -> None:
    _, answer = template_server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "temperature": 0},
    )
    longest = template_server.llm.max_model_len
    assert answer["usage"]["total_tokens"] == longest
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_clients_exceptions_are_those_it_has_for_them(server: Running) -> None:
    one = client(server)
    with pytest.raises(openai.NotFoundError):
        one.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        one.completions.create(model=MODEL, prompt="x", temperature=-1)
    too_long: list[Any] = [[1] * 5000, "def " * 5000, ["x", "x" * 1_000_000]]
    for prompt in too_long:
        with pytest.raises(openai.BadRequestError, match="at most") as caught:
            one.completions.create(model=MODEL, prompt=prompt)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert [model.id for model in one.models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the collector comes by: `made` keeps what was not closed."""
    made, generate = [], server.llm.generate

    def kept(ids: list[int], *arguments: Any, **options: Any) -> Any:
        made.append(generate([10**9] if ids == [7] else ids, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(server.llm, "generate", kept)
    refused = {**LONG, "stream": stream, "prompt": [[5], [10**9]]}
    assert server.post("/v1/completions", refused)[0] == 400
    assert not made, "refused before any of its prompts is queued"
    assert server.post("/v1/completions", refused | {"prompt": [[5], [7]]})[0] == 400
    assert len(made) == 2 and not any(one.ag_frame for one in made)

    with server.aborts_one(), server.connect(posted({**LONG, "stream": stream})) as connection:
        wait_for(lambda: server.stats().num_running)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert len(made) == 3 and made[2].ag_frame is None


def test_a_client_that_leaves_immediately_is_counted(server: Running) -> None:
    """Whether the engine has heard of its request or not."""

    def num_aborted() -> float:
        metrics = server.request("GET", "/metrics")[2].decode()
        found = re.search(r'success_total{.*"abort".*} (\S+)', metrics)
        assert found is not None
        return float(found[1])

    before = num_aborted()
    may_go = threading.Event()
    with ExitStack() as stack:
        stack.callback(may_go.set)
        server.loop.call_soon_threadsafe(may_go.wait, 20)
        for i in range(8):  # the last ones come with their end, before the loop reads them
            if i == 4:
                may_go.set()
            server.connect(posted({**LONG, "stream": i % 2 == 0})).close()
    wait_for(lambda: num_aborted() == before + 8)
    with server.aborts_one(), server.connect(posted(LONG)):
        wait_for(lambda: server.stats().num_running)
    wait_for(lambda: not server.app.state.server.live.gate.num_posts)
    assert num_aborted() == before + 9, "once"


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

    before = server.stats().num_finished
    server.call(fail_next)
    status, answer = server.post("/v1/completions", LONG)
    assert status == 500 and answer["error"]["message"].endswith("has failed: MemoryError")
    assert server.request("GET", "/health")[0] == 200
    assert server.post("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
    assert server.stats().num_finished == before + 1
    assert "ASGI" not in caplog.text, "the step's fault, not the route's"
    server.call(fail_next)
    *chunks, done = server.events("/v1/completions", LONG)
    assert done is None and "failed: MemoryError" in chunks[-1]["error"]["message"]


STOPPED = "the engine has stopped: RuntimeError"


def test_a_dead_engine_is_said_to_be_dead() -> None:
    with running() as found:

        def break_for_good(engine: LLMEngine) -> None:
            def step() -> Any:
                error = RuntimeError("a rank is gone")
                error.is_final = True  # pyright: ignore[reportAttributeAccessIssue]
                raise error

            engine.core.step = step

        with ThreadPoolExecutor(1) as pool:
            film = pool.submit(found.request, "GET", "/events")
            wait_for(lambda: found.app.state.server.live.viewers)
            found.call(break_for_good)
            assert found.post("/v1/completions", LONG)[0] == 503
            assert film.result(20)[0] == 200, "whoever watched it is told"
        assert found.request("GET", "/events")[0] == 503
        for _ in range(2):
            status, answer = found.post("/v1/completions", LONG)
            assert (status, answer["error"]["message"]) == (503, STOPPED)
        status, _, content = found.request("GET", "/health")
        assert (status, json.loads(content)["error"]["message"]) == (503, STOPPED), "Trap 86"


def test_a_crowd_is_taken_a_few_at_a_time(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting all connections at the same time would delay every stream. The system queues the
    others."""
    turns: list[Counter[str]] = []
    is_over, may_go = threading.Event(), threading.Event()

    def turn() -> None:
        turns.append(Counter())
        if not is_over.is_set():
            server.loop.call_soon(turn)

    def counted(own: PatientProtocol, argument: Any, name: str, whole: Any) -> None:
        turns[-1][name] += 1
        whole(own, argument)

    for name in ("connection_made", "data_received"):
        whole = getattr(PatientProtocol, name)
        monkeypatch.setattr(PatientProtocol, name, partialmethod(counted, name=name, whole=whole))
    server.loop.call_soon_threadsafe(turn)
    with ExitStack() as stack:
        crowd: list[socket.socket] = []
        for _ in range(2):  # a new connection, and a known one
            may_go.clear()
            server.loop.call_soon_threadsafe(may_go.wait, 20)
            while len(crowd) < 60:
                crowd.append(stack.enter_context(server.connect(timeout=1)))
            for connection in crowd:
                connection.settimeout(30)
                connection.sendall(HEALTH)
            may_go.set()
            assert all(one.recv(1 << 16).startswith(b"HTTP/1.1 200") for one in crowd)
    is_over.set()
    for name, min_calls in ("connection_made", 60), ("data_received", 120):
        assert sum(counts[name] for counts in turns) >= min_calls
        assert max(counts[name] for counts in turns) <= FEW


def test_adapters_are_models() -> None:
    root = SHIPPED_ADAPTER.parent
    with running(ServeConfig(MODEL, adapter_root=root), max_loras=2) as found:
        load = {"lora_name": "tests", "lora_path": SHIPPED_ADAPTER.name}
        assert found.post("/v1/load_lora_adapter", load | {"lora_name": MODEL})[0] == 400
        fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        plain = found.post("/v1/completions", fields | {"model": MODEL})[1]
        assert found.post("/v1/completions", fields | {"model": "tests"})[0] == 404
        assert found.request("POST", "/v1/load_lora_adapter", load)[0] == 200
        models = json.loads(found.request("GET", "/v1/models")[2])["data"]
        assert [m["id"] for m in models] == [MODEL, "tests"] and models[1]["parent"] == MODEL
        assert {m["max_model_len"] for m in models} == {found.llm.max_model_len}
        other = found.post("/v1/completions", fields | {"model": "tests"})[1]
        assert other["choices"][0]["text"] != plain["choices"][0]["text"]
        for path, status in (("../..", 403), ("/etc", 403), ("nothing", 404)):
            wrong = {"lora_name": "x", "lora_path": path}
            assert found.post("/v1/load_lora_adapter", wrong)[0] == status
        for status in (200, 404):
            unloaded = found.request("POST", "/v1/unload_lora_adapter", {"lora_name": "tests"})
            assert unloaded[0] == status
        assert found.post("/v1/completions", fields | {"model": "tests"})[0] == 404
    with running(max_loras=2) as found:
        assert found.post("/v1/load_lora_adapter", load)[0] == 403
        assert found.post("/v1/unload_lora_adapter", {"lora_name": "tests"})[0] == 403


# -- the command


@contextmanager
def serving(*settings: str) -> Iterator[tuple[Forked, str]]:
    """The command, when all is ready, and what it has said until then."""
    command = ["common.serve", "--port", "0", "--num-blocks", "300", *settings]
    process, stderr = start_program(*command, VLLM_API_KEY="")  # none
    try:
        log = ""
        while "curl" not in log:
            log += stderr.readline()
            assert process.poll() is None, log
        assert "watch it" in log
        yield process, log
    finally:
        process.kill()
        stderr.close()


def client_of(log: str) -> openai.OpenAI:
    match = re.search(r"is served at (\S+)", log)
    assert match is not None
    return openai.OpenAI(base_url=match[1], api_key="x", max_retries=0)


def test_a_signal_lets_running_requests_finish() -> None:
    with serving("--drain-seconds", "60") as (process, log):
        one = client_of(log)
        stream = one.completions.create(model=MODEL, prompt="x", max_tokens=30, stream=True)
        chunks = iter(stream)
        next(chunks)
        process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason in ("length", "stop")
        assert process.wait(120) == 0


def test_requests_beyond_the_drain_time_get_an_error() -> None:
    with serving("--drain-seconds", "2") as (process, log):
        one = client_of(log)
        fields: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "stream": True}
        streams = [
            iter(one.completions.create(model=MODEL, prompt=f"{i}", **fields)) for i in range(8)
        ]
        next(streams[0])
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="no new requests") as caught:
            while True:  # until the signal is heard
                one.completions.create(model=MODEL, prompt="x", max_tokens=1)
        assert caught.value.response.headers["retry-after"]
        with pytest.raises(openai.APIError, match="shut down"):
            while True:
                next(streams[0])
        one.close()
        assert process.wait(120) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_no_piece_waits_for_another(host: str) -> None:
    """The socket options of a connection's transport: with Nagle's algorithm each answer is delayed
    by 40 ms."""

    async def has_no_delay() -> int:
        found = asyncio.get_running_loop().create_future()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                own = transport.get_extra_info("socket")
                found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        try:
            listener = open_port(host, 0)
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error}")
        made = await asyncio.get_running_loop().create_server(Protocol, sock=listener)
        async with made:
            _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
            try:
                return await found
            finally:
                writer.close()

    assert asyncio.run(has_no_delay())


def test_an_interrupt_while_it_loads_is_no_traceback() -> None:
    process, stderr = start_program("common.serve", "--port", "0")
    with stderr:
        assert "loading" in stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in stderr.read()
        assert process.wait(60) == 130


def test_kv_events_of_a_server_are_heard() -> None:
    """By a reader that has only the address which the server prints."""
    from common.serve.kv_listen import listen

    with (
        serving("--kv-events", "tcp://127.0.0.1:*") as (process, log),
        ThreadPoolExecutor(1) as pool,
    ):
        address = re.search(r"are at (\S+)", log)
        assert address is not None
        one, heard = client_of(log), listen(address[1])

        def hear(kind: str) -> Event:
            number, event = next(one for one in heard if one[1]["type"] == kind)
            assert number >= 0
            return event

        coming = pool.submit(hear, "BlockStored")
        for i in range(300):  # until the reader is connected
            one.completions.create(model=MODEL, prompt=[i + 5] * 40, max_tokens=1)
            if wait([coming], 0.1).done:
                break
        assert len(coming.result(1)["token_ids"]) % 16 == 0
        process.send_signal(signal.SIGTERM)
        assert pool.submit(hear, "AllBlocksCleared").result(120)
        assert process.wait(120) == 0
