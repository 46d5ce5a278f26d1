"""Chapter 6's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    stall       eight users decode, one brings a long prompt: the time of each step, whole and in
                chunks
    sweep       the same for many chunk sizes: the waits of the others and of the new request,
                and the throughput of all

All are times and want a quiet machine; systems take turns.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import load_model
from common.requests.tokenizer import load_tokenizer
from step_record import StepRecord
from workshop.book.palette import DECODE, INK, PROMPT, shade
from workshop.measure.bench.bench_record import percentiles, rounded
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, plot_band, run_lab
from workshop.measure.plot_spec_decode import held_out_texts, pieces_of
from workshop.measure.rounds import run_in_turn

CPU = torch.device("cpu")
NUM_SHORT, SHORT_PROMPT, SHORT_OUTPUT = 8, 64, 96
LONG_PROMPT, LONG_OUTPUT = 1800, 8
LONG_ARRIVES = 16  # steps after the first token of the others
SIZES: tuple[int | bool, ...] = (16, 32, 64, 128, 256, 512, 1024, False)
WHOLE, CHUNKS = {"chunked_prefill": False}, {"chunked_prefill": 128}
PREFILL_FIRST = {"scheduler": "prefill_first"}
SYSTEMS: dict[str, dict] = {
    "whole prompts": WHOLE,
    "chunks of 128": CHUNKS,
    "prefill first, whole": PREFILL_FIRST | WHOLE,
    "prefill first, chunks of 128": PREFILL_FIRST | CHUNKS,
    "prefill first, mixed chunks of 128": PREFILL_FIRST | CHUNKS | {"mixing": True},
}


def serve(engine: LLMEngine, short: list[list[int]], long: list[int]) -> dict:
    """Serve all requests to the end. Times are in milliseconds."""
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    for i, prompt in enumerate(short):
        engine.add_request(f"short-{i}", prompt, greedy(SHORT_OUTPUT))
    while len(steps) < LONG_ARRIVES:
        engine.step()
    arrival = time.monotonic()
    engine.add_request("long", long, greedy(LONG_OUTPUT))
    while engine.has_unfinished_requests():
        engine.step()
    engine.on_step = None
    return describe(steps, arrival)


def describe(steps: list[StepRecord], arrival: float) -> dict:
    start = steps[0].start_time
    times: dict[str, list[float]] = {}
    for step in steps:
        end = step.start_time + step.step_ms / 1e3
        for name, tokens in step.new_token_ids.items():
            times.setdefault(name, []).extend([end] * len(tokens))
    pairs = [pair for name in times if name != "long" for pair in pairwise(times[name])]
    gaps = [1e3 * (b - a) for a, b in pairs if b > arrival]
    seconds = max(map(max, times.values())) - start
    p50, p99 = percentiles(gaps, [50, 99])
    found = {
        "output_tokens_per_s": sum(map(len, times.values())) / seconds,
        "gap_ms_p50": p50,
        "gap_ms_p99": p99,
        "long_ttft_ms": 1e3 * (times["long"][0] - arrival),
        "num_steps": len(steps),
    }
    return rounded(found, 3)


def measure_systems(systems: dict[str, dict], num_rounds: int) -> dict:
    """Return the runs of each engine, given by its options."""
    model = load_model(SHIPPED_CHECKPOINT, "auto", CPU)
    texts = held_out_texts(load_tokenizer(SHIPPED_CHECKPOINT), longer_than=LONG_PROMPT)
    short, long = pieces_of(texts, NUM_SHORT, SHORT_PROMPT), texts[0][:LONG_PROMPT]
    limits: dict = {"num_blocks": 400, "max_num_batched_tokens": 2048, "prefix_cache": None}
    engines = {
        name: LLMEngine(EngineConfig(**limits | options), loaded=model)
        for name, options in systems.items()
    }
    runs = run_in_turn(engines, lambda name: serve(engines[name], short, long), num_rounds)
    config = {"long_prompt": LONG_PROMPT, "num_threads": torch.get_num_threads()}
    return {"config": config, "runs": runs}


def measure_stall(measurement: Measurement) -> dict:
    return measure_systems(SYSTEMS, measurement.of(1, 7))


def measure_sweep(measurement: Measurement) -> dict:
    sizes = measurement.of(SIZES[3:5], SIZES)
    systems = {str(size or "whole"): {"chunked_prefill": size} for size in sizes}
    return measure_systems(systems, measurement.of(1, 5))


# -- tables


def tables_of_stall(record: dict) -> dict[str, str]:
    """Compare chunks with whole prompts, round by round."""
    pairs = list(zip(record["runs"]["whole prompts"], record["runs"]["chunks of 128"], strict=True))
    gaps, speed, wait = (
        statistics.median(b[name] / a[name] for a, b in pairs)
        for name in ("gap_ms_p99", "output_tokens_per_s", "long_ttft_ms")
    )
    note = (
        "Chunks of 128 against whole prompts, median of the rounds: the p99 of the others' gaps is "
        f"**{1 / gaps:.1f} times** shorter, all together get {speed:.0%} of the throughput, and "
        f"the long prompt's first token takes {wait:.1f} times as long."
    )
    return {"stall_note": note}


# -- figures


def draw_sweep(record: dict) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained")
    names = list(record["runs"])
    shown = {
        "gap_ms_p99": ("the others:\nbetween tokens, p99, ms", shade(DECODE, 0.85)),
        "long_ttft_ms": ("the long prompt:\nfirst token, ms", PROMPT),
        "output_tokens_per_s": ("all together:\noutput tokens a second", INK),
    }
    for axis, (name, (label, color)) in zip(axes, shown.items()):
        values = ([run[name] for run in runs] for runs in record["runs"].values())
        plot_band(axis, range(len(names)), values, color)
        axis.lines[0].set_linewidth(2)
        axis.set_title(label, loc="left")
        axis.set(ylim=0)
        axis.set_xticks(range(len(names)), names, rotation=60)
        axis.grid()
    figure.supxlabel("chunk size, tokens", fontsize=14)
    return figure


CLOCK = "time.perf_counter and time.monotonic"
PARTS = {
    "stall": Part(measure_stall, tables=tables_of_stall, clock=CLOCK),
    "sweep": Part(measure_sweep, {"sweep": draw_sweep}, clock=CLOCK),
}


if __name__ == "__main__":
    run_lab(__file__, "06_chunked_prefill", PARTS)
