"""The cost of a feature: the same work in several settings, in turn.

    python -m workshop.bench.features NAME            measures (minutes), writes the record
    python -m workshop.bench.features --tables        prints all tables, from the records
    python -m workshop.bench.features NAME --tiny     almost no work, into build/

    hostile       one client's heaviest legal bodies, while other clients wait
    overlap       steps are planned one ahead, or are not
    serve         the same requests by `LLM.generate`, by `AsyncLLM` and over HTTP

A record has the runs by table, workload and setting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.requests.gc_utils import freeze_gc_heap
from workshop.measure.bench import feature_hostile, feature_overlap, feature_serve
from workshop.measure.bench.bench_record import (
    ROOT,
    describe_environment,
    read_record,
    write_record,
)
from workshop.measure.rounds import Case

RECORDS = Path(__file__).parent / "records"
WALL = {"clock": "time.perf_counter"}


@dataclass(frozen=True, slots=True)
class Feature:
    """`config` describes the work, and is recorded; `tiny` replaces parts of it by almost no work.
    `threads` in it is set for the process."""

    cases: Callable[[dict[str, Any]], Iterator[Case]]
    tables: Callable[[dict[str, Any]], list[str]]
    config: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 5
    num_warm_ups: int = 1


FEATURES = {
    "hostile": Feature(
        feature_hostile.cases,
        feature_hostile.tables,
        feature_hostile.CONFIG,
        {"bodies": ["nothing"]},
        num_rounds=1,
        num_warm_ups=0,
    ),
    "overlap": Feature(
        feature_overlap.overlap_cases,
        feature_overlap.overlap_tables,
        {
            **WALL,
            **{"device_ms": [2.0, 5.0], "num_running_device": [32, 256], "num_threads": [1, 2]},
            **{"num_running_cpu": [1, 8, 32, 128], "num_running_stops": 32, "max_tokens": 48},
        },
        {
            **{"device_ms": [1.0], "num_running_device": [2], "num_threads": [1]},
            **{"num_running_cpu": [2], "num_running_stops": 4, "max_tokens": 3},
        },
    ),
    "serve": Feature(
        feature_serve.cases,
        feature_serve.tables,
        feature_serve.CONFIG,
        {"numbers": {"shipped": [2]}},
        num_rounds=3,
    ),
}


def measure(name: str, num_rounds: int, tiny: bool = False) -> dict[str, Any]:
    # Not above: processes of `serve` import this module, too.
    from workshop.measure.bench.bench_models import choose_dtype

    feature, environment = FEATURES[name], describe_environment()
    threads_before = torch.get_num_threads()
    defaults = {
        "dtype": str(choose_dtype("auto")).removeprefix("torch."),
        "threads": threads_before,
    }
    config = defaults | feature.config | (feature.tiny if tiny else {})
    torch.set_num_threads(config["threads"])  # chosen, so the engine keeps it
    runs: dict[str, dict[str, Any]] = {}
    for case in feature.cases(config):
        print(f"{name}: {case.part}, {case.name}", file=sys.stderr, flush=True)
        found = case.run(num_rounds, feature.num_warm_ups)
        runs.setdefault(case.part, {})[case.name] = found
    torch.set_num_threads(threads_before)
    return {
        "command": f"python -m workshop.bench.features {name}",
        "environment": environment,
        "config": config | {"rounds": num_rounds},
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FEATURES))
    parser.add_argument("--tables", action="store_true", help="from the records, without measuring")
    parser.add_argument("--tiny", action="store_true", help="almost no work, into build/")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(FEATURES):
        parser.error(f"NAME must be one of {', '.join(FEATURES)}, got {', '.join(unknown)}")
    if not args.names and not args.tables:
        parser.error("cannot measure without a NAME")
    folder = ROOT / "build" / "features-smoke" if args.tiny else RECORDS
    freeze_gc_heap()
    for name in args.names or FEATURES:
        feature, path = FEATURES[name], folder / f"{name}.json"
        if not args.tables:
            write_record(path, measure(name, 1 if args.tiny else feature.num_rounds, args.tiny))
        record = read_record(path)
        print("\n\n".join(feature.tables(record)))


if __name__ == "__main__":
    main()
