"""The floor of a run: the least time in which these requests could be served by these kernels.

    prompts     every prompt token once, at the rate of the layers' matrices with many rows
    decodes     for each step the packed matrices alone, with a row for each request still at it
    kv          for each step every cached key and value, read once at the measured bandwidth

Nothing else: no attention, norms, sampling or scheduling. All three rates are measured in the same
run (`bench_roofline.py`). Everybody is there at time 0, and a seat that becomes free is taken at
once. The first token of a request comes with its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class DecodeStep:
    num_rows: int
    kv_tokens: int  # cached positions of all rows together, the step's own included


@dataclass(frozen=True, slots=True)
class RunFloor:
    """Seconds, and what was counted."""

    num_prompt_tokens: int
    num_decode_steps: int
    num_decode_tokens: int
    prompts_s: float
    decodes_s: float
    kv_s: float

    @property
    def seconds(self) -> float:
        return self.prompts_s + self.decodes_s + self.kv_s


def decode_steps(lengths: Sequence[tuple[int, int]], max_num_seqs: int) -> list[DecodeStep]:
    """Of requests `(prompt tokens, output tokens)`, at most `max_num_seqs` at a time."""
    waiting, running, steps = list(lengths), [], []  # of running: positions, decodes to come
    while waiting or running:
        num_free = max_num_seqs - len(running)
        seated, waiting = waiting[:num_free], waiting[num_free:]
        running += [(num_prompt, num_outputs - 1) for num_prompt, num_outputs in seated]
        running = [(n + 1, left - 1) for n, left in running if left > 0]
        if running:
            steps.append(DecodeStep(len(running), sum(n for n, _ in running)))
        running = [(n, left) for n, left in running if left > 0]
    return steps


def rows_ms(linear_ms: Mapping[str, Sequence[float]], num_rows: int) -> float:
    """Milliseconds of the matrices with so many rows: measured, or on the line between the nearest
    measured numbers of rows. Raises `ValueError` outside of what was measured."""
    points = sorted((int(rows), median(times)) for rows, times in linear_ms.items())
    if not points[0][0] <= num_rows <= points[-1][0]:
        raise ValueError(f"num_rows must be from {points[0][0]} to {points[-1][0]}, got {num_rows}")
    below = max(point for point in points if point[0] <= num_rows)
    above = min(point for point in points if point[0] >= num_rows)
    if below == above:
        return below[1]
    share = (num_rows - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])


def run_floor(
    lengths: Sequence[tuple[int, int]], max_num_seqs: int, roofline: Mapping[str, Any]
) -> RunFloor:
    """Of requests `(prompt tokens, output tokens)`, at rates as `bench_roofline.py` has them."""
    steps = decode_steps(lengths, max_num_seqs)
    num_prompt_tokens = sum(num_prompt for num_prompt, _ in lengths)
    kv_bytes = sum(step.kv_tokens for step in steps) * roofline["kv_bytes_per_token"]
    prefill = roofline["prefill"]
    return RunFloor(
        num_prompt_tokens=num_prompt_tokens,
        num_decode_steps=len(steps),
        num_decode_tokens=sum(step.num_rows for step in steps),
        prompts_s=num_prompt_tokens * median(prefill["ms"]) / prefill["num_rows"] / 1e3,
        decodes_s=sum(rows_ms(roofline["linear_ms"], step.num_rows) for step in steps) / 1e3,
        kv_s=kv_bytes / median(roofline["bandwidth"]["matvec_gb_per_s"]) / 1e9,
    )


def floor_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The floor of a record's whole workload, with its parts, as the record keeps it."""
    config = record["config"]
    work = config["workload"]
    lengths = list(zip(work["prompt_tokens"], work["output_tokens"], strict=True))
    floor = run_floor(lengths, config["max_num_seqs"], record["roofline"])
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in {**asdict(floor), "seconds": floor.seconds}.items()
    }
