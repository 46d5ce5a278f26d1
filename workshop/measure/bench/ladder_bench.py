"""The ladder: one workload, one engine, and one more chapter in each configuration.

    python -m workshop.ladder                 measure, write the record, print the tables
    python -m workshop.ladder --smoke         the same with almost no work: does it run?
    python -m workshop.ladder --table         print the tables of the record
    python -m workshop.ladder --write-readme  put them into README.md, this folder's and chapters'

There are two regimes: many users, who queue, and few, who do not. Each seed draws a different
workload (`ladder_workload.py`). All configurations serve it, one after the other, and each seed
starts with a different one. Each chapter also has the work in which its question arises, served
with the chapter and without. A table shows the median over the seeds and the extremes, also of
configurations that lose. `ladder_systems.py` has the configurations. The CPU is measured.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from workshop.measure.bench.bench_command import Driver, Tables, describe_malloc
from workshop.measure.bench.bench_record import ROOT, read_record, record_head, write_record
from workshop.measure.bench.ladder_table import (
    render,
    render_gains,
    render_rows,
    render_short,
)
from workshop.measure.rounds import rotated

RECORD = ROOT / "workshop" / "measure" / "bench" / "records" / "ladder.json"
NUM_RESERVATIONS = 3  # of the longest request, which the KV memory holds without pages


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from common.engine_config import SHIPPED_CHECKPOINT
    from common.requests.gc_utils import freeze_gc_heap
    from common.requests.tokenizer import load_tokenizer
    from workshop.measure.bench.bench_models import choose_dtype, load_models
    from workshop.measure.bench.bench_work import Limits
    from workshop.measure.bench.ladder_systems import CHUNK, RUNGS, configs_of, describe
    from workshop.measure.bench.ladder_workload import (
        MAX_TOKENS,
        QUESTIONS,
        REGIMES,
        make_workload,
        min_prompt_tokens,
    )

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
            "max_num_seqs": limits["many"].max_num_seqs,
            "block_size": limits["many"].block_size,
        },
        "regimes": {},
        "questions": {},
    }
    work = []
    for name, regime in regimes.items():
        entry = record["regimes" if name in REGIMES else "questions"][name] = {
            "title": regime.title,
            "num_requests": regime.num_requests,
            "num_long": regime.num_long,
            "arrivals_per_s": regime.arrivals_per_s,
            "longest": limits[name].longest,
            "num_positions": limits[name].num_positions,
            "prompt_tokens": [[len(r.prompt_token_ids) for r in w] for w in workloads[name]],
            "output_tokens": [[r.num_outputs for r in w] for w in workloads[name]],
            "min_prompt_tokens": [
                min_prompt_tokens(r.prompt_token_ids for r in w) for w in workloads[name]
            ],
            "rungs": {
                config: {"title": RUNGS[config][0], "runs": []} for config in configs_of(name)
            },
        }
        work.append((name, entry["rungs"]))
    num_runs = args.rounds * sum(len(configs) for _, configs in work)
    with tqdm(total=num_runs, unit="run", disable=None) as bar:
        for seed in range(args.rounds):
            for name, configs in work:
                requests, tokens = workloads[name][seed], {}
                for config in rotated(configs, seed):
                    bar.set_description(f"{name}, seed {seed}, {config}")
                    gc.collect()
                    outcome = RUNGS[config][1](models, limits[name], requests)
                    tokens[config] = outcome.token_ids
                    run = {"seed": seed, **describe(outcome, requests)}
                    configs[config]["runs"].append(run)
                    bar.update()
                lowest = tokens[next(iter(configs))]
                for config, own in tokens.items():  # floating point may break ties differently
                    same = sum(own[i] == lowest[i] for i in own)
                    configs[config]["runs"][-1]["same_tokens"] = same
                write_record(args.record, record)
    return record


# -- the command


def tables(path: Path) -> Tables:
    record = read_record(path)
    shown = (render(record), render_short(record), render_gains(record))
    return Tables(*shown, render_rows(record))


def announce(args: argparse.Namespace) -> str:
    return "8 rungs in two regimes, and 6 in their own, on the CPU; about 15 minutes"


def run(args: argparse.Namespace) -> int:
    print("\n" + render(measure(args)))
    return 0


DRIVER = Driver(
    name="ladder",
    description=__doc__ or "",
    rounds="--seeds",
    record="--record",
    committed=RECORD,
    smoke=ROOT / "build" / "ladder-smoke.json",
    announce=announce,
    measure=run,
    tables=tables,
)
main = DRIVER.main
