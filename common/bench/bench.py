"""The benchmark: the engine, its own baselines and `transformers`, side by side in one run.

    python -m common.bench                      measure, write records, print the tables
    python -m common.bench --smoke              the same with almost no work, to see that it runs
    python -m common.bench --table              print the tables of the records that are there
    python -m common.bench --write-readme       put them into README.md and common/bench/README.md

The runs of the systems are interleaved: round r runs every system once, each round starting with
another, so that a machine that grows slower or busier does so for all. A table shows the median and
the extremes of the rounds. Every run of a system sets it up anew, lets it serve two short requests
that are not counted, and then serves the whole workload.

What is compared, and what counts as useful, is in `bench_systems.py`; the floors in
`bench_roofline.py`; the form of the record in `bench_record.py`. It measures the CPU.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from common.bench.bench_command import Driver, describe_malloc
from common.bench.bench_record import ROOT, describe_environment, write_record
from common.bench.bench_table import render, tables_of

if TYPE_CHECKING:  # torch comes late: malloc has to be chosen before the process that uses it
    import torch

    from common.bench.bench_systems import BenchModels, BenchRequest, Limits

SYSTEM_NAMES = (
    "one-at-a-time",
    "static",
    "padded",
    "paged",
    "prefix-cache",
    "two-phase",
    "speculative",
    "chunked",
    "transformers-generate",
    "transformers-continuous",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are uniform between both ends. `num_one_at_a_time`: so many of the requests are
    served one at a time; `minutes` is about what one round takes on two cores."""

    num_requests: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    num_one_at_a_time: int
    minutes: float


WORKLOADS = {
    "tiny": Workload(64, (16, 128), (16, 128), 64, 1.5),
    "qwen3-0.6b": Workload(32, (32, 256), (32, 128), 4, 8.0),
}
SMOKE = Workload(4, (4, 16), (4, 8), 2, 0.5)


# -- measuring


@dataclass(slots=True)
class Bench:
    """One model's measurement. `record` is complete in form from the start and grows run by run."""

    models: BenchModels
    limits: Limits
    requests: list[BenchRequest]
    warm_up: list[BenchRequest]
    record: dict[str, Any]

    def run_system(self, name: str, round_number: int, place: int) -> list[list[int]] | None:
        """Set the system up, time it once and note the run. Its tokens; None if it failed.

        A failure becomes part of the record and is not tried again."""
        from common.bench.bench_systems import SYSTEMS

        entry = self.record["systems"][name]
        requests = self.requests[: entry["num_requests"]]
        try:
            with SYSTEMS[name](self.models, self.limits) as serve:
                serve(self.warm_up)
                gc.collect()
                start = time.perf_counter()
                served = serve(requests)
                seconds = time.perf_counter() - start
                details = served.describe()
        except Exception as error:
            entry["error"] = _one_line(error)
            entry["is_unavailable"] = type(error).__name__ == "CannotRunError"
            return None
        finally:
            gc.collect()
        num_useful = sum(request.max_tokens for request in requests)
        lengths = [len(tokens) for tokens in served.token_ids]
        if lengths != [request.max_tokens for request in requests]:
            entry["error"] = "it did not give every request the number of tokens it asked for"
            return None
        entry["runs"].append(
            {
                "round": round_number,
                "place": place,
                "seconds": round(seconds, 4),
                "useful_tokens_per_s": round(num_useful / seconds, 3),
                **details,
            }
        )
        return served.token_ids


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: each system is first once in `len(names)` rounds."""
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def run_rounds(bench: Bench, repeats: int, deadline: float | None = None) -> Iterator[str]:
    """Run all systems of the record, interleaved. Yields a system's name after each of its runs.

    No run is started after `deadline`, in seconds of `time.monotonic()`."""
    systems = bench.record["systems"]
    first_tokens: dict[str, list[list[int]]] = {}
    for round_number in range(repeats):
        for place, name in enumerate(rotated(list(systems), round_number)):
            if deadline is not None and time.monotonic() > deadline:
                return
            if systems[name]["error"] is None:
                tokens = bench.run_system(name, round_number, place)
                if tokens is not None:
                    first_tokens.setdefault(name, tokens)
                    note_agreement(systems, first_tokens)
            yield name


def note_agreement(
    systems: dict[str, dict[str, Any]], first_tokens: dict[str, list[list[int]]]
) -> None:
    """How many requests got the same tokens as from `transformers`' generate, or else from the
    first system: all of them in exact arithmetic, fewer where two tokens are equally likely."""
    name = "transformers-generate"
    reference = name if name in first_tokens else next(iter(first_tokens))
    for system, tokens in first_tokens.items():
        same = sum(a == b for a, b in zip(tokens, first_tokens[reference]))
        compared = min(len(tokens), len(first_tokens[reference]))
        systems[system]["agreement"] = {"with": reference, "same": same, "of": compared}


# -- setting up


def load_models(name: str, dtype: torch.dtype) -> BenchModels:
    """`name` is one of `WORKLOADS`, or a Qwen3 checkpoint's directory. float32 weights are what
    bfloat16 ones would be: rounded."""
    import torch

    from common.bench.bench_systems import BenchModels, make_twin
    from common.engine_config import SHIPPED_CHECKPOINT
    from common.loader import QWEN3_0_6B, load_model, random_model

    if name == "qwen3-0.6b":
        loaded = random_model(QWEN3_0_6B, seed=0, dtype=dtype)
    else:
        loaded = load_model(SHIPPED_CHECKPOINT if name == "tiny" else name, dtype)
    if dtype == torch.float32:
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return BenchModels(loaded, make_twin(loaded))


def choose_dtype(name: str) -> torch.dtype:
    """`"auto"`: bfloat16 if this CPU multiplies it natively, else float32."""
    import torch

    if name == "auto":
        is_native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if is_native else torch.float32
    return getattr(torch, name)


def make_bench(name: str, args: argparse.Namespace, environment: dict[str, Any]) -> Bench:
    """Model, work and an empty record."""
    import torch

    from common.bench.bench_systems import TITLES, Limits, make_requests

    work = SMOKE if args.smoke else WORKLOADS.get(name, WORKLOADS["qwen3-0.6b"])
    dtype = choose_dtype(args.dtype)
    models = load_models(name, dtype)
    vocab_size = models.loaded.config.vocab_size
    requests = make_requests(
        work.num_requests, work.prompt_lens, work.output_lens, vocab_size, args.seed
    )
    # Other prompts than the measured ones: no system may remember them.
    warm_up = make_requests(2, work.prompt_lens, (4, 8), vocab_size, args.seed + 1)
    limits = Limits(longest=max(r.num_positions for r in requests + warm_up))
    shown = name if name in WORKLOADS else Path(name).name
    weights = "random" if name == "qwen3-0.6b" else "checkpoint"
    config = {
        "model": shown,
        "num_parameters": models.loaded.model.num_parameters,
        "weights": weights + (", rounded to bfloat16" if dtype == torch.float32 else ""),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "malloc": describe_malloc(),
        "repeats": args.rounds,
        "time_budget_s": args.time_budget,
        "seed": args.seed,
        "smoke": args.smoke,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "block_size": limits.block_size,
        "workload": {
            "num_requests": work.num_requests,
            "prompt_lens": list(work.prompt_lens),
            "output_lens": list(work.output_lens),
            "prompt_tokens": [len(r.prompt_token_ids) for r in requests],
            "output_tokens": [r.max_tokens for r in requests],
        },
    }
    systems = {
        system: {
            "title": TITLES[system],
            "num_requests": work.num_one_at_a_time
            if system == "one-at-a-time"
            else work.num_requests,
            "error": None,
            "runs": [],
        }
        for system in args.systems
    }
    record = {
        "command": shlex.join(["python", "-m", "common.bench", *args.argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": environment,
        "config": config,
        "systems": systems,
        "roofline": {},
        "gather": {},
    }
    return Bench(models, limits, requests, warm_up, record)


def measure_floors(bench: Bench, smoke: bool) -> None:
    from common.bench.bench_roofline import (
        kv_bytes_per_token,
        measure_bandwidth,
        measure_gather,
        measure_linear,
    )

    repeats = 2 if smoke else 7
    bandwidth = measure_bandwidth(32 if smoke else 512, repeats)
    num_seqs = min(bench.limits.max_num_seqs, len(bench.requests))
    linear = measure_linear(bench.models.loaded, [1, num_seqs], repeats)
    kv = {"kv_bytes_per_token": kv_bytes_per_token(bench.models.loaded)}
    bench.record["roofline"] = {"bandwidth": bandwidth} | linear | kv
    bench.record["gather"] = measure_gather(2 if smoke else 25)


# -- the command


def announce(args: argparse.Namespace) -> str:
    minutes = sum(
        (SMOKE if args.smoke else WORKLOADS.get(m, WORKLOADS["qwen3-0.6b"])).minutes
        for m in args.models
    )
    minutes *= args.rounds * len(args.systems) / len(SYSTEM_NAMES)
    if args.time_budget is not None:
        minutes = min(minutes, args.time_budget / 60)
    return (
        f"{len(args.systems)} systems on {' and '.join(args.models)}, "
        f"{args.rounds} interleaved rounds, on the CPU; about {max(1, round(minutes))} minutes "
        "on two cores"
    )


def measure(args: argparse.Namespace) -> int:
    """Measure all models, one after the other. The exit status: 1 if a system broke."""
    import torch
    from transformers.utils import logging

    from common.bench.bench_systems import SYSTEMS

    assert set(SYSTEMS) == set(SYSTEM_NAMES)
    logging.set_verbosity_error()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    deadline = None if args.time_budget is None else time.monotonic() + args.time_budget
    environment = describe_environment()
    status, tables = 0, []
    num_runs = len(args.models) * args.rounds * len(args.systems)
    with tqdm(total=num_runs, unit="run", dynamic_ncols=True, disable=None) as bar:
        for name in args.models:
            bar.set_description(f"{name}: loading")
            bench = make_bench(name, args, environment)
            path = args.record / f"bench_{bench.record['config']['model']}.json"
            bar.set_description(f"{name}: floors")
            measure_floors(bench, args.smoke)

            for system in run_rounds(bench, args.rounds, deadline):
                write_record(path, bench.record)
                bar.set_description(f"{name}: {system} done")
                bar.update()
            write_record(path, bench.record)
            tables.append(render(bench.record))
            for system, entry in bench.record["systems"].items():
                if entry["error"] is not None:
                    tqdm.write(f"bench: {name}: {system}: {entry['error']}", file=sys.stderr)
                    status |= not entry.get("is_unavailable", False)
            bench = None  # one model in memory at a time
            gc.collect()
    print("\n" + "\n\n".join(tables))
    return int(status)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=model_names, default=list(WORKLOADS), metavar="A,B",
        help="tiny, qwen3-0.6b, or directories of Qwen3 checkpoints")  # fmt: skip
    add("--systems", type=system_names, default=list(SYSTEM_NAMES), metavar="A,B",
        help=", ".join(SYSTEM_NAMES))  # fmt: skip
    add("--time-budget", type=float, metavar="SECONDS", help="start no further run after so long")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float64"), default="auto",
        help="auto: bfloat16 if native, else float32")  # fmt: skip
    add("--threads", type=int, help="of torch, for all systems")
    add("--seed", type=int, default=0, help="of the workload")


def system_names(text: str) -> list[str]:
    return _names(text, SYSTEM_NAMES.__contains__, ", ".join(SYSTEM_NAMES))


def model_names(text: str) -> list[str]:
    allowed = f"{', '.join(WORKLOADS)}, nor a directory"
    return _names(text, lambda name: name in WORKLOADS or Path(name).is_dir(), allowed)


def _names(text: str, is_known: Callable[[str], bool], allowed: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError("it needs at least one name")
    if unknown := [name for name in names if not is_known(name)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {allowed}")
    return names


DRIVER = Driver(
    name="bench",
    description=__doc__ or "",
    rounds="--repeats",
    record="--records",
    committed=ROOT / "common" / "bench" / "records",
    smoke=ROOT / "build" / "bench-smoke",
    add_arguments=add_arguments,
    announce=announce,
    measure=measure,
    tables=tables_of,
)
main = DRIVER.main


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    name = "" if type(error).__name__ == "CannotRunError" else f"{type(error).__name__}: "
    return (name + text)[:300].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
