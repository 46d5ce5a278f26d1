"""The ladder: one workload, one engine, and one more chapter in each configuration.

    python -m workshop.ladder                 measure, write the record, print the tables
    python -m workshop.ladder --smoke         the same with almost no work: does it run?
    python -m workshop.ladder --table         print the tables of the record
    python -m workshop.ladder --write-readme  put them into README.md, this folder's and chapters'

There are two regimes: many users, who queue, and few, who do not. Each seed draws a different
workload (`ladder_workload.py`). All configurations serve it, one after the other, and each seed
starts with a different one. Each chapter also has the work in which its question arises, served
with the chapter and without. A table shows the median over the seeds and the extremes, also of
configurations that lose. The configurations are systems of the benchmark (`bench_systems.py`), with
the same weights and the same KV memory. The CPU is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.engine_config import SHIPPED_CHECKPOINT
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from workshop.measure.bench.bench_command import BENCH, Driver, Tables, describe_malloc
from workshop.measure.bench.bench_models import BenchModels, choose_dtype, load_models
from workshop.measure.bench.bench_record import (
    describe_latency,
    read_record,
    record_head,
    rounded,
    write_record,
)
from workshop.measure.bench.bench_systems import CHUNK, serve_timed
from workshop.measure.bench.bench_work import BenchRequest, Limits, Served
from workshop.measure.bench.ladder_table import render, render_gains, render_rows
from workshop.measure.bench.ladder_workload import (
    MAX_TOKENS,
    QUESTIONS,
    REGIMES,
    make_workload,
    min_prompt_tokens,
)
from workshop.measure.rounds import Measured, measure_in_turn

RECORD = BENCH / "records" / "ladder.json"
# Tokens that no workload has, so that no prompt is known.
WARM_UP = [BenchRequest([7] * 20, 4, 4), BenchRequest([9] * 40, 4, 4)]
NUM_RESERVATIONS = 3  # of the longest request, which the KV memory holds without pages


# Title, and system of the benchmark.
RUNGS = {
    "one-at-a-time": ("one at a time", "one-at-a-time"),
    "static": ("static batch", "static"),
    "continuous": ("1 continuous batching", "padded"),
    "paged": ("2 paged KV", "paged"),
    "prefix-cache": ("3 prefix cache", "prefix-cache"),
    "preempting": ("4 preempting scheduler", "two-phase"),
    "speculative": ("5 speculative decoding", "speculative"),
    "chunked": ("6 chunked prefill", "chunked"),
}


def configs_of(name: str) -> list[str]:
    """All configurations for a regime; for a chapter's question its own and the one before."""
    configs = list(RUNGS)
    return configs[configs.index(name) - 1 :][:2] if name in RUNGS else configs


def describe(served: Served, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """Return the numbers that a table shows for one run. Times are in milliseconds."""
    waits = [
        [at - request.arrival_time for at in times]
        for times, request in zip(served.token_times, requests, strict=True)
    ]
    latencies = {
        f"{name}_{p}": value
        for name, percentiles in describe_latency(waits).items()
        for p, value in percentiles.items()
    }
    seconds = max(times[-1] for times in served.token_times) - requests[0].arrival_time
    speed = round(sum(map(len, served.token_ids)) / seconds, 2)
    return {"output_tokens_per_s": speed} | latencies | rounded(served.details)


def run_config(
    models: BenchModels,
    limits: Limits,
    workloads: Sequence[Sequence[BenchRequest]],
    rungs: dict[str, Any],
    config: str,
    seed: int,
    place: int,
) -> None:
    served = serve_timed(RUNGS[config][1], models, limits, WARM_UP, workloads[seed])
    rungs[config]["runs"].append({"seed": seed, **describe(served, workloads[seed])})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    freeze_gc_heap()
    torch.set_num_threads(torch.get_num_threads())  # chosen, so the engine keeps it
    dtype = choose_dtype("auto")
    models = load_models("tiny", dtype)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    regimes = {
        name: replace(regime, num_requests=5, num_long=min(1, regime.num_long), arrivals_per_s=10.0)
        if args.smoke
        else regime
        for name, regime in (REGIMES | QUESTIONS).items()
    }
    workloads = {
        name: [make_workload(tokenizer, regime, seed) for seed in range(args.rounds)]
        for name, regime in regimes.items()
    }
    limits = {
        name: Limits(longest=longest, num_positions=NUM_RESERVATIONS * longest)
        for name, seeds in workloads.items()
        for longest in [max(len(r.prompt_token_ids) for w in seeds for r in w) + MAX_TOKENS]
    }
    record: dict[str, Any] = {
        **record_head("workshop.ladder", args.argv),
        "config": {
            "clock": "time.monotonic, in seconds",
            "model": "tiny",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "malloc": describe_malloc(),
            "seeds": args.rounds,
            "chunk": CHUNK,
            "max_tokens": MAX_TOKENS,
        },
        "regimes": {},
        "questions": {},
    }
    work: list[Measured] = []
    for name, regime in regimes.items():
        rungs = {config: {"title": RUNGS[config][0], "runs": []} for config in configs_of(name)}
        requests = workloads[name]
        record["regimes" if name in REGIMES else "questions"][name] = {
            **asdict(regime),
            "longest": limits[name].longest,
            "num_positions": limits[name].num_positions,
            "prompt_tokens": [[len(r.prompt_token_ids) for r in w] for w in requests],
            "output_tokens": [[r.num_outputs for r in w] for w in requests],
            "min_prompt_tokens": [
                min_prompt_tokens(r.prompt_token_ids for r in w) for w in requests
            ],
            "rungs": rungs,
        }
        run = partial(run_config, models, limits[name], requests, rungs)
        work.append(Measured(name, list(rungs), run))
    measure_in_turn(work, args.rounds, partial(write_record, args.record, record))
    return record


# -- the command


def tables(path: Path) -> Tables:
    record = read_record(path)
    return {
        "workshop/measure/bench/README.md ladder": render(record),
        "README.md ladder_gains": render_gains(record),
        **{f"{chapter}/README.md ladder_row": row for chapter, row in render_rows(record).items()},
    }


def run(args: argparse.Namespace) -> int:
    print("\n" + render(measure(args)))
    return 0


DRIVER = Driver(
    name="ladder",
    rounds="--seeds",
    record="--record",
    committed=RECORD,
    announce=lambda args: "8 rungs in two regimes, and 6 in their own, on the CPU; 15 minutes",
    measure=run,
    tables=tables,
)
main = DRIVER.main
