"""The floor of a run: the least time in which these kernels could serve these requests.

    prompts     every prompt token once, at the rate of the layers' matrices with many rows
    decodes     for each step the packed matrices alone, with a row for each running request
    kv          for each step every cached key and value, read once at the measured bandwidth

Attention, norms, sampling and scheduling are left out. All three rates are measured in the same
run (`bench_roofline.py`). Every request is there at time 0, and a slot that becomes free is filled
immediately. The first token of a request comes with its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from workshop.measure.bench.bench_record import rounded


@dataclass(frozen=True, slots=True)
class RunFloor:
    """Seconds, and the counts they are made of."""

    num_prompt_tokens: int
    num_decode_steps: int
    num_decode_tokens: int
    prompts_s: float
    decodes_s: float
    kv_s: float

    @property
    def seconds(self) -> float:
        return self.prompts_s + self.decodes_s + self.kv_s


def decode_steps(lengths: Sequence[tuple[int, int]], max_num_seqs: int) -> list[tuple[int, int]]:
    """The decode steps of requests `(prompt tokens, output tokens)`, `max_num_seqs` at a time: for
    each its rows, and the cached positions of all rows together, with those of this step."""
    waiting, running, steps = list(lengths), [], []  # running: (positions, remaining decodes)
    while waiting or running:
        num_free = max_num_seqs - len(running)
        seated, waiting = waiting[:num_free], waiting[num_free:]
        running += [(num_prompt, num_outputs - 1) for num_prompt, num_outputs in seated]
        running = [(n + 1, left - 1) for n, left in running if left > 0]
        if running:
            steps.append((len(running), sum(n for n, _ in running)))
    return steps


def rows_ms(linear_ms: Mapping[str, Sequence[float]], num_rows: int) -> float:
    """Milliseconds of the matrices with `num_rows` rows: measured, or interpolated linearly between
    the nearest measured numbers of rows. Raises `ValueError` outside the measured range."""
    rows, times = zip(*sorted((int(n), median(ms)) for n, ms in linear_ms.items()), strict=True)
    if not rows[0] <= num_rows <= rows[-1]:
        raise ValueError(f"num_rows must be from {rows[0]} to {rows[-1]}, got {num_rows}")
    return float(np.interp(num_rows, rows, times))


def run_floor(
    lengths: Sequence[tuple[int, int]], max_num_seqs: int, roofline: Mapping[str, Any]
) -> RunFloor:
    """The floor of requests `(prompt tokens, output tokens)`, at `bench_roofline.py`'s rates."""
    steps = decode_steps(lengths, max_num_seqs)
    num_prompt_tokens = sum(num_prompt for num_prompt, _ in lengths)
    kv_bytes = sum(num_tokens for _, num_tokens in steps) * roofline["kv_bytes_per_token"]
    prefill = roofline["prefill"]
    return RunFloor(
        num_prompt_tokens=num_prompt_tokens,
        num_decode_steps=len(steps),
        num_decode_tokens=sum(num_rows for num_rows, _ in steps),
        prompts_s=num_prompt_tokens * median(prefill["ms"]) / prefill["num_rows"] / 1e3,
        decodes_s=sum(rows_ms(roofline["linear_ms"], rows) for rows, _ in steps) / 1e3,
        kv_s=kv_bytes / median(roofline["bandwidth"]["matvec_gb_per_s"]) / 1e9,
    )


def floor_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The floor of a record's whole workload, with its parts, in the form of the record."""
    config = record["config"]
    work = config["workload"]
    lengths = list(zip(work["prompt_tokens"], work["output_tokens"], strict=True))
    floor = run_floor(lengths, config["max_num_seqs"], record["roofline"])
    return rounded({**asdict(floor), "seconds": floor.seconds})
