"""Prefill and decode in two servers over the real store, by the proxy and by the real router."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from common.llm import LLM, SamplingParams
from common.serve.fleet.programs import (
    HOW_TO_INSTALL,
    Program,
    router_program,
    start_router,
    start_server,
)
from mooncake_master import MooncakeMaster, MooncakeUnavailableError

pytestmark = pytest.mark.slow
BLOCK_SIZE, MAX_TOKENS = 8, 12
PROMPTS = [random.Random(i).choices(range(2, 4096), k=100) for i in range(4)]
FULL = (100 - 1) // BLOCK_SIZE * BLOCK_SIZE  # tokens that a store can have of each


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def servers(stack: ExitStack) -> list[Program]:
    """For prefill and for decode."""
    try:
        master = stack.enter_context(MooncakeMaster())
    except MooncakeUnavailableError as failure:
        pytest.skip(str(failure))
    fields = {"kind": "mooncake", "master": master.address.master, "segment_mbytes": 64}
    fields["metadata"] = master.address.metadata
    flags = ("--block-size", str(BLOCK_SIZE), "--num-blocks", "400", "--dtype", "float32")
    flags = (*flags, "--num-threads", "1", "--kv-connector", json.dumps(fields))
    found = [stack.enter_context(start_server(*flags)) for _ in range(2)]
    for server in found:
        server.wait_until_ready()
    return found


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """One engine alone."""
    llm = LLM(block_size=BLOCK_SIZE, num_blocks=400, dtype="float32", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    texts = [o.outputs[0].text for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.close()
    return texts


def ask(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def ask_all(url: str, prompts: list[list[int]]) -> tuple[list[str], list[int]]:
    """Texts, and the prompts' tokens that were not computed by whoever answered."""
    answers = [ask(url, prompt) for prompt in prompts]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    return [a["choices"][0]["text"] for a in answers], cached


def computed(server: Program) -> int:
    found = server.metrics()
    queries, hits = (
        sum(found[f"vllm:prefix_cache_{name}_total"].values()) for name in ("queries", "hits")
    )
    return int(queries - hits)


def test_the_decode_server_loads_what_the_prefill_server_computed_and_lives_without_it(
    servers: list[Program], expected: list[str], stack: ExitStack
) -> None:
    prefill, decode = servers
    flags = ("--prefill", prefill.url, "--decode", decode.url)
    proxy = stack.enter_context(start_server(*flags, module="common.serve.fleet.pd_proxy"))
    proxy.wait_until_ready()

    assert ask_all(proxy.url, PROMPTS[:2]) == (expected[:2], [FULL] * 2)
    assert computed(prefill) == 2 * 100 and computed(decode) == 2 * (100 - FULL)

    body = {"prompt": PROMPTS[2], "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=60) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    *pieces, usage, done = [json.loads(line) if line != "[DONE]" else line for line in lines]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected[2]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL and done == "[DONE]"

    prefill.kill()
    assert ask_all(proxy.url, PROMPTS[3:]) == (expected[3:], [0])
    bad = httpx.post(
        f"{proxy.url}/v1/completions", content="{", headers={"content-type": "application/json"}
    )
    assert bad.status_code == 400 and "error" in bad.json()


@pytest.mark.skipif(router_program() is None, reason=HOW_TO_INSTALL)
def test_the_real_router_does_so_too_while_the_prefill_server_lives(
    servers: list[Program], expected: list[str], stack: ExitStack
) -> None:
    prefill, decode = servers
    flags = ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)
    router = stack.enter_context(start_router("--policy", "round_robin", *flags))
    router.wait_until_ready()
    # In `usage` it says what the prefill server had cached.
    assert ask_all(router.url, PROMPTS) == (expected, [0] * len(PROMPTS))
    assert computed(prefill) == 4 * 100 and computed(decode) == 4 * (100 - FULL)
