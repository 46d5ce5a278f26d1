"""Steps that are planned one ahead, and steps that are not. `features.py` runs these workloads.

`device`   a simulated device: the result of a step can be read a given number of milliseconds after
           the end of the step before, as if kernels were queued. The host's work is the real one.
           The possible gain shows: a step takes the longer of the two instead of their sum
`cpu`      the shipped model on this processor, whose cores host and device share
`stops`    the same, with answers that end at a stop token: work begun after it is lost
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from request import SamplingParams
from scheduler_interface import ModelRunner, RunnerInput, StepHandle, StepOutput
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.bench_work import greedy
from workshop.measure.bench.stub_model import stub_model
from workshop.measure.rounds import Case, ratios

Config = dict[str, Any]


def load_shipped(dtype: torch.dtype | str = "auto") -> LoadedModel:
    return load_model(SHIPPED_CHECKPOINT, dtype, torch.device("cpu"))


def make_engine(loaded: LoadedModel, num_seqs: int, overlaps: bool) -> LLMEngine:
    config = EngineConfig(
        device="cpu",
        max_num_seqs=num_seqs,
        prefix_cache=None,
        num_blocks=8 * num_seqs + 20,
        overlap_scheduling=overlaps,
    )
    return LLMEngine(config, loaded=loaded)


def prompt(i: int, length: int, vocab_size: int = 4010) -> list[int]:
    return [5 + (31 * i + 7 * j) % (vocab_size - 10) for j in range(length)]


def run_batch(
    engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams
) -> dict[str, float]:
    """Serve requests that arrive at the same time. Returns seconds, steps and output tokens of the
    steps after all prompts."""
    engine.reset_stats()
    engine.add_requests([(str(i), p, params) for i, p in enumerate(prompts)])
    while engine.stats().num_waiting:
        engine.step()
    middle, before = time.perf_counter(), engine.stats()
    while engine.has_unfinished_requests():
        engine.step()
    end, after = time.perf_counter(), engine.stats()
    engine.step()  # discards the step that is still in flight
    return {
        "seconds": round(end - middle, 6),
        "num_steps": after.num_steps - before.num_steps,
        "output_tokens": after.output_tokens - before.output_tokens,
    }


def step_ms(run: dict[str, float]) -> float:
    return 1e3 * run["seconds"] / run["num_steps"]


@dataclass(frozen=True, slots=True)
class QueuedStep:
    handle: StepHandle
    ends_at: float  # seconds of `time.perf_counter()`

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return self.handle.wait()


class QueuedDevice:
    """A `ModelRunner` whose steps take `seconds` each, one after another, without a processor."""

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        self.runner, self.seconds, self._is_free_at = runner, seconds, 0.0

    def execute(self, plan: RunnerInput) -> QueuedStep:
        handle = self.runner.execute(plan)
        if not plan.is_empty:
            self._is_free_at = max(self._is_free_at, time.perf_counter()) + self.seconds
        return QueuedStep(handle, self._is_free_at)


def overlap_cases(config: Config) -> Iterator[Case]:
    params = greedy(config["max_tokens"])
    for ms in config["device_ms"]:
        for n in config["num_running_device"]:
            name = f"{ms:g} ms, {n} running"
            yield from overlapped_and_not("device", name, stub_model(n), n, params, ms / 1e3)
    shipped = load_shipped()
    # Drawn tokens end an answer at a third of the vocabulary: after three tokens, on average.
    stop_ids = list(range(0, shipped.config.vocab_size, 3))
    max_tokens = config["max_tokens"]
    stops = SamplingParams(seed=1, temperature=2.0, max_tokens=max_tokens, stop_token_ids=stop_ids)
    for threads in config["num_threads"]:
        torch.set_num_threads(threads)
        suffix = f"running, {threads} thread{'s' * (threads > 1)}"
        for n in config["num_running_cpu"]:
            yield from overlapped_and_not("cpu", f"{n} {suffix}", shipped, n, params)
        n = config["num_running_stops"]
        yield from overlapped_and_not("stops", f"{n} {suffix}", shipped, n, stops)


def overlapped_and_not(
    part: str,
    name: str,
    loaded: LoadedModel,
    n: int,
    params: SamplingParams,
    device_s: float | None = None,
) -> Iterator[Case]:
    kinds = {"plain": False, "overlapped": True}
    engines = {kind: make_engine(loaded, n, overlaps) for kind, overlaps in kinds.items()}
    cores: list[Any] = [engine.core for engine in engines.values()]
    runners = [core.runner for core in cores]
    for core in cores:
        if device_s is not None:
            inner = getattr(core.runner, "runner", core.runner)  # without the thread
            core.runner = QueuedDevice(inner, device_s)

    def run(engine: LLMEngine) -> dict[str, float]:
        prompts = [prompt(i, 12 + i % 8, loaded.config.vocab_size) for i in range(n)]
        decode = run_batch(engine, prompts, params)
        return decode | {"discarded_tokens": engine.stats().discarded_tokens}

    settings = {kind: partial(run, engine) for kind, engine in engines.items()}
    yield Case(part, name, settings, round_factor=4 if part == "stops" else 1)
    for engine, core, runner in zip(engines.values(), cores, runners, strict=True):
        core.runner = runner
        engine.close()


def overlap_tables(record: Config) -> list[str]:
    def token_ms(run: dict[str, float]) -> float:
        return 1e3 * run["seconds"] / run["output_tokens"]

    tables = []
    for part, cases in record["runs"].items():
        number, unit, digits = (step_ms, "ms a step", 2)
        if part == "stops":
            number, unit, digits = (token_ms, "ms a token", 3)
        rows = []
        for name, found in cases.items():
            plain, overlapped = found["plain"], found["overlapped"]
            shown = [f"{statistics.median(map(number, r)):.{digits}f}" for r in (plain, overlapped)]
            if part == "stops":
                discarded, tokens = (
                    sum(run[field] for run in overlapped)
                    for field in ("discarded_tokens", "output_tokens")
                )
                shown.append(f"{discarded / tokens:.0%}")
            speedup = ratios(map(token_ms, plain), map(token_ms, overlapped))
            rows.append([f"{'device of ' * (part == 'device')}{name}", *shown, speedup])
        head = ["", f"plain, {unit}", f"overlapped, {unit}"]
        head += ["discarded tokens"] * (part == "stops")
        tables.append(markdown_table([*head, "times as fast (lowest-highest)"], rows))
    return tables
