"""The gain and the loss of planning a step ahead: both engines side by side.

    python -m workshop.bench.overlap_bench           measures (a minute), writes the record
    python -m workshop.bench.overlap_bench --tables  writes the tables of common/README.md

`device`   a simulated device: the result of a step can be read a given number of milliseconds after
           the end of the step before, as if kernels were queued. The host's work is the real one.
           The possible gain shows: a step takes the longer of the two instead of their sum
`cpu`      the shipped model on this processor, whose cores the two share
`stops`    the same, with answers that end at a stop token: work begun after it is lost
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from common.requests.gc_utils import freeze_gc_heap
from request import SamplingParams
from scheduler_interface import ModelRunner, RunnerInput, StepHandle, StepOutput
from workshop.measure.bench.bench_record import (
    describe_environment,
    markdown_table,
)
from workshop.measure.bench.side_by_side import (
    add_requests,
    measure_and_tell,
    ms_per_step,
    spread,
)
from workshop.measure.bench.stub_model import VOCAB_SIZE, stub_model

RECORD = Path(__file__).parent / "records" / "overlap.json"
PAGE = Path(__file__).parents[3] / "common" / "README.md"
DEVICE_MS = (2.0, 5.0)
NUM_RUNNING_DEVICE = (32, 256)
NUM_RUNNING_CPU = (1, 8, 32, 128)
NUM_THREADS = (1, 2)
KINDS = {"plain": False, "overlapped": True}


@dataclass(frozen=True, slots=True)
class QueuedStep:
    handle: StepHandle
    is_over_at: float  # seconds of `time.perf_counter()`

    def wait(self) -> StepOutput:
        time.sleep(max(0.0, self.is_over_at - time.perf_counter()))
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


def make_engine(loaded: LoadedModel, num_running: int, overlaps: bool) -> LLMEngine:
    config = EngineConfig(
        device="cpu",
        max_num_seqs=num_running,
        num_blocks=20 * num_running + 20,
        prefix_cache=None,
        overlap_scheduling=overlaps,
    )
    return LLMEngine(config, loaded=loaded)


def run(engine: LLMEngine, num_running: int, vocab_size: int, params: SamplingParams) -> dict:
    """Return the seconds of all decode steps of one batch, and their counts."""
    engine.reset_stats()
    add_requests(engine, num_running, vocab_size, params)
    while engine.stats().num_waiting:
        engine.step()
    start = time.perf_counter()
    before = engine.stats()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - start
    after = engine.stats()
    engine.step()  # discards the step that is still in flight
    return {
        "seconds": round(seconds, 6),
        "num_steps": after.num_steps - before.num_steps,
        "output_tokens": after.output_tokens - before.output_tokens,
        "discarded_tokens": engine.stats().discarded_tokens,
    }


def compare(
    loaded: LoadedModel,
    num_running: int,
    params: SamplingParams,
    rounds: int,
    device_seconds: float | None = None,
) -> dict[str, list[dict]]:
    """Run both engines in turn."""
    vocab_size = loaded.config.vocab_size
    engines = {name: make_engine(loaded, num_running, on) for name, on in KINDS.items()}
    for engine in engines.values():
        if device_seconds is not None:
            inner = getattr(engine.core.runner, "runner", engine.core.runner)  # without the thread
            engine.core.runner = QueuedDevice(inner, device_seconds)
        run(engine, num_running, vocab_size, params)
    found: dict[str, list[dict]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            found[name].append(run(engine, num_running, vocab_size, params))
    for engine in engines.values():
        engine.close()
    return found


def measure(rounds: int) -> dict:
    freeze_gc_heap()
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    threads_before = torch.get_num_threads()
    device: dict[str, dict] = {}
    for ms in DEVICE_MS:
        for n in NUM_RUNNING_DEVICE:
            found = compare(stub_model(n), n, greedy, rounds, ms / 1e3)
            device[f"{ms:g} ms, {n} running"] = found
    shipped = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    # Drawn tokens end an answer at a third of the vocabulary: after three tokens, on average.
    stop_ids = list(range(0, shipped.config.vocab_size, 3))
    short = SamplingParams(seed=1, temperature=2.0, max_tokens=48, stop_token_ids=stop_ids)
    cpu: dict[str, dict] = {}
    stops: dict[str, dict] = {}
    for threads in NUM_THREADS:
        torch.set_num_threads(threads)
        for n in NUM_RUNNING_CPU:
            name = f"{n} running, {threads} thread{'s' * (threads > 1)}"
            cpu[name] = compare(shipped, n, greedy, rounds)
        stops[f"32 running, {threads} thread{'s' * (threads > 1)}"] = compare(
            shipped, 32, short, 4 * rounds
        )
    torch.set_num_threads(threads_before)
    return {
        "command": "python -m workshop.bench.overlap_bench",
        "environment": describe_environment(),
        "config": {
            "clock": "time.perf_counter",
            "vocab_size_of_the_stub": VOCAB_SIZE,
            "dtype": str(shipped.model.embed_weight.dtype),
            "max_tokens": greedy.max_tokens,
            "rounds": rounds,
        },
        "device": device,
        "cpu": cpu,
        "stops": stops,
    }


# -- tables


def _ms_per_token(runs: list[dict]) -> float:
    return statistics.median(1e3 * run["seconds"] / run["output_tokens"] for run in runs)


def _ratio(found: dict[str, list[dict]]) -> str:
    """The ratio of overlapped to plain throughput, for the same tokens."""
    pairs = zip(found["plain"], found["overlapped"], strict=True)
    ratios = [
        (one["seconds"] / one["output_tokens"]) / (other["seconds"] / other["output_tokens"])
        for one, other in pairs
    ]
    return spread(ratios)


def table_of_all(record: dict) -> str:
    head = ["", "plain, ms a step", "overlapped, ms a step", "times as fast (lowest-highest)"]

    def row(name: str, found: dict) -> list[str]:
        steps = [f"{ms_per_step(found[kind]):.2f}" for kind in KINDS]
        return [name, *steps, _ratio(found)]

    device = [row(f"device of {name}", found) for name, found in record["device"].items()]
    cpu = [row(name, found) for name, found in record["cpu"].items()]
    stops = []
    for name, found in record["stops"].items():
        runs = found["overlapped"]
        share = sum(r["discarded_tokens"] for r in runs) / sum(r["output_tokens"] for r in runs)
        tokens = [f"{_ms_per_token(found[kind]):.3f}" for kind in KINDS]
        stops.append([name, *tokens, f"{share:.0%}", _ratio(found)])
    stops_head = ["", "plain, ms a token", "overlapped, ms a token", "discarded tokens", head[3]]
    tables = [(head, device), (head, cpu), (stops_head, stops)]
    return "\n\n".join(markdown_table(*table) for table in tables)


def main() -> None:
    measure_and_tell(__doc__, RECORD, PAGE, "overlap", measure, table_of_all)


if __name__ == "__main__":
    main()
