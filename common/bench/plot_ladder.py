"""The ladder as a figure: throughput and worst waiting, rung by rung.

    python common/bench/plot_ladder.py

Reads `records/ladder.json`, writes `common/figures/ladder.svg` and the tables in README.md.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from common.bench.bench_record import read_record
from common.bench.ladder_bench import main as write_tables
from common.tools.palette import BASELINE, INK, save

HERE = Path(__file__).parent


QUANTITIES = {
    "output_tokens_per_s": "output tokens\na second",
    "ttft_ms_p99": "time to first\ntoken, p99, ms",
    "inter_token_ms_p99": "between two\ntokens, p99, ms",
}


def draw(record: dict) -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(9, 5.4), sharey=True, layout="constrained")
    regimes = list(record["regimes"].values())
    for axis, (name, label) in zip(axes, QUANTITIES.items(), strict=True):
        for marker, color, regime in zip("os", (INK, BASELINE), regimes, strict=True):
            rungs = list(regime["rungs"].values())
            values = [[run[name] for run in rung["runs"]] for rung in rungs]
            middle = [statistics.median(v) for v in values]
            spread = [
                [m - min(v) for m, v in zip(middle, values)],
                [max(v) - m for m, v in zip(middle, values)],
            ]
            style = {"fmt": marker, "color": color, "capsize": 3, "label": regime["title"]}
            axis.errorbar(middle, range(len(rungs)), xerr=spread, **style)
        axis.set_xlabel(label)
        if name == "output_tokens_per_s":
            axis.set_xlim(0)
        else:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid()
    axes[0].set_yticks(range(len(rungs)), [rung["title"] for rung in rungs])
    axes[0].invert_yaxis()
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    record = read_record(HERE / "records" / "ladder.json")
    save({"ladder": lambda: draw(record)}, HERE.parent / "figures")
    write_tables(["--write-readme"])
