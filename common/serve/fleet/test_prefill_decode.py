"""Prefill and decode in two servers, over the real store: by vLLM's two requests, and by the real
router."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from common.llm import LLM, SamplingParams
from common.serve.fleet.testing.programs import Program, start_router, start_server
from conftest import need
from mooncake_master import MooncakeMaster

BLOCK_SIZE, MAX_TOKENS = 8, 12
PROMPTS = [random.Random(i).choices(range(2, 4096), k=100) for i in range(4)]
FULL = (100 - 1) // BLOCK_SIZE * BLOCK_SIZE  # tokens that a store can have of each
# What the first of vLLM's two requests has besides.
ONE_TOKEN = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


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


def post_all(url: str, prompts: list[list[int]], **more: object) -> tuple[list[str], list[int]]:
    """Texts, and the number of prompt tokens that the answering server did not compute."""
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    texts, cached = list[str](), list[int]()
    for prompt in prompts:
        sent = body | {"prompt": prompt} | more
        answer = httpx.post(f"{url}/v1/completions", json=sent, timeout=60)
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
    "kind", ["two requests", pytest.param("router", marks=pytest.mark.needs("vllm-router"))]
)
def test_the_decode_server_loads_kv_of_the_prefill_server(
    kind: str, servers: list[Program], alone: LLM, stack: ExitStack
) -> None:
    """The texts are one engine's. Without the prefill server, the other one computes the prompt."""
    prefill, decode = servers
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = [o.outputs[0].text for o in alone.generate(PROMPTS, params, use_tqdm=False)]
    url = decode.url
    if kind == "router":
        flags = ("--prefill", prefill.url, "--decode", decode.url)
        pair = ("--policy", "round_robin", "--vllm-pd-disaggregation", *flags)
        front = stack.enter_context(start_router(*pair))  # says what prefill had cached
        front.wait_until_ready()
        url = front.url
    else:
        post_all(prefill.url, PROMPTS[:3], **ONE_TOKEN)
    hits = 0 if kind == "router" else FULL
    assert post_all(url, PROMPTS[:3]) == (expected[:3], [hits] * 3)
    assert computed(prefill) == 3 * 100 and computed(decode) == 3 * (100 - FULL)
    prefill.kill()
    assert post_all(decode.url, PROMPTS[3:]) == (expected[3:], [0])
