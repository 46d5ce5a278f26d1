"""The figures and tables of chapter 6, drawn from its records.

All are times and want a quiet machine. `plot_chunked_prefill_lab.py` defines the measurements. The
command line is described in `workshop/measure/lab_frame.py`.
"""

from __future__ import annotations

import statistics

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from workshop.book.palette import DECODE, INK, PAPER, PROMPT, label_line, shade
from workshop.measure.bench.bench_record import percentile, table_of
from workshop.measure.lab_frame import Part, run_lab, timed
from workshop.measure.plot_chunked_prefill_lab import (
    measure_adaptive,
    measure_attention,
    measure_stall,
    measure_sweep,
    median_of,
)

CLOCK = "time.perf_counter and time.monotonic"


# -- figures


def draw_stall(record: dict) -> Figure:
    """Draw steps as bars at their time on the clock, with their durations."""
    systems = ("whole prompts", "chunks of 128")
    figure, axes = plt.subplots(
        2, 1, figsize=(9, 5.6), layout="constrained", sharex=True, sharey=True
    )
    for axis, system in zip(axes, systems):
        timeline = record["runs"][system][-1]["timeline"]
        for has_chunk, color, label in (
            (False, DECODE, "without the long prompt"),
            (True, PROMPT, "with a chunk of the long prompt"),
        ):
            steps = [(t, ms) for t, ms, _, chunk in timeline if (chunk > 1) == has_chunk]
            axis.bar(
                [t for t, _ in steps],
                [ms for _, ms in steps],
                [ms for _, ms in steps],
                align="edge",
                color=color,
                edgecolor=PAPER,
                linewidth=0.2,
                label=label,
            )
        axis.set(title=system)
        axis.grid()
    figure.supylabel("a step takes, ms", fontsize=14)
    axes[0].legend()
    axes[1].set_xlabel("ms since the first arrival")
    return figure


def draw_sweep(record: dict) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained")
    names = list(record["runs"])
    shown = {
        "gap_ms_p99": ("the others:\nbetween tokens, p99, ms", shade(DECODE, 0.85)),
        "long_ttft_ms": ("the long prompt:\nfirst token, ms", PROMPT),
        "output_tokens_per_s": ("all together:\noutput tokens a second", INK),
    }
    for axis, (name, (label, color)) in zip(axes, shown.items()):
        middle = [median_of(record["runs"][size], name) for size in names]
        low = [min(run[name] for run in record["runs"][size]) for size in names]
        high = [max(run[name] for run in record["runs"][size]) for size in names]
        axis.fill_between(range(len(names)), low, high, color=color, alpha=0.2)
        axis.plot(range(len(names)), middle, "o-", color=color, linewidth=2)
        axis.set(title=label, ylim=0)
        axis.set_xticks(range(len(names)), names, rotation=60)
        axis.grid()
    figure.supxlabel("chunk size, tokens", fontsize=14)
    return figure


def draw_adaptive(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    targets = record["config"]["targets_ms"]
    for place, (_, *runs) in enumerate(record["runs"].values()):
        times = [ms for run in runs for ms in run["chunk_step_ms"]]
        spread = [place + 0.3 * (i / max(1, len(times) - 1) - 0.5) for i in range(len(times))]
        axis.plot(spread, times, ".", color=PROMPT, alpha=0.4)
        axis.plot([place - 0.3, place + 0.3], [targets[place]] * 2, "-", color=INK, linewidth=2.5)
    label_line(axis, 0.3, targets[0], "the target", INK)
    label_line(
        axis, len(targets) - 0.85, min(times), "a step with\na chunk", PROMPT, offset=(-4, 0)
    )
    axis.set(xlabel="target_step_ms", ylabel="steps with a chunk, ms", yscale="log")
    axis.set_xticks(range(len(targets)), [f"{ms:g}" for ms in targets])
    axis.set_xlim(-0.5, len(targets) - 0.1)
    axis.grid()
    return figure


# -- tables


def _middle(runs: list[dict], name: str, form: str = ",.1f") -> str:
    return format(median_of(runs, name), form)


def _spread(runs: list[dict], name: str) -> str:
    values = [run[name] for run in runs]
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


def note_of_stall(record: dict) -> str:
    """Compare chunks with whole prompts, round by round."""
    pairs = list(zip(record["runs"]["whole prompts"], record["runs"]["chunks of 128"], strict=True))
    gaps = statistics.median(a["gap_ms_p99"] / b["gap_ms_p99"] for a, b in pairs)
    speed = statistics.median(b["output_tokens_per_s"] / a["output_tokens_per_s"] for a, b in pairs)
    wait = statistics.median(b["long_ttft_ms"] / a["long_ttft_ms"] for a, b in pairs)
    return (
        "Chunks of 128 against whole prompts, median of the rounds: the p99 of the others' gaps is "
        f"**{gaps:.1f} times** shorter, all together get {speed:.0%} of the throughput, and the "
        f"long prompt's first token takes {wait:.1f} times as long."
    )


def table_of_runs(record: dict, first_column: str) -> str:
    return table_of(
        [
            {
                first_column: name,
                "others' gap p50, ms": _middle(runs, "gap_ms_p50"),
                "p99 (the longest), ms": _spread(runs, "gap_ms_p99"),
                "long prompt's first token, ms": _middle(runs, "long_ttft_ms", ",.0f"),
                "output tok/s, all": _spread(runs, "output_tokens_per_s"),
                "steps": _middle(runs, "num_steps", ",.0f"),
            }
            for name, runs in record["runs"].items()
        ]
    )


def table_of_adaptive(record: dict) -> str:
    rows = []
    for target, (cold, *runs) in zip(record["config"]["targets_ms"], record["runs"].values()):
        times = [ms for run in runs for ms in run["chunk_step_ms"]]
        over = sum(ms > 1.25 * target for ms in times) / len(times)
        learning = percentile(cold["chunk_step_ms"], 90)
        rows.append(
            {
                "target, ms": f"{target:g}",
                "steps with a chunk p50, ms": f"{statistics.median(times):,.1f}",
                "p90, ms": f"{percentile(times, 90):,.1f}",
                "p99, ms": f"{percentile(times, 99):,.1f}",
                "more than 25 % over": f"{over:.0%}",
                "p90 while learning, ms": f"{learning:,.1f}",
                "chunks": f"{median_of(runs, 'num_chunks'):,.0f}",
                "long prompt's first token, ms": _spread(runs, "long_ttft_ms"),
                "others' gap p99, ms": _spread(runs, "gap_ms_p99"),
            }
        )
    return table_of(rows)


def table_of_attention(record: dict) -> str:
    rows = []
    for mix, times in record["layer_ms"].items():
        ratios = [a / b for a, b in zip(times["chapter 2"], times["chapter 6"], strict=True)]
        spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
        rows.append(
            {
                "one layer": mix,
                "chapter 2, ms": f"{statistics.median(times['chapter 2']):.2f}",
                "chapter 6, ms": f"{statistics.median(times['chapter 6']):.2f}",
                "times as fast": f"**{statistics.median(ratios):.2f}×** {spread}",
            }
        )
    return table_of(rows)


def tables_of_stall(record: dict) -> dict[str, str]:
    title = f"a prompt of {record['config']['long_prompt']:,} tokens arrives"
    return {"stall": table_of_runs(record, title), "stall_note": note_of_stall(record)}


PARTS = {
    "stall": Part(timed(measure_stall, CLOCK), {"stall": draw_stall}, tables_of_stall),
    "sweep": Part(
        timed(measure_sweep, CLOCK),
        {"sweep": draw_sweep},
        lambda record: {"sweep": table_of_runs(record, "chunk size")},
    ),
    "adaptive": Part(
        timed(measure_adaptive, CLOCK),
        {"adaptive": draw_adaptive},
        lambda record: {"adaptive": table_of_adaptive(record)},
    ),
    "attention": Part(
        timed(measure_attention, CLOCK),
        tables=lambda record: {"attention": table_of_attention(record)},
    ),
}

if __name__ == "__main__":
    run_lab(__file__, "06_chunked_prefill", PARTS)
