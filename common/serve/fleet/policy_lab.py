"""A laboratory of routers' policies, SIMULATED: see `simulated_router.py` for what is assumed.

    python -m common.serve.fleet.policy_lab --trace FILE ...   runs; the record, and the tables
    python -m common.serve.fleet.policy_lab --tables           the tables alone, from the record

`plot_policies.py` draws it.
The record is made of Mooncake's synthetic and conversation traces (FAST'25). It depends on no
clock: the same commit and files give the same numbers on any machine, busy or not.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.serve.fleet.simulated_router import (
    DECODE_SECONDS,
    PREFILL_RATE,
    Policy,
    Served,
    simulate,
)
from prefix_workloads import TRACE_BLOCK_SIZE, TraceRequest, read_trace
from replay_trace import make_cache, num_distinct_blocks, replay
from workshop.measure.bench.bench_record import (
    markdown_table,
    percentiles,
    read_record,
    record_head,
    write_record,
)
from workshop.measure.bench.side_by_side import write_table

HERE = Path(__file__).parent
RECORD = HERE / "records" / "policies.json"
CAPACITY = 1000  # blocks of an engine
LOAD = 1.0
ENGINES = (4, 16, 64)
WEIGHT = 0.1
ALONE = Policy("turns")  # of one engine all policies are the same
POLICIES = {
    "round robin": ALONE,
    "power of two": Policy("two"),
    "tree, overlap alone": Policy("tree"),
    "exact, overlap alone": Policy("exact"),
    "tree, load weighed": Policy("tree", WEIGHT),
    "large tree, load weighed": Policy("tree", WEIGHT, 32.0),
    "exact, load weighed": Policy("exact", WEIGHT),
    "both, load weighed": Policy("both", WEIGHT),
}
SHOWN, ROUTERS = 16, 4  # of so many engines the tables say more: also with some routers in turn
WEIGHTS = (0.0, WEIGHT, 1.0, 3.0, 10.0)


def summary(
    trace: Sequence[TraceRequest], served: Sequence[Served], num_engines: int
) -> dict[str, Any]:
    computed, requests = [0] * num_engines, [0] * num_engines
    for request, one in zip(trace, served, strict=True):
        computed[one.engine] += request.input_length - one.hit
        requests[one.engine] += 1
    p50, p90, p99 = percentiles([one.first_token for one in served], [50, 90, 99])
    return {
        "num_tokens_expected": sum(one.expected for one in served),
        "num_tokens_hit": sum(one.hit for one in served),
        "computed_tokens": computed,
        "requests": requests,
        "first_token_s": {"p50": round(p50, 3), "p90": round(p90, 3), "p99": round(p99, 3)},
    }


def run_one(
    trace: Sequence[TraceRequest], policy: Policy, num_engines: int, num_routers: int
) -> dict[str, Any]:
    served = simulate(trace, policy, num_engines, CAPACITY, LOAD, num_routers)
    of_what = {**asdict(policy), "num_engines": num_engines, "num_routers": num_routers}
    print(of_what, flush=True)
    return {**of_what, **summary(trace, served, num_engines)}


def run_all(trace: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """A process for each core: the order in which they end changes nothing."""
    wanted = [(policy, num, 1) for num in ENGINES for policy in POLICIES.values()]
    wanted += [(ALONE, 1, 1)]
    wanted += [(policy, SHOWN, ROUTERS) for policy in POLICIES.values()]
    wanted += [(Policy("both", weight), SHOWN, 1) for weight in WEIGHTS]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(run_one, trace), *zip(*dict.fromkeys(wanted), strict=True)))


def measure(paths: Sequence[Path], num_requests: int, arguments: Sequence[str]) -> dict[str, Any]:
    record = record_head("common.serve.fleet.policy_lab", arguments)
    record["config"] = {
        "simulated": True,
        "capacity": CAPACITY,
        "block_size": TRACE_BLOCK_SIZE,
        "load": LOAD,
        "prefill_tokens_per_s": PREFILL_RATE,
        "decode_s_per_token": DECODE_SECONDS,
        "seed": 0,
    }
    record["traces"] = {}
    for path in paths:
        trace = read_trace(path)[:num_requests]
        limit = num_distinct_blocks(trace)
        record["traces"][path.stem.removeprefix("mooncake_").removesuffix("_trace")] = {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "num_requests": len(trace),
            "num_tokens": sum(request.input_length for request in trace),
            "num_distinct_blocks": limit,
            "num_tokens_hit_unbounded": replay(trace, make_cache("hash", limit)).num_tokens_hit,
            "runs": run_all(trace),
        }
    return record


# -- what is shown


def find(
    work: dict[str, Any], policy: Policy, num_engines: int, num_routers: int = 1
) -> dict[str, Any]:
    wanted = {**asdict(policy), "num_engines": num_engines, "num_routers": num_routers}
    return next(run for run in work["runs"] if wanted.items() <= run.items())


def hit_rate(work: dict[str, Any], run: dict[str, Any]) -> float:
    return run["num_tokens_hit"] / work["num_tokens"]


def busiest(run: dict[str, Any]) -> float:
    """What the busiest engine computes, as a multiple of the mean."""
    return max(run["computed_tokens"]) / statistics.mean(run["computed_tokens"])


def seconds(run: dict[str, Any]) -> str:
    p99 = run["first_token_s"]["p99"]
    return f"{p99:,.1f}" if p99 < 100 else f"{p99:,.0f}"


def policy_table(work: dict[str, Any]) -> str:
    head = ["policy", *(f"{num} engines find" for num in ENGINES)]
    head += [f"{SHOWN}, of {ROUTERS} routers", f"{SHOWN}: first token p99, s (busiest)"]
    rows = []
    for name, policy in POLICIES.items():
        run, runs = find(work, policy, SHOWN), [find(work, policy, num) for num in ENGINES]
        found = [hit_rate(work, one) for one in (*runs, find(work, policy, SHOWN, ROUTERS))]
        rows.append([name, *(f"{f:.1%}" for f in found), f"{seconds(run)} ({busiest(run):.1f})"])
    return markdown_table(head, rows)


def tables(record: dict[str, Any]) -> str:
    parts = []
    for name, work in record["traces"].items():
        alone = hit_rate(work, find(work, ALONE, 1))
        unbounded = work["num_tokens_hit_unbounded"] / work["num_tokens"]
        parts.append(
            f"Mooncake's {name} trace, the first {work['num_requests']:,} requests, "
            f"{work['num_tokens'] / 1e6:,.0f} million prompt tokens, "
            f"{work['num_distinct_blocks']:,} different blocks. One engine finds {alone:.1%}, one "
            f"whose cache never evicts {unbounded:.1%}.\n\n{policy_table(work)}"
        )
    head, rows = ["load weight"], [[f"{weight:g}"] for weight in WEIGHTS]
    for name, work in record["traces"].items():
        head += [f"{name}: found", "first token p99, s"]
        for row, weight in zip(rows, WEIGHTS, strict=True):
            run = find(work, Policy("both", weight), SHOWN)
            row += [f"{hit_rate(work, run):.1%}", seconds(run)]
    parts.append(f"`both`, {SHOWN} engines, by load weight:\n\n{markdown_table(head, rows)}")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, nargs="+", help="JSONL, as Mooncake's FAST'25")
    parser.add_argument("--requests", type=int, default=4000, help="the first so many of each")
    parser.add_argument("--tables", action="store_true", help="from the record, without running")
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    if not args.tables:
        if not args.trace or not all(path.exists() for path in args.trace):
            parser.error("--trace: Mooncake's traces, files of JSON lines")
        arguments = [Path(a).name if "/" in a else a for a in sys.argv[1:]]
        write_record(args.output, measure(args.trace, args.requests, arguments))
    record = read_record(args.output)
    print(tables(record))
    if args.output == RECORD:
        for page in ("README.md", "README.zh.md"):
            write_table(HERE / page, "policies", tables(record), record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
