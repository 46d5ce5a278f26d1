"""Routers' policies as a figure, from the record: `python common/serve/fleet/plot_policies.py`."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.serve.fleet.policy_lab import ALONE, ENGINES, HERE, POLICIES, RECORD, find, hit_rate
from workshop.book.figure_file import save
from workshop.book.palette import BASELINE, CACHED, INK, OTHER, tint
from workshop.measure.bench.bench_record import read_record

COLORS = {"turns": BASELINE, "two": BASELINE, "tree": OTHER, "exact": CACHED, "both": INK}


def draw() -> Figure:
    numbers = (1, *ENGINES)
    works = read_record(RECORD)["traces"]
    figure, axes = plt.subplots(
        2,
        len(works),
        figsize=(9, 9),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (top, below), (name, work) in zip(axes.T, works.items(), strict=True):
        for label, policy in POLICIES.items():
            runs = [find(work, ALONE, 1), *(find(work, policy, num) for num in ENGINES)]
            is_other = policy.index == "two" or policy.tree_size > 1
            style: dict[str, Any] = {
                "color": tint(COLORS[policy.index], 0.6 if is_other else 1),
                "linestyle": "--" if label.endswith("alone") else "-",
                "marker": "s" if is_other else "o",
                "label": label,
            }
            top.plot(numbers, [100 * hit_rate(work, run) for run in runs], **style)
            below.plot(numbers, [run["first_token_s"]["p99"] for run in runs], **style)
        top.set(title=f"{name} trace, simulated", xscale="log", ylim=0)
        below.set(xlabel="engines", yscale="log")
        below.set_xticks(numbers, [str(num) for num in numbers])
        below.minorticks_off()
        top.grid()
        below.grid()
    axes[0][0].set_ylabel("prompt tokens found, %")
    axes[1][0].set_ylabel("first token, p99, s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    save({"policies": draw}, HERE / "figures")
