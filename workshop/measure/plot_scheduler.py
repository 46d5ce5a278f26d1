"""The figures and tables of chapter 4, drawn from its records.

`lab`, `memory`, `thrash` and `rules` are simulated on a cost model that `lab` fits to the shipped
checkpoint on this machine; `control` times the schedulers themselves and wants a quiet one.
`plot_scheduler_lab.py` and `plot_scheduler_control.py` define the measurements,
`plot_scheduler_tables.py` the tables. The command line is described in
`workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import statistics

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workshop.book.palette import (
    BASELINE,
    INK,
    PREEMPTED,
    PROMPT,
    WASTE,
    label_axes,
    label_line,
    tint,
)
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.plot_scheduler_control import measure_control
from workshop.measure.plot_scheduler_lab import (
    measure_lab,
    measure_memory,
    measure_rules,
    measure_thrash,
)
from workshop.measure.plot_scheduler_tables import (
    mean_while_somebody_waits,
    percentile_ms,
    tables_of_control,
    tables_of_lab,
    tables_of_memory,
    tables_of_rules,
    tables_of_thrash,
)

PREFILL_FIRST = "prefill first"


def fit_of(measurement: Measurement) -> dict:
    """The cost model that `--record lab` has fitted. Raises `ValueError` if there is none."""
    if "lab" not in measurement.records:
        raise ValueError("cannot simulate without the cost model; run --record lab first")
    return measurement.records["lab"]["fit"]


def draw_memory(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    reserved, *filled = record["runs"].values()
    for run, share in zip(filled, (0.5, 0.75, 1), strict=True):
        axis.plot(run["end_s"], run["num_running"], color=tint(INK, share), linewidth=2)
    axis.plot(reserved["end_s"], reserved["num_running"], color=WASTE, linewidth=2)
    marks = ", ".join(name.rpartition(" ")[2] for name in record["runs"] if "watermark" in name)
    label = f"filled as needed,\nwatermark {marks}"
    most = max(filled[0]["num_running"])
    at = filled[0]["end_s"][filled[0]["num_running"].index(most)]
    label_line(axis, at, most, label, INK, offset=(40, -8))
    label_line(axis, 1, max(reserved["num_running"]), "everything reserved", WASTE, offset=(0, -26))
    few, many = map(mean_while_somebody_waits, (reserved, filled[0]))
    title = f"Filled as needed, {many / few:.1f} times as many requests run (simulated)"
    label_axes(axis, title, "time, s", "requests that run", ylim=0)
    return figure


def draw_lab(record: dict) -> Figure:
    """Draw a panel for each workload, a numbered mark for each system."""
    workloads = record["workloads"]
    figure, axes = plt.subplots(2, 2, figsize=(9, 9), layout="constrained")
    systems = list(next(iter(workloads.values())))
    for axis, (workload, runs) in zip(axes.flat, workloads.items(), strict=True):
        points = [
            (percentile_ms(run["ttft_s"], 99) / 1e3, percentile_ms(run["itl_s"], 99))
            for run in runs.values()
        ]
        for name, point in zip(systems, points):
            axis.plot(*point, **_mark(name))
        axis.set_xlim(0, 1.2 * max(x for x, _ in points))
        axis.set_ylim(0, 1.2 * max(y for _, y in points))
        _label_points(axis, points)
        axis.set_title(workload)
        axis.grid()
    for axis in axes[1]:
        axis.set_xlabel("time to first token, p99, s")
    for axis in axes[:, 0]:
        axis.set_ylabel("between two tokens, p99, ms")
    names = [f"{i + 1}  {name}" for i, name in enumerate(systems)]
    handles = [Line2D([], [], **_mark(name)) for name in systems]
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=12)
    figure.suptitle("Prefill first (squares): later first tokens than with 1 (simulated)")
    return figure


def _mark(system: str) -> dict:
    if system.startswith(PREFILL_FIRST):
        return {"marker": "s", "color": PROMPT, "alpha": 0.8, "ls": "", "markersize": 8}
    return {"marker": "o", "color": INK, "alpha": 0.6, "ls": "", "markersize": 8}


def _label_points(axis: Axes, points: list[tuple[float, float]]) -> None:
    """Write the systems' numbers above their marks; systems whose marks touch share one label."""
    (_, width), (_, height) = axis.get_xlim(), axis.get_ylim()

    def touch(i: int, j: int) -> bool:
        (x, y), (x2, y2) = points[i], points[j]
        return abs(x - x2) < 0.06 * width and abs(y - y2) < 0.06 * height

    groups: list[list[int]] = []
    for i in range(len(points)):
        near = next((group for group in groups if any(touch(i, j) for j in group)), None)
        if near is None:
            groups.append([i])
        else:
            near.append(i)
    for group in groups:
        x = statistics.mean(points[i][0] for i in group)
        y = max(points[i][1] for i in group)
        others = [points[i] for i in range(len(points)) if i not in group]
        is_close = any(abs(x - a) < 0.1 * width and abs(y - b) < 0.13 * height for a, b in others)
        place = {"ha": "center", "va": "bottom", "offset": (0, 6)}
        if is_close and len(group) == 1:
            place = {"ha": "left", "va": "center", "offset": (7, 0)}
        label_line(axis, x, y, _ranges([i + 1 for i in group]), INK, fontsize=12, **place)


def _ranges(numbers: list[int]) -> str:
    """Format ranges: `[1, 2, 3, 6]` is "1-3, 6"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def draw_thrash(record: dict) -> Figure:
    """Draw one panel a system, with the other systems in the background."""
    runs = record["runs"]
    figure, axes = plt.subplots(
        2, 3, figsize=(9, 5.6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, run) in zip(axes.flat, runs.items(), strict=True):
        for other in runs.values():
            axis.plot(other["window_s"], other["tokens_per_s"], color=tint(BASELINE, 0.4), lw=0.8)
        color = PROMPT if name.startswith(PREFILL_FIRST) else INK
        color = {"no bound, no watermark": PREEMPTED, "everything reserved": WASTE}.get(name, color)
        axis.plot(run["window_s"], run["tokens_per_s"], color=color, linewidth=2)
        axis.set_title(name.replace(", ", ",\n").replace("and a ", "and a\n"), fontsize=13)
        axis.set_ylim(0)
        axis.grid()
    figure.supxlabel("time, s", fontsize=14)
    figure.supylabel("output tokens a second", fontsize=14)
    filled, reserved = (
        runs[name]["throughput"] for name in ("no bound, no watermark", "everything reserved")
    )
    less = 1 - reserved / filled
    figure.suptitle(
        f"In bursts, reserving everything loses {less:.0%} of the throughput (simulated)"
    )
    return figure


def draw_control(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    styles = {
        "two phases": (INK, "o-"),
        PREFILL_FIRST: (PROMPT, "s-"),
        "chapter 1": (BASELINE, "^-"),
    }
    for name, times in record["running_us"].items():
        color, style = styles[name]
        middle = [statistics.median(t) / 1e3 for t in times.values()]
        axis.plot([int(n) for n in times], middle, style, color=color, label=name)
    axis.set(
        title="One decision for all decoding requests",
        xlabel="running requests",
        ylabel="schedule + update, ms",
        xscale="log",
        yscale="log",
    )
    ticks = [int(n) for n in next(iter(record["running_us"].values()))]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.grid()
    axis.legend(loc="lower right")
    return figure


PARTS = {
    "lab": Part(lambda m: measure_lab(tiny=m.tiny), {"lab": draw_lab}, tables_of_lab),
    "memory": Part(
        lambda m: measure_memory(fit_of(m), tiny=m.tiny), {"memory": draw_memory}, tables_of_memory
    ),
    "thrash": Part(
        lambda m: measure_thrash(fit_of(m), tiny=m.tiny), {"thrash": draw_thrash}, tables_of_thrash
    ),
    "rules": Part(lambda m: measure_rules(fit_of(m), tiny=m.tiny), tables=tables_of_rules),
    "control": Part(
        lambda m: measure_control(tiny=m.tiny), {"control": draw_control}, tables_of_control
    ),
}

if __name__ == "__main__":
    run_lab(__file__, "04_scheduler", PARTS)
