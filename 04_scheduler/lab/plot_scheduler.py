"""The figures and tables of chapter 4, drawn from its records.

    python 04_scheduler/lab/plot_scheduler.py   draw figures/ from records/
    python 04_scheduler/lab/plot_scheduler.py --tables   tables into README.md too
    python 04_scheduler/lab/plot_scheduler.py --record lab  measure first: lab memory thrash control

`lab`, `memory` and `thrash` are simulated on a cost model that `lab` fits to the shipped checkpoint
on this machine; `control` times the schedulers themselves and wants a quiet one. `--tiny` measures
almost nothing and writes to build/. What is measured stands in `plot_scheduler_lab.py` and
`plot_scheduler_control.py`, the tables in `plot_scheduler_tables.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from common.bench.bench_record import ROOT, describe_environment, read_record, write_record
from plot_scheduler_control import measure_control
from plot_scheduler_lab import measure_lab, measure_memory, measure_thrash
from plot_scheduler_tables import percentile_ms, write_tables

HERE = Path(__file__).resolve().parent
SMOKE = ROOT / "build" / "scheduler-smoke" / "lab"
PARTS = {
    "lab": measure_lab,
    "memory": measure_memory,
    "thrash": measure_thrash,
    "control": measure_control,
}
BLUE, ORANGE, GREY, GREEN = "#1f4e79", "#c55a11", "#a6a6a6", "#548235"


def draw_memory(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for (name, run), color in zip(record["runs"].items(), (GREY, BLUE, ORANGE, GREEN)):
        axis.plot(run["end_s"], run["num_running"], color=color, label=name)
    axis.set(
        title="One pool, the same requests (simulated)",
        xlabel="time, s",
        ylabel="requests that run",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def draw_lab(record: dict) -> plt.Figure:
    workloads = record["workloads"]
    figure, axes = plt.subplots(1, len(workloads), figsize=(10, 3.8), layout="constrained")
    for axis, (workload, systems) in zip(axes, workloads.items()):
        for name, run in systems.items():
            marker = "s" if name.startswith("prefill") else "o"
            color = ORANGE if name.startswith("prefill") else BLUE
            first, between = percentile_ms(run["ttft_s"], 99), percentile_ms(run["itl_s"], 99)
            axis.plot(first / 1e3, between, marker, color=color, alpha=0.7)
        axis.set(title=workload, xlabel="time to first token, p99, s", ylim=0)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("between tokens, p99, ms")
    handles = [
        plt.Line2D([], [], marker=m, color=c, ls="") for m, c in (("o", BLUE), ("s", ORANGE))
    ]
    figure.legend(
        handles,
        ["two phases, each policy", "prefill first"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.suptitle("Every policy and both schools (simulated): the first token, and the others")
    return figure


def draw_thrash(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6.8, 4), layout="constrained")
    for (name, run), color in zip(
        record["runs"].items(), (ORANGE, BLUE, GREEN, GREY, "#7030a0", "#c00000")
    ):
        axis.plot(run["window_s"], run["tokens_per_s"], color=color, label=name)
    axis.set(
        title="Steady arrivals above what the memory carries (simulated)",
        xlabel="time, s",
        ylabel="output tokens a second",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_control(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for (name, times), color in zip(record["running_us"].items(), (BLUE, ORANGE, GREY)):
        xs = [int(n) for n in times]
        axis.plot(
            xs, [statistics.median(t) / 1e3 for t in times.values()], "o-", color=color, label=name
        )
    for name, points in record["elsewhere_ms"].items():
        axis.plot([int(n) for n in points], list(points.values()), "x", color="black")
        last = list(points.items())[-1]
        axis.annotate(f" {name}", (int(last[0]), last[1]))
    axis.set(
        title="One decision for everybody who decodes",
        xlabel="running requests",
        ylabel="schedule + update, ms",
        xscale="log",
        yscale="log",
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


FIGURES = {
    "memory": draw_memory,
    "lab": draw_lab,
    "thrash": draw_thrash,
    "control": draw_control,
}


def draw(records: dict[str, dict], folder: Path) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "scheduler", "svg.fonttype": "none", "font.size": 11}
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
    paths = {part: folder / "records" / f"scheduler_{part}.json" for part in PARTS}
    for part in options.record:
        environment = describe_environment()  # before: its load average is that of the others
        fit = read_record(paths["lab"])["fit"] if part in ("memory", "thrash") else None
        record = PARTS[part](fit, tiny=options.tiny)
        command = f"python 04_scheduler/lab/plot_scheduler.py --record {part}"
        write_record(paths[part], {"command": command, "environment": environment, **record})
    records = {part: read_record(path) for part, path in paths.items() if path.exists()}
    draw(records, folder.parent / "figures")
    if options.tables:
        write_tables(records, folder.parent / "README.md")


if __name__ == "__main__":
    main()
