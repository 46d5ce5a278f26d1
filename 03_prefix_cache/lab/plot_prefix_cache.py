"""The figures and tables of chapter 3, drawn from its records.

    python 03_prefix_cache/lab/plot_prefix_cache.py   draw figures/ from records/
    python 03_prefix_cache/lab/plot_prefix_cache.py --tables   tables into README.md too
    python 03_prefix_cache/lab/plot_prefix_cache.py --record ops engine loss store  measure first
    python 03_prefix_cache/lab/plot_prefix_cache.py --record trace --trace FILE  replay

Each part is a record of its own and takes a minute or two. `--tiny` measures almost nothing and
writes to build/, to see that everything runs. What is timed stands in `plot_prefix_cache_ops.py`,
`..._workload.py` and `..._engine.py`; the tree is drawn in `..._tree.py`, the tables are made in
`..._tables.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from common.bench.bench_record import (
    ROOT,
    describe_environment,
    percentile,
    read_record,
    write_record,
)
from plot_prefix_cache_tables import NAMES, hit_rate, in_order, write_tables
from plot_prefix_cache_tree import draw_tree
from prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest, read_trace
from replay_trace import CACHES, make_cache, num_distinct_blocks, replay

HERE = Path(__file__).resolve().parent
SMOKE = ROOT / "build" / "prefix-cache-smoke" / "lab"
PARTS = ("ops", "trace", "engine", "loss", "store")
CAPACITIES = (100, 300, 1000, 2000, 3000, 5000, 7000, 10000, 15000, 20000, 30000)

# -- records


def record_part(part: str, options: argparse.Namespace) -> dict:
    """Raises `ValueError` or `OSError` if a trace is asked for that is not there or broken."""
    tiny = options.tiny
    if part == "trace":
        return record_trace(options.trace, tiny=tiny)
    if part == "store":
        from measure_mooncake import measure

        config = {"kv_nbytes": 1_000_000, "clock": "time.perf_counter"}
        return {"config": config, "ms": measure(config["kv_nbytes"], 3 if tiny else 50)}
    if part == "ops":
        from plot_prefix_cache_ops import measure_operations
        from plot_prefix_cache_workload import measure_workload

        operations = measure_operations(5 if tiny else 50, tiny=tiny)
        return {**operations, "workload": measure_workload(3 if tiny else 5)}
    from plot_prefix_cache_engine import measure_engine, measure_engine_loss

    if part == "engine":
        return measure_engine(1 if tiny else 4, tiny=tiny)
    return measure_engine_loss(4 if tiny else 80)


def record_trace(path: Path | None, *, tiny: bool) -> dict:
    if path is None:
        raise ValueError("--record trace needs --trace FILE")
    trace = read_trace(path)[: 200 if tiny else None]
    limit = num_distinct_blocks(trace)
    capacities = [*(c for c in CAPACITIES if c < limit), limit]
    full = [_only_full_blocks(request) for request in trace]
    return {
        "config": {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "block_size": TRACE_BLOCK_SIZE,
            "num_requests": len(trace),
            "num_distinct_blocks": limit,
        },
        "full_blocks_only": asdict(replay(full, make_cache("hash", limit))),
        **{
            name: [asdict(replay(trace, make_cache(name, capacity))) for capacity in capacities]
            for name in CACHES
        },
    }


def _only_full_blocks(request: TraceRequest) -> TraceRequest:
    num_full = request.input_length // TRACE_BLOCK_SIZE
    return TraceRequest(
        request.timestamp_ms,
        request.input_length,
        request.output_length,
        request.hash_ids[:num_full],
    )


# -- figures

COLORS = {"off": "#a6a6a6", "hash": "#1f4e79", "radix": "#c55a11"}
MARKERS = ["o", "s", "^", "D"]


def plot_spread(axis: plt.Axes, times: dict[str, list[float]], **style: object) -> None:
    """Medians as a line, and the stretch from the 10th to the 90th percentile behind it."""
    xs = [int(x) for x in times]
    axis.plot(xs, [statistics.median(values) for values in times.values()], **style)
    low, high = ([percentile(values, p) for values in times.values()] for p in (10, 90))
    axis.fill_between(xs, low, high, color=style["color"], alpha=0.2, linewidth=0)


def draw_operations(record: dict) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, cache in zip(axes, CACHES):
        sizes = record["sizes"][cache]
        shades = plt.get_cmap("viridis")([0.05, 0.35, 0.6, 0.85])
        for operation, marker, color in zip(next(iter(sizes.values())), MARKERS, shades):
            times = {size: runs[operation] for size, runs in sizes.items()}
            plot_spread(axis, times, marker=marker, color=color, label=operation)
        axis.set(title=NAMES[cache], xlabel="cached blocks", xscale="log", ylim=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("µs for a prompt of 4,096 tokens")
    axes[1].legend(frameon=False, ncols=2)
    largest, smallest = (pick(map(int, sizes)) for pick in (max, min))
    growth = max(
        statistics.median(runs[str(largest)][operation])
        / statistics.median(runs[str(smallest)][operation])
        for runs in record["sizes"].values()
        for operation in runs[str(smallest)]
    )
    figure.suptitle(
        f"{largest // smallest:,} times the blocks: at most {growth:.1f} times the cost"
    )
    return figure


def draw_depth(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for cache, marker in zip(CACHES, MARKERS):
        style = {"color": COLORS[cache], "marker": marker, "label": NAMES[cache]}
        plot_spread(axis, record["depths"][cache], **style)
    axis.set(
        title="A radix match costs its nodes, a hash chain its blocks",
        xlabel="nodes on the path of a 4,096-token prompt",
        ylabel="µs to match it",
        xscale="log",
        ylim=0,
    )
    ticks = [int(depth) for depth in record["depths"]["radix"]]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def draw_workload(record: dict) -> plt.Figure:
    workload = record["workload"]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for kind, run in workload["kinds"].items():
        cache, block_size = kind.split(", ")
        each = [statistics.median(times) for times in zip(*run["us"], strict=True)]
        total = [sum(each[: n + 1]) / 1e3 for n in range(len(each))]
        label = f"{NAMES[cache]}, blocks of {block_size}: {run['hit_rate']:.1%} hit"
        dashes = "--" if block_size == "1" else "-"
        axis.plot(range(1, len(each) + 1), total, dashes, color=COLORS[cache], label=label)
    axis.set(
        title="One workload: what is hit, and what that costs",
        xlabel="requests served",
        ylabel="time in the cache so far, ms",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure


def draw_hit_rate(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for cache, marker, dashes in zip(CACHES, ("o", "x"), ("-", ":")):
        capacities = [run["capacity"] for run in record[cache]]
        rates = [100 * hit_rate(run) for run in record[cache]]
        style = {"color": COLORS[cache], "marker": marker, "label": NAMES[cache]}
        axis.plot(capacities, rates, dashes, **style)
    limit = 100 * hit_rate(record["hash"][-1])
    axis.axhline(limit, color=COLORS["off"], label=f"nothing is evicted: {limit:.1f} %")
    axis.set(
        title=f"{record['config']['num_requests']:,} requests of a published trace",
        xlabel=f"capacity, blocks of {TRACE_BLOCK_SIZE} tokens",
        ylabel="prompt tokens found, %",
        xscale="log",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="center left")
    return figure


def draw_shared(record: dict) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, times), marker in zip(record["shared_ms"].items(), MARKERS):
        style = {"color": COLORS[name], "marker": marker, "label": NAMES[name]}
        plot_spread(axis, times, **style)
    length = record["config"]["prompt_len"]
    axis.set(
        title=f"Prompts of {length:,} tokens: only what is new costs time",
        xlabel="shared prefix, tokens",
        ylabel="time to first token, ms",
        ylim=0,
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="lower left")
    return figure


def draw_families(record: dict) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    families = in_order(record["families"])
    for shift, name in enumerate(COLORS):
        places = [place + 0.27 * (shift - 1) for place in range(len(families))]
        style = {"width": 0.25, "color": COLORS[name], "label": NAMES[name]}
        computed = [100 * f["num_computed"][name] / f["num_prompt"] for f in families.values()]
        left.bar(places, computed, **style)
        right.bar(
            places, [statistics.median(f["ttft_ms"][name]) for f in families.values()], **style
        )
    left.set(title="Prompt tokens computed", ylabel="% of prompt tokens")
    right.set(title="Time to first token, median", ylabel="ms")
    for axis in (left, right):
        axis.set_xticks(range(len(families)), list(families))
        axis.set_xlabel("family of requests")
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(COLORS), frameon=False)
    return figure


FIGURES = {
    "operations": ("ops", draw_operations),
    "depth": ("ops", draw_depth),
    "workload": ("ops", draw_workload),
    "hit_rate": ("trace", draw_hit_rate),
    "shared_prefix": ("engine", draw_shared),
    "families": ("engine", draw_families),
}


def draw(records: dict[str, dict], folder: Path) -> None:
    # Text stays text, and what varies from run to run (ids, the date) is fixed: no diff.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "prefix_cache", "svg.fonttype": "none", "font.size": 11}
    )
    folder.mkdir(parents=True, exist_ok=True)
    figures = {n: (lambda p=p, f=f: f(records[p])) for n, (p, f) in FIGURES.items() if p in records}
    for name, make in {**figures, "radix_tree": draw_tree}.items():
        figure = make()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--record", nargs="+", choices=PARTS, default=[], metavar="PART", help="|".join(PARTS)
    )
    parser.add_argument("--trace", type=Path, help="for --record trace: JSONL, see replay_trace.py")
    parser.add_argument("--tables", action="store_true", help="put the tables into README.md")
    parser.add_argument("--tiny", action="store_true", help="almost no work, into build/")
    options = parser.parse_args()
    folder = SMOKE if options.tiny else HERE
    for part in options.record:
        environment = describe_environment()  # before: its load average is that of the others
        try:
            record = record_part(part, options)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        command = f"python 03_prefix_cache/lab/plot_prefix_cache.py --record {part}"
        command += f" --trace {options.trace.name}" if part == "trace" else ""
        head = {"command": command, "environment": environment}
        write_record(folder / "records" / f"prefix_cache_{part}.json", {**head, **record})
    paths = {part: folder / "records" / f"prefix_cache_{part}.json" for part in PARTS}
    records = {part: read_record(path) for part, path in paths.items() if path.exists()}
    draw(records, folder.parent / "figures")
    if options.tables:
        write_tables(records, folder.parent / "README.md")


if __name__ == "__main__":
    main()
