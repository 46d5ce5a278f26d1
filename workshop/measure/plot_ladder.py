"""The ladder as README's picture: each chapter's effect on throughput and on the two waits.

    python -m workshop.plot_ladder

Reads `workshop/measure/bench/records/ladder.json`, writes `workshop/figures/ladder.svg` and the
tables in README.md and workshop/measure/bench/README.md.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from workshop.book.figure_file import save
from workshop.book.palette import BASELINE, DECODE, INK
from workshop.measure.bench.bench_record import percentiles, read_record
from workshop.measure.bench.ladder_bench import main as write_tables

RECORD = Path(__file__).parent / "bench" / "records" / "ladder.json"
FIGURES = Path(__file__).parents[1] / "figures"


def spread(config: dict, name: str) -> list[float]:
    """Return the lowest of the runs, their median and the highest."""
    return percentiles([run[name] for run in config["runs"]], [0, 50, 100])


def draw() -> Figure:
    """Draw the three numbers of README's table, as bars: the first regime, many users."""
    many, *_ = read_record(RECORD)["regimes"].values()
    configs = {config["title"]: config for config in many["rungs"].values()}
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


if __name__ == "__main__":
    save({"ladder": draw}, FIGURES)
    write_tables(["--write-readme"])
