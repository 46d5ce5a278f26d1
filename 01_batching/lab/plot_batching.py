"""The figures and tables of chapter 1, drawn from its record.

    python 01_batching/lab/plot_batching.py   draw figures/ from records/
    python 01_batching/lab/plot_batching.py --record    run the workloads first (some minutes)
    python 01_batching/lab/plot_batching.py --write     put the tables of the record into README.md

What is counted and timed, and how, stands in `plot_batching_workloads.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

import plot_batching_workloads as workloads
from common.bench.bench_record import (
    describe_environment,
    markdown_table,
    read_record,
    replace_between_markers,
    write_record,
)

HERE = Path(__file__).resolve().parent
RECORD = HERE / "records" / "batching.json"
TOKENIZER = HERE.parents[1] / "common" / "checkpoints" / "tiny" / "tokenizer.json"
QWEN3_0_6B_BYTES = 2 * 28 * 8 * 128 * 2  # KV of one token: K and V, layers, heads, head_dim, bf16


def make_record(tokenizer_file: Path, repeats: int) -> dict:
    environment = describe_environment()
    lengths = workloads.stdlib_lengths(tokenizer_file)
    return {
        "command": "python 01_batching/lab/plot_batching.py --record",
        "environment": environment,
        "config": {
            name.lower(): value
            for name, value in vars(workloads).items()
            if name.isupper() and isinstance(value, int | list)
        }
        | {"repeats": repeats, "threads": 1},
        "lengths": lengths,
        "counted": workloads.count(lengths),
        "seconds": workloads.measure_time(lengths, repeats),
    }


# -- figures

PREFILL, USEFUL, WASTED, INK = "#1f4e79", "#9dc3e6", "#f4b183", "#404040"
COLORS = {"P": PREFILL, "u": USEFUL, ".": WASTED}


def draw_timeline(record: dict) -> plt.Figure:
    timeline = record["counted"]["timeline"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 4.4), sharex=True, layout="constrained")
    num_tokens = sum(output for _, output in timeline["lengths"])
    for axis, name in zip(axes, ("static", "continuous")):
        slots = timeline[name]
        for slot, row in enumerate(slots):
            draw_row(axis, slot, row)
        num_steps = len(slots[0])
        used = num_tokens / (len(slots) * num_steps)
        axis.set_title(f"{name} batching: {num_steps} steps, {used:.0%} of slot-steps used")
        axis.set(ylabel="slot", ylim=(len(slots) - 0.5, -0.5), yticks=range(len(slots)))
        axis.axvline(num_steps, color=INK, linewidth=1)
    axes[0].set_xlim(0, max(len(timeline[name][0]) for name in ("static", "continuous")))
    axes[1].set_xlabel("step")
    kinds = {
        "prefill": PREFILL,
        "decode": USEFUL,
        "wasted: computed, nobody reads it": WASTED,
        "empty: not computed": "white",
    }
    handles = [Patch(facecolor=c, edgecolor=INK, label=kind) for kind, c in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_row(axis: plt.Axes, slot: int, row: list[list[str] | None]) -> None:
    """One bar for each run of steps with one use; the number of the request at its first step."""
    start = 0
    for step in range(1, len(row) + 1):
        if step < len(row) and row[step] == row[start]:
            continue
        if row[start] is not None:
            req_id, use = row[start]
            axis.barh(slot, step - start, 0.8, left=start, color=COLORS[use], edgecolor="white")
            if use == "P":
                center = (start + 0.5, slot)
                axis.annotate(req_id[1:], center, color="white", ha="center", va="center", size=8)
        start = step


def draw_spread(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    spreads = record["config"]["spreads"]
    for name, color in (("continuous", PREFILL), ("static", WASTED)):
        runs = [[100 * run[name]["utilisation"] for run in row] for row in spread_runs(record)]
        axis.plot(spreads, [statistics.median(row) for row in runs], "o-", color=color, label=name)
        axis.fill_between(spreads, [*map(min, runs)], [*map(max, runs)], color=color, alpha=0.25)
    axis.set_xticks(spreads, [f"±{spread:.0%}" for spread in spreads])
    axis.set(xlabel="spread of output lengths about their mean", ylabel="% of slot-steps used")
    axis.set(ylim=(0, 102), title="Equal lengths leave nothing to gain")
    axis.legend(frameon=False, loc="lower left")
    return figure


def draw_copies(record: dict) -> plt.Figure:
    copies = record["counted"]["copies"]
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    steps = range(1, len(copies["copied"]) + 1)
    unit = copies["new"][-1]  # what one decode step has to write
    axis.plot(steps, [b / unit for b in copies["copied"]], color=WASTED, label="written")
    axis.plot(steps, [b / unit for b in copies["new"]], color=PREFILL, label="new")
    axis.set(xlabel="step", ylabel="KV written, one decode step's new KV = 1", yscale="log")
    axis.set_title("The padded batch writes the whole cache to add one token")
    axis.legend(frameon=False, loc="center right")
    return figure


def spread_runs(record: dict) -> list[list[dict]]:
    return record["counted"]["spread"]


def draw(record: dict) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "batching", "svg.fonttype": "none", "font.size": 11}
    )
    pictures = {"timeline": draw_timeline, "spread": draw_spread, "copies": draw_copies}
    (HERE.parent / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        figure = picture(record)
        figure.savefig(HERE.parent / "figures" / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


# -- tables


def tables(record: dict) -> dict[str, str]:
    """What stands between `<!-- table:NAME -->` markers in the README."""
    return {
        "headline": _headline(record),
        "real": _real_table(record),
        "spread": _spread_table(record),
        "cases": _cases_table(record),
        "padding": _padding_table(record),
        "copies": _copies(record),
        "time": _time_table(record),
        "made_on": _made_on(record),
    }


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
        f"and takes {static['steps']:,} steps. The same requests, scheduled anew at every "
        f"iteration, use {continuous['utilisation']:.0%} and take {continuous['steps']:,} steps."
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


def _padding_table(record: dict) -> str:
    run = record["counted"]["real"][str(record["config"]["num_slots"])]
    needed = run["continuous"]["needed"]
    rows = [
        [name, f"{count:,}", f"{count / needed:.1f}"]
        for name, count in (
            ("no padding at all (chapter 2)", needed),
            ("static batch, its prompts padded once", run["static"]["computed"]),
            ("continuous, padded batch", run["continuous"]["computed"]),
        )
    ]
    return markdown_table(["way", "token positions computed", "relative"], rows)


def _copies(record: dict) -> str:
    config, copies = record["config"], record["counted"]["copies"]
    real = record["counted"]["real"][str(config["num_slots"])]["continuous"]
    ratios = [copied / new for copied, new in zip(copies["copied"], copies["new"])]
    num_requests = config["copy_requests"]
    gigabytes = ratios[-1] * num_requests * QWEN3_0_6B_BYTES / 1e9
    return (
        f"{num_requests} requests of {config['copy_prompt']} prompt tokens: the second step writes "
        f"{ratios[1]:.0f} times the KV that is new in it, step {len(ratios)} writes "
        f"{ratios[-1]:.0f} times. Over the whole workload above it is "
        f"{real['bytes_copied'] / real['bytes_new']:.0f} times. Calculated, not measured: in a "
        f"model of Qwen3-0.6B's shape, {QWEN3_0_6B_BYTES:,} bytes of KV a token, step "
        f"{len(ratios)} would write {gigabytes:.1f} GB to add {num_requests} tokens."
    )


def _time_table(record: dict) -> str:
    """Each repeat against the static batch of the same repeat: median, lowest and highest."""
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


def _made_on(record: dict) -> str:
    where, config = record["environment"], record["config"]
    return (
        f"Made by `{record['command']}` at commit `{where['commit'][:10]}` on {where['cpu']}, "
        f"{where['cores']} cores, {where['cpu_capability']}, Python {where['python']}, "
        f"torch {where['torch']}, transformers {where['transformers']}; timed on "
        f"{config['threads']} thread, {config['repeats']} repeats, load average "
        f"{where['load_average']:.1f} at the start."
    )


def write_tables(record: dict, readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    for name, content in tables(record).items():
        text = replace_between_markers(text, name, content)
    readme.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the workloads first")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    parser.add_argument("--repeats", type=int, default=5, help="of each timed call")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")
    options = parser.parse_args()
    if options.record:
        write_record(RECORD, make_record(options.tokenizer, options.repeats))
    record = read_record(RECORD)
    draw(record)
    if options.write:
        write_tables(record, HERE.parent / "README.md")


if __name__ == "__main__":
    main()
