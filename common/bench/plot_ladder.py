"""The ladder as a figure: throughput and worst waiting, rung by rung.

    python common/plot_ladder.py

Reads `common/records/ladder.json`, writes `common/figures/ladder.svg` and the tables in README.md.
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

HERE = Path(__file__).parent


def draw(record: dict) -> None:
    plt.rcParams["svg.hashsalt"] = "vllm-from-scratch"
    quantities = {
        "output_tokens_per_s": "output tokens a second",
        "ttft_ms_p99": "time to first token, p99 (ms)",
        "inter_token_ms_p99": "between two tokens, p99 (ms)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 4), sharey=True)
    for axis, (name, label) in zip(axes, quantities.items(), strict=True):
        for marker, regime in zip("os", record["regimes"].values(), strict=True):
            rungs = list(regime["rungs"].values())
            values = [[run[name] for run in rung["runs"]] for rung in rungs]
            middle = [statistics.median(v) for v in values]
            spread = [
                [m - min(v) for m, v in zip(middle, values)],
                [max(v) - m for m, v in zip(middle, values)],
            ]
            places = range(len(rungs))
            axis.errorbar(middle, places, xerr=spread, fmt=marker, capsize=3, label=regime["title"])
        axis.set_xlabel(label)
        if name == "output_tokens_per_s":
            axis.set_xlim(0)
        else:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(rungs)), [rung["title"] for rung in rungs])
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(HERE.parent / "figures" / "ladder.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(read_record(HERE / "records" / "ladder.json"))
    write_tables(["--write-readme"])
