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

from workshop.measure.bench.bench_record import rounded


@dataclass(frozen=True, slots=True)
class DecodeStep:
    num_rows: int
    kv_tokens: int  # cached positions of all rows together, with those of this step


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


def decode_steps(lengths: Sequence[tuple[int, int]], max_num_seqs: int) -> list[DecodeStep]:
    """The decode steps of requests `(prompt tokens, output tokens)`, `max_num_seqs` at a time."""
    waiting, running, steps = list(lengths), [], []  # running: (positions, remaining decodes)
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
    """Milliseconds of the matrices with `num_rows` rows: measured, or interpolated linearly between
    the nearest measured numbers of rows. Raises `ValueError` outside the measured range."""
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
    """The floor of requests `(prompt tokens, output tokens)`, at `bench_roofline.py`'s rates."""
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
    """The floor of a record's whole workload, with its parts, in the form of the record."""
    config = record["config"]
    work = config["workload"]
    lengths = list(zip(work["prompt_tokens"], work["output_tokens"], strict=True))
    floor = run_floor(lengths, config["max_num_seqs"], record["roofline"])
    return rounded({**asdict(floor), "seconds": floor.seconds})
