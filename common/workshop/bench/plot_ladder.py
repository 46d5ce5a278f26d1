"""The ladder as two figures: what each chapter does to throughput and to the two waits.

    python common/workshop/bench/plot_ladder.py

Reads `common/workshop/bench/records/ladder.json`, writes `ladder.svg` (many users: README's
picture) and `ladder_regimes.svg` (both regimes) in `common/workshop/figures/`, and the tables in
README.md and common/workshop/bench/README.md.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from common.workshop.bench.bench_record import read_record
from common.workshop.bench.ladder_bench import main as write_tables
from common.workshop.tools.palette import BASELINE, DECODE, INK, PROMPT, save

HERE = Path(__file__).parent
FIGURES = HERE.parent / "figures"


def spread(rung: dict, name: str) -> tuple[float, list[list[float]]]:
    """The median of the runs, and how far the lowest and the highest are from it."""
    values = [run[name] for run in rung["runs"]]
    middle = statistics.median(values)
    return middle, [[middle - min(values)], [max(values) - middle]]


def draw_many(record: dict) -> Figure:
    """The three numbers of README's table, as bars."""
    quantities = {
        "output_tokens_per_s": ("output tokens a second (more is better)", "{:,.0f}"),
        "ttft_ms_p50": ("first token, p50, ms (less is better)", "{:,.0f}"),
        "inter_token_ms_p99": ("gap between tokens, p99, ms (less)", "{:,.0f}"),
    }
    rungs = list(record["regimes"]["many"]["rungs"].values())
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, (name, (label, form)) in zip(axes, quantities.items(), strict=True):
        for place, rung in enumerate(rungs):
            middle, error = spread(rung, name)
            color = DECODE if rung["title"][0].isdigit() else BASELINE
            axis.barh(place, middle, color=color, height=0.66)
            axis.errorbar(middle, place, xerr=error, color=INK, lw=1, capsize=2)
            axis.annotate(
                form.format(middle),
                (middle + error[1][0], place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        axis.set(xlim=(0, axis.get_xlim()[1] * 1.14), xticks=[])
        axis.set_title(label, loc="left", fontsize=10)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].set_yticks(range(len(rungs)), [rung["title"] for rung in rungs])
    axes[0].tick_params(axis="y", labelsize=11, length=0)
    axes[0].invert_yaxis()
    return figure


def draw_regimes(record: dict) -> Figure:
    """Throughput and the worst waits, where many users queue and where few do not."""
    quantities = {
        "output_tokens_per_s": "output tokens a second",
        "ttft_ms_p99": "time to first token, p99 (ms)",
        "inter_token_ms_p99": "between two tokens, p99 (ms)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, (name, label) in zip(axes, quantities.items(), strict=True):
        shown = zip(record["regimes"].values(), "os", (DECODE, PROMPT), strict=True)
        for regime, marker, color in shown:
            for place, rung in enumerate(regime["rungs"].values()):
                middle, error = spread(rung, name)
                axis.errorbar(middle, place, xerr=error, fmt=marker, color=color, capsize=3)
                if name == "output_tokens_per_s" and rung["title"] == "2 paged KV":
                    axis.annotate(
                        regime["title"],
                        (middle, place),
                        xytext=(-5, 8),
                        textcoords="offset points",
                        color=color,
                    )
        axis.set_xlabel(label)
        if name == "output_tokens_per_s":
            axis.set_xlim(0)
        else:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    titles = [rung["title"] for rung in regime["rungs"].values()]
    axes[0].set_yticks(range(len(titles)), titles)
    axes[0].invert_yaxis()
    return figure


if __name__ == "__main__":
    ladder = read_record(HERE / "records" / "ladder.json")
    save(
        {
            "ladder": lambda: draw_many(ladder),
            "ladder_regimes": lambda: draw_regimes(ladder),
        },
        FIGURES,
    )
    write_tables(["--write-readme"])
