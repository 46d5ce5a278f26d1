"""The tables of chapter 3, made from its records for `plot_prefix_cache.py --tables`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from workshop.measure.bench.bench_record import markdown_table, percentiles
from workshop.measure.prefix_workloads import TRACE_BLOCK_SIZE
from workshop.measure.replay_trace import CACHES

NAMES = {"off": "no cache", "hash": "hash chain", "radix": "radix tree"}


def hit_rate(run: dict) -> float:
    return run["num_tokens_hit"] / run["num_tokens"]


def in_order(families: dict[str, dict]) -> dict[str, dict]:
    """Sort the families from the most shared tokens to none."""
    left = {name: f["num_computed"]["hash"] / f["num_prompt"] for name, f in families.items()}
    return {name: families[name] for name in sorted(families, key=left.__getitem__)}


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return `median (10th - 90th percentile)`."""
    shown = [f"{value:,.{digits}f}" for value in percentiles(values, [50, 10, 90])]
    return f"{shown[0]} ({shown[1]} - {shown[2]})"


def tables_of_ops(record: dict) -> dict[str, str]:
    sizes = record["sizes"]
    rows = [
        [
            f"{operation}, {NAMES[cache]}",
            *(spread(runs[operation]) for runs in sizes[cache].values()),
        ]
        for operation in next(iter(sizes["hash"].values()))
        for cache in CACHES
    ]
    head = ["µs for 4,096 tokens", *(f"{int(size):,} blocks" for size in sizes["hash"])]
    prompts = [
        [DESIGNS[name], spread(times["new"]), spread(times["known"])]
        for name, times in record["prompts"].items()
    ]
    if record["config"]["xxhash"] is None:
        prompts.append([f"{DESIGNS['dict, xxhash']}: not measured, package missing", "-", "-"])
    workload = [
        [
            f"{NAMES[kind.split(', ')[0]]}, blocks of {kind.split(', ')[1]}",
            f"{run['hit_rate']:.1%}",
            f"{run['num_evicted_tokens']:,}",
            spread([statistics.mean(times) for times in run["us"]]),
        ]
        for kind, run in record["workload"]["kinds"].items()
    ]
    return {
        "operations": markdown_table(head, rows),
        "prompt": markdown_table(["µs for 4,096 tokens", "new, evicts another", "known"], prompts),
        "workload": markdown_table(
            ["cache", "tokens hit", "tokens evicted", "µs a request"], workload
        ),
    }


DESIGNS = {
    "hash": "hash chain of this chapter, blake2b",
    "radix": "radix tree of this chapter",
    "dict, blake2b": "dictionary of chained hashes (after nano-vllm), blake2b",
    "dict, xxhash": "dictionary of chained hashes (after nano-vllm), xxhash",
}


def tables_of_trace(record: dict) -> dict[str, str]:
    runs = zip(record["hash"], record["radix"], strict=True)
    rows = [
        [
            f"{a['capacity']:,}",
            f"{a['capacity'] * TRACE_BLOCK_SIZE / 1e6:.2f}",
            f"{hit_rate(a):.1%}",
            f"{hit_rate(b):.1%}",
        ]
        for a, b in runs
    ]
    rows[-1][0] += ", nothing evicted"
    head = ["capacity, blocks of 512", "million tokens", "hash chain hits", "radix tree hits"]
    return {"trace": markdown_table(head, rows)}


def tables_of_engine(record: dict) -> dict[str, str]:
    rows = []
    for family, kept in in_order(record["families"]).items():
        for name in NAMES:
            computed = kept["num_computed"][name]
            rows.append(
                [
                    f"{family}, {NAMES[name]}",
                    f"{kept['num_prompt']:,}",
                    f"{computed:,}",
                    f"{1 - computed / kept['num_prompt']:.1%}",
                    spread(kept["ttft_ms"][name]),
                ]
            )
    head = ["requests", "prompt tokens", "computed", "hit", "ms to first token"]
    shared = record["shared_ms"]
    by_length = [
        [f"{int(length):,}", *(spread(shared[name][length]) for name in NAMES)]
        for length in shared["off"]
    ]
    return {
        "families": markdown_table(head, rows),
        "shared": markdown_table(["shared tokens", *(NAMES[name] for name in NAMES)], by_length),
    }


def tables_of_loss(record: dict) -> dict[str, str]:
    """Compare each request with itself in the engine without a cache."""
    rows = []
    for name in ("hash", "radix"):
        cells = [NAMES[name]]
        for kind in ("first_token_ms", "whole_ms"):
            ratios = [a / b for a, b in zip(record[kind][name], record[kind]["off"], strict=True)]
            quarters = (100 * (ratio - 1) for ratio in percentiles(ratios, [50, 25, 75]))
            cells.append("{:+.1f} % ({:+.1f} - {:+.1f})".format(*quarters))
        rows.append(cells)
    head = ["no prefix shared, processor time", "to the first token", "whole request"]
    return {"loss": markdown_table(head, rows)}


def tables_of_store(record: dict) -> dict[str, str]:
    rows = [[operation, spread(times, 2)] for operation, times in record["ms"].items()]
    head = [f"{record['config']['kv_nbytes'] / 1e6:.0f} MB, two processes, loopback TCP", "ms"]
    return {"store": markdown_table(head, rows)}
