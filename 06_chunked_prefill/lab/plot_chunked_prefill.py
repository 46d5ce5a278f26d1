"""The figures and tables of chapter 6, drawn from its records.

    python 06_chunked_prefill/lab/plot_chunked_prefill.py   draw figures/ from records/
    python 06_chunked_prefill/lab/plot_chunked_prefill.py --tables   tables into README.md
    python 06_chunked_prefill/lab/plot_chunked_prefill.py --record stall  measure first: stall sweep
                                                                       adaptive attention

All are times and want a quiet machine. `--tiny` measures almost nothing and writes to build/. What
is measured stands in `plot_chunked_prefill_lab.py`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from common.bench.bench_record import (
    ROOT,
    describe_environment,
    made_on,
    markdown_table,
    percentile,
    read_record,
    replace_between_markers,
    write_record,
)
from plot_chunked_prefill_lab import (
    measure_adaptive,
    measure_attention,
    measure_stall,
    measure_sweep,
    median_of,
)

HERE = Path(__file__).resolve().parent
SMOKE = ROOT / "build" / "chunked-prefill-smoke" / "lab"
PARTS = {
    "stall": measure_stall,
    "sweep": measure_sweep,
    "adaptive": measure_adaptive,
    "attention": measure_attention,
}
BLUE, ORANGE, GREEN = "#1f4e79", "#c55a11", "#548235"


# -- figures


def draw_stall(record: dict) -> plt.Figure:
    """Steps as bars: where they stand on the clock, and how long they take."""
    systems = ("whole prompts", "chunks of 128")
    figure, axes = plt.subplots(
        2, 1, figsize=(8, 4.6), layout="constrained", sharex=True, sharey=True
    )
    for axis, system in zip(axes, systems):
        timeline = record["runs"][system][-1]["timeline"]
        for has_chunk, color, label in (
            (False, BLUE, "decodes only"),
            (True, ORANGE, "with a piece of the long prompt"),
        ):
            steps = [(t, ms) for t, ms, _, chunk in timeline if (chunk > 1) == has_chunk]
            axis.bar(
                [t for t, _ in steps],
                [ms for _, ms in steps],
                [ms for _, ms in steps],
                align="edge",
                color=color,
                edgecolor="white",
                linewidth=0.2,
                label=label,
            )
        axis.set(title=system, ylabel="a step takes, ms")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=9)
    axes[1].set_xlabel("ms since the first arrival")
    return figure


def draw_sweep(record: dict) -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    names = list(record["runs"])
    for axis, (name, label) in zip(
        axes,
        {
            "gap_ms_p99": "others, between tokens p99, ms",
            "long_ttft_ms": "newcomer's first token, ms",
            "output_tokens_per_s": "output tokens a second, all",
        }.items(),
    ):
        middle = [median_of(record["runs"][size], name) for size in names]
        low = [min(run[name] for run in record["runs"][size]) for size in names]
        high = [max(run[name] for run in record["runs"][size]) for size in names]
        axis.fill_between(range(len(names)), low, high, color=BLUE, alpha=0.15)
        axis.plot(range(len(names)), middle, "o-", color=BLUE)
        axis.set(xlabel="chunk size, tokens", ylabel=label, ylim=0)
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.grid(alpha=0.3)
    return figure


def draw_adaptive(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    targets = record["config"]["targets_ms"]
    for place, (_, *runs) in enumerate(record["runs"].values()):
        times = [ms for run in runs for ms in run["chunk_step_ms"]]
        spread = [place + 0.3 * (i / max(1, len(times) - 1) - 0.5) for i in range(len(times))]
        axis.plot(spread, times, ".", color=BLUE, alpha=0.4)
        axis.plot([place - 0.3, place + 0.3], [targets[place]] * 2, "-", color=ORANGE)
    axis.set(xlabel="target_step_ms", ylabel="steps with a chunk, ms", yscale="log")
    axis.set_xticks(range(len(targets)), [f"{ms:g}" for ms in targets])
    axis.grid(alpha=0.3)
    return figure


FIGURES = {"stall": draw_stall, "sweep": draw_sweep, "adaptive": draw_adaptive}


def draw(records: dict[str, dict], folder: Path) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "chunked_prefill", "svg.fonttype": "none", "font.size": 11}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES.keys() & records.keys():
        figure = FIGURES[name](records[name])
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


# -- tables


def _middle(runs: list[dict], name: str, form: str = ",.1f") -> str:
    return format(median_of(runs, name), form)


def _spread(runs: list[dict], name: str) -> str:
    values = [run[name] for run in runs]
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} - {max(values):,.1f})"


def note_of_stall(record: dict) -> str:
    """Chunks against whole prompts, round by round."""
    pairs = list(zip(record["runs"]["whole prompts"], record["runs"]["chunks of 128"], strict=True))
    gaps = statistics.median(a["gap_ms_p99"] / b["gap_ms_p99"] for a, b in pairs)
    speed = statistics.median(b["output_tokens_per_s"] / a["output_tokens_per_s"] for a, b in pairs)
    wait = statistics.median(b["long_ttft_ms"] / a["long_ttft_ms"] for a, b in pairs)
    return (
        "Chunks of 128 against whole prompts, median of the rounds: the p99 of the others' gaps is "
        f"**{gaps:.1f} times** shorter, all together get {speed:.0%} of the throughput, and the "
        f"newcomer waits {wait:.1f} times as long."
    )


def table_of_runs(record: dict, first_column: str) -> str:
    head = [
        first_column,
        "others, between tokens p50",
        "p99",
        "longest",
        "newcomer's first token",
        "output tok/s, all",
        "steps",
    ]
    rows = [
        [
            name,
            f"{_middle(runs, 'gap_ms_p50')} ms",
            f"{_spread(runs, 'gap_ms_p99')} ms",
            f"{_middle(runs, 'gap_ms_max')} ms",
            f"{_middle(runs, 'long_ttft_ms', ',.0f')} ms",
            _spread(runs, "output_tokens_per_s"),
            _middle(runs, "num_steps", ",.0f"),
        ]
        for name, runs in record["runs"].items()
    ]
    return markdown_table(head, rows)


def table_of_adaptive(record: dict) -> str:
    rows = []
    for target, (cold, *runs) in zip(record["config"]["targets_ms"], record["runs"].values()):
        times = [ms for run in runs for ms in run["chunk_step_ms"]]
        over = sum(ms > 1.25 * target for ms in times) / len(times)
        rows.append(
            [
                f"{target:g} ms",
                f"{statistics.median(times):,.1f} ms",
                f"{percentile(times, 90):,.1f} ms",
                f"{percentile(times, 99):,.1f} ms",
                f"{over:.0%}",
                f"{percentile(cold['chunk_step_ms'], 90):,.1f} ms",
                f"{median_of(runs, 'num_chunks'):,.0f}",
                f"{_spread(runs, 'long_ttft_ms')} ms",
                f"{_spread(runs, 'gap_ms_p99')} ms",
            ]
        )
    head = [
        "target",
        "steps with a chunk: p50",
        "p90",
        "p99",
        "more than 25 % over",
        "p90 in the round of learning",
        "chunks",
        "newcomer's first token",
        "others, between tokens p99",
    ]
    return markdown_table(head, rows)


def table_of_attention(record: dict) -> str:
    rows = []
    for mix, times in record["layer_ms"].items():
        ratios = [a / b for a, b in zip(times["chapter 2"], times["chapter 6"], strict=True)]
        rows.append(
            [
                mix,
                f"{statistics.median(times['chapter 2']):.2f} ms",
                f"{statistics.median(times['chapter 6']):.2f} ms",
                f"**{statistics.median(ratios):.2f}×** ({min(ratios):.2f} - {max(ratios):.2f})",
            ]
        )
    head = ["one layer", "chapter 2", "chapter 6", "times as fast"]
    return markdown_table(head, rows)


def make_tables(records: dict[str, dict]) -> dict[str, str]:
    tables = {}
    if "stall" in records:
        long_prompt = records["stall"]["config"]["long_prompt"]
        title = f"a prompt of {long_prompt:,} tokens arrives"
        tables["stall"] = table_of_runs(records["stall"], title)
        tables["stall_note"] = note_of_stall(records["stall"])
    if "sweep" in records:
        tables["sweep"] = table_of_runs(records["sweep"], "chunk size")
    if "adaptive" in records:
        tables["adaptive"] = table_of_adaptive(records["adaptive"])
    if "attention" in records:
        tables["attention"] = table_of_attention(records["attention"])
    return tables | {f"made_on_{name}": made_on(record) for name, record in records.items()}


def write_tables(records: dict[str, dict], readme: Path) -> None:
    tables = make_tables(records)
    if not readme.exists():
        print("\n\n".join(tables.values()))
        return
    text = readme.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = replace_between_markers(text, name, table)
    readme.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", nargs="+", choices=PARTS, default=[], metavar="PART", help="|".join(PARTS)
    )
    parser.add_argument("--tables", action="store_true", help="put the tables into README.md")
    parser.add_argument("--tiny", action="store_true", help="almost no work, into build/")
    options = parser.parse_args()
    folder = SMOKE if options.tiny else HERE
    paths = {part: folder / "records" / f"chunked_prefill_{part}.json" for part in PARTS}
    environment = describe_environment()  # before: its load average is that of the others
    for part in options.record:
        record = PARTS[part](tiny=options.tiny)
        record["config"]["clock"] = "time.perf_counter and time.monotonic"
        command = f"python 06_chunked_prefill/lab/plot_chunked_prefill.py --record {part}"
        write_record(paths[part], {"command": command, "environment": environment, **record})
    records = {part: read_record(path) for part, path in paths.items() if path.exists()}
    draw(records, folder.parent / "figures")
    if options.tables:
        write_tables(records, folder.parent / "README.md")


if __name__ == "__main__":
    main()
