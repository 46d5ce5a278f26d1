"""The ladder: one workload, one engine, and one chapter more on each rung.

    python -m common.ladder                     measure, write the record, print the tables
    python -m common.ladder --smoke             the same with almost no work, to see that it runs
    python -m common.ladder --table             print the tables of the record
    python -m common.ladder --write-readme      put them between the markers in README.md

Two regimes: many users, who queue, and few, who do not. Each seed draws a workload of its own
(`ladder_workload.py`); all rungs serve it, one after the other, each seed beginning with another
rung. A table shows the median over the seeds and the extremes. Rungs that lose stay in it. What the
rungs are is in `ladder_systems.py`. It measures the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.bench.bench_record import (
    ROOT,
    describe_environment,
    made_on,
    markdown_table,
    read_record,
    replace_between_markers,
    summarise,
    write_record,
)

RECORD = ROOT / "common" / "bench" / "records" / "ladder.json"
SMOKE_RECORD = ROOT / "build" / "ladder-smoke.json"
NUM_RESERVATIONS = 3  # of the longest request: what the KV memory holds without pages


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from common.bench.bench import choose_dtype, describe_malloc, load_models, rotated
    from common.bench.ladder_systems import CHUNK, RUNGS, Limits, describe
    from common.bench.ladder_workload import MAX_TOKENS, REGIMES, make_workload
    from common.engine_config import SHIPPED_CHECKPOINT
    from common.tokenizer import load_tokenizer

    dtype = choose_dtype("auto")
    models = load_models("tiny", dtype)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    regimes = {
        name: replace(regime, num_requests=5, num_long=1, arrivals_per_s=10.0)
        if args.smoke
        else regime
        for name, regime in REGIMES.items()
    }
    workloads = {
        name: [make_workload(tokenizer, regime, seed) for seed in range(args.seeds)]
        for name, regime in regimes.items()
    }
    longest = max(
        len(request.prompt_token_ids) + MAX_TOKENS
        for workload in workloads.values()
        for requests in workload
        for request in requests
    )
    limits = Limits(longest=longest, num_positions=NUM_RESERVATIONS * longest)
    record: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "common.bench.ladder_bench", *args.argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": describe_environment(),
        "config": {
            "clock": "time.monotonic, in seconds",
            "model": "tiny",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "malloc": describe_malloc(),
            "seeds": args.seeds,
            "chunk": CHUNK,
            "max_tokens": MAX_TOKENS,
            "longest": longest,
            "num_positions": limits.num_positions,
            "max_num_seqs": limits.max_num_seqs,
            "block_size": limits.block_size,
        },
        "regimes": {},
    }
    for name, regime in regimes.items():
        record["regimes"][name] = {
            "title": regime.title,
            "num_requests": regime.num_requests,
            "num_long": regime.num_long,
            "arrivals_per_s": regime.arrivals_per_s,
            "prompt_tokens": [[len(r.prompt_token_ids) for r in w] for w in workloads[name]],
            "output_tokens": [[r.num_outputs for r in w] for w in workloads[name]],
            "rungs": {rung: {"title": title, "runs": []} for rung, (title, _) in RUNGS.items()},
        }
    with tqdm(total=len(regimes) * args.seeds * len(RUNGS), unit="run", disable=None) as bar:
        for seed in range(args.seeds):
            for name, regime in record["regimes"].items():
                requests, tokens = workloads[name][seed], {}
                for rung in rotated(list(RUNGS), seed):
                    bar.set_description(f"{name}, seed {seed}, {rung}")
                    gc.collect()
                    outcome = RUNGS[rung][1](models, limits, requests)
                    tokens[rung] = outcome.token_ids
                    run = {"seed": seed, **describe(outcome, requests)}
                    regime["rungs"][rung]["runs"].append(run)
                    bar.update()
                for rung, own in tokens.items():  # floating point may break ties differently
                    same = sum(own[i] == tokens["one-at-a-time"][i] for i in own)
                    regime["rungs"][rung]["runs"][-1]["same_tokens"] = same
                write_record(args.record, record)
    return record


# -- tables


def render(record: dict[str, Any]) -> str:
    return "\n\n".join([*(_regime(r) for r in record["regimes"].values()), made_on(record)])


def _regime(regime: dict[str, Any]) -> str:
    head = [
        f"{regime['title']}: {regime['num_requests']} requests, "
        f"{regime['arrivals_per_s']:g} a second, {regime['num_long']} long",
        "output tok/s",
        "lowest-highest",
        "TTFT p50 / p99",
        "between tokens p50 / p99",
        "KV waste",
        "prefix hits",
        "preempted",
        "guesses right",
        "tokens a pass",
        "steps",
    ]
    return markdown_table(head, [_row(rung) for rung in regime["rungs"].values()])


def _row(rung: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        found = summarise([run[name] for run in rung["runs"] if name in run])
        return "" if found is None else format(found.median, form)

    speed = summarise([run["output_tokens_per_s"] for run in rung["runs"]])
    return [
        rung["title"],
        f"{speed.median:,.0f}",
        f"{speed.low:,.0f}-{speed.high:,.0f}",
        f"{shown('ttft_ms_p50', ',.0f')} / {shown('ttft_ms_p99', ',.0f')} ms",
        f"{shown('inter_token_ms_p50', '.1f')} / {shown('inter_token_ms_p99', ',.0f')} ms",
        shown("kv_waste", ".0%"),
        shown("prefix_hits", ".0%"),
        shown("preemptions", ",.0f"),
        shown("acceptance", ".0%"),
        shown("tokens_per_pass", ".2f"),
        shown("num_steps", ",.0f"),
    ]


# -- the process


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.ladder", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=None, help="workloads (default 3)")
    parser.add_argument("--smoke", action="store_true", help="5 requests, 1 seed")
    parser.add_argument("--malloc", choices=("tuned", "default"), default="tuned",
                        help="as in common.bench")  # fmt: skip
    parser.add_argument("--record", type=Path, help="file of the record")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--write-readme", action="store_true", help="only write them to README.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.seeds = args.seeds if args.seeds is not None else 1 if args.smoke else 3
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}: it must be >= 1")
    args.record = args.record or (SMOKE_RECORD if args.smoke else RECORD)
    args.argv = list(argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    from common.bench.bench import restart_with

    args = parse(sys.argv[1:] if argv is None else argv)
    if args.table or args.write_readme:
        table = render(read_record(args.record))
        if args.table:
            print(table)
        if args.write_readme:
            text = args.readme.read_text(encoding="utf-8")
            args.readme.write_text(replace_between_markers(text, "ladder", table), encoding="utf-8")
        return 0
    environment = restart_with(args)
    if environment is not None and argv is None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    print("ladder: measures 8 rungs in two regimes, on the CPU; about 10 minutes", flush=True)
    print("\n" + render(measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
