"""Shared parts of the benches that run one work on several engines, in turn, in one process.

They are about the host, and each writes one table of a record into a page."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.engine import LLMEngine
from request import SamplingParams
from workshop.measure.bench.bench_record import (
    made_on,
    read_record,
    write_between_markers,
    write_record,
)


def add_requests(
    engine: LLMEngine, num_requests: int, vocab_size: int, params: SamplingParams
) -> None:
    """Add prompts of 12 to 19 tokens, all different."""
    for i in range(num_requests):
        prompt = [(31 * i + 7 * j) % (vocab_size - 10) for j in range(12 + i % 8)]
        engine.add_request(str(i), prompt, params)


def ms_per_step(runs: Sequence[dict]) -> float:
    return statistics.median(1e3 * run["seconds"] / run["num_steps"] for run in runs)


def spread(ratios: Sequence[float]) -> str:
    """Return the median of the rounds, the lowest and the highest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def write_table(page: Path, name: str, table: str, record: dict) -> None:
    write_between_markers(page, name, f"{table}\n\n{made_on(record)}")


def measure_and_tell(
    doc: str | None,
    record_path: Path,
    page: Path,
    name: str,
    measure: Callable[[int], dict[str, Any]],
    table_of: Callable[[dict[str, Any]], str],
    rounds: int = 5,
) -> None:
    """Run a bench as a command: measure, write the record, and from that the page's table."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tables", action="store_true", help="from the record, without measuring")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, default=record_path)
    arguments = parser.parse_args()
    if not arguments.tables:
        write_record(arguments.output, measure(arguments.rounds))
    record = read_record(arguments.output)
    print(table_of(record))
    if arguments.output == record_path:
        write_table(page, name, table_of(record), record)
