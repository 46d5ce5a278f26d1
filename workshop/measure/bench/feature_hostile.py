"""One client's heaviest legal bodies, and how long the other clients wait. `features.py` runs this.

Each body gets a new server with the shipped model on one thread. Two streams run in it, and a
client asks `/health` every 20 ms. Then the body comes. The table has the longest answer of
`/health` (the aim is 250 ms), the longest silence of a stream (500 ms), and how long the server
took to end after a SIGTERM, sent after `SECONDS` or when the body is answered. The aims hold on two
quiet cores."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from common.engine_config import SHIPPED_ADAPTER
from common.serve.fleet.testing.programs import start_server
from workshop.measure.bench.bench_record import markdown_table

SECONDS = 30.0  # at most, for a body
STUCK_S = 60.0
COMPLETIONS = "/v1/completions"


def prompt(i: int, length: int, num_ids: int = 4000) -> list[int]:
    return [5 + (31 * i + 7 * j) % (num_ids - 5) for j in range(length)]


def words(num_bytes: int) -> dict[str, Any]:
    return {"prompt": "x", "bad_words": ["lorem ipsum " * (num_bytes // 1024 // 12)] * 1024}


def grammar() -> dict[str, Any]:
    parts = {f"name{i}": {"type": "array", "items": {"enum": [i, f"{i}"]}} for i in range(2000)}
    schema = {"type": "object", "properties": parts, "additionalProperties": False}
    return {"prompt": "x", "structured_outputs": {"json": schema}, "max_tokens": 5}


STREAM = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True}
TWELVE = {"prompt": [prompt(i, 1000) for i in range(12)], "max_tokens": 1}
MANY = {"n": 128, "logprobs": 20, "max_tokens": 100, "ignore_eos": True}
# A body by its name. The client disconnects immediately if the name ends with "left".
BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {"prompt": "x"},
    "`bad_words` of 4 MB": lambda: words(4 << 20),
    "`bad_words` of 15 MB": lambda: words(15 << 20),
    "`bad_words` of 60 KB": lambda: words(60 << 10),
    "2,048 prompts": lambda: {"prompt": ["def f(x):"] * 2048},
    "1,000 prompts, streamed": lambda: {"prompt": ["def f(x):"] * 1000, "stream": True},
    "12 prompts, `prompt_logprobs` 20": lambda: TWELVE | {"prompt_logprobs": 20},
    "12 prompts, echo, `logprobs` 20": lambda: TWELVE | {"echo": True, "logprobs": 20},
    "`n` 128, `logprobs` 20": lambda: MANY | {"prompt": "x"},
    "a grammar of 2,000 parts, left": grammar,
    "an adapter's expression": lambda: {"lora_name": "a", "lora_path": "hostile"},
}
PATHS = {"nothing": "/tokenize", "an adapter's expression": "/v1/load_lora_adapter"}  # others


async def open_request(
    port: int, path: str, body: bytes | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over HTTP with as little work as possible. The caller reads the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    method, content = ("GET", b"") if body is None else ("POST", body)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return reader, writer


async def longest_wait(port: int, path: str, body: bytes | None, until: asyncio.Event) -> float:
    """The longest seconds between two reads until `until` is set; for `/health`, of one answer."""
    longest, begin = 0.0, time.monotonic()
    while not until.is_set():
        begin = time.monotonic()
        reader, writer = await open_request(port, path, body)
        while not until.is_set() and await asyncio.wait_for(reader.read(1 << 16), STUCK_S):
            longest, begin = max(longest, time.monotonic() - begin), time.monotonic()
        writer.transport.abort()
        if body is None:
            await asyncio.sleep(0.02)
    return longest


async def measure_body(name: str, flags: list[str]) -> list[str]:
    """Return the cells of a row."""
    path, body = PATHS.get(name, COMPLETIONS), json.dumps(BODIES[name]()).encode()
    with start_server(*flags) as server:
        server.wait_until_ready()
        port, over = int(server.url.rpartition(":")[2]), asyncio.Event()
        for warm in (STREAM, words(5 << 10)):
            few = json.dumps(warm | {"max_tokens": 40}).encode()
            reader, _ = await open_request(port, COMPLETIONS, few)
            await reader.read()
        stream = COMPLETIONS, json.dumps(STREAM).encode()
        others: list[tuple[str, bytes | None]] = [("/health", None), stream, stream]
        waits = [asyncio.create_task(longest_wait(port, *other, over)) for other in others]
        await asyncio.sleep(1.0)
        reader, writer = await open_request(port, path, body)
        status = "left"
        if name.endswith("left"):
            await asyncio.sleep(0.3)
            writer.transport.abort()
        else:
            status = "no answer"
            with suppress(asyncio.TimeoutError):
                status = (await asyncio.wait_for(reader.readline(), SECONDS)).decode()[9:12]
                await asyncio.wait_for(reader.read(), SECONDS)
        await asyncio.sleep(1.0)
        over.set()
        health, *silences = await asyncio.gather(*waits)
        begin, ended = time.monotonic(), "never"
        server.process.terminate()
        with suppress(TimeoutExpired):
            server.process.wait(STUCK_S)
            ended = f"{time.monotonic() - begin:.1f}"
    return [name, status, f"{1e3 * health:,.0f}", f"{1e3 * max(silences):,.0f}", ended]


def hostile(tiny: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SHIPPED_ADAPTER, Path(folder, "hostile"))
        file = Path(folder, "hostile", "adapter_config.json")
        backtracks = {"target_modules": "([a-z._0-9]+)+!"}  # forever
        file.write_text(json.dumps(json.loads(file.read_text()) | backtracks))
        flags = ["--num-threads", "1", "--drain-seconds", "1", "--num-blocks", "2000"]
        flags += ["--adapter-root", folder, "--max-loras", "1", "--max-num-batched-tokens", "512"]
        names = list(BODIES)[: 1 if tiny else None]
        rows = [asyncio.run(measure_body(name, flags)) for name in names]
    head = ["body", "status", "longest `/health`, ms", "longest silence, ms"]
    return markdown_table([*head, "ended after SIGTERM, s"], rows)
