"""Prefill and decode in two servers: the proxy between two that only note what they are asked; and
over the real store, by the proxy and by the real router."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from common.llm import LLM, SamplingParams
from common.serve.conftest import Running, in_thread, posted
from common.serve.fleet.pd_proxy import ASK, make_proxy
from common.serve.fleet.testing.programs import Program, start_router, start_server
from conftest import need
from mooncake_master import MooncakeMaster

BLOCK_SIZE, MAX_TOKENS = 8, 12
PROMPTS = [random.Random(i).choices(range(2, 4096), k=100) for i in range(4)]
FULL = (100 - 1) // BLOCK_SIZE * BLOCK_SIZE  # tokens that a store can have of each
BODY = {"prompt": "x", "temperature": 0}
NOT_FOR_ONE = {"stream": True, "stream_options": {}, "min_tokens": 3, "n": 2, "max_tokens": 9}
NOT_FOR_ONE["max_completion_tokens"] = 9


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def served(stack: ExitStack, app: Any) -> str:
    listener = stack.enter_context(in_thread(uvicorn.Server(uvicorn.Config(app))))
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


class Server:
    """Notes what it is asked, and says `answer`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.status = 200
        self.seconds = 0.0
        self.seen: list[tuple[str, Any, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        path = f"{request.url.path}?{request.url.query}".removesuffix("?")
        self.seen.append((path, request.headers, await request.body()))
        await asyncio.sleep(self.seconds)
        name = request.headers.get("x-request-id", "none")
        headers = {"x-request-id": name, "x-own": "1", "retry-after": "7"}
        await JSONResponse(self.answer, self.status, headers)(scope, receive, send)


def test_both_are_asked_as_vllm_asks_and_the_second_one_answers(stack: ExitStack) -> None:
    where = {"kv_transfer_params": {"where": 7}}
    first = Server(where)
    second = Server({"text": "y"})
    places = [served(stack, one) for one in (first, second)]
    proxy = served(stack, make_proxy(*places, prefill_seconds=0.5))
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "Cookie": "a=b"}
    headers["Content-Type"] = "application/json"

    def post(content: bytes, path: str = "/v1/completions") -> httpx.Response:
        first.seen.clear()
        second.seen.clear()
        return httpx.post(f"{proxy}{path}", content=content, headers=headers, timeout=30)

    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = post(json.dumps(BODY | NOT_FOR_ONE).encode(), path)
        assert answer.json() == {"text": "y"} and answer.headers["x-request-id"] == "mine"
        assert "x-own" not in answer.headers
        only = {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
        for one, body in (first, BODY | only), (second, BODY | NOT_FOR_ONE | where):
            ((place, found, content),) = one.seen
            assert (place, json.loads(content)) == (path, body)
            assert (found["authorization"], found["x-request-id"]) == ("Bearer k", "mine")
            assert "cookie" not in found
    whole = json.dumps(BODY).encode()
    for name, wrong in ("answer", {}), ("status", 500), ("seconds", 1.0), ("content", b"[1]"):
        # the second one is asked as if it were alone
        vars(first).update(answer=where, status=200, seconds=0.0)
        setattr(first, name, wrong)
        content = wrong if isinstance(wrong, bytes) else whole
        assert post(content).json() == {"text": "y"} and second.seen[0][2] == content
        assert len(first.seen) == (content == whole)
    second.status = 418
    assert post(b"{}", "/tokenize").status_code == 418 and not first.seen
    answer = httpx.get(f"{proxy}/v1/models?after=x&limit=2", timeout=30)
    assert answer.status_code == 418 and answer.headers["retry-after"] == "7" and not first.seen
    assert second.seen[-1][0] == "/v1/models?after=x&limit=2"


def test_without_the_first_it_answers_and_a_disconnect_ends_the_request(
    server: Running, stack: ExitStack
) -> None:
    taken = stack.enter_context(socket.socket())  # and not listened to
    taken.bind(("127.0.0.1", 0))
    unused_url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    proxy = served(stack, make_proxy(unused_url, server.url))
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    address = "127.0.0.1", int(proxy.rpartition(":")[2])
    with server.aborts_one(), socket.create_connection(address) as connection:
        connection.sendall(posted(long))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    alone = served(stack, make_proxy(unused_url, unused_url))
    assert httpx.get(f"{alone}/v1/models", timeout=30).status_code == 502


# -- over the store


@pytest.fixture
def servers(stack: ExitStack) -> list[Program]:
    """For prefill and for decode."""
    need("Mooncake")
    address = stack.enter_context(MooncakeMaster()).address
    fields = {"kind": "mooncake", "master": address.master, "segment_mbytes": 64}
    fields["metadata"] = address.metadata
    flags = ("--block-size", str(BLOCK_SIZE), "--num-blocks", "400", "--dtype", "float64")
    flags = (*flags, "--num-threads", "1", "--kv-connector", json.dumps(fields))
    found = [stack.enter_context(start_server(*flags)) for _ in range(2)]
    for server in found:
        server.wait_until_ready()
    return found


def post_all(url: str, prompts: list[list[int]]) -> tuple[list[str], list[int]]:
    """Texts, and the number of prompt tokens that the answering server did not compute."""
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    texts, cached = list[str](), list[int]()
    for prompt in prompts:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=60)
        found = answer.raise_for_status().json()
        texts.append(found["choices"][0]["text"])
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    return texts, cached


def computed(server: Program) -> int:
    found = server.metrics()
    queries, hits = (found[f"vllm:prefix_cache_{name}_total"] for name in ("queries", "hits"))
    return int(sum(queries.values()) - sum(hits.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["proxy", pytest.param("router", marks=pytest.mark.needs("vllm-router"))]
)
def test_the_decode_server_loads_kv_of_the_prefill_server(
    kind: str, servers: list[Program], alone: LLM, stack: ExitStack
) -> None:
    """By the proxy, which works without it, and by the real router. The texts are one engine's."""
    prefill, decode = servers
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = [o.outputs[0].text for o in alone.generate(PROMPTS, params, use_tqdm=False)]
    flags = ("--prefill", prefill.url, "--decode", decode.url)
    if kind == "router":
        pair = ("--policy", "round_robin", "--vllm-pd-disaggregation", *flags)
        front = stack.enter_context(start_router(*pair))  # says what prefill had cached
        hits = 0
    else:
        module = "common.serve.fleet.pd_proxy"
        front = stack.enter_context(start_server(*flags, module=module))
        hits = FULL
    front.wait_until_ready()
    assert post_all(front.url, PROMPTS[:3]) == (expected[:3], [hits] * 3)
    assert computed(prefill) == 3 * 100 and computed(decode) == 3 * (100 - FULL)
    if kind == "proxy":
        prefill.kill()
        assert post_all(front.url, PROMPTS[3:]) == (expected[3:], [0])
