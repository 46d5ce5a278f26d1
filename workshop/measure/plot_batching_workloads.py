"""The counts and times of chapter 1's record. `plot_batching.py --record` runs this module; alone
it does nothing.

Every number comes from a run of the chapter's own code over a small random model. Outputs have the
lengths that the workload asks for (EOS is ignored), so counted numbers, in steps, tokens and bytes,
depend neither on the machine nor on the weights. Only the last part times anything, and the chapter
shows only ratios of its calls, which are made in turn.
"""

from __future__ import annotations

import ast
import itertools
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request
from static_batching import StaticBatchingReport, generate_static
from step_record import RecordedScheduler, StepRecord

SEED = 0
NUM_REQUESTS, MAX_PROMPT, MAX_OUTPUT = 128, 256, 256  # the real workload; longer ones are cut
NUM_SLOTS = 16
BATCH_SIZES = [4, 8, 16, 32]
SPREADS = [0.0, 0.25, 0.5, 0.75, 1.0]  # outputs from MEAN * (1 - spread) to MEAN * (1 + spread)
SPREAD_SEEDS, SPREAD_REQUESTS, SPREAD_SLOTS, SPREAD_PROMPT, SPREAD_MEAN = 3, 64, 8, 8, 32
TIMELINE_SHRINK = 8  # divisor of the lengths, so that single steps are visible
COPY_REQUESTS, COPY_PROMPT, COPY_OUTPUT = 16, 16, 128
MAX_NUM_BATCHED_TOKENS = 2048

Lengths = Sequence[tuple[int, int]]  # (prompt tokens, output tokens) of each request

# -- workloads


def stdlib_functions(tokenizer_file: Path, num_functions: int, seed: int) -> Lengths:
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
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lengths = []
    for source, start, body, end in random.Random(seed).sample(spans, num_functions):
        lines = source.splitlines(keepends=True)
        prompt, output = ("".join(lines[a:b]) for a, b in ((start, body), (body, end)))
        num_prompt = max(len(tokenizer.encode(prompt).ids), 1)
        lengths.append((num_prompt, len(tokenizer.encode(output).ids) + 1))
    return lengths


def stdlib_lengths(tokenizer_file: Path) -> list[tuple[int, int]]:
    functions = stdlib_functions(tokenizer_file, NUM_REQUESTS, SEED)
    return [(min(prompt, MAX_PROMPT), min(output, MAX_OUTPUT)) for prompt, output in functions]


def spread_lengths(spread: float, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    low = max(1, round(SPREAD_MEAN * (1 - spread)))
    high = 2 * SPREAD_MEAN - low  # the mean stays the same
    return [(SPREAD_PROMPT, rng.randint(low, high)) for _ in range(SPREAD_REQUESTS)]


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
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    return model.to(dtype).eval()  # pyright: ignore[reportArgumentType]


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


def count_copies(model: PreTrainedModel) -> dict:
    """Count the KV bytes written in each step of requests of the same length."""
    copied, new = [0], [0]

    def after_step(record: StepRecord, runner: HFModelRunner) -> None:
        copied.append(runner.num_bytes_copied)
        new.append(runner.num_bytes_new)

    serve(model, [(COPY_PROMPT, COPY_OUTPUT)] * COPY_REQUESTS, COPY_REQUESTS, on_step=after_step)
    return {
        "copied": [b - a for a, b in itertools.pairwise(copied)],
        "new": [b - a for a, b in itertools.pairwise(new)],
    }


def count(lengths: Lengths) -> dict:
    torch.set_num_threads(1)
    model = tiny_model()
    equal = [(SPREAD_PROMPT, SPREAD_MEAN)] * SPREAD_REQUESTS
    by_length = sorted(lengths, key=lambda pair: pair[1])
    return {
        "timeline": count_timeline(model, lengths),
        "real": {str(size): compare(model, lengths, size) for size in BATCH_SIZES},
        "spread": [
            [
                compare(model, spread_lengths(spread, seed), SPREAD_SLOTS)
                for seed in range(SPREAD_SEEDS)
            ]
            for spread in SPREADS
        ],
        "cases": {
            "one request": compare(model, [(32, 64)], NUM_SLOTS),
            "64 requests of equal length": compare(model, equal, SPREAD_SLOTS),
            "16 requests, 16 slots": compare(model, lengths[:NUM_SLOTS], NUM_SLOTS),
            "the workload, shortest output first": compare(model, by_length, NUM_SLOTS),
            "the workload, longest output first": compare(model, by_length[::-1], NUM_SLOTS),
        },
        "copies": count_copies(model),
    }


def measure_time(lengths: Lengths, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Time the four ways to serve 16 requests on 8 slots, in turn, on one thread. In seconds."""
    torch.set_num_threads(1)
    model = tiny_model(layers=4, width=256, head_dim=64, dtype=torch.float32)
    workloads = {
        "equal lengths": [(32, 48)] * 16,
        "the workload's first 16": [(min(p, 64), min(o, 96)) for p, o in lengths[:16]],
    }
    ways: dict[str, Callable[[Lengths], object]] = {
        "one request at a time": lambda jobs: serve(model, jobs, 1, batched=False),
        "static batch": lambda jobs: generate_static(model, make_requests(jobs), 8),
        "continuous, each request alone": lambda jobs: serve(model, jobs, 8, batched=False),
        "continuous, padded batch": lambda jobs: serve(model, jobs, 8),
    }
    seconds: dict[str, dict[str, list[float]]] = {w: {name: [] for name in ways} for w in workloads}
    names = list(ways)
    for way in ways.values():
        way([(8, 4)] * 8)  # warm up
    for workload, jobs in workloads.items():
        for r in range(repeats):
            for name in names[r % len(names) :] + names[: r % len(names)]:
                start = time.perf_counter()
                ways[name](jobs)
                seconds[workload][name].append(round(time.perf_counter() - start, 4))
    return seconds
