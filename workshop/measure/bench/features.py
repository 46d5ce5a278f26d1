"""The cost of a feature: the same work in several settings, in turn, and a table of it.

python -m workshop.bench.features NAME ...        minutes each
python -m workshop.bench.features NAME --tiny     almost no work, to see that it runs

overlap       steps are planned one ahead, or are not: on a simulated device, whose steps take
              time but no processor, and with the shipped model on this processor, whose cores
              host and device share; with answers that end at a stop token, work begun is lost
serve         the same requests, all at the same time, by `LLM`'s own call, by `AsyncLLM` and
              over HTTP. The client's processor time is subtracted, because the server loses it
hostile       one client's heaviest legal bodies, while others wait (`feature_hostile.py`)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.gc_utils import freeze_gc_heap
from common.serve.async_llm import AsyncLLM
from common.serve.fleet.testing.programs import start_server
from request import SamplingParams
from scheduler_interface import RunnerInput, StepHandle, StepOutput
from workshop.measure.bench import feature_hostile
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.bench_work import greedy
from workshop.measure.bench.feature_hostile import COMPLETIONS, open_request, prompt
from workshop.measure.bench.stub_model import stub_model
from workshop.measure.rounds import ratios, run_in_turn


@dataclass(frozen=True, slots=True)
class QueuedStep:
    handle: StepHandle
    ends_at: float  # seconds of `time.perf_counter()`

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return self.handle.wait()


class QueuedDevice:
    """A `ModelRunner` whose steps take `seconds` each, one after another, without a processor."""

    def __init__(self, runner: Any, seconds: float) -> None:
        self.outer = runner
        self.runner = getattr(runner, "runner", runner)  # without the thread
        self.seconds, self._is_free_at = seconds, 0.0

    def execute(self, plan: RunnerInput) -> QueuedStep:
        handle = self.runner.execute(plan)
        if not plan.is_empty:
            self._is_free_at = max(self._is_free_at, time.perf_counter()) + self.seconds
        return QueuedStep(handle, self._is_free_at)


def decode_speed(engine: LLMEngine, number: int, params: SamplingParams) -> float:
    """Serve requests that arrive together. Returns output tokens a second after all prompts."""
    engine.reset_stats()
    engine.add_requests((str(i), prompt(i, 12 + i % 8, 60), params) for i in range(number))
    while engine.stats().num_waiting:
        engine.step()
    start, before = time.perf_counter(), engine.stats().output_tokens
    while engine.has_unfinished_requests():
        engine.step()
    speed = (engine.stats().output_tokens - before) / (time.perf_counter() - start)
    engine.step()  # discards the step that is still in flight
    return speed


def overlap(tiny: bool) -> str:
    shipped = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    params = greedy(3 if tiny else 48)
    # Drawn tokens end an answer at a third of the vocabulary: after three tokens, on average.
    stop_ids = list(range(0, shipped.config.vocab_size, 3))
    stops = SamplingParams(seed=1, temperature=2.0, max_tokens=48, stop_token_ids=stop_ids)
    cases = [(stub_model(n), n, ms, params) for ms in (2, 5) for n in (32, 256)]
    cases += [(shipped, n, 0, params) for n in (1, 8, 32, 128)] + [(shipped, 32, 0, stops)]
    rows = []
    for loaded, number, device_ms, params in cases[::4] if tiny else cases:
        work = f"device of {device_ms} ms" if device_ms else "shipped model"
        work += ", with stops" * (params is stops)
        runs = plain_and_overlapped(loaded, 2 if tiny else number, device_ms, params, tiny)
        speeds = [f"{median(run):,.0f}" for run in runs]
        rows.append([f"{work}, {number} running", *speeds, ratios(*reversed(runs))])
    head = ["work", "plain, tok/s", "overlapped, tok/s", "times as fast (lowest-highest)"]
    return markdown_table(head, rows)


def plain_and_overlapped(
    loaded: LoadedModel, number: int, device_ms: int, params: SamplingParams, tiny: bool
) -> list[list[float]]:
    engines: dict[str, LLMEngine] = {}
    for kind in ("plain", "overlapped"):
        config = EngineConfig(
            device="cpu",
            max_num_seqs=number,
            prefix_cache=None,
            num_blocks=8 * number + 20,
            overlap_scheduling=kind == "overlapped",
        )
        engine = engines[kind] = LLMEngine(config, loaded=loaded)
        if device_ms:
            part: Any = engine.core
            part.runner = QueuedDevice(part.runner, device_ms / 1e3)
    speed = partial(decode_speed, number=number, params=params)
    runs = run_in_turn(engines, lambda kind: speed(engines[kind]), 1 if tiny else 5)
    for engine in engines.values():
        core: Any = engine.core
        core.runner = getattr(core.runner, "outer", core.runner)
        engine.close()
    return list(runs.values())


async def seconds_over_http(port: int, number: int, num_tokens: int) -> float:
    """Run a client that does as little as possible. Its processor time does not count."""
    start, cpu_start = time.monotonic(), time.process_time()
    params = {"stream": True, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}

    async def read(prompt: list[int]) -> None:
        body = json.dumps({"prompt": prompt, **params}).encode()
        reader, writer = await open_request(port, COMPLETIONS, body)
        data = await reader.read()
        writer.close()
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data[-300:]

    await asyncio.gather(*(read(prompt(i, 16)) for i in range(number)))
    return time.monotonic() - start - (time.process_time() - cpu_start)


async def seconds_of_async(llm: AsyncLLM, number: int, params: SamplingParams) -> float:
    start = time.monotonic()

    async def read(prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, params):
            pass

    await asyncio.gather(*(read(prompt(i, 16)) for i in range(number)))
    return time.monotonic() - start


def serve(tiny: bool) -> str:
    limits: dict[str, Any] = {
        "max_num_seqs": 256,
        "num_blocks": 2000,
        "num_threads": torch.get_num_threads(),
    }
    flags = [word for name, n in limits.items() for word in (f"--{name.replace('_', '-')}", f"{n}")]
    engine, llm = LLMEngine(EngineConfig(**limits)), AsyncLLM(**limits)
    loop, num_tokens, rows = asyncio.new_event_loop(), 2 if tiny else 64, []
    params = greedy(num_tokens)

    def generate(number: int) -> float:
        start = time.monotonic()
        engine.generate_batch([prompt(i, 16) for i in range(number)], params)
        return time.monotonic() - start

    with start_server(*flags) as server:
        server.wait_until_ready()
        port = int(server.url.rpartition(":")[2])
        systems = {
            "`LLM.generate`": generate,
            "`AsyncLLM`": lambda n: loop.run_until_complete(seconds_of_async(llm, n, params)),
            "HTTP": lambda n: loop.run_until_complete(seconds_over_http(port, n, num_tokens)),
        }
        for number in (2,) if tiny else (1, 32, 256):
            runs = run_in_turn(systems, lambda name, n=number: systems[name](n), 1 if tiny else 3)
            for name, seconds in runs.items():
                speed = f"{number * num_tokens / median(seconds):,.0f}"
                rows.append([f"{number}", name, speed, ratios(runs["`LLM.generate`"], seconds)])
    llm.close()
    return markdown_table(["requests at once", "by", "output tok/s", "of `LLM.generate`"], rows)


FEATURES = {"hostile": feature_hostile.hostile, "overlap": overlap, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", choices=FEATURES)
    parser.add_argument("--tiny", action="store_true", help="almost no work")
    args = parser.parse_args(arguments)
    freeze_gc_heap()
    torch.set_num_threads(torch.get_num_threads())  # chosen, so the engine keeps it
    for name in args.names:
        print(FEATURES[name](args.tiny), flush=True)


if __name__ == "__main__":
    main()
