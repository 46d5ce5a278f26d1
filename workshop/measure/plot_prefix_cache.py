"""The figures and tables of chapter 3, drawn from its records; the parts take a minute or two each.

    --record ops engine loss store
    --record trace --trace FILE      replay a trace in Mooncake's format (see replay_trace.py)

`plot_prefix_cache_ops.py`, `..._workload.py` and `..._engine.py` define what is timed, and
`..._tables.py` makes the tables. The command line is described in `workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.book.palette import BASELINE, CACHED, INK, label_line, shade, tint
from workshop.measure.bench.bench_record import percentiles
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.plot_prefix_cache_tables import (
    NAMES,
    hit_rate,
    in_order,
    tables_of_engine,
    tables_of_loss,
    tables_of_ops,
    tables_of_store,
    tables_of_trace,
)
from workshop.measure.prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest, read_trace
from workshop.measure.replay_trace import CACHES, make_cache, num_distinct_blocks, replay

CAPACITIES = (100, 300, 1000, 2000, 3000, 5000, 7000, 10000, 15000, 20000, 30000)

# -- records. Measuring modules are imported when needed: drawing needs no engine.


def measure_store(measurement: Measurement) -> dict:
    from workshop.measure.measure_mooncake import measure

    config = {"kv_nbytes": 1_000_000, "clock": "time.perf_counter"}
    return {"config": config, "ms": measure(config["kv_nbytes"], 3 if measurement.tiny else 50)}


def measure_ops(measurement: Measurement) -> dict:
    from workshop.measure.plot_prefix_cache_ops import measure_operations
    from workshop.measure.plot_prefix_cache_workload import measure_workload

    tiny = measurement.tiny
    operations = measure_operations(5 if tiny else 50, tiny=tiny)
    return {**operations, "workload": measure_workload(3 if tiny else 5)}


def measure_engine(measurement: Measurement) -> dict:
    from workshop.measure import plot_prefix_cache_engine as engine

    return engine.measure_engine(1 if measurement.tiny else 4, tiny=measurement.tiny)


def measure_loss(measurement: Measurement) -> dict:
    from workshop.measure import plot_prefix_cache_engine as engine

    return engine.measure_engine_loss(4 if measurement.tiny else 80)


def measure_trace(measurement: Measurement) -> dict:
    path = measurement.options.trace
    if path is None:
        raise ValueError("--record trace needs --trace FILE")
    trace = read_trace(path)[: 200 if measurement.tiny else None]
    limit = num_distinct_blocks(trace)
    capacities = [*(c for c in CAPACITIES if c < limit), limit]
    full = [_only_full_blocks(request) for request in trace]
    return {
        "command": f"python -m workshop.plot_prefix_cache --record trace --trace {path.name}",
        "config": {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "block_size": TRACE_BLOCK_SIZE,
            "num_requests": len(trace),
            "num_distinct_blocks": limit,
        },
        "full_blocks_only": asdict(replay(full, make_cache("hash", limit))),
        **{
            name: [asdict(replay(trace, make_cache(name, capacity))) for capacity in capacities]
            for name in CACHES
        },
    }


def _only_full_blocks(request: TraceRequest) -> TraceRequest:
    num_full = request.input_length // TRACE_BLOCK_SIZE
    return TraceRequest(
        request.timestamp_ms,
        request.input_length,
        request.output_length,
        request.hash_ids[:num_full],
    )


# -- figures

COLORS = {"off": BASELINE, "hash": CACHED, "radix": shade(CACHED, 0.45)}
MARKERS = ["o", "s", "^", "D"]


def plot_spread(axis: Axes, times: dict[str, list[float]], **style: Any) -> list[float]:
    """Draw medians as a line over an area from the 10th to the 90th percentile. Returns the
    medians."""
    xs = [int(x) for x in times]
    middle = [statistics.median(values) for values in times.values()]
    axis.plot(xs, middle, **style)
    low, high = zip(*(percentiles(values, [10, 90]) for values in times.values()), strict=True)
    axis.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)
    return middle


def draw_operations(record: dict) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), sharey=True, layout="constrained")
    for axis, cache in zip(axes, CACHES):
        sizes = record["sizes"][cache]
        for index, operation in enumerate(next(iter(sizes.values()))):
            times = {size: runs[operation] for size, runs in sizes.items()}
            style = {"marker": MARKERS[index], "color": tint(COLORS[cache], 1 - 0.2 * index)}
            plot_spread(axis, times, **style, label=operation)
        axis.set(title=NAMES[cache], xlabel="cached blocks", xscale="log", ylim=0)
        axis.grid()
    axes[1].legend(loc="upper left", fontsize=12)
    axes[0].set_ylabel("µs for a prompt of 4,096 tokens")
    largest, smallest = (pick(map(int, sizes)) for pick in (max, min))
    growth = max(
        statistics.median(runs[str(largest)][operation])
        / statistics.median(runs[str(smallest)][operation])
        for runs in record["sizes"].values()
        for operation in runs[str(smallest)]
    )
    figure.suptitle(
        f"{largest // smallest:,} times the blocks: at most {growth:.1f} times the cost"
    )
    return figure


def draw_depth(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for cache, marker in zip(CACHES, MARKERS):
        times = record["depths"][cache]
        middle = plot_spread(axis, times, color=COLORS[cache], marker=marker)
        place = int(next(iter(times)))
        label_line(axis, place, middle[0], NAMES[cache], COLORS[cache], offset=(0, 14))
    axis.set(
        title="A radix match costs its nodes, a hash chain its blocks",
        xlabel="nodes on the path of a 4,096-token prompt",
        ylabel="µs to match it",
        xscale="log",
        ylim=0,
    )
    ticks = [int(depth) for depth in record["depths"]["radix"]]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid()
    return figure


def draw_workload(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    for kind, run in record["workload"]["kinds"].items():
        cache, block_size = kind.split(", ")
        each = [statistics.median(times) for times in zip(*run["us"], strict=True)]
        total = [sum(each[: n + 1]) / 1e3 for n in range(len(each))]
        label = f"{NAMES[cache]}, blocks of {block_size}:\n{run['hit_rate']:.1%} hit"
        dashes = "--" if block_size == "1" else "-"
        axis.plot(range(1, len(each) + 1), total, dashes, color=COLORS[cache], linewidth=2)
        label_line(axis, len(each), total[-1], label, COLORS[cache], fontsize=12)
    axis.set(
        title="One workload: what is hit, and what that costs",
        xlabel="requests served",
        ylabel="time in the cache so far, ms",
        ylim=0,
    )
    axis.set_xlim(0, 1.42 * len(each))
    axis.grid()
    return figure


def draw_hit_rate(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for cache, marker, dashes in zip(CACHES, ("o", "x"), ("-", ":")):
        capacities = [run["capacity"] for run in record[cache]]
        rates = [100 * hit_rate(run) for run in record[cache]]
        style: dict[str, Any] = {
            "color": COLORS[cache],
            "marker": marker,
            "label": NAMES[cache],
        }
        axis.plot(capacities, rates, dashes, **style)
    limit = 100 * hit_rate(record["hash"][-1])
    axis.axhline(limit, color=BASELINE)
    label = f"nothing is evicted: {limit:.1f} %"
    label_line(axis, capacities[0], limit, label, INK, offset=(0, 10))
    axis.set(
        title=f"{record['config']['num_requests']:,} requests of Mooncake's synthetic trace",
        xlabel=f"capacity, blocks of {TRACE_BLOCK_SIZE} tokens",
        ylabel="prompt tokens found, %",
        xscale="log",
        ylim=(0, 1.15 * limit),
    )
    axis.grid()
    axis.legend(loc="lower right")
    return figure


def draw_shared(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    places = {"off": (0, -16), "hash": (0, -26), "radix": (0, -44)}
    for (name, times), marker in zip(record["shared_ms"].items(), MARKERS):
        middle = plot_spread(axis, times, color=COLORS[name], marker=marker)
        index = 4 if name == "off" else 1  # where nothing else is drawn
        x = [int(length) for length in times][index % len(times)]
        place = {"ha": "left" if name == "off" else "right", "offset": places[name]}
        label_line(axis, x, middle[index % len(times)], NAMES[name], COLORS[name], **place)
    length = record["config"]["prompt_len"]
    axis.set(
        title=f"Prompts of {length:,} tokens: only what is new costs time",
        xlabel="shared prefix, tokens",
        ylabel="time to first token, ms",
        ylim=0,
    )
    axis.grid()
    return figure


def draw_families(record: dict) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    families = in_order(record["families"])
    for shift, name in enumerate(COLORS):
        places = [place + 0.27 * (shift - 1) for place in range(len(families))]
        style = {"width": 0.25, "color": COLORS[name], "label": NAMES[name]}
        computed = [100 * f["num_computed"][name] / f["num_prompt"] for f in families.values()]
        left.bar(places, computed, **style)
        right.bar(
            places, [statistics.median(f["ttft_ms"][name]) for f in families.values()], **style
        )
    left.set(title="Prompt tokens computed", ylabel="% of prompt tokens")
    right.set(title="Time to first token, median", ylabel="ms")
    for axis in (left, right):
        axis.set_xticks(range(len(families)), [name.replace(" ", "\n") for name in families])
        axis.set_xlabel("family of requests")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(COLORS))
    return figure


PARTS = {
    "ops": Part(
        measure_ops,
        {"operations": draw_operations, "depth": draw_depth, "workload": draw_workload},
        tables_of_ops,
    ),
    "trace": Part(measure_trace, {"hit_rate": draw_hit_rate}, tables_of_trace),
    "engine": Part(
        measure_engine, {"shared_prefix": draw_shared, "families": draw_families}, tables_of_engine
    ),
    "loss": Part(measure_loss, tables=tables_of_loss),
    "store": Part(measure_store, tables=tables_of_store),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="for --record trace: JSONL, see replay_trace.py")


if __name__ == "__main__":
    run_lab(__file__, "03_prefix_cache", PARTS, add_options=add_options)
