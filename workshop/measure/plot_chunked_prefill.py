"""Chapter 6's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    stall       eight users decode, one brings a long prompt: the time of each step, whole and in
                chunks
    sweep       the same for many chunk sizes: the waits of the others and of the new request,
                and the throughput of all
    batch_invariance    the cost of `batch_invariant=True`, and the requests whose tokens differ
                without it from those that they get alone
    calls       the packed products of one layer in calls of exactly one tile of rows

All are times and want a quiet machine; systems take turns. The last two use one thread and
processor time. The models of `batch_invariance` are the shipped checkpoint and one of Qwen3-0.6B's
shapes with random weights.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import nn

from batch_invariance import CALL_TILES
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.linear import Linear, reason_not_packed
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import load_tokenizer
from step_record import StepRecord
from workshop.book.palette import DECODE, INK, PAPER, PROMPT, shade
from workshop.measure.bench.bench_record import percentiles
from workshop.measure.bench.bench_work import greedy
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.lab_frame import Measurement, Part, plot_band, run_lab, table
from workshop.measure.plot_spec_decode import held_out_texts, pieces_of
from workshop.measure.rounds import median_of, ratios, run_in_turn, spread

CPU = torch.device("cpu")
NUM_SHORT, SHORT_PROMPT, SHORT_OUTPUT = 8, 64, 96
LONG_PROMPT, LONG_OUTPUT = 1800, 8
LONG_ARRIVES = 16  # steps after the first token of the others
SIZES: tuple[int | bool, ...] = (16, 32, 64, 128, 256, 512, 1024, False)
PREFILL_FIRST = {"scheduler": "prefill_first"}
SYSTEMS: dict[str, dict] = {
    "whole prompts": {"chunked_prefill": False},
    "chunks of 128": {"chunked_prefill": 128},
    "prefill first, whole": PREFILL_FIRST | {"chunked_prefill": False},
    "prefill first, chunks of 128": PREFILL_FIRST | {"chunked_prefill": 128},
    "prefill first, mixed chunks of 128": PREFILL_FIRST | {"chunked_prefill": 128, "mixing": True},
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
    chunks = [step for step in steps if step.num_scheduled_tokens.get("long", 0) > 1]
    p50, p99 = percentiles(gaps, [50, 99])
    return {
        "output_tokens_per_s": round(sum(map(len, times.values())) / seconds, 2),
        "gap_ms_p50": round(p50, 3),
        "gap_ms_p99": round(p99, 3),
        "gap_ms_max": round(max(gaps), 3),
        "long_ttft_ms": round(1e3 * (times["long"][0] - arrival), 3),
        "num_steps": len(steps),
        "num_chunks": len(chunks),
        "chunk_step_ms": [round(step.step_ms, 3) for step in chunks],
        "timeline": [
            [
                round(1e3 * (step.start_time - start), 2),
                round(step.step_ms, 2),
                len(step.num_scheduled_tokens) - ("long" in step.num_scheduled_tokens),
                step.num_scheduled_tokens.get("long", 0),
            ]
            for step in steps
        ],
    }


def measure_systems(systems: dict[str, dict], num_rounds: int, num_warm_ups: int = 1) -> dict:
    """Return the runs of each engine, given by its options. Only the last run keeps its
    timeline."""
    model = load_model(SHIPPED_CHECKPOINT, "auto", CPU)
    texts = held_out_texts(load_tokenizer(SHIPPED_CHECKPOINT), longer_than=LONG_PROMPT)
    short, long = pieces_of(texts, NUM_SHORT, SHORT_PROMPT), texts[0][:LONG_PROMPT]
    limits: dict = {"num_blocks": 400, "max_num_batched_tokens": 2048, "prefix_cache": None}
    engines = {
        name: LLMEngine(EngineConfig(**limits | options), loaded=model)
        for name, options in systems.items()
    }
    runs = run_in_turn(
        engines, lambda name: serve(engines[name], short, long), num_rounds, num_warm_ups
    )
    for own in runs.values():
        for run in own[:-1]:
            del run["timeline"]
    config = {"num_short": NUM_SHORT, "short_prompt": SHORT_PROMPT, "short_output": SHORT_OUTPUT}
    config |= {"long_prompt": LONG_PROMPT, "long_output": LONG_OUTPUT, "num_rounds": num_rounds}
    return {"config": config | {"num_threads": torch.get_num_threads()}, "runs": runs}


def measure_stall(measurement: Measurement) -> dict:
    return measure_systems(SYSTEMS, measurement.of(1, 7))


def measure_sweep(measurement: Measurement) -> dict:
    sizes = measurement.of(SIZES[3:5], SIZES)
    systems = {str(size or "whole"): {"chunked_prefill": size} for size in sizes}
    record = measure_systems(systems, measurement.of(1, 5))
    for own in record["runs"].values():
        del own[-1]["timeline"]
    return record


# -- the cost of batch invariance

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_ALONE = 8  # requests of a cell, also served alone
# name: dtypes, concurrent requests, tokens of a prompt (from, to), output tokens, repeats
CELLS = {
    "tiny": (("bfloat16", "float32"), (1, 32, 128), (16, 96), 32, 5),
    "Qwen3-0.6B shapes": (("bfloat16",), (1, 8), (32, 128), 12, 3),
}
LOADERS: dict[str, Callable[[torch.dtype], LoadedModel]] = {
    "tiny": lambda dtype: load_model(SHIPPED_CHECKPOINT, dtype, CPU),
    "Qwen3-0.6B shapes": partial(random_model, QWEN3_0_6B, 0),
}


def answers_of(
    engine: LLMEngine, prompts: list[list[int]], num_outputs: int
) -> list[Sequence[int]]:
    outputs = engine.generate_batch(prompts, greedy(num_outputs))
    return [output.outputs[0].token_ids for output in outputs.values()]


def measure_model(name: str, measurement: Measurement) -> list[dict]:
    """Serve all requests of a cell at the same time, and then the first ones alone."""
    dtypes, sizes, lengths, num_outputs, repeats = CELLS[name]
    if measurement.tiny:
        dtypes, sizes, num_outputs, repeats = dtypes[:1], (2,), 2, 1
    rng, cells = random.Random(0), []
    prompts = [
        [rng.randrange(2, 4000) for _ in range(rng.randint(*lengths))] for _ in range(max(sizes))
    ]
    config: dict = {"prefix_cache": None}  # so every repeat computes everything
    config["num_blocks"] = 1 + sum(-(-(len(p) + num_outputs) // 16) for p in prompts)
    for dtype in dtypes:
        engines = {  # two models, because one stays batch-invariant
            mode: LLMEngine(
                EngineConfig(batch_invariant=mode == "with", **config),
                loaded=LOADERS[name](DTYPES[dtype]),
            )
            for mode in ("without", "with")
        }
        for size in sizes:
            together: dict[str, list[Sequence[int]]] = {}

            def run(mode: str, size=size, engines=engines, together=together) -> float:
                start = time.process_time()
                together[mode] = answers_of(engines[mode], prompts[:size], num_outputs)
                return round(time.process_time() - start, 4)

            seconds = run_in_turn(engines, run, repeats)
            few = prompts[: min(size, NUM_ALONE)]
            other = {
                mode: sum(
                    answers_of(engine, [p], num_outputs) != [ids]
                    for p, ids in zip(few, together[mode])
                )
                for mode, engine in engines.items()
            }
            cell = {"model": name, "dtype": dtype, "num_requests": size, "seconds": seconds}
            cell |= {"num_outputs": num_outputs, "num_alone": len(few), "num_other_tokens": other}
            cells.append(cell)
    return cells


def measure_invariance(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    models = measurement.of(["tiny"], list(CELLS))
    cells = [cell for name in models for cell in measure_model(name, measurement)]
    config = {"threads": 1, "clock": "processor time", "seed": 0, "compile": "auto"}
    return {"config": config, "cells": cells}


LAYERS = {  # the matrices of one layer, [out, in]
    "shipped checkpoint": ((768, 256), (256, 256), (1536, 256), (256, 704)),
    "Qwen3-0.6B shapes": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
}
WEIGHED_ROWS = (1, 32, 512)


def measure_calls(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    repeats, cells = measurement.of(1, 15), []
    dtypes = [d for d in DTYPES if reason_not_packed(DTYPES[d], CPU) is None]
    for dtype, (name, shapes) in itertools.product(dtypes, LAYERS.items()):
        weights = [torch.randn(shape).to(DTYPES[dtype]) for shape in shapes]
        layer = [Linear(nn.Parameter(weight, requires_grad=False)) for weight in weights]
        for matrix in layer:
            matrix.pack()
        numbers = sorted({*CALL_TILES[torch.float32], *WEIGHED_ROWS})
        rows = {n: [torch.randn(n, s[1]).to(DTYPES[dtype]) for s in shapes] for n in numbers}

        def run(number: int, layer=layer, rows=rows, is_small=shapes[0][1] < 1000) -> float:
            start = time.process_time()
            for _ in range(20 if is_small else 2):
                for matrix, x in zip(layer, rows[number], strict=True):
                    matrix(x)
            return time.process_time() - start

        times = {str(n): found for n, found in run_in_turn(numbers, run, repeats).items()}
        cells.append({"model": name, "dtype": dtype, "seconds": times})
    return {"config": {"threads": 1, "clock": "processor time"}, "cells": cells}


# -- tables


def _middle(name: str, digits: int = 1) -> Callable[[list[dict]], str]:
    return lambda runs: f"{median_of(runs, name):,.{digits}f}"


def _spread(name: str) -> Callable[[list[dict]], str]:
    return lambda runs: spread([run[name] for run in runs], 1)


def times_as(values: Iterable[float], base: Iterable[float], unit: str = "") -> str:
    """Return the `ratios`, with the median in bold type."""
    middle, extremes = ratios(values, base).split(" ")
    return f"**{middle}{unit}** {extremes}"


def note_of_stall(record: dict) -> str:
    """Compare chunks with whole prompts, round by round."""
    pairs = list(zip(record["runs"]["whole prompts"], record["runs"]["chunks of 128"], strict=True))
    gaps, speed, wait = (
        statistics.median(b[name] / a[name] for a, b in pairs)
        for name in ("gap_ms_p99", "output_tokens_per_s", "long_ttft_ms")
    )
    return (
        "Chunks of 128 against whole prompts, median of the rounds: the p99 of the others' gaps is "
        f"**{1 / gaps:.1f} times** shorter, all together get {speed:.0%} of the throughput, and "
        f"the long prompt's first token takes {wait:.1f} times as long."
    )


RUN_COLUMNS = {
    "others' gap p50, ms": _middle("gap_ms_p50"),
    "p99 (the longest), ms": _spread("gap_ms_p99"),
    "long prompt's first token, ms": _middle("long_ttft_ms", 0),
    "output tok/s, all": _spread("output_tokens_per_s"),
    "steps": _middle("num_steps", 0),
}


def tables_of_stall(record: dict) -> dict[str, str]:
    title = f"a prompt of {record['config']['long_prompt']:,} tokens arrives"
    return {
        "stall": table(title, record["runs"], RUN_COLUMNS),
        "stall_note": note_of_stall(record),
    }


def tables_of_invariance(record: dict) -> dict[str, str]:
    def speed(cell: dict, mode: str) -> str:
        num_tokens = cell["num_requests"] * cell["num_outputs"]
        return f"{num_tokens / statistics.median(cell['seconds'][mode]):,.1f}"

    def other(cell: dict, mode: str) -> str:
        return f"{cell['num_other_tokens'][mode]} of {cell['num_alone']}"

    cells = {f"{c['model']}, {c['dtype']}, {c['num_requests']}": c for c in record["cells"]}
    columns = {
        "without, tok/s": lambda cell: speed(cell, "without"),
        "with, tok/s": lambda cell: speed(cell, "with"),
        "times as long": lambda c: times_as(c["seconds"]["with"], c["seconds"]["without"]),
        "other tokens than alone, without": lambda cell: other(cell, "without"),
        "with": lambda cell: other(cell, "with"),
    }
    return {"batch_invariance": table("model, dtype, requests at once", cells, columns)}


def tables_of_calls(record: dict) -> dict[str, str]:
    rows = {}
    for cell in record["cells"]:
        call = {int(n): statistics.median(times) for n, times in cell["seconds"].items()}
        for tile in sorted(CALL_TILES[torch.float32]):
            costs = [-(-n // tile) * call[tile] / call[n] for n in WEIGHED_ROWS]
            rows[f"{cell['model']}, {cell['dtype']}, {tile}"] = costs
    columns: dict[str, Callable[[list[float]], str]] = {
        f"{n} rows": lambda costs, i=i: f"{costs[i]:.2f}" for i, n in enumerate(WEIGHED_ROWS)
    }
    columns["geometric mean"] = lambda costs: f"**{statistics.geometric_mean(costs):.2f}**"
    return {"batch_invariance_calls": table("rows of a call", rows, columns)}


# -- figures


def draw_stall(record: dict) -> Figure:
    """Draw steps as bars at their time on the clock, with their durations."""
    systems = ("whole prompts", "chunks of 128")
    figure, axes = plt.subplots(
        2, 1, figsize=(9, 5.6), layout="constrained", sharex=True, sharey=True
    )
    for axis, system in zip(axes, systems):
        timeline = record["runs"][system][-1]["timeline"]
        for has_chunk, color, label in (
            (False, DECODE, "without the long prompt"),
            (True, PROMPT, "with a chunk of the long prompt"),
        ):
            steps = [(t, ms) for t, ms, _, chunk in timeline if (chunk > 1) == has_chunk]
            starts, ms = zip(*steps)
            look = {"color": color, "edgecolor": PAPER, "linewidth": 0.2, "label": label}
            axis.bar(starts, ms, ms, align="edge", **look)
        axis.set(title=system)
        axis.grid()
    figure.supylabel("a step takes, ms", fontsize=14)
    axes[0].legend()
    axes[1].set_xlabel("ms since the first arrival")
    return figure


def draw_sweep(record: dict) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained")
    names = list(record["runs"])
    shown = {
        "gap_ms_p99": ("the others:\nbetween tokens, p99, ms", shade(DECODE, 0.85)),
        "long_ttft_ms": ("the long prompt:\nfirst token, ms", PROMPT),
        "output_tokens_per_s": ("all together:\noutput tokens a second", INK),
    }
    for axis, (name, (label, color)) in zip(axes, shown.items()):
        values = [[run[name] for run in runs] for runs in record["runs"].values()]
        plot_band(axis, range(len(names)), values, color)
        axis.lines[0].set_linewidth(2)
        axis.set(title=label, ylim=0)
        axis.set_xticks(range(len(names)), names, rotation=60)
        axis.grid()
    figure.supxlabel("chunk size, tokens", fontsize=14)
    return figure


CLOCK = "time.perf_counter and time.monotonic"
PARTS = {
    "stall": Part(measure_stall, {"stall": draw_stall}, tables_of_stall, CLOCK),
    "sweep": Part(measure_sweep, {"sweep": draw_sweep}, clock=CLOCK),
    "batch_invariance": Part(measure_invariance, tables=tables_of_invariance),
    "calls": Part(measure_calls, tables=tables_of_calls),
}


if __name__ == "__main__":
    run_lab(__file__, "06_chunked_prefill", PARTS)
