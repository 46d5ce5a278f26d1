"""Chapter 1's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

Every number comes from a run of the chapter's own code over a small random model. Outputs have the
lengths that the workload asks for (EOS is ignored), so counted numbers, in steps, tokens and bytes,
depend neither on the machine nor on the weights. Measuring takes some minutes.
"""

from __future__ import annotations

import ast
import random
import statistics
import sysconfig
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request
from static_batching import generate_static
from step_record import StepRecord, make_record
from workshop.book.palette import DECODE, INK, PAPER, PROMPT, WASTE, add_key
from workshop.measure.bench.bench_models import make_twin
from workshop.measure.bench.bench_record import ROOT
from workshop.measure.bench.random_weights import random_model, shape_of
from workshop.measure.lab_frame import Measurement, Part, run_lab

TOKENIZER = ROOT / "common" / "checkpoints" / "tiny" / "tokenizer.json"

SEED = 0
NUM_REQUESTS, MAX_PROMPT, MAX_OUTPUT = 128, 256, 256  # the real workload; longer ones are cut
NUM_SLOTS = 16
TIMELINE_SHRINK = 8  # divisor of the lengths, so that single steps are visible
MAX_NUM_BATCHED_TOKENS = 2048

Lengths = Sequence[tuple[int, int]]  # (prompt tokens, output tokens) of each request

# -- workloads


def stdlib_functions(num_functions: int, seed: int) -> Lengths:
    """Draw functions of Python's standard library. Returns `(prompt, output)` tokens: the prompt is
    the code from the outermost class or function around one to the end of its header, the output is
    its body and an end-of-text token.
    """
    spans: list[tuple[Any, ...]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for top in ast.parse(source).body:
            for node in ast.walk(top):
                if isinstance(node, ast.FunctionDef):
                    body = node.body[0].lineno - 1
                    spans.append((source, top.lineno - 1, body, node.end_lineno))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    lengths = []
    for source, *bounds in random.Random(seed).sample(spans, num_functions):
        lines = source.splitlines(keepends=True)
        texts = ["".join(lines[a:b]) for a, b in pairwise(bounds)]
        prompt, output = (len(tokenizer.encode(text).ids) for text in texts)
        lengths.append((max(prompt, 1), output + 1))
    return lengths


def make_requests(lengths: Lengths) -> list[Request]:
    rng = random.Random(SEED)
    return [
        Request.from_tokens(f"r{i}", rng.choices(range(64), k=prompt), output, arrival_time=i)
        for i, (prompt, output) in enumerate(lengths)
    ]


# -- runs


def serve(
    model: PreTrainedModel, lengths: Lengths, max_num_seqs: int
) -> tuple[list[StepRecord], HFModelRunner, dict[str, list[int]]]:
    """Serve requests that are all there at the start with continuous batching. Returns the records
    of its steps, its runner, and every request's tokens."""
    records: list[StepRecord] = []
    runner = HFModelRunner(model, batched=True)
    scheduler = FCFSScheduler(max_num_seqs, MAX_NUM_BATCHED_TOKENS)
    engine = EngineCore(scheduler, runner)
    requests = make_requests(lengths)
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        engine.step()
        records.append(make_record(engine, len(records)))
    return records, runner, {r.request_id: r.output_token_ids for r in requests}


def compare(model: PreTrainedModel, lengths: Lengths, num_slots: int) -> dict[str, dict]:
    """Serve the same requests both ways. Raises `AssertionError` if one token differs."""
    report = generate_static(model, make_requests(lengths), num_slots)
    records, runner, token_ids = serve(model, lengths, num_slots)
    assert token_ids == report.token_ids, "batching changed a token"
    num_tokens = sum(output for _, output in lengths)
    scheduled = [list(record.num_scheduled_tokens.values()) for record in records]
    # Computed positions are rows times columns of every model call, padding included.
    padded = sum(
        batch.num_prompt_tokens
        + batch.num_padding_tokens
        + len(batch.req_ids) * (batch.num_steps - 1)
        for batch in report.batches
    )
    found: dict[str, dict[str, Any]] = {
        "static": {"steps": report.num_steps, "computed": padded},
        "continuous": {
            "steps": len(records),
            "computed": sum(len(step) * max(step) for step in scheduled),
            "needed": sum(map(sum, scheduled)),  # without padding
            "bytes_copied": runner.num_bytes_copied,
            "bytes_new": runner.num_bytes_new,
        },
    }
    for run in found.values():
        run["utilisation"] = num_tokens / (run["steps"] * num_slots)
    return found


# -- parts of the record


def count_timeline(model: PreTrainedModel, lengths: Lengths) -> dict:
    """Count twelve requests on four slots, step by step. `continuous[slot][step]` is the request id
    and its action, or None where nothing is computed; a request keeps the slot it was admitted to.
    """
    lengths = [(-(-p // TIMELINE_SHRINK), -(-o // TIMELINE_SHRINK)) for p, o in lengths[:12]]
    report = generate_static(model, make_requests(lengths), 4)
    static: list[list] = [[] for _ in range(4)]
    for batch in report.batches:
        for slot, (req_id, row) in enumerate(zip(batch.req_ids, batch.timeline, strict=True)):
            static[slot] += [[req_id, use] for use in row]
    records, _, token_ids = serve(model, lengths, 4)
    assert token_ids == report.token_ids
    continuous: list[list] = [[] for _ in range(4)]
    holders: list[str | None] = [None] * 4
    for record in records:
        for req_id in record.admitted:
            holders[holders.index(None)] = req_id
        for slot, req_id in enumerate(holders):
            use = "P" if req_id in record.admitted else "u"
            continuous[slot].append(None if req_id is None else [req_id, use])
        holders = [None if req_id in record.finished else req_id for req_id in holders]
    return {"lengths": lengths, "static": static, "continuous": continuous}


def measure(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    max_prompt, max_output = measurement.of((8, 8), (MAX_PROMPT, MAX_OUTPUT))
    functions = stdlib_functions(NUM_REQUESTS, SEED)
    lengths = [(min(p, max_prompt), min(o, max_output)) for p, o in functions]
    shape = shape_of(1, 16, 32, 2, 1, 8, vocab=64)  # its text is noise
    model = make_twin(random_model(shape, SEED, torch.float64))
    by_length = sorted(lengths, key=lambda pair: pair[1])
    cases = {
        "one request": ([(32, 64)], NUM_SLOTS),
        "64 requests of equal length": ([(8, 32)] * 64, 8),
        "16 requests, 16 slots": (lengths[:NUM_SLOTS], NUM_SLOTS),
        "the workload, shortest output first": (by_length, NUM_SLOTS),
        "the workload, longest output first": (by_length[::-1], NUM_SLOTS),
    }
    counted = {
        "timeline": count_timeline(model, lengths),
        "real": {str(NUM_SLOTS): compare(model, lengths, NUM_SLOTS)},
        "cases": {name: compare(model, *case) for name, case in cases.items()},
    }
    config = {"seed": SEED, "num_slots": NUM_SLOTS, "threads": 1}
    return {"config": config, "lengths": lengths, "counted": counted}


# -- figures

COLORS = {"P": PROMPT, "u": DECODE, ".": WASTE}


def draw_timeline(record: dict) -> Figure:
    timeline = record["counted"]["timeline"]
    figure, axes = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    num_tokens = sum(output for _, output in timeline["lengths"])
    for axis, name in zip(axes, ("static", "continuous")):
        slots = timeline[name]
        for slot, row in enumerate(slots):
            draw_row(axis, slot, row)
        num_steps = len(slots[0])
        used = num_tokens / (len(slots) * num_steps)
        axis.set_title(f"{name} batching: {num_steps} steps, {used:.0%} of slot-steps used")
        axis.set(ylabel="slot", ylim=(len(slots) - 0.6, -0.8), yticks=range(len(slots)))
        axis.axvline(num_steps, color=INK, linewidth=1)
    axes[0].set_xlim(0, max(len(timeline[name][0]) for name in ("static", "continuous")))
    axes[1].set_xlabel("step")
    wasted = {"computed, not used": WASTE, "empty": PAPER}
    add_key(figure, {"prompt": PROMPT, "decode": DECODE, **wasted})
    return figure


def draw_row(axis: Axes, slot: int, row: list[list[str] | None]) -> None:
    """Draw a bar for each run of steps with one use, the request's number at its first step."""
    start = 0
    for mark, steps in groupby(row):
        width = len(list(steps))
        if mark is not None:
            req_id, use = mark
            axis.barh(slot, width, 0.6, left=start, color=COLORS[use], edgecolor=PAPER)
            if use == "P":
                above = (start + 0.5, slot - 0.3)
                axis.annotate(req_id[1:], above, color=INK, ha="center", va="bottom", size=10)
        start += width


# -- tables


def tables(record: dict) -> dict[str, str]:
    num_slots = record["config"]["num_slots"]
    real = record["counted"]["real"][str(num_slots)]
    outputs = [output for _, output in record["lengths"]]
    headline = _headline(real["static"], real["continuous"], outputs, num_slots)
    return {"headline": headline}


def _headline(static: dict, continuous: dict, outputs: list[int], num_slots: int) -> str:
    return (
        f"The workload is {len(outputs)} functions of Python's standard library: the prompt is the "
        f"code before a function's body, the output is its body, {min(outputs)} to {max(outputs)} "
        f"tokens (longer ones are cut) and {statistics.mean(outputs):.0f} on average. On "
        f"{num_slots} slots a static batch uses **{static['utilisation']:.0%} of its slot-steps** "
        f"and takes {static['steps']:,} steps. If you schedule the same requests again at every "
        f"iteration, they use {continuous['utilisation']:.0%} and take {continuous['steps']:,}."
    )


PARTS = {"batching": Part(measure, {"timeline": draw_timeline}, tables)}

if __name__ == "__main__":
    run_lab(__file__, "01_batching", PARTS)
