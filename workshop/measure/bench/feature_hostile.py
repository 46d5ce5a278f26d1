"""One client's heaviest legal bodies, and how long the other clients wait. `features.py` runs this.

Each body gets a new server with the shipped model on one thread. Two streams run in it, and a
client asks `/health` every 20 ms. Then the body comes. Recorded are the longest answer of
`/health`, the longest silence of a stream, and how long the server took to end after a SIGTERM,
sent after `SECONDS` or when the body is answered. The aims hold on two quiet cores."""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from common.engine_config import SHIPPED_ADAPTER
from common.serve.fleet.programs import start_server
from workshop.measure.bench.bench_record import markdown_table, rounded
from workshop.measure.bench.feature_overlap import prompt
from workshop.measure.bench.load import open_request
from workshop.measure.rounds import Case, median_of

HEALTH_S, SILENCE_S = 0.25, 0.5  # the aims
SECONDS = 30.0  # at most, for a body
DRAIN_S, STUCK_S = 1.0, 60.0
CHUNK = 512  # tokens of a step: the longest silence is at least that of an ordinary prompt's chunk
STREAM = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True}
TWELVE = [prompt(i, 1000) for i in range(12)]
COMPLETIONS = "/v1/completions"
CONFIG = {
    "aims": {"health": HEALTH_S, "silence": SILENCE_S},
    "drain_s": DRAIN_S,
    "max_num_batched_tokens": CHUNK,
}


def words(num_bytes: int) -> dict[str, Any]:
    return {"prompt": "x", "bad_words": ["lorem ipsum " * (num_bytes // 1024 // 12)] * 1024}


def grammar() -> dict[str, Any]:
    """A grammar of 2,000 parts."""
    parts = {f"name{i}": {"type": "array", "items": {"enum": [i, f"{i}"]}} for i in range(2000)}
    schema = {"type": "object", "properties": parts, "additionalProperties": False}
    return {"prompt": "x", "structured_outputs": {"json": schema}, "max_tokens": 5}


# A body by its name. The client disconnects immediately if the name ends with "left".
BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {"prompt": "x"},
    "`bad_words` of 4 MB": lambda: words(4 << 20),
    "`bad_words` of 15 MB": lambda: words(15 << 20),
    "`bad_words` of 60 KB": lambda: words(60 << 10),
    "2,048 prompts": lambda: {"prompt": ["def f(x):"] * 2048},
    "1,000 prompts, streamed": lambda: {"prompt": ["def f(x):"] * 1000, "stream": True},
    "12 prompts, `prompt_logprobs` 20": lambda: {
        "prompt": TWELVE, "prompt_logprobs": 20, "max_tokens": 1
    },
    "12 prompts, echo, `logprobs` 20, streamed": lambda: {
        "prompt": TWELVE, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True
    },
    "`n` 128, `logprobs` 20": lambda: {
        "prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 100, "ignore_eos": True
    },
    "a grammar of 2,000 parts, left": grammar,
    "an adapter's expression": lambda: {"lora_name": "a", "lora_path": "hostile"},
}  # fmt: skip
PATHS = {"nothing": "/tokenize", "an adapter's expression": "/v1/load_lora_adapter"}  # others


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


async def measure_body(name: str, folder: Path) -> dict[str, Any]:
    path, body = PATHS.get(name, COMPLETIONS), json.dumps(BODIES[name]()).encode()
    flags = ["--num-threads", "1", "--drain-seconds", f"{DRAIN_S}", "--num-blocks", "2000"]
    flags += ["--adapter-root", f"{folder}", "--max-loras", "1"]
    with start_server(*flags, "--max-num-batched-tokens", f"{CHUNK}") as server:
        server.wait_until_ready()
        port, over = int(server.url.rpartition(":")[2]), asyncio.Event()
        prompts = [STREAM | {"prompt": prompt} for prompt in ("def f(", "class A")]
        for warm in [*prompts, words(5 << 10)]:
            few = json.dumps(warm | {"max_tokens": 40}).encode()
            reader, _ = await open_request(port, COMPLETIONS, few)
            await reader.read()
        streams = [json.dumps(prompt).encode() for prompt in prompts]
        waits = [
            asyncio.create_task(longest_wait(port, url_path, content, over))
            for url_path, content in [("/health", None), *((COMPLETIONS, s) for s in streams)]
        ]
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        reader, writer = await open_request(port, path, body)
        status = "left"
        if name.endswith("left"):
            await asyncio.sleep(0.3)
            writer.transport.abort()
        else:
            try:
                status = (await asyncio.wait_for(reader.readline(), SECONDS)).decode()[9:12]
                await asyncio.wait_for(reader.read(), SECONDS - (time.monotonic() - begin))
            except asyncio.TimeoutError:
                status = f"{status} (unfinished)" if status != "left" else "no answer"
        await asyncio.sleep(1.0)
        over.set()
        health, *silences = await asyncio.gather(*waits)
        begin = time.monotonic()
        server.process.terminate()
        with suppress(TimeoutExpired):
            server.process.wait(STUCK_S)
        ended = None if server.process.poll() is None else time.monotonic() - begin
        found = {"status": status, "health": health, "silence": max(silences), "ended": ended}
        return rounded(found, 3)


def cases(config: dict[str, Any]) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SHIPPED_ADAPTER, Path(folder, "hostile"))
        file = Path(folder, "hostile", "adapter_config.json")
        backtracks = {"target_modules": "([a-z._0-9]+)+!"}  # forever
        file.write_text(json.dumps(json.loads(file.read_text()) | backtracks))
        runs = {
            name: lambda name=name: asyncio.run(measure_body(name, Path(folder)))
            for name in config.get("bodies", BODIES)
        }
        yield Case("bodies", "beside two streams", runs)


def tables(record: dict[str, Any]) -> list[str]:
    rows = []
    for name, runs in record["runs"]["bodies"]["beside two streams"].items():
        ends = [run["ended"] for run in runs]
        ended = "never" if None in ends else f"{statistics.median(ends):.1f}"
        shown = [f"{1e3 * median_of(runs, key):,.0f}" for key in ("health", "silence")]
        rows.append([name, runs[-1]["status"], *shown, ended])
    longest = ["longest `/health`, ms", "longest silence, ms"]
    return [markdown_table(["body", "status", *longest, "ended after SIGTERM, s"], rows)]
