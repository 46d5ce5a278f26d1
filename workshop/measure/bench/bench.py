"""The benchmark: the engine, its own baselines and `transformers`, side by side in one run.

    python -m workshop.bench                 measure, write records, print the tables
    python -m workshop.bench --smoke         the same with almost no work: does it run?
    python -m workshop.bench --table         print the tables of the existing records
    python -m workshop.bench --write-readme  put them into README.md and this folder's

vLLM's CPU build is another system where it is installed: `vllm_system.py`.

The runs of the systems are interleaved. Each round runs every system once and starts with a
different one, so a machine that grows slower or busier does so for all. A table shows the median
and the extremes of the rounds. Every run of a system sets it up from scratch, lets it serve two
short requests that are not counted, and then serves the whole workload.

The work and the definition of useful tokens are in `bench_work.py`, the systems in
`bench_systems.py`, the floor of a decode step in `bench_roofline.py`. The benchmark measures the
CPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from common.requests.gc_utils import freeze_gc_heap
from workshop.measure.bench.bench_command import BENCH, Driver, describe_malloc
from workshop.measure.bench.bench_models import choose_dtype, load_models
from workshop.measure.bench.bench_record import (
    describe_latency,
    record_head,
    rounded,
    write_record,
)
from workshop.measure.bench.bench_roofline import (
    measure_bandwidth,
    measure_linear,
)
from workshop.measure.bench.bench_systems import serve_timed
from workshop.measure.bench.bench_table import render, tables_of
from workshop.measure.bench.bench_work import CannotRunError, Limits, make_requests
from workshop.measure.bench.vllm_system import is_installed
from workshop.measure.rounds import Measured, measure_in_turn

# The systems with their titles in the tables; `bench_systems.py` says more.
TITLES = {
    "one-at-a-time": "one at a time (paged engine, one request in flight)",
    "static": "static batches (chapter 1's baseline)",
    "padded": "chapter 1: continuous batching, padded caches",
    "paged": "chapters 1 + 2: the paged engine",
    "prefix-cache": "chapters 1 to 3: with a prefix cache",
    "two-phase": "chapters 1 to 4: with preemption instead of reservation",
    "speculative": "chapters 1 to 5: with n-gram draft tokens",
    "chunked": "**chapters 1 to 6: with prompts in chunks of 128**",
    "transformers-generate": "`transformers` generate, one static batch",
    "vllm": "vLLM's CPU build, compiled",
}


# Number of requests, the bounds of prompts and outputs, and how many of them one at a time.
WORKLOADS = {
    "tiny": (64, (16, 128), (16, 128), 64),
    "qwen3-0.6b": (32, (32, 256), (32, 128), 4),
}
SMOKE = (4, (4, 16), (4, 8), 2)


# -- setting up


def make_bench(
    name: str, args: argparse.Namespace, head: dict[str, Any]
) -> tuple[dict[str, Any], Measured]:
    """Build the model and the work. Returns a record, which begins with `head` and grows run by
    run, and what measures the systems."""
    work = SMOKE if args.smoke else WORKLOADS.get(name, WORKLOADS["qwen3-0.6b"])
    num_requests, prompt_lens, output_lens, num_one_at_a_time = work
    dtype = choose_dtype(args.dtype)
    models = load_models(name, dtype)
    vocab_size = models.loaded.config.vocab_size
    requests = make_requests(num_requests, prompt_lens, output_lens, vocab_size, 0)
    # Not the measured prompts: no system may have them in its cache.
    warm_up = make_requests(2, prompt_lens, (4, 8), vocab_size, 1)
    limits = Limits(longest=max(r.num_positions for r in requests + warm_up))
    weights = "random" if name == "qwen3-0.6b" else "checkpoint"
    config = {
        "model": Path(name).name,
        "num_parameters": models.loaded.model.num_parameters,
        "weights": weights + ", rounded to bfloat16" * (dtype == torch.float32),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "malloc": describe_malloc(),
        "repeats": args.rounds,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "workload": {
            "num_requests": num_requests,
            "prompt_lens": prompt_lens,
            "output_lens": output_lens,
            "prompt_tokens": [len(r.prompt_token_ids) for r in requests],
            "output_tokens": [r.num_outputs for r in requests],
        },
    }
    systems = {
        system: {
            "title": TITLES[system],
            "num_requests": num_one_at_a_time if system == "one-at-a-time" else num_requests,
            "error": None,
            "runs": [],
        }
        for system in args.systems
    }

    def run(system: str, round_number: int, place: int) -> None:
        """A failure is recorded and not tried again."""
        entry = systems[system]
        if entry["error"] is not None:
            return
        own = requests[: entry["num_requests"]]
        try:
            served = serve_timed(system, models, limits, warm_up, own)
            lengths = [len(tokens) for tokens in served.token_ids]
            assert lengths == [request.num_outputs for request in own], "a token is missing"
        except Exception as error:
            entry["error"] = " ".join((str(error) or repr(error)).split()).replace("|", "/")
            entry["is_unavailable"] = isinstance(error, CannotRunError)
            return
        finally:
            gc.collect()
        seconds = served.seconds or 0.0
        entry["runs"].append(
            {
                "round": round_number,
                "place": place,
                "seconds": round(seconds, 4),
                "useful_tokens_per_s": round(sum(lengths) / seconds, 3),
                **(describe_latency(served.token_times) if served.token_times else {}),
                **rounded(served.details),
            }
        )

    repeats = 2 if args.smoke else 7
    most = min(limits.max_num_seqs, num_requests)
    roofline = {
        "bandwidth": measure_bandwidth(32 if args.smoke else 512, repeats),
        **measure_linear(models.loaded, [1, min(8, most), most], repeats),
    }
    record = {**head, "config": config, "systems": systems, "roofline": roofline}
    return record, Measured(name, list(systems), run)


# -- the command


def announce(args: argparse.Namespace) -> str:
    return (
        f"{len(args.systems)} systems on {' and '.join(args.models)}, "
        f"{args.rounds} interleaved rounds, on the CPU"
    )


def measure(args: argparse.Namespace) -> int:
    """Measure all models, one after the other. Returns the exit status: 1 if a system failed."""
    freeze_gc_heap()
    logging.set_verbosity_error()
    torch.set_num_threads(torch.get_num_threads())  # chosen, so the engine keeps it
    deadline = None if args.time_budget is None else time.monotonic() + args.time_budget
    head = record_head("workshop.bench", args.argv)
    status, tables = 0, []
    for name in args.models:
        record, work = make_bench(name, args, head)
        path = args.record / f"bench_{record['config']['model']}.json"
        measure_in_turn([work], args.rounds, partial(write_record, path, record), deadline)
        tables.append(render(record))
        for system, entry in record["systems"].items():
            if entry["error"] is not None:
                print(f"bench: {name}: {system}: {entry['error']}", file=sys.stderr)
                status |= not entry["is_unavailable"]
        del work  # one model in memory at a time
        gc.collect()
    print("\n" + "\n\n".join(tables))
    return int(status)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=model_names, default=list(WORKLOADS), metavar="A,B",
        help="tiny, qwen3-0.6b, or directories of Qwen3 checkpoints")  # fmt: skip
    add("--systems", type=system_names, default=default_systems(), metavar="A,B",
        help=", ".join(TITLES))  # fmt: skip
    add("--time-budget", type=float, metavar="SECONDS", help="start no further run after so long")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="auto: bfloat16 if native, else float32")  # fmt: skip


def default_systems() -> list[str]:
    """Return all systems, with vLLM only where it is installed."""
    return [n for n in TITLES if n != "vllm" or is_installed()]


def system_names(text: str) -> list[str]:
    return _names(text, TITLES.__contains__, ", ".join(TITLES))


def model_names(text: str) -> list[str]:
    allowed = f"{', '.join(WORKLOADS)}, nor a directory"
    return _names(text, lambda name: name in WORKLOADS or Path(name).is_dir(), allowed)


def _names(text: str, is_known: Callable[[str], bool], allowed: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if not name or not is_known(name)]:
        raise argparse.ArgumentTypeError(f"must be one of {allowed}, got {unknown[0]!r}")
    return names


DRIVER = Driver(
    name="bench",
    rounds="--repeats",
    record="--records",
    committed=BENCH / "records",
    add_arguments=add_arguments,
    announce=announce,
    measure=measure,
    tables=tables_of,
)
main = DRIVER.main
