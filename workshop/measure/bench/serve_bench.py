"""The cost of a server: the same requests by `LLM`'s own call, by `AsyncLLM`, and over HTTP.

    python -m workshop.bench.serve_bench           measures (minutes), writes the record
    python -m workshop.bench.serve_bench --tables  writes common/serve/README.md's table

All requests of a run come at the same time; the first column gives their number. Each system has a
separate process, and they are measured in turn. The shipped model's step takes milliseconds; a step
of Qwen3-0.6B's shape with random weights (`NUM_LAYERS`) takes longer than any work of the server.
The engine is in a thread of the server, or, to compare, in a separate process (`EngineInProcess`,
here only), with data pickled once a step. The client is a separate process; its processor time is
measured, because the server loses it."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from common.serve.async_llm import AsyncLLM
from common.serve.deltas import EngineUpdate
from common.serve.engine_loop import EngineLoop
from request import SamplingParams
from workshop.measure.bench.bench_record import describe_environment, markdown_table
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.bench.side_by_side import measure_and_tell, spread

RECORD = Path(__file__).parent / "records" / "serve.json"
PAGE = Path(__file__).parents[3] / "common" / "serve" / "README.md"
NUMBERS = {"shipped": (1, 32, 256), "large": (1, 32), "medium": (256,)}
NUM_LAYERS = {"large": 12, "medium": 4}
NUM_PROMPT = 16
NUM_ANSWER = {"shipped": 64, "large": 8, "medium": 8}
SYSTEMS = {
    "generate": "`LLM.generate`",
    "thread": "`AsyncLLM`",
    "process": "`AsyncLLM`, engine in a process",
    "http thread": "HTTP",
    "http process": "HTTP, engine in a process",
}


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
    shape = replace(
        QWEN3_0_6B, num_hidden_layers=NUM_LAYERS[model], vocab_size=tokenizer.vocab_size
    )
    return LLMEngine(config, loaded=random_model(shape), tokenizer=tokenizer)


class EngineInProcess:
    """Does for `AsyncLLM` what `EngineLoop` does, with the engine in another process."""

    death_reason = None

    def __init__(self, model: str, deliver: Callable[[EngineUpdate], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_engine_process, args=(model, there), daemon=True)
        self._process.start()
        self.made = Future[Any]()
        self.made.set_result(SimpleNamespace(**self._here.recv()))
        self.made.result().tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
        threading.Thread(target=self._read, args=(deliver,), daemon=True).start()

    def _read(self, deliver: Callable[[EngineUpdate], None]) -> None:
        while True:
            try:
                deliver(self._here.recv())
            except EOFError:
                return

    def add(self, *arguments: Any) -> None:
        self._here.send(("add", arguments))

    def abort(self, *arguments: Any) -> None:
        self._here.send(("abort", arguments))

    def call(self, *arguments: Any) -> None:
        self._here.send(("call", arguments))

    def close(self) -> None:
        self._here.send(("close", ()))
        self._process.join(10)


def _engine_process(model: str, there: Connection) -> None:
    is_ready = threading.Event()

    def deliver(engine_update: EngineUpdate) -> None:
        if is_ready.is_set():
            there.send(engine_update)

    loop = EngineLoop(lambda: make_engine(model), deliver)
    engine = loop.made.result()
    names = ("max_model_len", "model_config", "adapters")
    there.send({name: getattr(engine, name) for name in names})
    is_ready.set()
    what = ""
    with suppress(EOFError):  # the other process has ended
        while what != "close":
            what, arguments = there.recv()
            getattr(loop, what)(*arguments)


class MeasuredLLM(AsyncLLM):
    def __init__(self, model: str, in_process: bool) -> None:
        self.model, self.in_process = model, in_process
        super().__init__()

    def _make_loop(self, max_waiting: int | None) -> Any:
        if self.in_process:
            return EngineInProcess(self.model, self._deliver)
        return super()._make_loop(max_waiting)

    def _make_engine(self) -> LLMEngine:
        return make_engine(self.model)


# -- one run: seconds in all, and to each first token


@dataclass(slots=True)
class Run:
    seconds: float
    first_token: float  # the median
    client: float = 0.0  # seconds of the processor


def prompt(i: int) -> list[int]:
    return [5 + (31 * i + 7 * j) % 4000 for j in range(NUM_PROMPT)]


def params(model: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_ANSWER[model], ignore_eos=True)


def run_generate(engine: LLMEngine, model: str, number: int) -> Run:
    started = time.monotonic()
    outputs = engine.generate_batch([prompt(i) for i in range(number)], params(model))
    seconds = time.monotonic() - started
    firsts = [o.metrics.first_token_time - started for o in outputs.values()]  # pyright: ignore
    return Run(seconds, statistics.median(firsts))


async def run_async(llm: AsyncLLM, model: str, number: int) -> Run:
    started = time.monotonic()

    async def read(i: int) -> float:
        first = 0.0
        async for delta in llm.generate(prompt(i), params(model)):
            if delta.completions and not first:
                first = time.monotonic() - started
        return first

    firsts = await asyncio.gather(*map(read, range(number)))
    return Run(time.monotonic() - started, statistics.median(firsts))


async def run_http(port: int, model: str, number: int) -> Run:
    """Run a client that does as little as possible."""
    started, before = time.monotonic(), time.process_time()

    async def read(i: int) -> float:
        how = {"temperature": 0, "max_tokens": NUM_ANSWER[model], "ignore_eos": True}
        body = json.dumps({"prompt": prompt(i), "stream": True, **how}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        first, data = 0.0, b""
        while piece := await reader.read(1 << 16):
            data += piece
            if not first and b"data: " in data:
                first = time.monotonic() - started
        writer.close()
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data[-300:]
        return first

    firsts = await asyncio.gather(*map(read, range(number)))
    client = time.process_time() - before
    return Run(time.monotonic() - started, statistics.median(firsts), client)


# -- all of them, in turns


def serve(model: str, in_process: bool) -> None:
    """Run a server in this process, on a free port, which is printed as the first line."""
    from common.serve.app import ServeConfig, make_app
    from common.serve.ports import open_port
    from common.serve.running import DrainingServer, make_event_loop

    llm = MeasuredLLM(model, in_process)
    _, gate = make_app(llm, ServeConfig(model))
    listener = open_port("127.0.0.1", 0)
    listener.listen()  # earlier connections wait
    print(listener.getsockname()[1], flush=True)
    server = DrainingServer(llm, gate, drain_seconds=1.0)
    make_event_loop().run_until_complete(server.serve(sockets=[listener]))


def run_when_asked(model: str, in_process: bool | None) -> None:
    """Run once for each line of stdin, its number of requests; None: by `LLM.generate`'s engine."""
    if in_process is None:
        engine = make_engine(model)
        run = functools.partial(run_generate, engine, model)
    else:
        loop, llm = asyncio.new_event_loop(), MeasuredLLM(model, in_process)

        def run(number: int) -> Run:
            return loop.run_until_complete(run_async(llm, model, number))

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(astuple(run(int(line)))), flush=True)


class System:
    """A system in a separate process, where no other engine slows it down."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        command = [sys.executable, "-m", "workshop.bench.serve_bench", "--system", name]
        self._process = subprocess.Popen(
            [*command, "--model", model], stdin=PIPE, stdout=PIPE, text=True
        )
        self._said = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.name} has ended"
        return line

    def run(self, number: int) -> Run:
        if self.name.startswith("http"):
            return asyncio.run(run_http(int(self._said), self.model, number))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return Run(*json.loads(self._line()))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_model(model: str, rounds: int) -> dict[str, Any]:
    found: dict[str, dict[str, list]] = {name: {} for name in SYSTEMS}
    with ExitStack() as stack:
        systems = [System(name, model) for name in SYSTEMS]
        for system in systems:
            stack.callback(system.close)
        for i in range(1 + rounds):
            for number in NUMBERS[model]:
                for system in systems if i % 2 else reversed(systems):
                    one = system.run(number)
                    if i:  # the first warms up
                        figures = [round(figure, 5) for figure in astuple(one)]
                        found[system.name].setdefault(str(number), []).append(figures)
    return found


def measure(rounds: int, models: tuple[str, ...] = tuple(NUMBERS)) -> dict[str, Any]:
    freeze_gc_heap()
    return {
        "command": "python -m workshop.bench.serve_bench",
        "environment": describe_environment(),
        "config": {
            "num_prompt": NUM_PROMPT,
            "num_answer": NUM_ANSWER,
            "numbers": NUMBERS,
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "layers": NUM_LAYERS,  # of Qwen3-0.6B's shape, random weights, float32
        },
        "runs": {model: measure_model(model, rounds) for model in models},
    }


def table_of(record: dict[str, Any]) -> str:
    """Return a row for each system, compared with the same round's `LLM.generate`. The client's
    processor time is subtracted from the seconds."""
    rows = []
    for model, systems in record["runs"].items():
        answer = record["config"]["num_answer"][model]
        for number in map(str, record["config"]["numbers"][model]):
            base = [seconds for seconds, _, _ in systems["generate"][number]]
            for name, says in SYSTEMS.items():
                runs = systems[name][number]
                own = [seconds - client for seconds, _, client in runs]
                share = spread([b / o for b, o in zip(base, own, strict=True)])
                rows.append(
                    [
                        f"{model}, {number}",
                        says,
                        f"{int(number) * answer / statistics.median(own):,.0f}",
                        "1" if name == "generate" else share,
                        f"{1e3 * statistics.median(first for _, first, _ in runs):,.0f}",
                    ]
                )
    columns = ["output tok/s", "of `LLM.generate`", "first token (p50), ms"]
    return markdown_table(["model, requests at once", "by", *columns], rows)


def main() -> None:
    if "--system" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--system", choices=SYSTEMS)
        parser.add_argument("--model", choices=NUMBERS)
        arguments = parser.parse_args()
        freeze_gc_heap()
        in_process = "process" in arguments.system
        if arguments.system.startswith("http"):
            serve(arguments.model, in_process)
        else:
            alone = arguments.system == "generate"
            run_when_asked(arguments.model, None if alone else in_process)
    else:
        measure_and_tell(__doc__, RECORD, PAGE, "serve", measure, table_of, rounds=3)


if __name__ == "__main__":
    main()
