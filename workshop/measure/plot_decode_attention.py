"""The time of decode attention: gathered, compiled, on contiguous memory, and only read.

    python -m workshop.plot_decode_attention --record decode_attention [--threads 1]

Four calls do the same work, in turn, each round starting with another; every repeat is kept.
`gathered` is `paged_attention`, `compiled` is `beyond/decode_attention.py`, `contiguous` is
PyTorch's attention on memory without blocks, `read` sums keys and values as integers, once: no
attention can be faster than that. The layers of a model follow each other, so that nothing is
still in the cache.
With one thread, times are processor time, which other programs disturb least; else wall time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from decode_attention import AttendRows, QueryRows, compile_rows
from paged_attention import AttentionMetadata, TorchAttentionBackend
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.lab_frame import Measurement, Part, run_lab

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 16, 8, 128  # a layer of Qwen3-0.6B
SCALE = HEAD_DIM**-0.5
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_SEQS, SEQ_LENS = (1, 8, 32, 128), ("64", "256", "1024", "mixed")
CACHE_BYTES = 256 << 20  # of keys that are read before the first ones are read again
Call = Callable[[int], object]  # of a layer


def lengths_of(num_seqs: int, name: str) -> list[int]:
    if name != "mixed":
        return [int(name)] * num_seqs
    rng = random.Random(num_seqs)
    return [int(32 * 64 ** rng.random()) for _ in range(num_seqs)]


def time_in_turn(calls: dict[str, Call], repeats: int, layers: int, threads: int) -> dict:
    """Return milliseconds of each call, all repeats."""
    clock = time.process_time if threads == 1 else time.perf_counter
    names, times = list(calls), {name: [] for name in calls}
    for name in names:
        calls[name](0)
    for r in range(repeats):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start = clock()
            calls[name](r % layers)
            times[name].append(round((clock() - start) * 1e3, 4))
    return times


class Memory:
    """Random numbers, as keys and values of any layout."""

    def __init__(self, dtype: torch.dtype, num_tokens: int) -> None:
        self.dtype, size = dtype, NUM_KV_HEADS * HEAD_DIM * num_tokens
        self.flat = [torch.empty(size, dtype=dtype).uniform_(-1, 1) for _ in range(2)]

    def layers(self, *shape: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        size = torch.Size(shape).numel()
        num = max(1, min(8, self.flat[0].numel() // size, CACHE_BYTES // size))
        keys, values = (
            [flat[i * size : (i + 1) * size].view(shape) for i in range(num)] for flat in self.flat
        )
        return keys, values


def cell(memory: Memory, lengths: list[int], compiled: AttendRows | None, options) -> dict:
    num_blocks = [-(-n // BLOCK_SIZE) for n in lengths]
    ids = (torch.randperm(sum(num_blocks)) + 1).split(num_blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    num_seqs, seq_lens = len(lengths), torch.tensor(lengths)
    head_keys, head_values = memory.layers(sum(num_blocks) + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = memory.layers(sum(num_blocks) + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    query = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM).to(memory.dtype)
    starts = torch.arange(num_seqs + 1)
    metadata = AttentionMetadata(starts, seq_lens, tables, starts[:-1], 1, max(lengths))
    plan = TorchAttentionBackend().plan(metadata, NUM_HEADS, keys[0])
    tables, output, in_order = tables.int(), torch.empty_like(query), np.arange(num_seqs)

    def lay_out() -> QueryRows:
        return QueryRows(BLOCK_SIZE, tables, in_order, in_order, seq_lens.numpy())

    rows = lay_out()
    calls: dict[str, Call] = {
        "gathered": lambda i: plan.attend(query, keys[i], values[i], SCALE),
        "read": lambda i: (keys[i].view(torch.int64).sum(), values[i].view(torch.int64).sum()),
    }
    if compiled is not None:
        calls["compiled"] = lambda i: compiled(
            query,
            head_keys[i].transpose(1, 2),
            head_values[i].transpose(1, 2),
            rows,
            SCALE,
            output,
        )
    if len(set(lengths)) == 1:
        whole = memory.layers(num_seqs, NUM_KV_HEADS, lengths[0], HEAD_DIM)
        shared = query.view(num_seqs, NUM_KV_HEADS, -1, HEAD_DIM)
        calls["contiguous"] = lambda i: scaled_dot_product_attention(
            shared, whole[0][i], whole[1][i], scale=SCALE
        )
    planned = time.perf_counter()
    for _ in range(10):
        lay_out()
    plan_ms = (time.perf_counter() - planned) * 100
    times = time_in_turn(calls, options.repeats, len(keys), options.threads)
    return {"ms": times, "plan_ms": round(plan_ms, 4)}


def measure(measurement: Measurement) -> dict:
    options = measurement.options
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if measurement.tiny:
        options.repeats = 1
    counts, names = (NUM_SEQS, SEQ_LENS) if not measurement.tiny else ((2,), ("64",))
    cells, compile_s = [], {}
    for dtype_name, dtype in DTYPES.items():
        num_tokens = max(sum(lengths_of(n, name)) for n in counts for name in names)
        memory = Memory(dtype, num_tokens + (max(counts) + 1) * BLOCK_SIZE)
        example = memory.layers(4, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        start = time.perf_counter()
        compiled = compile_rows(NUM_HEADS, example[0][0].transpose(1, 2))
        compile_s[dtype_name] = round(time.perf_counter() - start, 2)
        for num_seqs in counts:
            for name in names:
                found = cell(memory, lengths_of(num_seqs, name), compiled, options)
                head = {"dtype": dtype_name, "num_seqs": num_seqs, "seq_len": name}
                cells.append({**head, **found})
    clock = "processor time" if options.threads == 1 else "wall"
    config = {"threads": options.threads, "clock": clock, "repeats": options.repeats, "seed": 0}
    return {"config": config, "compile_s": compile_s, "cells": cells}


def tables(record: dict) -> dict[str, str]:
    names = ("gathered", "compiled", "contiguous", "read")
    rows = [
        [
            f"{c['num_seqs']} of {c['seq_len']}, {c['dtype']}",
            *(
                f"{statistics.median(c['ms'][n]):.2f} ({min(c['ms'][n]):.2f})"
                if n in c["ms"]
                else ""
                for n in names
            ),
        ]
        for c in record["cells"]
    ]
    head = ["sequences; ms a layer, median (least)", *names]
    return {"decode_attention": markdown_table(head, rows)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)


def main(arguments: Sequence[str] | None = None) -> None:
    parts = {"decode_attention": Part(measure, tables=tables)}
    run_lab(__file__, "02_paged_kv", parts, arguments, add_options=add_options)


if __name__ == "__main__":
    main()
