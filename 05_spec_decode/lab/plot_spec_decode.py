"""The figures and tables of chapter 5, drawn from its records.

    python 05_spec_decode/lab/plot_spec_decode.py   draw figures/ from records/
    python 05_spec_decode/lab/plot_spec_decode.py --tables   tables into README.md too
    python 05_spec_decode/lab/plot_spec_decode.py --record engine  measure: engine formula
                                                                    rules proposers

All but `rules` are times and want a quiet machine. `--tiny` measures almost nothing and writes to
build/. What is measured stands in `plot_spec_decode_engine.py` and `plot_spec_decode_lab.py`, the
tables in `plot_spec_decode_tables.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from common.bench.bench_record import ROOT, describe_environment, read_record, write_record
from plot_spec_decode_engine import measure_engine, measure_formula
from plot_spec_decode_lab import measure_proposers, measure_rules
from plot_spec_decode_tables import RULE_NAMES, predict, speedups, write_tables

HERE = Path(__file__).resolve().parent
SMOKE = ROOT / "build" / "spec-decode-smoke" / "lab"
PARTS = {
    "engine": measure_engine,
    "formula": measure_formula,
    "rules": measure_rules,
    "proposers": measure_proposers,
}
COLORS = ("#1f4e79", "#c55a11", "#548235", "#a6a6a6", "#7030a0")


def draw_engine(record: dict) -> plt.Figure:
    workloads = record["runs"]
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(10, 3.8), layout="constrained", sharey=True
    )
    for axis, (workload, batches) in zip(axes, workloads.items()):
        names = [name for name in record["config"]["systems"] if name != "plain"]
        for name, color in zip(names, COLORS):
            ratios = [
                statistics.median(speedups(systems[name], systems["plain"]))
                for systems in batches.values()
            ]
            axis.plot(range(len(batches)), ratios, "o-", color=color, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=workload, xlabel="requests at a time", ylim=0)
        axis.set_xticks(range(len(batches)), list(batches))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("times as fast as plain decoding")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=10)
    return figure


def draw_formula(record: dict) -> plt.Figure:
    figure, axes = plt.subplots(
        1, len(record["points"]), figsize=(8, 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (size, points) in zip(axes[0], record["points"].items()):
        lengths = [int(name) for name in points if name != "0"]
        predicted = [predict(points, k)[1] for k in lengths]
        axis.plot(lengths, predicted, "-", color=COLORS[0], label="formula")
        for index, k in enumerate(lengths):
            ratios = speedups(points[str(k)], points["0"])
            middle = statistics.median(ratios)
            spread = [[middle - min(ratios)], [max(ratios) - middle]]
            label = "measured" if index == 0 else None
            axis.errorbar(k, middle, spread, fmt="o", color=COLORS[1], capsize=3, label=label)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{size} at a time", xlabel="drafts a pass, k", ylim=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("times as fast as plain decoding")
    axes[0][-1].legend(frameon=False)
    return figure


def draw_rules(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    temperatures = list(record["acceptance"])
    for (rule, name), color in zip(RULE_NAMES.items(), COLORS):
        rates = [100 * record["acceptance"][t][rule] for t in temperatures]
        axis.plot([float(t) for t in temperatures], rates, "o-", color=color, label=name)
    axis.set(
        title="All four are exact; they do not accept alike",
        xlabel="temperature",
        ylabel="drafts accepted, %",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    return figure


def draw_proposers(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for (name, by_length), color in zip(record["step_us"].items(), COLORS):
        lengths = [int(n) for n in by_length]
        times = [statistics.median(t) / 1e3 for t in by_length.values()]
        axis.plot(lengths, times, "o-", color=color, label=name)
    axis.set(
        title="What four guesses cost",
        xlabel="tokens so far",
        ylabel="ms a step",
        xscale="log",
        yscale="log",
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


FIGURES = {
    "engine": draw_engine,
    "formula": draw_formula,
    "rules": draw_rules,
    "proposers": draw_proposers,
}


def draw(records: dict[str, dict], folder: Path) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "spec_decode", "svg.fonttype": "none", "font.size": 11}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        figure = FIGURES[name](record)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", nargs="+", choices=PARTS, default=[], metavar="PART", help="|".join(PARTS)
    )
    parser.add_argument("--tables", action="store_true", help="put the tables into README.md")
    parser.add_argument("--tiny", action="store_true", help="almost no work, into build/")
    options = parser.parse_args()
    folder = SMOKE if options.tiny else HERE
    paths = {part: folder / "records" / f"spec_decode_{part}.json" for part in PARTS}
    environment = describe_environment()  # before: its load average is that of the others
    for part in options.record:
        record = PARTS[part](tiny=options.tiny)
        if part != "rules":
            record["config"]["clock"] = "time.perf_counter"
        command = f"python 05_spec_decode/lab/plot_spec_decode.py --record {part}"
        write_record(paths[part], {"command": command, "environment": environment, **record})
    records = {part: read_record(path) for part, path in paths.items() if path.exists()}
    draw(records, folder.parent / "figures")
    if options.tables:
        write_tables(records, folder.parent / "README.md")


if __name__ == "__main__":
    main()
