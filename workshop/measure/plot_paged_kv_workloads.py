"""The counts of chapter 2's record. `plot_paged_kv.py --record` runs this module; alone it does
nothing.

The book's own loop, scheduler and KV manager serve requests whose lengths are those of functions of
Python's standard library: the prompt is the code around a function, the output its body. No model
runs: KV placement depends on lengths alone, so a scripted runner replaces it. Counted numbers do
not depend on the machine, only on the version of Python whose library is read.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from block_pool import Block, BlockPool
from engine_core import EngineCore
from kv_cache_manager import KVCacheManager
from paged_attention import PagedKVCache
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, RunnerInput, SchedulerOutput, StepOutput
from workshop.measure.plot_batching import stdlib_functions

SEED = 0
NUM_REQUESTS = 256
MAX_PROMPT, MAX_TOKENS, MAX_MODEL_LEN = 1024, 512, 2048
NUM_SLOTS = 16384  # of KV memory, for any block size
BLOCK_SIZE = 16
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
EOS = 1
QWEN3_0_6B = {"num_layers": 28, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}

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
    kv_cache = PagedKVCache(num_blocks=1, block_size=block_size, device="meta", **QWEN3_0_6B)
    return {
        "block_size": block_size,
        "host_bytes_per_token": host_bytes / tokens,
        "device_bytes_per_token": 4 / block_size,
        "kv_bytes_per_token": kv_cache.kv_bytes_per_block / block_size,
    }
