"""The figures and tables of chapter 5, drawn from its records.

All parts but `rules` are times and want a quiet machine. `plot_spec_decode_engine.py` and
`plot_spec_decode_lab.py` define the measurements, `plot_spec_decode_tables.py` the tables. The
command line is described in `workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import statistics

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from workshop.book.palette import BASELINE, DRAFT, INK, NGRAM, label_axes, label_line, tint
from workshop.measure.lab_frame import Part, run_lab, timed
from workshop.measure.plot_spec_decode_engine import measure_engine, measure_formula
from workshop.measure.plot_spec_decode_lab import measure_proposers, measure_rules
from workshop.measure.plot_spec_decode_tables import (
    RULE_NAMES,
    predict,
    speedups,
    tables_of_engine,
    tables_of_formula,
    tables_of_proposers,
    tables_of_rules,
)

CLOCK = "time.perf_counter"


def style_of(system: str) -> dict:
    """A line style. Colour: the proposer. Dashed: adaptive length. Pale: fewer draft tokens."""
    color = NGRAM if system.startswith("n-gram") else DRAFT
    style = {"color": color, "linestyle": "-", "marker": "o"}
    if "adaptive" in system:
        style |= {"linestyle": "--", "marker": "D"}
    elif system.endswith(", 2"):
        style |= {"color": tint(color, 0.5), "marker": "s"}
    return style


def draw_engine(record: dict) -> Figure:
    workloads = record["runs"]
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(9, 4.6), layout="constrained", sharey=True
    )
    for axis, (workload, batches) in zip(axes, workloads.items()):
        for name in record["config"]["systems"]:
            if name == "plain":
                continue
            ratios = [
                statistics.median(speedups(systems[name], systems["plain"]))
                for systems in batches.values()
            ]
            axis.plot(range(len(batches)), ratios, **style_of(name), label=name)
        axis.axhline(1, color=BASELINE, linewidth=1.5)
        axis.set(title=workload, xlabel="requests at a time", ylim=0)
        axis.set_xticks(range(len(batches)), list(batches))
        axis.grid()
    label_line(axes[-1], len(batches) - 1, 1, "plain = 1", BASELINE, ha="right", offset=(0, 9))
    axes[0].set_ylabel("times as fast as plain decoding")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def draw_formula(record: dict) -> Figure:
    figure, axes = plt.subplots(
        1, len(record["points"]), figsize=(9, 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (size, points) in zip(axes[0], record["points"].items()):
        lengths = [int(name) for name in points if name != "0"]
        predicted = [predict(points, k)[1] for k in lengths]
        axis.plot(lengths, predicted, "-", color=INK, linewidth=2, label="formula")
        for index, k in enumerate(lengths):
            ratios = speedups(points[str(k)], points["0"])
            middle = statistics.median(ratios)
            spread = [[middle - min(ratios)], [max(ratios) - middle]]
            label = "measured" if index == 0 else None
            axis.errorbar(k, middle, spread, fmt="o", color=DRAFT, capsize=4, label=label)
        axis.axhline(1, color=BASELINE, linewidth=1.5)
        axis.set(title=f"{size} at a time", xlabel="drafts a pass, k", ylim=0)
        axis.grid()
    axes[0][0].set_ylabel("times as fast as plain")
    axes[0][-1].legend()
    return figure


def draw_rules(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    temperatures = list(record["acceptance"])
    xs = [float(t) for t in temperatures]
    styles = ((INK, "o-"), (BASELINE, "s-"), (BASELINE, "^--"), (BASELINE, "D:"))
    for (rule, name), (color, style) in zip(RULE_NAMES.items(), styles):
        rates = [100 * record["acceptance"][t][rule] for t in temperatures]
        axis.plot(xs, rates, style, color=color, linewidth=2, label=name)
    title = "All four are exact; they do not accept alike"
    label_axes(axis, title, "temperature", "drafts accepted, %", ylim=0)
    figure.legend(loc="outside lower center")
    return figure


def draw_proposers(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    for index, (name, by_length) in enumerate(record["step_us"].items()):
        lengths = [int(n) for n in by_length]
        times = [statistics.median(t) / 1e3 for t in by_length.values()]
        color = DRAFT if name.startswith("draft") else tint(NGRAM, 1 - 0.25 * index)
        axis.plot(lengths, times, "o-", color=color, label=name, linewidth=2)
    title = "What four draft tokens cost"
    label_axes(axis, title, "tokens so far", "ms a step", xscale="log", yscale="log")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


PARTS = {
    "engine": Part(timed(measure_engine, CLOCK), {"engine": draw_engine}, tables_of_engine),
    "formula": Part(timed(measure_formula, CLOCK), {"formula": draw_formula}, tables_of_formula),
    "rules": Part(lambda m: measure_rules(tiny=m.tiny), {"rules": draw_rules}, tables_of_rules),
    "proposers": Part(
        timed(measure_proposers, CLOCK), {"proposers": draw_proposers}, tables_of_proposers
    ),
}

if __name__ == "__main__":
    run_lab(__file__, "05_spec_decode", PARTS)
