"""The figures and tables of chapter 1, drawn from its record. Measuring takes some minutes.

`plot_batching_workloads.py` defines what is counted and timed, and how. The command line is
described in `workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.book.palette import (
    BASELINE,
    DECODE,
    INK,
    PAPER,
    PROMPT,
    WASTE,
    add_key,
    label_line,
)
from workshop.measure import plot_batching_workloads as workloads
from workshop.measure.bench.bench_record import ROOT, markdown_table, read_record
from workshop.measure.lab_frame import Measurement, Part, run_lab

TOKENIZER = ROOT / "common" / "checkpoints" / "tiny" / "tokenizer.json"
QWEN3_0_6B_BYTES = 2 * 28 * 8 * 128 * 2  # KV of one token: K and V, layers, heads, head_dim, bf16


def measure(measurement: Measurement) -> dict:
    options = measurement.options
    repeats = 1 if measurement.tiny else options.repeats
    lengths = workloads.stdlib_lengths(options.tokenizer)
    if measurement.tiny:
        lengths = [(min(p, 8), min(o, 8)) for p, o in lengths]
    config = {
        name.lower(): value
        for name, value in vars(workloads).items()
        if name.isupper() and isinstance(value, int | list)
    }
    return {
        "config": config | {"repeats": repeats, "threads": 1},
        "lengths": lengths,
        "counted": workloads.count(lengths),
        "seconds": workloads.measure_time(lengths, repeats),
    }


# -- figures

COLORS = {"P": PROMPT, "u": DECODE, ".": WASTE}


def draw_timeline(record: dict) -> Figure:
    timeline = record["counted"]["timeline"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    num_tokens = sum(output for _, output in timeline["lengths"])
    for axis, name in zip(axes, ("static", "continuous")):
        slots = timeline[name]
        for slot, row in enumerate(slots):
            draw_row(axis, slot, row)
        num_steps = len(slots[0])
        used = num_tokens / (len(slots) * num_steps)
        axis.set_title(f"{name} batching: {num_steps} steps, {used:.0%} of slot-steps used")
        axis.set(ylabel="slot", ylim=(len(slots) - 0.6, -0.8), yticks=range(len(slots)))
        axis.axvline(num_steps, color=INK, linewidth=1)
    axes[0].set_xlim(0, max(len(timeline[name][0]) for name in ("static", "continuous")))
    axes[1].set_xlabel("step")
    wasted = {"computed, not used": WASTE, "empty": PAPER}
    add_key(figure, {"prompt": PROMPT, "decode": DECODE, **wasted})
    return figure


def draw_row(axis: Axes, slot: int, row: list[list[str] | None]) -> None:
    """Draw a bar for each run of steps with one use, the request's number at its first step."""
    start = 0
    for step in range(1, len(row) + 1):
        if step < len(row) and row[step] == row[start]:
            continue
        mark = row[start]
        if mark is not None:
            req_id, use = mark
            axis.barh(slot, step - start, 0.6, left=start, color=COLORS[use], edgecolor=PAPER)
            if use == "P":
                above = (start + 0.5, slot - 0.3)
                axis.annotate(req_id[1:], above, color=INK, ha="center", va="bottom", size=10)
        start = step


def draw_spread(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    spreads = record["config"]["spreads"]
    for name, color in (("continuous", INK), ("static", BASELINE)):
        runs = [[100 * run[name]["utilisation"] for run in row] for row in spread_runs(record)]
        middle = [statistics.median(row) for row in runs]
        axis.plot(spreads, middle, "o-", color=color)
        axis.fill_between(spreads, [*map(min, runs)], [*map(max, runs)], color=color, alpha=0.25)
        label_line(axis, spreads[-1], middle[-1], name, color, offset=(10, 0))
    axis.set_xticks(spreads, [f"±{spread:.0%}" for spread in spreads])
    axis.set(xlabel="spread of output lengths about their mean", ylabel="% of slot-steps used")
    axis.set(xlim=(-0.03, 1.28), ylim=(0, 104), title="Equal lengths leave nothing to gain")
    return figure


def draw_copies(record: dict) -> Figure:
    copies = record["counted"]["copies"]
    figure, axis = plt.subplots(figsize=(7.5, 4), layout="constrained")
    steps = range(1, len(copies["copied"]) + 1)
    unit = copies["new"][-1]  # bytes that one decode step has to write
    for name, what, color in (("copied", "written", WASTE), ("new", "new", DECODE)):
        ratios = [num_bytes / unit for num_bytes in copies[name]]
        axis.plot(steps, ratios, color=color, linewidth=2.5)
        label_line(axis, steps[-1], ratios[-1], what, color)
    axis.set(xlabel="step", ylabel="KV, one step's new KV = 1", yscale="log")
    axis.set_xlim(right=steps[-1] * 1.16)
    axis.set_title("The padded batch writes the whole cache to add one token")
    return figure


def spread_runs(record: dict) -> list[list[dict]]:
    return record["counted"]["spread"]


# -- tables


def tables(record: dict) -> dict[str, str]:
    return {
        "sharing": _sharing(
            read_record(ROOT / "workshop/measure/bench/records/bench_qwen3-0.6b.json")
        ),
        "headline": _headline(record),
        "real": _real_table(record),
        "spread": _spread_table(record),
        "cases": _cases_table(record),
        "floor": _floor_table(record),
        "copies": _copies(record),
        "time": _time_table(record),
    }


def _sharing(bench: dict) -> str:
    """The cost of a pass by its number of rows: the matrices of a whole model, from `bench`."""
    roofline = bench["roofline"]
    times = {int(n): statistics.median(ms) for n, ms in roofline["linear_ms"].items()}
    rows = [
        [f"{num} row" + "s" * (num > 1), f"{ms:.0f}", f"{ms / num:.1f}"]
        for num, ms in times.items()
        if num in (1, 8, 32)
    ]
    gigabytes, cpu = roofline["weight_bytes"] / 1e9, bench["environment"]["cpu"]
    return (
        f"Here are all matrices of Qwen3-0.6B in bfloat16, {gigabytes:.1f} GB, on two cores of an "
        f"{cpu} (`workshop/measure/bench/records/bench_qwen3-0.6b.json`, commit "
        f"`{bench['environment']['commit'][:10]}`):\n\n"
        + markdown_table(["a pass of", "milliseconds", "milliseconds a row"], rows)
    )


def _headline(record: dict) -> str:
    run = record["counted"]["real"][str(record["config"]["num_slots"])]
    static, continuous = run["static"], run["continuous"]
    lengths = record["lengths"]
    outputs = [output for _, output in lengths]
    num_slots = record["config"]["num_slots"]
    return (
        f"The workload is {len(lengths)} functions of Python's standard library: the prompt is the "
        f"code before a function's body, the output is its body, {min(outputs)} to {max(outputs)} "
        f"tokens (longer ones are cut) and {statistics.mean(outputs):.0f} on average. On "
        f"{num_slots} slots a static batch uses **{static['utilisation']:.0%} of its slot-steps** "
        f"and takes {static['steps']:,} steps. If you schedule the same requests again at every "
        f"iteration, they use {continuous['utilisation']:.0%} and take {continuous['steps']:,}."
    )


def _real_table(record: dict) -> str:
    rows = []
    for size, run in record["counted"]["real"].items():
        pair = (run["static"], run["continuous"])
        rows.append(
            [
                size,
                *(f"{way['steps']:,}" for way in pair),
                *(f"{way['utilisation']:.0%}" for way in pair),
                *(f"{way['first_token_step']:,.0f}" for way in pair),
            ]
        )
    head = ["slots", "steps, static", "continuous", "slots used, static", "continuous"]
    return markdown_table([*head, "mean step of the first token, static", "continuous"], rows)


def _spread_table(record: dict) -> str:
    rows = []
    for spread, runs in zip(record["config"]["spreads"], spread_runs(record)):
        shares = [[run[name]["utilisation"] for run in runs] for name in ("static", "continuous")]
        ratio = [run["static"]["steps"] / run["continuous"]["steps"] for run in runs]
        rows.append(
            [
                f"±{spread:.0%}",
                *(f"{statistics.median(share):.0%}" for share in shares),
                f"{statistics.median(ratio):.2f}",
            ]
        )
    head = ["spread of output lengths", "slots used, static", "continuous"]
    return markdown_table([*head, "steps, static / continuous"], rows)


def _cases_table(record: dict) -> str:
    rows = []
    real = record["counted"]["real"][str(record["config"]["num_slots"])]
    for name, run in {"the workload, as it comes": real, **record["counted"]["cases"]}.items():
        static, continuous = run["static"], run["continuous"]
        rows.append(
            [
                name,
                f"{static['steps']:,}",
                f"{continuous['steps']:,}",
                f"{static['steps'] / continuous['steps']:.2f}",
            ]
        )
    return markdown_table(["case", "steps, static", "continuous", "ratio"], rows)


def _floor_table(record: dict) -> str:
    """The least possible cost of the workload, and in brackets each way's multiple of it."""
    num_slots = record["config"]["num_slots"]
    run = record["counted"]["real"][str(num_slots)]
    static, continuous = run["static"], run["continuous"]
    outputs = [output for _, output in record["lengths"]]
    min_steps = max(max(outputs), -(-sum(outputs) // num_slots))

    def times(count: int, floor: int) -> str:
        return f"{count:,} ({count / floor:.1f} x)"

    def megabytes(num_bytes: int) -> str:
        return f"{num_bytes / 1e6:,.1f} MB"

    needed, new, copied = (continuous[name] for name in ("needed", "bytes_new", "bytes_copied"))
    rows = [
        [
            "steps",
            f"{min_steps:,}",
            times(static["steps"], min_steps),
            times(continuous["steps"], min_steps),
        ],
        [
            "token positions computed",
            f"{needed:,}",
            times(static["computed"], needed),
            times(continuous["computed"], needed),
        ],
        ["KV written", megabytes(new), "", f"{megabytes(copied)} ({copied / new:.0f} x)"],
    ]
    return markdown_table(["", "floor", "static batch", "continuous, padded"], rows)


def _copies(record: dict) -> str:
    config, copies = record["config"], record["counted"]["copies"]
    ratios = [copied / new for copied, new in zip(copies["copied"], copies["new"])]
    num_requests = config["copy_requests"]
    gigabytes = ratios[-1] * num_requests * QWEN3_0_6B_BYTES / 1e9
    return (
        f"{num_requests} requests of {config['copy_prompt']} prompt tokens: the second step writes "
        f"{ratios[1]:.0f} times the KV that is new in it, step {len(ratios)} writes "
        f"{ratios[-1]:.0f} times. Calculated, not measured: in a model of Qwen3-0.6B's shape, "
        f"{QWEN3_0_6B_BYTES:,} bytes of KV a token, step {len(ratios)} would write "
        f"{gigabytes:.1f} GB to add {num_requests} tokens."
    )


def _time_table(record: dict) -> str:
    """Compare each repeat with the static batch of the same repeat: median, lowest and highest."""
    workloads_timed = record["seconds"]
    rows = []
    for name in next(iter(workloads_timed.values())):
        cells = []
        for ways in workloads_timed.values():
            ratios = [mine / base for mine, base in zip(ways[name], ways["static batch"])]
            median = statistics.median(ratios)
            cells.append(f"{median:.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
        rows.append([name, *cells])
    return markdown_table(["time, static batch = 1", *workloads_timed], rows)


PARTS = {
    "batching": Part(
        measure,
        {"timeline": draw_timeline, "spread": draw_spread, "copies": draw_copies},
        tables,
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="of each timed call")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")


if __name__ == "__main__":
    run_lab(__file__, "01_batching", PARTS, add_options=add_options)
