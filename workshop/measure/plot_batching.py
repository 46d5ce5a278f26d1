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
from collections.abc import Callable, Sequence
from pathlib import Path

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
from static_batching import StaticBatchingReport, generate_static
from step_record import RecordedScheduler, StepRecord
from workshop.book.palette import (
    DECODE,
    INK,
    PAPER,
    PROMPT,
    WASTE,
    add_key,
)
from workshop.measure.bench.bench_models import make_twin
from workshop.measure.bench.bench_record import ROOT, markdown_table
from workshop.measure.bench.random_weights import random_model, shape_of
from workshop.measure.lab_frame import Measurement, Part, run_lab, table

TOKENIZER = ROOT / "common" / "checkpoints" / "tiny" / "tokenizer.json"

SEED = 0
NUM_REQUESTS, MAX_PROMPT, MAX_OUTPUT = 128, 256, 256  # the real workload; longer ones are cut
NUM_SLOTS = 16
BATCH_SIZES = [4, 8, 16, 32]
TIMELINE_SHRINK = 8  # divisor of the lengths, so that single steps are visible
MAX_NUM_BATCHED_TOKENS = 2048

Lengths = Sequence[tuple[int, int]]  # (prompt tokens, output tokens) of each request

# -- workloads


def stdlib_functions(num_functions: int, seed: int) -> Lengths:
    """Draw functions of Python's standard library. Returns `(prompt, output)` tokens: the prompt is
    the code from the outermost class or function around one to the end of its header, the output is
    its body and an end-of-text token.
    """
    spans: list[tuple[str, int, int, int | None]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for top in ast.parse(source).body:
            for node in ast.walk(top):
                if isinstance(node, ast.FunctionDef):
                    body = node.body[0].lineno - 1
                    spans.append((source, top.lineno - 1, body, node.end_lineno))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    lengths = []
    for source, start, body, end in random.Random(seed).sample(spans, num_functions):
        lines = source.splitlines(keepends=True)
        prompt, output = ("".join(lines[a:b]) for a, b in ((start, body), (body, end)))
        num_prompt = max(len(tokenizer.encode(prompt).ids), 1)
        lengths.append((num_prompt, len(tokenizer.encode(output).ids) + 1))
    return lengths


def make_requests(lengths: Lengths, vocab_size: int = 64) -> list[Request]:
    rng = random.Random(SEED)
    return [
        Request.from_tokens(
            f"r{i}", [rng.randrange(vocab_size) for _ in range(prompt)], output, arrival_time=i
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


def tiny_model(
    layers: int = 1, width: int = 16, head_dim: int = 8, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """Build a Qwen3 with random weights. Its text is noise; its tensors have the right shapes."""
    shape = shape_of(layers, width, 2 * width, 2, 1, head_dim, vocab=64)
    return make_twin(random_model(shape, SEED, dtype))


# -- runs


def serve(
    model: PreTrainedModel,
    lengths: Lengths,
    max_num_seqs: int,
    batched: bool = True,
    on_step: Callable[[StepRecord, HFModelRunner], None] | None = None,
) -> tuple[list[StepRecord], HFModelRunner, dict[str, list[int]]]:
    """Serve requests that are all there at the start with continuous batching. Returns the records
    of its steps, its runner, and every request's tokens."""
    records: list[StepRecord] = []
    runner = HFModelRunner(model, batched=batched)
    scheduler = FCFSScheduler(max_num_seqs, MAX_NUM_BATCHED_TOKENS)
    engine = EngineCore(RecordedScheduler(scheduler, [records.append]), runner)
    requests = make_requests(lengths)
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        engine.step()
        if on_step is not None:
            on_step(records[-1], runner)
    return records, runner, {r.request_id: r.output_token_ids for r in requests}


def describe_static(report: StaticBatchingReport, num_slots: int) -> dict:
    first_tokens = [batch.start_step + 1 for batch in report.batches for _ in batch.req_ids]
    return {
        "steps": report.num_steps,
        "tokens": report.slot_steps_used,
        "utilisation": report.slot_steps_used / (report.num_steps * num_slots),
        "first_token_step": sum(first_tokens) / len(first_tokens),
        # Rows times columns of every model call: the computed positions, padding included.
        "computed": sum(
            b.num_prompt_tokens + b.num_padding_tokens + len(b.req_ids) * (b.num_steps - 1)
            for b in report.batches
        ),
    }


def describe_continuous(
    records: list[StepRecord], runner: HFModelRunner, num_slots: int
) -> dict[str, float]:
    num_tokens = sum(len(ids) for r in records for ids in r.new_token_ids.values())
    first_tokens = [r.step + 1 for r in records for _ in r.admitted]
    scheduled = [list(r.num_scheduled_tokens.values()) for r in records]
    return {
        "steps": len(records),
        "tokens": num_tokens,
        "utilisation": num_tokens / (len(records) * num_slots),
        "first_token_step": sum(first_tokens) / len(first_tokens),
        "computed": sum(len(step) * max(step) for step in scheduled),
        "needed": sum(map(sum, scheduled)),  # without padding
        "bytes_copied": runner.num_bytes_copied,
        "bytes_new": runner.num_bytes_new,
    }


def compare(model: PreTrainedModel, lengths: Lengths, num_slots: int) -> dict[str, dict]:
    """Serve the same requests both ways. Raises `AssertionError` if one token differs."""
    report = generate_static(model, make_requests(lengths), num_slots)
    records, runner, token_ids = serve(model, lengths, num_slots)
    assert token_ids == report.token_ids, "batching changed a token"
    return {
        "static": describe_static(report, num_slots),
        "continuous": describe_continuous(records, runner, num_slots),
    }


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
            static[slot] += [[req_id, use.value] for use in row]
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


def count(lengths: Lengths) -> dict:
    model = tiny_model()
    equal = [(8, 32)] * 64
    by_length = sorted(lengths, key=lambda pair: pair[1])
    return {
        "timeline": count_timeline(model, lengths),
        "real": {str(size): compare(model, lengths, size) for size in BATCH_SIZES},
        "cases": {
            "one request": compare(model, [(32, 64)], NUM_SLOTS),
            "64 requests of equal length": compare(model, equal, 8),
            "16 requests, 16 slots": compare(model, lengths[:NUM_SLOTS], NUM_SLOTS),
            "the workload, shortest output first": compare(model, by_length, NUM_SLOTS),
            "the workload, longest output first": compare(model, by_length[::-1], NUM_SLOTS),
        },
    }


def measure(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    max_prompt, max_output = measurement.of((8, 8), (MAX_PROMPT, MAX_OUTPUT))
    functions = stdlib_functions(NUM_REQUESTS, SEED)
    lengths = [(min(p, max_prompt), min(o, max_output)) for p, o in functions]
    config = {
        name.lower(): value
        for name, value in globals().items()
        if name.isupper() and isinstance(value, int | list)
    }
    return {
        "config": config | {"threads": 1},
        "lengths": lengths,
        "counted": count(lengths),
    }


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
    for step in range(1, len(row) + 1):
        if step < len(row) and row[step] == row[start]:
            continue
        mark = row[start]
        if mark is not None:
            req_id, use = mark
            axis.barh(slot, step - start, 0.6, left=start, color=COLORS[use], edgecolor=PAPER)
            if use == "P":
                above = (start + 0.5, slot - 0.3)
                axis.annotate(req_id[1:], above, color=INK, ha="center", va="bottom", size=10)
        start = step


# -- tables


def tables(record: dict) -> dict[str, str]:
    return {
        "headline": _headline(record),
        "cases": _cases_table(record),
        "floor": _floor_table(record),
    }


def _headline(record: dict) -> str:
    run = record["counted"]["real"][str(record["config"]["num_slots"])]
    static, continuous = run["static"], run["continuous"]
    lengths = record["lengths"]
    outputs = [output for _, output in lengths]
    num_slots = record["config"]["num_slots"]
    return (
        f"The workload is {len(lengths)} functions of Python's standard library: the prompt is the "
        f"code before a function's body, the output is its body, {min(outputs)} to {max(outputs)} "
        f"tokens (longer ones are cut) and {statistics.mean(outputs):.0f} on average. On "
        f"{num_slots} slots a static batch uses **{static['utilisation']:.0%} of its slot-steps** "
        f"and takes {static['steps']:,} steps. If you schedule the same requests again at every "
        f"iteration, they use {continuous['utilisation']:.0%} and take {continuous['steps']:,}."
    )


def _both(form: str, field: str, head: str) -> dict[str, Callable[[dict], str]]:
    """Return two columns: the static batch's field and that of the continuous one."""
    return {
        f"{head}, static": lambda run: form.format(run["static"][field]),
        f"{head}, continuous": lambda run: form.format(run["continuous"][field]),
    }


def _cases_table(record: dict) -> str:
    real = record["counted"]["real"][str(record["config"]["num_slots"])]
    columns = _both("{:,}", "steps", "steps") | {
        "ratio": lambda run: f"{run['static']['steps'] / run['continuous']['steps']:.2f}"
    }
    return table("case", {"the workload, as it comes": real, **record["counted"]["cases"]}, columns)


def _floor_table(record: dict) -> str:
    """The least possible cost of the workload, and in brackets each way's multiple of it."""
    num_slots = record["config"]["num_slots"]
    run = record["counted"]["real"][str(num_slots)]
    continuous = run["continuous"]
    outputs = [output for _, output in record["lengths"]]
    min_steps = max(max(outputs), -(-sum(outputs) // num_slots))

    needed, new, copied = (continuous[name] for name in ("needed", "bytes_new", "bytes_copied"))
    rows = []
    for name, floor, field in (
        ("steps", min_steps, "steps"),
        ("token positions computed", needed, "computed"),
    ):
        counts = (run[way][field] for way in ("static", "continuous"))
        rows.append([name, f"{floor:,}", *(f"{n:,} ({n / floor:.1f} x)" for n in counts)])
    new, copied = new / 1e6, copied / 1e6
    rows.append(["KV written", f"{new:,.1f} MB", "", f"{copied:,.1f} MB ({copied / new:.0f} x)"])
    return markdown_table(["", "floor", "static batch", "continuous, padded"], rows)


PARTS = {
    "batching": Part(measure, {"timeline": draw_timeline}, tables),
}


if __name__ == "__main__":
    run_lab(__file__, "01_batching", PARTS)
