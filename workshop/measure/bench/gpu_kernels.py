"""The kernels of the engine, each on its own, for `make gpu`.

prewarm           compile every kernel of the other parts, on many cores, into Triton's cache
run_tests         the tests of all kernels on the device, against float64 or PyTorch
time_attention    a layer's attention against its floor
tune              decode attention with other tiles, stages and splits"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch

from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import read_checkpoint
from common.runner.launch_configurations import attention_shape, launch_configurations
from common.runner.warm_up import compile_now
from kernel_launch import DecodeTuning, Launch, architecture_of
from mixed_attention_triton import MixedTritonAttentionBackend
from paged_attention import AttentionMetadata
from split_attention_triton import merge_launch, split_launch
from workshop.measure.bench import gpu_lab
from workshop.measure.bench.bench_record import ROOT
from workshop.measure.bench.gpu_lab import BLOCK_SIZE, Lab, Part
from workshop.measure.resources import TUNINGS as TILINGS

TESTS = (  # with those marked `gpu`; conftest.py marks tests of kernels where there is a GPU
    "02_paged_kv/beyond/test_split_attention_triton.py",
    "06_chunked_prefill/beyond/test_mixed_attention_triton.py",
    "common/models/regions/test_regions.py",
    "common/sampling/test_sampler_kernel.py",
    "05_spec_decode/beyond/test_rejection_sampler_triton.py",
    "common/runner/test_graphs.py",
    "common/models/test_model.py",
)
TUNINGS = [DecodeTuning(), DecodeTuning(heads_fastest=False)]
TUNINGS += [DecodeTuning(num_programs=waves * 132) for waves in (6, 8, 16, 24)]
TUNINGS += [tiles._replace(split_keys=keys) for keys in (256, 512, 1024) for tiles in TILINGS]

ATTENTION_TOLERANCE = 0.02  # in bfloat16, which has 8 bits


@cache
def wanted_launches(what: str) -> list[Launch]:
    """Return the launches to compile, slow ones first: float32 products without tensor cores."""
    chunks, full = EngineConfig(speculative={"method": "draft"}), gpu_lab.FULL.model
    kind = architecture_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if what == "tune":
        shape = attention_shape(full, chunks, torch.bfloat16, kind, "ieee", False)
        shapes = [shape._replace(tuning=tuning) for tuning in TUNINGS]
        found = [split_launch(x, True, loops=loops) for x in shapes for loops in (True, False)]
        return found + [merge_launch(x, True) for x in shapes]
    by_name: dict[str, Launch] = {}
    for model in (full, read_checkpoint(SHIPPED_CHECKPOINT).config):
        for dtype in (torch.float32, torch.bfloat16):
            for engine in (chunks, EngineConfig(chunked_prefill=False)):
                for launch in launch_configurations(model, engine, dtype, kind):
                    by_name[f"{launch.kernel.__name__} {launch}"] = launch
    return sorted(by_name.values(), key=lambda launch: launch.arguments.get("query") != "*fp32")


def compile_one(what: str, is_rehearsal: bool, index: int) -> tuple[float, str]:
    """Compile one launch, in a process of its own. A rehearsal has no GPU to compile for."""
    launch, start = wanted_launches(what)[index], time.perf_counter()
    if not is_rehearsal:
        compile_now(launch)._init_handles()
    return round(time.perf_counter() - start, 2), f"{launch.kernel.__name__} {launch.constants}"


def compile_all(what: str, is_rehearsal: bool) -> dict[str, Any]:
    jobs, num = range(len(wanted_launches(what))), 1 if is_rehearsal else os.cpu_count() or 1
    with ProcessPoolExecutor(min(12, num), get_context("spawn")) as pool:
        seconds = sorted(pool.map(partial(compile_one, what, is_rehearsal), jobs), reverse=True)
    return {"kernels": len(seconds), "seconds": sum(s for s, _ in seconds), "slowest": seconds[:5]}


def prewarm(lab: Lab, part: Part) -> None:
    part.attempt("compiled", "all", partial(compile_all, "all", lab.is_rehearsal))


def run_tests(lab: Lab, part: Part) -> None:
    """Run pytest with pytest's own time limit, so that the failures are still reported."""
    limit_s = max(1, round(part.deadline - time.monotonic()) - 5)
    how = f"-m gpu -n 10 --timeout 100 --session-timeout {limit_s} --tb=short --maxfail 40"
    how = "--collect-only" if lab.is_rehearsal else how
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *how.split(), *TESTS]

    def run() -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        lines = done.stdout.splitlines()
        for line in filter(lambda line: line.startswith(("FAILED", "ERROR")), lines):
            part.fail("tests", line)
        if done.returncode and not part.errors:
            part.fail("tests", f"pytest ended with {done.returncode}: {done.stdout[-300:]}")
        return lines[-1].strip("= ")

    part.attempt("tests", "pytest", run)


def attention_of(lab: Lab, num_seqs: int, context: int) -> Callable[..., Any]:
    """Plan a batch of decodes, once for all layers as in a step, and return one layer's call. As in
    a graph the host knows bounds only; blocks are in random order. Raises `ValueError` if the
    call's result differs from float64, checked for one in 16 sequences."""
    model, device, width = lab.sizes.model, lab.device, -(-context // BLOCK_SIZE)
    num_heads, num_kv_heads = model.num_attention_heads, model.num_key_value_heads
    scale = model.head_dim**-0.5
    order = torch.randperm(num_seqs * width, device=device, generator=lab.generator) + 1
    tables, last = order.view(num_seqs, width), context - 1
    shape = len(order) + 1, BLOCK_SIZE, num_kv_heads, model.head_dim
    caches = lab.normal(*shape), lab.normal(*shape)
    query = lab.normal(num_seqs, num_heads, model.head_dim)
    metadata = AttentionMetadata(
        torch.arange(num_seqs + 1, device=device),
        torch.full((num_seqs,), context, device=device),
        tables.int(),
        tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        max_query_len=1,
        max_seq_len=max(context, lab.sizes.engine["max_model_len"]),
    )

    by_head = query[::16].double().unflatten(1, (num_kv_heads, -1))
    keys, values = (c[tables[::16]].flatten(1, 2)[:, :context].double() for c in caches)
    weights = torch.einsum("nhgd,nkhd->nhgk", by_head, keys).mul_(scale).softmax(-1)
    right = torch.einsum("nhgk,nkhd->nhgd", weights, values).flatten(1, 2)

    def plan(tuning: DecodeTuning = TUNINGS[0]) -> Callable[[], torch.Tensor]:
        backend = MixedTritonAttentionBackend()
        backend.tuning = tuning
        made = backend.plan(metadata, num_heads, caches[0])
        error = (made.attend(query, *caches, scale)[::16] - right).abs().max() / right.abs().max()
        if not error <= ATTENTION_TOLERANCE:
            raise ValueError(f"attention is {error:.2g} of its largest number off float64")
        return lambda: made.attend(query, *caches, scale)

    return plan


@torch.inference_mode()
def time_attention(lab: Lab, cell: tuple[int, int], call: Callable[[], Any]) -> dict[str, Any]:
    return lab.beside_floor(lab.time(call), gpu_lab.attention_cost(lab.sizes.model, *cell))


def tune(lab: Lab, part: Part) -> None:
    part.attempt("compiled", "tune", partial(compile_all, "tune", lab.is_rehearsal))
    part.attempt("ceilings", "tune", lambda: lab.ceilings)
    cells = [(2, 20)] if lab.is_rehearsal else [(64, 256), (64, 2048), (256, 1024), (8, 8192)]
    plans = {cell: attention_of(lab, *cell) for cell in cells}

    def measure(tuning: DecodeTuning) -> dict[str, list[float]]:
        found = {c: time_attention(lab, c, plan(tuning)) for c, plan in plans.items()}
        return {"{} x {:,}".format(*c): [row["ms"][0], row["share"]] for c, row in found.items()}

    for tuning in TUNINGS[: 2 if lab.is_rehearsal else None]:
        part.attempt("tuned", str(tuning), partial(measure, tuning))
