"""The cost of a feature: the same work in several settings, in turn.

    python -m workshop.bench.features NAME            measures (minutes), writes record and tables
    python -m workshop.bench.features --tables        writes all tables, from the records
    python -m workshop.bench.features NAME --tiny     almost no work, into build/

    adapters      no, half or all requests use 1 to 8 different adapters; `peft` for comparison
    events        the engine's events are written to a file, or are not
    experts       a block of experts, an MLP as large as those of one token, `transformers`' block
    grammars      all rows have a grammar, or none; compiling; the bits of one row
    hostile       one client's heaviest legal bodies, while other clients wait
    overlap       steps are planned one ahead, or are not
    serve         the same requests by `LLM.generate`, by `AsyncLLM` and over HTTP
    token_rules   all rows have a rule of `SamplingParams`, or none

A record has the runs by table, workload and setting. `events` has a setting twice: the difference
between `off` and `off again` is the noise of the machine. Processor time counts other programs less
than wall time. The work of an engine is in `feature_engines.py`.
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
from workshop.measure.bench import feature_engines, feature_experts, feature_hostile, feature_serve
from workshop.measure.bench.bench_record import (
    ROOT,
    describe_environment,
    read_record,
    write_record,
    write_table,
)
from workshop.measure.rounds import Case

RECORDS = Path(__file__).parent / "records"
WALL, PROCESSOR = {"clock": "time.perf_counter"}, {"clock": "time.process_time", "threads": 1}


@dataclass(frozen=True, slots=True)
class Feature:
    """`config` describes the work, and is recorded; `tiny` replaces parts of it by almost no work.
    `threads` in it is set for the process."""

    page: str
    cases: Callable[[dict[str, Any]], Iterator[Case]]
    tables: Callable[[dict[str, Any]], list[str]]
    config: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    num_rounds: int = 5
    num_warm_ups: int = 1


FEATURES = {
    "adapters": Feature(
        "04_scheduler/beyond/ADAPTERS.md",
        feature_engines.adapter_cases,
        feature_engines.adapter_tables,
        {
            **PROCESSOR,
            **{"dtype": "float32", "rank": 8, "num_requests": 32, "num_prompt": 64},
            **{"num_answer": 32, "num_by_peft": 2, "numbers": [1, 2, 4, 8]},
        },
        {"num_requests": 4, "num_prompt": 8, "num_answer": 3, "numbers": [2]},
    ),
    "events": Feature(
        "common/events/README.md",
        feature_engines.event_cases,
        feature_engines.event_tables,
        {**WALL, "num_running": [1, 32, 256], "max_tokens": 48},
        {"num_running": [2], "max_tokens": 3},
        num_rounds=9,
    ),
    "experts": Feature(
        "common/models/experts/README.md",
        feature_experts.cases,
        feature_experts.tables,
        {
            **PROCESSOR,
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            "hidden_size": 2048,  # all four as in https://huggingface.co/Qwen/Qwen3-30B-A3B
            "num_rows": [1, 2, 4, 8, 16, 32, 64, 128],
        },
        {
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"hidden_size": 32, "num_rows": [1, 4, 64]},
        },
        num_rounds=3,
    ),
    "grammars": Feature(
        "04_scheduler/beyond/GRAMMARS.md",
        feature_engines.grammar_cases,
        feature_engines.grammar_tables,
        {
            **WALL,
            **{"threads": 1, "num_rows": [1, 8, 32, 128], "max_tokens": 48},
            "schema": feature_engines.SCHEMA,  # every answer is longer than `max_tokens`
            **{"num_large": 151_936, "num_masks": 50},
        },
        {"num_rows": [2], "max_tokens": 4, "num_large": 5_000, "num_masks": 3},
        num_rounds=7,
    ),
    "hostile": Feature(
        "common/serve/README.md",
        feature_hostile.cases,
        feature_hostile.tables,
        feature_hostile.CONFIG,
        {"bodies": ["nothing"]},
        num_rounds=1,
        num_warm_ups=0,
    ),
    "overlap": Feature(
        "common/README.md",
        feature_engines.overlap_cases,
        feature_engines.overlap_tables,
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
        "common/serve/README.md",
        feature_serve.cases,
        feature_serve.tables,
        feature_serve.CONFIG,
        {"numbers": {"shipped": [2]}},
        num_rounds=3,
    ),
    "token_rules": Feature(
        "common/README.md",
        feature_engines.token_rule_cases,
        feature_engines.token_rule_tables,
        {**WALL, "threads": 1, "num_rows": [1, 32, 128], "max_tokens": 48},
        {"num_rows": [2], "max_tokens": 4},
        num_rounds=7,
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
        tables = "\n\n".join(feature.tables(record))
        print(tables)
        if not args.tiny:
            write_table(ROOT / feature.page, name, tables, record)


if __name__ == "__main__":
    main()
