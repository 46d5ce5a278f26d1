"""Chapter 2's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    paged_kv            counts KV memory without a model, and times gathering and decode attention
                        against the block size
    decode_attention    times decode attention: gathered, compiled, on contiguous memory, only read
    compile_border      the model size from which compiling pays: the whole engine, both ways
    threads             the model size from which a second thread pays

The counts depend on lengths alone, those of functions of Python's standard library, so a scripted
runner replaces the model. Calls that do the same work are made in turn, and every repeat is kept.
With one thread (`--threads`), times are processor time, which other programs disturb less than wall
time.

`COMPILE_FROM_PARAMETERS` and `THREADS_FROM_PARAMETERS` in `common/engine_config.py` are chosen from
the last two parts. Compiling costs time at every start, also when the machine code is on the disk
already. The longer start is paid back after this many output tokens:

    start_s / (seconds a token, plain - seconds a token, compiled)

`threads` serves one request at a time and 16 together, on a quiet machine and next to a process
that keeps one core busy. `--sizes` measures only some of its models and keeps the others from the
last record.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import scaled_dot_product_attention

from block_pool import Block, BlockPool
from common.engine import LLMEngine
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from decode_attention import AttendRows, QueryRows, compile_rows
from engine_core import EngineCore
from kv_cache_manager import KVCacheManager
from paged_attention import AttentionMetadata, PagedKVCache, TorchAttentionBackend
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, RunnerInput, SchedulerOutput, StepOutput
from workshop.book.palette import BASELINE, DECODE, INK, WASTE, add_key, label_line
from workshop.measure.bench.bench_models import choose_dtype
from workshop.measure.bench.bench_record import markdown_table, read_record, table_of
from workshop.measure.bench.bench_table import times_the_floor
from workshop.measure.bench.bench_work import BenchRequest, Limits, greedy, make_requests
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.lab_frame import Measurement, Part, run_lab, table
from workshop.measure.plot_batching import BENCH_RECORD, TOKENIZER, stdlib_functions
from workshop.measure.rounds import run_in_turn, time_in_turn

SEED = 0
NUM_REQUESTS = 256
MAX_PROMPT, MAX_TOKENS, MAX_MODEL_LEN = 1024, 512, 2048
NUM_SLOTS = 16384  # of KV memory, for any block size
BLOCK_SIZE = 16
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
EOS = 1
KV_OF_QWEN3 = {"num_layers": 28, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}

Clock = Callable[[], float]


def clock_of(threads: int) -> tuple[str, Clock]:
    return ("processor time", time.process_time) if threads == 1 else ("wall", time.perf_counter)


# -- the workload


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the workload. `max_tokens` is its user's limit."""

    prompt_len: int
    output_len: int
    max_tokens: int = MAX_TOKENS


def stdlib_jobs(tokenizer_file: Path) -> list[Job]:
    """Return chapter 1's functions of the standard library, cut to length."""
    functions = stdlib_functions(tokenizer_file, NUM_REQUESTS, SEED)
    return [Job(min(prompt, MAX_PROMPT), min(output, MAX_TOKENS)) for prompt, output in functions]


# -- serving it without a model


class ScriptedRunner:
    """Ends every request after its known number of outputs."""

    def __init__(self, output_lens: dict[str, int]) -> None:
        self.remaining = dict(output_lens)

    def execute(self, plan: RunnerInput) -> FinishedStep:
        output = StepOutput()
        for request_id in plan.num_scheduled_tokens:
            self.remaining[request_id] -= 1
            output.token_ids[request_id] = [EOS * (not self.remaining[request_id])]
        return FinishedStep(output)


class AskingScheduler(PagedFCFSScheduler):
    """Allocates slots in every step, and not only at admission: some memories below promise less at
    admission than a reservation."""

    def make_plan(self, num_tokens: dict[str, int]) -> SchedulerOutput:
        for request_id, num_new_tokens in num_tokens.items():
            request = self.requests[request_id]
            has_room = self.kv_memory.allocate_slots(request, num_new_tokens)
            assert has_room, f"{request!r} is running, but the KV cache is full"
        return super().make_plan(num_tokens)


class GrowOnDemand(KVCacheManager):
    """Allocates slots when a token needs them and reserves nothing. Safe only where the pool cannot
    run out; chapter 4's scheduler makes it safe everywhere."""

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_reserved_tokens: int = 0
    ) -> bool:
        return super().allocate_slots(request, num_new_tokens)


class FirstFit(KVCacheManager):
    """The other baseline: one contiguous region a request, as long as prompt + max_tokens, in the
    first hole that is large enough. Blocks have one slot, but must be adjacent."""

    def _allocate_blocks(self, num_blocks: int) -> list[Block] | None:
        start = 1
        for block in self.pool.blocks[1:]:
            start = block.block_id + 1 if block.ref_cnt else start
            if block.block_id + 1 - start == num_blocks:
                region = self.pool.blocks[start : start + num_blocks]
                self.pool.reclaim(region)
                return list(region)
        return None if num_blocks else []


def make_memory(
    block_size: int, num_slots: int = NUM_SLOTS, kind: type[KVCacheManager] = KVCacheManager
) -> KVCacheManager:
    return kind(BlockPool(num_slots // block_size + 1), block_size)


def serve(
    jobs: Sequence[Job],
    memory: KVCacheManager,
    max_num_seqs: int = 256,
    with_snapshot: bool = False,
) -> dict:
    """Run all jobs to their end and count slots after every step.

    `crowded_*` are sums over the steps after which a request waits: in those steps memory is the
    limit and demand is not.
    """
    scheduler = AskingScheduler(memory, max_num_seqs, 2048, MAX_MODEL_LEN)
    requests = [
        Request(
            str(i),
            [0] * job.prompt_len,
            SamplingParams(temperature=0, max_tokens=job.max_tokens),
            [EOS],
        )
        for i, job in enumerate(jobs)
    ]
    output_lens = {str(i): job.output_len for i, job in enumerate(jobs)}
    core = EngineCore(scheduler, ScriptedRunner(output_lens))
    for request in requests:
        core.add_request(request)
    total = memory.pool.num_usable_blocks * memory.block_size
    names = "held written peak_held crowded_steps crowded_held crowded_written crowded_running"
    sums = dict.fromkeys(names.split(), 0)
    snapshots: list[dict] = []
    num_steps = 0
    while core.has_unfinished_requests():
        core.step()
        num_steps += 1
        running = list(scheduler.running.values())
        held = total - memory.pool.num_free_blocks * memory.block_size
        written = sum(request.num_computed_tokens for request in running)
        sums["held"] += held
        sums["written"] += written
        sums["peak_held"] = max(sums["peak_held"], held)
        if scheduler.waiting and with_snapshot:
            held_by = [_snapshot_of(request, memory) for request in running]
            snapshots.append({"step": num_steps, "written": written, "requests": held_by})
        if scheduler.waiting:
            sums["crowded_steps"] += 1
            sums["crowded_held"] += held
            sums["crowded_written"] += written
            sums["crowded_running"] += len(running)
    memory.check_invariants()
    result: dict[str, Any] = {"block_size": memory.block_size, "total_slots": total}
    result |= {"steps": num_steps, **sums}
    if with_snapshot:  # the last crowded step that has written the median amount, to 1 %
        median = statistics.median(snapshot["written"] for snapshot in snapshots)
        typical = [s for s in snapshots if abs(s["written"] - median) <= 0.01 * total]
        result["snapshot"] = typical[-1]
    return result


def _snapshot_of(request: Request, memory: KVCacheManager) -> dict:
    return {
        "request_id": request.request_id,
        "num_computed_tokens": request.num_computed_tokens,
        "block_ids": list(memory.get_block_ids(request.request_id)),
    }


def count(jobs: list[Job]) -> dict:
    """Return everything that is counted, not timed."""
    endless = len(jobs) * MAX_MODEL_LEN
    contiguous = serve(jobs, make_memory(MAX_MODEL_LEN), with_snapshot=True)
    paged = serve(jobs, make_memory(BLOCK_SIZE), with_snapshot=True)
    at_once = round(paged["crowded_running"] / paged["crowded_steps"])
    asked = {str(m): [replace(job, max_tokens=m) for job in jobs] for m in (512, 768, 1024)}
    asked["what it needs"] = [replace(job, max_tokens=job.output_len) for job in jobs]
    return {
        "contiguous": contiguous,
        "first_fit": serve(jobs, make_memory(1, kind=FirstFit)),
        "paged": paged,
        "on_demand_max_num_seqs": at_once,
        "on_demand": [
            serve(jobs, make_memory(size, endless, GrowOnDemand), at_once) for size in BLOCK_SIZES
        ],
        "asked_for": {name: serve(some, make_memory(BLOCK_SIZE)) for name, some in asked.items()},
        "tables": [measure_tables(size) for size in BLOCK_SIZES],
    }


def measure_tables(block_size: int, num_requests: int = 64, num_tokens: int = 1024) -> dict:
    """Bytes of Python objects for pool and tables, and of the runner's int32 tables, a KV token."""
    tokens = num_requests * num_tokens
    requests = [Request.from_tokens(str(i), [0]) for i in range(num_requests)]
    tracemalloc.start()
    memory = make_memory(block_size, tokens)
    for request in requests:
        memory.allocate_slots(request, num_tokens)
    host_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kv_cache = PagedKVCache(num_blocks=1, block_size=block_size, device="meta", **KV_OF_QWEN3)
    return {
        "block_size": block_size,
        "host_bytes_per_token": host_bytes / tokens,
        "device_bytes_per_token": 4 / block_size,
        "kv_bytes_per_token": kv_cache.kv_bytes_per_block / block_size,
    }


# -- gathering and decode attention, against the block size

# A decode step of 32 sequences of 256 tokens in layers of Qwen3-0.6B's shape.
NUM_SEQS, SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 256, 16, 8, 128, 4


def decode_metadata(block_size: int, seed: int = 0) -> AttentionMetadata:
    """Scatter every sequence's blocks over the memory; no sequence uses block 0."""
    num_blocks = NUM_SEQS * SEQ_LEN // block_size
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) + 1
    tables = ids.view(NUM_SEQS, -1)
    last = tables[:, -1] * block_size + block_size - 1
    starts, lens = torch.arange(NUM_SEQS + 1), torch.full((NUM_SEQS,), SEQ_LEN)
    return AttentionMetadata(starts, lens, tables.int(), last, 1, SEQ_LEN)


def measure_time(repeats: int) -> dict:
    """Time gathering and decode attention, in milliseconds for `NUM_LAYERS` layers."""
    torch.manual_seed(0)
    num_slots = NUM_SEQS * SEQ_LEN + max(BLOCK_SIZES)
    flat = [torch.randn(2, num_slots, NUM_KV_HEADS, HEAD_DIM) for _ in range(NUM_LAYERS)]
    query = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM)
    buffer = torch.empty(NUM_SEQS * SEQ_LEN, NUM_KV_HEADS, HEAD_DIM)
    scale = HEAD_DIM**-0.5

    def as_blocks(tensor: torch.Tensor, block_size: int) -> torch.Tensor:
        return tensor.view(-1, block_size, NUM_KV_HEADS, HEAD_DIM)

    def gather_blocks(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten()
        out = as_blocks(buffer, block_size)
        for layer in flat:
            for cache in layer:
                torch.index_select(as_blocks(cache, block_size), 0, ids, out=out)

    def index_anew(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten().long()
        for layer in flat:
            for cache in layer:
                as_blocks(cache, block_size)[ids]

    def select_anew(block_size: int) -> None:
        ids = decode_metadata(block_size).block_tables.flatten()
        for layer in flat:
            for cache in layer:
                torch.index_select(as_blocks(cache, block_size), 0, ids)

    def only_fill() -> None:
        for _ in range(2 * NUM_LAYERS):
            torch.empty_like(buffer).fill_(0)

    def attend_paged(block_size: int) -> None:
        layers = [[as_blocks(kv, block_size) for kv in layer] for layer in flat]
        plan = TorchAttentionBackend().plan(decode_metadata(block_size), NUM_HEADS, layers[0][0])
        for keys, values in layers:
            plan.attend(query, keys, values, scale)

    def attend_contiguous() -> None:
        rows = query.view(NUM_SEQS, NUM_KV_HEADS, -1, HEAD_DIM)
        for layer in flat:
            kv = layer[:, : NUM_SEQS * SEQ_LEN]
            key, value = kv.view(2, NUM_SEQS, SEQ_LEN, NUM_KV_HEADS, HEAD_DIM).transpose(2, 3)
            scaled_dot_product_attention(rows, key, value, scale=scale)

    gathers: dict[str, Callable[[], object]] = {
        str(size): partial(gather_blocks, size) for size in BLOCK_SIZES
    }
    for size in (1, BLOCK_SIZE):
        gathers[f"anew {size}"] = partial(index_anew, size)
        gathers[f"select {size}"] = partial(select_anew, size)
    gathers["fill"] = only_fill
    attends: dict[str, Callable[[], object]] = {
        str(size): partial(attend_paged, size) for size in BLOCK_SIZES
    }
    attends["contiguous"] = attend_contiguous
    return {
        "gather_ms": time_in_turn(gathers, repeats, time.process_time),
        "attend_ms": time_in_turn(attends, repeats, time.process_time),
    }


def measure_paged_kv(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    repeats = 1 if measurement.tiny else measurement.options.repeats or 9
    jobs = stdlib_jobs(measurement.options.tokenizer)
    config = {
        "seed": SEED,
        "num_slots": NUM_SLOTS,
        "max_model_len": MAX_MODEL_LEN,
        "threads": 1,
        "clock": "processor time",
        "repeats": repeats,
    }
    return {
        "config": config,
        "jobs": [[job.prompt_len, job.output_len, job.max_tokens] for job in jobs],
        "counted": count(jobs),
        "timed": measure_time(repeats),
    }


# -- decode attention by itself

SCALE = HEAD_DIM**-0.5
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CELL_SEQS, CELL_LENS = (1, 8, 32, 128), ("64", "256", "1024", "mixed")
CACHE_BYTES = 256 << 20  # of keys that are read before the first ones are read again


def lengths_of(num_seqs: int, name: str) -> list[int]:
    if name != "mixed":
        return [int(name)] * num_seqs
    rng = random.Random(num_seqs)
    return [int(32 * 64 ** rng.random()) for _ in range(num_seqs)]


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


def cell(
    memory: Memory, lengths: list[int], compiled: AttendRows | None, num_rounds: int, clock: Clock
) -> dict:
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
    calls: dict[str, Callable[[int], object]] = {  # of a layer
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
    layers = itertools.cycle(range(len(keys)))  # not the same twice: it would be in the cache
    in_turn = {name: lambda call=call: call(next(layers)) for name, call in calls.items()}
    times = time_in_turn(in_turn, num_rounds, clock)
    return {"ms": times, "plan_ms": round(plan_ms, 4)}


def measure_decode_attention(measurement: Measurement) -> dict:
    options, tiny = measurement.options, measurement.tiny
    threads, repeats = options.threads or 1, 1 if tiny else options.repeats or 20
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    counts, names = ((2,), ("64",)) if tiny else (CELL_SEQS, CELL_LENS)
    cells, compile_s = [], {}
    for dtype_name, dtype in DTYPES.items():
        num_tokens = max(sum(lengths_of(n, name)) for n in counts for name in names)
        memory = Memory(dtype, num_tokens + (max(counts) + 1) * BLOCK_SIZE)
        example = memory.layers(4, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        start = time.perf_counter()
        compiled = compile_rows(NUM_HEADS, example[0][0].transpose(1, 2))
        compile_s[dtype_name] = round(time.perf_counter() - start, 2)
        for num_seqs, name in itertools.product(counts, names):
            lengths = lengths_of(num_seqs, name)
            found = cell(memory, lengths, compiled, repeats, clock_of(threads)[1])
            cells.append({"dtype": dtype_name, "num_seqs": num_seqs, "seq_len": name, **found})
    config = {"threads": threads, "clock": clock_of(threads)[0], "repeats": repeats, "seed": 0}
    return {"config": config, "compile_s": compile_s, "cells": cells}


# -- the whole engine, compiled or not, with one thread or two

# layers, hidden, inner, heads, KV heads, head dim, vocabulary; the middle ones are of common shapes
SHAPES = {
    "8 layers of 256": (8, 256, 768, 4, 2, 64, 4096),
    "12 layers of 384": (12, 384, 1152, 6, 2, 64, 8192),
    "30 layers of 576": (30, 576, 1536, 9, 3, 64, 49152),
    "32 layers of 960": (32, 960, 2560, 15, 5, 64, 49152),
    "28 layers of 1024": (28, 1024, 3072, 16, 8, 128, 151936),
}
PROMPT_LENS, OUTPUT_LENS = (32, 256), (16, 32)
MODES = {"plain": False, "compiled": True}
# The part `threads`.
THREAD_SIZES = ("8 layers of 256", "12 layers of 384", "30 layers of 576", "28 layers of 1024")
NUM_TOGETHER, NUM_THREADS = (1, 16), (1, 2)
SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS = (8, 16), (6, 10)


def config_of(shape: Sequence[int]) -> ModelConfig:
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = shape
    return replace(
        QWEN3_0_6B, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=vocab, eos_token_ids=(),
    )  # fmt: skip


def make_engine(config: ModelConfig, dtype: torch.dtype, limits: Limits, is_compiled: bool):
    """Return an engine with separate weights, and the seconds to make it without them. The machine
    code is on the disk and not in this process."""
    loaded = random_model(config, seed=0, dtype=dtype)
    start = time.perf_counter()
    engine = LLMEngine(limits.engine_config(compile=is_compiled), loaded=loaded)
    return engine, time.perf_counter() - start


def serve_engine(engine: LLMEngine, requests: list[BenchRequest], clock: Clock) -> float:
    params = [greedy(request.max_tokens) for request in requests]
    start = clock()
    engine.generate_batch([request.prompt_token_ids for request in requests], params)
    return round(clock() - start, 4)


def measure_shape(
    shape: Sequence[int], dtype: torch.dtype, num_seqs: int, repeats: int, clock: Clock
) -> dict:
    config = config_of(shape)
    with torch.device("meta"):
        num_parameters = DecoderModel(config, dtype, "meta").num_parameters
    requests = make_requests(num_seqs, PROMPT_LENS, OUTPUT_LENS, config.vocab_size, seed=0)
    limits = Limits(max_num_seqs=num_seqs, longest=sum((PROMPT_LENS[1], OUTPUT_LENS[1])))
    engines, start_s = {}, {}
    for name, is_compiled in MODES.items():
        make_engine(config, dtype, limits, is_compiled)  # puts its files on the disk
        engines[name], start_s[name] = make_engine(config, dtype, limits, is_compiled)
        serve_engine(engines[name], requests[:2], clock)
    seconds = run_in_turn(
        engines, lambda name: serve_engine(engines[name], requests, clock), repeats, 0
    )
    return {
        "num_parameters": num_parameters,
        "num_output_tokens": sum(request.max_tokens for request in requests),
        "start_s": {name: round(value, 3) for name, value in start_s.items()},
        "seconds": seconds,
    }


TINY_SHAPES = {"2 layers of 64": (2, 64, 96, 2, 1, 32, 89)}


def measure_border(measurement: Measurement) -> dict:
    options, tiny = measurement.options, measurement.tiny
    threads, dtype = options.threads or 2, choose_dtype("auto")
    torch.set_num_threads(threads)
    repeats, num_seqs = (1, 2) if tiny else (options.repeats or 3, 32)
    clock_name, clock = clock_of(threads)
    sizes = {
        name: measure_shape(shape, dtype, num_seqs, repeats, clock)
        for name, shape in (TINY_SHAPES if tiny else SHAPES).items()
    }
    config = {
        "threads": threads, "repeats": repeats, "seed": 0, "clock": clock_name,
        "dtype": str(dtype).removeprefix("torch."), "num_requests": num_seqs,
        "prompt_lens": PROMPT_LENS, "output_lens": OUTPUT_LENS,
    }  # fmt: skip
    return {"config": config, "sizes": sizes}


def measure_threads(measurement: Measurement) -> dict:
    options, dtype = measurement.options, choose_dtype("auto")
    names, repeats = options.sizes, options.repeats or 3
    shapes = {name: SHAPES[name] for name in names or THREAD_SIZES}
    if measurement.tiny:
        shapes, repeats = TINY_SHAPES, 1
    before = measurement.records.get("threads", {}).get("sizes", {}) if names else {}
    config = {
        "compile": False, "seed": 0, "clock": "wall", "dtype": str(dtype).removeprefix("torch."),
        "prompt_lens": SHORT_PROMPT_LENS, "output_lens": SHORT_OUTPUT_LENS,
    }  # fmt: skip
    measured = {name: threads_of_shape(shape, dtype, repeats) for name, shape in shapes.items()}
    return {"config": config, "sizes": before | measured}


def threads_of_shape(shape: Sequence[int], dtype: torch.dtype, repeats: int) -> dict:
    """Return seconds of the same requests with each number of threads."""
    config = config_of(shape)
    limits = Limits(max_num_seqs=32, longest=sum((SHORT_PROMPT_LENS[1], SHORT_OUTPUT_LENS[1])))
    loaded = random_model(config, seed=0, dtype=dtype)
    engine = LLMEngine(limits.engine_config(compile=False), loaded=loaded)
    found: dict = {"num_parameters": engine.num_parameters, "runs": {}}
    for n in NUM_TOGETHER:
        lens = SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS
        requests = make_requests(n, *lens, config.vocab_size, seed=0)
        serve_engine(engine, requests, time.perf_counter)
        num_tokens = sum(request.max_tokens for request in requests)
        for name in ("quiet", "busy"):
            with keep_a_core_busy() if name == "busy" else nullcontext():
                seconds = time_each(engine, requests, repeats)
            run = {"num_output_tokens": num_tokens, "seconds": seconds}
            found["runs"][f"{n} together, {name}"] = run
    engine.close()
    return found


def time_each(engine: LLMEngine, requests: list[BenchRequest], repeats: int) -> dict:
    def run(number: str) -> float:
        torch.set_num_threads(int(number))
        return serve_engine(engine, requests, time.perf_counter)

    return run_in_turn(map(str, NUM_THREADS), run, repeats, 0)


@contextmanager
def keep_a_core_busy() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def tokens_to_win_back(size: dict) -> float | None:
    """Return the output tokens after which compiling has paid for itself. None: never."""
    plain, compiled = (statistics.median(size["seconds"][name]) for name in MODES)
    saved = (plain - compiled) / size["num_output_tokens"]
    extra = size["start_s"]["compiled"] - size["start_s"]["plain"]
    return extra / saved if saved > 0 else None


# -- figures


def empty_share(run: dict) -> float:
    """Return the share of the whole memory that holds nothing while requests wait for memory."""
    return 1 - run["crowded_written"] / (run["crowded_steps"] * run["total_slots"])


def draw_memory_map(record: dict) -> Figure:
    """Draw a bar for each request that runs: its slots, written and reserved."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 5), layout="constrained")
    counted, num_requests = record["counted"], []
    names = {"contiguous": "2,048 slots a request", "paged": "blocks of 16 slots"}
    for axis, (name, title) in zip(axes, names.items()):
        run = counted[name]
        snapshot = run["snapshot"]
        requests = snapshot["requests"]
        written = [request["num_computed_tokens"] for request in requests]
        held = [len(request["block_ids"]) * run["block_size"] for request in requests]
        axis.barh(range(len(requests)), held, 0.8, color=WASTE)
        axis.barh(range(len(requests)), written, 0.8, color=DECODE)
        empty = 1 - snapshot["written"] / run["total_slots"]
        num_requests.append(len(requests))
        axis.set_title(f"{name}, {title}:\n{empty:.0%} of memory empty")
        axis.set(xlabel="slots", xlim=(0, 2048), ylim=(len(requests) - 0.4, -0.6))
    axes[0].set_ylabel("running requests")
    figure.suptitle(
        "In blocks, the same memory holds {1} requests instead of {0}".format(*num_requests)
    )
    add_key(figure, {"written": DECODE, "reserved, empty": WASTE})
    return figure


def draw_block_size(record: dict) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    runs = record["counted"]["on_demand"]
    waste = [100 * (1 - run["written"] / run["held"]) for run in runs]
    left.plot(BLOCK_SIZES, waste, "o-", color=WASTE)
    left.set(title="Held slots that are empty", ylabel="% of held slots, counted", ylim=0)
    times = {name: statistics.median(ms) for name, ms in record["timed"]["attend_ms"].items()}
    ratio = [times[str(size)] / times["contiguous"] for size in BLOCK_SIZES]
    right.plot(BLOCK_SIZES, ratio, "o-", color=INK)
    right.axhline(1, color=BASELINE)
    label_line(right, BLOCK_SIZES[1], ratio[1], "paged, PyTorch", INK, offset=(10, 8))
    label_line(right, BLOCK_SIZES[0], 1, "contiguous", BASELINE, offset=(0, -12))
    right.set(title="Time of decode attention", ylabel="contiguous = 1, timed", ylim=0)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(BLOCK_SIZES[::2], [str(size) for size in BLOCK_SIZES[::2]])
        axis.set_xlabel("block size, tokens")
    return figure


# -- tables


def tables(record: dict) -> dict[str, str]:
    counted, timed = record["counted"], record["timed"]
    return {
        "headline": _headline(counted),
        "memory": _memory_table(counted),
        "asked_for": _asked_for_table(counted),
        "block_size": _block_size_table(counted, timed),
        "gather": _gather_table(timed),
        "floor": _floor_table(read_record(BENCH_RECORD)),
    }


def _headline(counted: dict) -> str:
    contiguous, paged = counted["contiguous"], counted["paged"]
    demand = next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)
    return (
        f"With a contiguous region of `max_model_len` slots for each request, **"
        f"{empty_share(contiguous):.0%} of the KV memory holds nothing while requests wait for "
        f"memory**. With blocks of {BLOCK_SIZE} slots it is {empty_share(paged):.0%} if each "
        f"request reserves all it may ever need, and of the blocks held "
        f"{1 - demand['written'] / demand['held']:.1%} if it takes a block when a token needs one."
    )


def _floor_table(bench: dict) -> str:
    """The floor of the bench's run by its parts, and the paged engine's multiple of it."""
    floor, roofline = bench["floor"], bench["roofline"]
    num_rows = roofline["prefill"]["num_rows"]
    matrices_ms = statistics.median(roofline["prefill"]["ms"])
    bandwidth = statistics.median(roofline["bandwidth"]["matvec_gb_per_s"])
    took = statistics.median(run["seconds"] for run in bench["systems"]["paged"]["runs"])
    rows = [
        [
            f"{floor['num_prompt_tokens']:,} prompt tokens; {num_rows:,} rows take "
            f"{matrices_ms:,.0f} ms",
            f"{floor['prompts_s']:.1f}",
        ],
        [
            f"{floor['num_decode_steps']} decode steps; the matrices alone",
            f"{floor['decodes_s']:.1f}",
        ],
        [
            f"KV read once in each; {roofline['kv_bytes_per_token']:,} bytes a token at "
            f"{bandwidth:.1f} GB/s",
            f"{floor['kv_s']:.1f}",
        ],
        ["the floor", f"{floor['seconds']:.1f}"],
        [
            f"measured: **{times_the_floor(bench, 'paged'):.2f} times the floor**",
            f"{took:.1f}",
        ],
    ]
    machine = bench["environment"]
    return (
        markdown_table(["part", "seconds"], rows)
        + f"\n\n<sub>`workshop/measure/bench/records/bench_qwen3-0.6b.json`, {machine['cpu']}, "
        f"{machine['cores']} cores, commit `{machine['commit'][:10]}`: `{bench['command']}`</sub>"
    )


def _memory_table(counted: dict) -> str:
    runs = {
        "contiguous, `max_model_len`": counted["contiguous"],
        "contiguous, prompt + `max_tokens`, first fit": counted["first_fit"],
        "paged, prompt + `max_tokens` (the engine of this chapter)": counted["paged"],
    }
    rows = []
    for name, run in runs.items():
        memory = run["crowded_steps"] * run["total_slots"]
        written, held = run["crowded_written"] / memory, run["crowded_held"] / memory
        shares = (f"{written:.0%}", f"{held - written:.0%}", f"{1 - held:.0%}")
        rows.append(_memory_row(name, run, *shares))
    demand = next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)
    share = demand["written"] / demand["held"]
    name = "paged, on demand (chapter 4), of the blocks it holds"
    rows.append(_memory_row(name, demand, f"{share:.1%}", f"{1 - share:.1%}", "-"))
    return table_of(rows)


def _memory_row(name: str, run: dict, written: str, reserved: str, free: str) -> dict[str, str]:
    return {
        "KV memory while requests wait": name,
        "written": written,
        "reserved, empty": reserved,
        "free": free,
        **_pace(run),
    }


def _pace(run: dict) -> dict[str, str]:
    at_once = run["crowded_running"] / run["crowded_steps"]
    return {"at once": f"{at_once:.1f}", "steps": f"{run['steps']:,}"}


def _asked_for_table(counted: dict) -> str:
    return table_of(
        [
            {
                "`max_tokens` each user asks for": name,
                "memory written": f"{1 - empty_share(run):.0%}",
                **_pace(run),
            }
            for name, run in counted["asked_for"].items()
        ]
    )


def _block_size_table(counted: dict, timed: dict) -> str:
    attend = {name: statistics.median(ms) for name, ms in timed["attend_ms"].items()}
    gather = {name: statistics.median(ms) for name, ms in timed["gather_ms"].items()}
    rows = []
    for run, bookkeeping in zip(counted["on_demand"], counted["tables"]):
        size = run["block_size"]
        host = bookkeeping["host_bytes_per_token"] / bookkeeping["kv_bytes_per_token"]
        rows.append(
            [
                size,
                f"{1 - run['written'] / run['held']:.1%}",
                f"{bookkeeping['host_bytes_per_token']:.1f}",
                f"{host:.4%}",
                f"{gather[str(size)] / gather[str(BLOCK_SIZE)]:.2f}",
                f"{attend[str(size)] / attend['contiguous']:.2f}",
            ]
        )
    head = ["block size", "empty slots", "table bytes a token", "of KV bytes"]
    return markdown_table([*head, "gather (16 = 1)", "attention (contiguous = 1)"], rows)


def _gather_table(timed: dict) -> str:
    ms = {name: statistics.median(times) for name, times in timed["gather_ms"].items()}
    ways = {
        "`cache[ids]`, fresh memory": "anew {}",
        "`index_select`, fresh memory": "select {}",
        "`index_select` into one buffer": "{}",
    }
    rows = [
        [way, *(f"{ms[name.format(b)] / ms[str(BLOCK_SIZE)]:.1f}" for b in (1, BLOCK_SIZE))]
        for way, name in ways.items()
        if name.format(1) in ms
    ]
    if "fill" in ms:
        fill = f"{ms['fill'] / ms[str(BLOCK_SIZE)]:.1f}"
        rows.append(["nothing gathered: fresh memory filled with 0", "-", fill])
    return markdown_table(
        ["gathering all keys and values", "by token", f"by block of {BLOCK_SIZE}"], rows
    )


def tables_of_decode_attention(record: dict) -> dict[str, str]:
    def cell(row: dict, name: str) -> str:
        times = row["ms"].get(name)
        return f"{statistics.median(times):.2f} ({min(times):.2f})" if times else ""

    rows = {f"{c['num_seqs']} of {c['seq_len']}, {c['dtype']}": c for c in record["cells"]}
    columns = {
        name: lambda row, name=name: cell(row, name)
        for name in ("gathered", "compiled", "contiguous", "read")
    }
    return {"decode_attention": table("sequences; ms a layer, median (least)", rows, columns)}


def _by_model(record: dict) -> dict[str, dict]:
    sizes = record["sizes"].items()
    return {f"{name}, {size['num_parameters'] / 1e6:,.0f} M": size for name, size in sizes}


def tables_of_border(record: dict) -> dict[str, str]:
    def speed(mode: str) -> Callable[[dict], str]:
        return lambda s: f"{s['num_output_tokens'] / statistics.median(s['seconds'][mode]):,.0f}"

    def longer_start(size: dict) -> float:
        return size["start_s"]["compiled"] - size["start_s"]["plain"]

    def tokens_to_win_back(size: dict) -> str:
        plain, compiled = (statistics.median(size["seconds"][mode]) for mode in MODES)
        saved = (plain - compiled) / size["num_output_tokens"]
        return f"{longer_start(size) / saved:,.0f}" if saved > 0 else "never"

    columns = {
        "plain tok/s": speed("plain"),
        "compiled tok/s": speed("compiled"),
        "longer start, s": lambda size: f"{longer_start(size):.1f}",
        "won back after, tokens": tokens_to_win_back,
    }
    return {"compile_border": table("model", _by_model(record), columns)}


def tables_of_threads(record: dict) -> dict[str, str]:
    """Return output tokens a second with one thread, then with two; medians."""

    def cell(size: dict, title: str) -> str:
        run = size["runs"][title]
        medians = map(statistics.median, run["seconds"].values())
        return " → ".join(f"{run['num_output_tokens'] / s:,.1f}" for s in medians)

    models = _by_model(record)
    columns = {
        title: lambda size, title=title: cell(size, title)
        for title in next(iter(models.values()))["runs"]
    }
    return {"threads": table("model", models, columns)}


PARTS = {
    "paged_kv": Part(
        measure_paged_kv, {"memory_map": draw_memory_map, "block_size": draw_block_size}, tables
    ),
    "decode_attention": Part(measure_decode_attention, tables=tables_of_decode_attention),
    "compile_border": Part(measure_border, tables=tables_of_border),
    "threads": Part(measure_threads, tables=tables_of_threads),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, help="of each timed call")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json")
    parser.add_argument("--threads", type=int, help="of decode_attention (1), compile_border (2)")
    parser.add_argument("--sizes", nargs="+", choices=THREAD_SIZES, default=[], metavar="NAME")


if __name__ == "__main__":
    run_lab(__file__, "02_paged_kv", PARTS, add_options=add_options)
