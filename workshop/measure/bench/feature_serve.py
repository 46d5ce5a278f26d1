"""The same requests by `LLM`'s own call, by `AsyncLLM`, and over HTTP. `features.py` runs this.

All requests of a run come at the same time. Each system has a separate process, and they are
measured in turn. The shipped model's step takes milliseconds; a step of Qwen3-0.6B's shape with
random weights (`layers` of them, in float32) takes longer than any work of the server. The client
is a separate process; its processor time is measured, because the server loses it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from common.serve.async_llm import AsyncLLM
from workshop.measure.bench.bench_record import markdown_table, rounded
from workshop.measure.bench.bench_work import greedy
from workshop.measure.bench.feature_overlap import prompt
from workshop.measure.bench.load import open_request
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.rounds import Case, ratios

CONFIG = {
    "num_prompt": 16,
    "num_answer": {"shipped": 64, "large": 8, "medium": 8},
    "numbers": {"shipped": [1, 32, 256], "large": [1, 32], "medium": [256]},
    "layers": {"large": 12, "medium": 4},
}
SYSTEMS = {
    "generate": "`LLM.generate`",
    "thread": "`AsyncLLM`",
    "http thread": "HTTP",
}
SPAWN = multiprocessing.get_context("spawn")


def make_engine(model: str) -> LLMEngine:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_blocks=2000,
        max_model_len=256,
        prefix_cache=None,
        compile=False,
        num_threads=torch.get_num_threads(),
    )
    if model == "shipped":
        return LLMEngine(config)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    num_layers = CONFIG["layers"][model]
    shape = replace(QWEN3_0_6B, num_hidden_layers=num_layers, vocab_size=tokenizer.vocab_size)
    return LLMEngine(config, loaded=random_model(shape), tokenizer=tokenizer)


class MeasuredLLM(AsyncLLM):
    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__()

    def _make_engine(self) -> LLMEngine:
        return make_engine(self.model)


# -- one run: seconds of all requests, and to the median first token


def prompts(number: int) -> list[list[int]]:
    return [prompt(i, CONFIG["num_prompt"]) for i in range(number)]


def describe(seconds: float, first_tokens: list[float], client: float = 0.0) -> dict[str, float]:
    """Return a run. `client` is the seconds of the client's processor."""
    found = {"seconds": seconds, "first_token": statistics.median(first_tokens), "client": client}
    return rounded(found, 5)


def run_generate(engine: LLMEngine, model: str, number: int) -> dict[str, float]:
    started = time.monotonic()
    params = greedy(CONFIG["num_answer"][model])
    outputs = engine.generate_batch(prompts(number), params)
    seconds = time.monotonic() - started
    first_tokens = [o.metrics.first_token_time - started for o in outputs.values()]  # pyright: ignore
    return describe(seconds, first_tokens)


async def run_async(llm: AsyncLLM, model: str, number: int) -> dict[str, float]:
    started = time.monotonic()

    async def read(prompt: list[int]) -> float:
        first = 0.0
        async for delta in llm.generate(prompt, greedy(CONFIG["num_answer"][model])):
            if delta.completions and not first:
                first = time.monotonic() - started
        return first

    first_tokens = await asyncio.gather(*map(read, prompts(number)))
    return describe(time.monotonic() - started, first_tokens)


async def run_http(port: int, model: str, number: int) -> dict[str, float]:
    """Run a client that does as little as possible."""
    started, before = time.monotonic(), time.process_time()
    params = {"temperature": 0, "max_tokens": CONFIG["num_answer"][model], "ignore_eos": True}

    async def read(prompt: list[int]) -> float:
        body = json.dumps({"prompt": prompt, "stream": True, **params}).encode()
        reader, writer = await open_request(port, "/v1/completions", body)
        first, data = 0.0, b""
        while text := await reader.read(1 << 16):
            data += text
            if not first and b"data: " in data:
                first = time.monotonic() - started
        writer.close()
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data[-300:]
        return first

    first_tokens = await asyncio.gather(*map(read, prompts(number)))
    client = time.process_time() - before
    return describe(time.monotonic() - started, first_tokens, client)


# -- the systems


def _system_process(name: str, model: str, there: Connection) -> None:
    """Serve on a free port and send it; or send None, and a run for each number of requests."""
    freeze_gc_heap()
    if name.startswith("http"):
        from common.serve.app import ServeConfig, make_app
        from common.serve.ports import open_port
        from common.serve.running import DrainingServer, make_event_loop

        llm = MeasuredLLM(model)
        _, gate = make_app(llm, ServeConfig(model))
        listener = open_port("127.0.0.1", 0)
        listener.listen()  # earlier connections wait
        there.send(listener.getsockname()[1])
        server = DrainingServer(llm, gate, drain_seconds=1.0)
        make_event_loop().run_until_complete(server.serve(sockets=[listener]))
    loop: Any = asyncio.new_event_loop()
    system = make_engine(model) if name == "generate" else MeasuredLLM(model)
    there.send(None)
    while True:
        if isinstance(system, LLMEngine):
            there.send(run_generate(system, model, there.recv()))
        else:
            there.send(loop.run_until_complete(run_async(system, model, there.recv())))


class System:
    """A system in a separate process, where no other engine slows it down."""

    def __init__(self, name: str, model: str) -> None:
        self.model = model
        self._here, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_system_process, args=(name, model, there))
        self._process.start()
        there.close()
        self._port = self._here.recv()

    def run(self, number: int) -> dict[str, float]:
        if self._port is not None:
            return asyncio.run(run_http(self._port, self.model, number))
        self._here.send(number)
        return self._here.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def cases(config: dict[str, Any]) -> Iterator[Case]:
    for model, numbers in config["numbers"].items():
        with ExitStack() as stack:
            systems: dict[str, System] = {}
            for name in SYSTEMS:
                systems[name] = System(name, model)
                stack.callback(systems[name].close)
            for number in numbers:
                runs = {name: partial(system.run, number) for name, system in systems.items()}
                yield Case(model, f"{number}", runs)


def tables(record: dict[str, Any]) -> list[str]:
    """Return a row for each system, compared with the same round's `LLM.generate`. The client's
    processor time is subtracted from the seconds."""
    rows = []
    for model, cases in record["runs"].items():
        for number, found in cases.items():
            num_tokens = int(number) * record["config"]["num_answer"][model]
            seconds = {k: [r["seconds"] - r["client"] for r in runs] for k, runs in found.items()}
            for name, title in SYSTEMS.items():
                speed = num_tokens / statistics.median(seconds[name])
                share = "1" if name == "generate" else ratios(seconds["generate"], seconds[name])
                first = 1e3 * statistics.median(run["first_token"] for run in found[name])
                cells = [f"{model}, {number}", title, f"{speed:,.0f}", share, f"{first:,.0f}"]
                rows.append(cells)
    columns = ["output tok/s", "of `LLM.generate`", "first token (p50), ms"]
    return [markdown_table(["model, requests at once", "by", *columns], rows)]
