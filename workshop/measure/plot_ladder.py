"""The ladder as two figures: each chapter's effect on throughput and on the two waits.

    python workshop/measure/plot_ladder.py

Reads `workshop/measure/bench/records/ladder.json`, writes `ladder.svg` (many users: README's
picture) and `ladder_regimes.svg` (both regimes) in `workshop/figures/`, and the tables in
README.md and workshop/measure/bench/README.md.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from workshop.book.figure_file import save
from workshop.book.figure_words import Words
from workshop.book.palette import BASELINE, DECODE, INK, PROMPT
from workshop.measure.bench.bench_record import read_record
from workshop.measure.bench.ladder_bench import main as write_tables

RECORD = Path(__file__).parent / "bench" / "records" / "ladder.json"
FIGURES = Path(__file__).parents[1] / "figures"


def regimes() -> dict[str, dict[str, dict]]:
    """Map the title of a regime and of a configuration to the measured numbers."""
    found = read_record(RECORD)["regimes"].values()
    return {x["title"]: {config["title"]: config for config in x["rungs"].values()} for x in found}


def spread(config: dict, name: str) -> tuple[float, float, float]:
    """Return the lowest of the runs, their median and the highest."""
    values = [run[name] for run in config["runs"]]
    return min(values), statistics.median(values), max(values)


def draw_many() -> Figure:
    """Draw the three numbers of README's table, as bars."""
    configs, *_ = regimes().values()
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.6), sharey=True, layout="constrained")
    quantities = {
        "output_tokens_per_s": "output tokens a second,\nmore is better",
        "ttft_ms_p50": "first token, p50, ms,\nless is better",
        "inter_token_ms_p99": "gap, p99, ms,\nless is better",
    }
    for axis, (name, label) in zip(axes, quantities.items(), strict=True):
        for place, (title, config) in enumerate(configs.items()):
            low, middle, high = spread(config, name)
            color = DECODE if title[0].isdigit() else BASELINE
            axis.barh(place, middle, color=color, height=0.65)
            axis.plot([low, high], [place, place], color=INK, linewidth=1.2)
            end = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 12}
            axis.annotate(f"{middle:,.0f}", (max(middle, high), place), **end)
        axis.set_title(label, loc="left", fontsize=12)
        axis.set_xlim(0, 1.45 * max(spread(config, name)[2] for config in configs.values()))
        axis.spines[:].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
    axes[0].set_yticks(range(len(configs)), list(configs), fontsize=12)
    axes[0].invert_yaxis()
    first, last = list(configs.values())[:: len(configs) - 1]
    (_, slow, _), (_, fast, _) = (spread(x, "output_tokens_per_s") for x in (first, last))
    (_, late, _), (_, soon, _) = (spread(x, "ttft_ms_p50") for x in (first, last))
    figure.suptitle(
        f"{slow:,.0f} to {fast:,.0f} tokens a second, "
        f"first token {late / 1e3:.1f} s to {soon:,.0f} ms"
    )
    note = "Each row adds a chapter; a thin line goes from the lowest of three runs to the highest."
    figure.supxlabel(f"Many users. {note}", fontsize=11)
    return figure


def draw_regimes() -> Figure:
    """Draw throughput and the worst waits, where many users queue and where few do not."""
    found = regimes()
    configs, *_ = found.values()
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.6), sharey=True, layout="constrained")
    quantities = {
        "output_tokens_per_s": "output tokens a second",
        "ttft_ms_p99": "first token, p99, ms",
        "inter_token_ms_p99": "gap, p99, ms",
    }
    for axis, (name, label) in zip(axes, quantities.items(), strict=True):
        for (title, measured), color, offset in zip(found.items(), (DECODE, PROMPT), (-0.2, 0.2)):
            places = [place + offset for place in range(len(measured))]
            low, middle, high = zip(*(spread(config, name) for config in measured.values()))
            axis.hlines(places, low, high, color=color)
            axis.plot(middle, places, "o", color=color, label=title)
        axis.set_title(label, loc="left", fontsize=12)
        if name == "output_tokens_per_s":
            axis.set_xlim(left=0)
        else:
            axis.set_xscale("log")
        axis.tick_params(labelsize=12)
        axis.grid()
    axes[0].set_yticks(range(len(configs)), list(configs))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle("Few users: no configuration is faster, but the first token comes sooner")
    return figure


if __name__ == "__main__":
    save({"ladder": draw_many, "ladder_regimes": draw_regimes}, FIGURES, Words())
    write_tables(["--write-readme"])
