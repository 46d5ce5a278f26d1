"""What the benches share that run one work on several engines, in turn, in one process.

Both are about the host, and both write one table of a record into a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from common.engine import LLMEngine
from common.workshop.bench.bench_record import made_on, write_between_markers
from request import SamplingParams


def add_requests(
    engine: LLMEngine, num_requests: int, vocab_size: int, params: SamplingParams
) -> None:
    """Prompts of 12 to 19 tokens, no two alike."""
    for i in range(num_requests):
        prompt = [(31 * i + 7 * j) % (vocab_size - 10) for j in range(12 + i % 8)]
        engine.add_request(str(i), prompt, params)


def ms_per_step(runs: Sequence[dict]) -> float:
    return statistics.median(1e3 * run["seconds"] / run["num_steps"] for run in runs)


def spread(ratios: Sequence[float]) -> str:
    """The median of the rounds, the lowest and the highest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def write_table(page: Path, name: str, table: str, record: dict) -> None:
    write_between_markers(page, name, f"{table}\n\n{made_on(record)}")
