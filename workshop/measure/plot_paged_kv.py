"""Chapter 2's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

The counts depend on lengths alone, those of functions of Python's standard library, so a scripted
runner replaces the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from block_pool import Block, BlockPool
from engine_core import EngineCore
from kv_cache_manager import KVCacheManager
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, RunnerInput, SchedulerOutput, StepOutput
from workshop.book.palette import DECODE, WASTE, add_key
from workshop.measure.lab_frame import Measurement, Part, run_lab, table
from workshop.measure.plot_batching import stdlib_functions

SEED = 0
NUM_REQUESTS = 256
MAX_PROMPT, MAX_TOKENS, MAX_MODEL_LEN = 1024, 512, 2048
NUM_SLOTS = 16384  # of KV memory, for any block size
BLOCK_SIZE = 16
EOS = 1


# -- the workload


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the workload. `max_tokens` is its user's limit."""

    prompt_len: int
    output_len: int
    max_tokens: int = MAX_TOKENS


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
    names = "held written crowded_steps crowded_held crowded_written crowded_running"
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
        if scheduler.waiting and with_snapshot:
            held_by = [_snapshot_of(request, memory) for request in running]
            snapshots.append({"step": num_steps, "written": written, "requests": held_by})
        if scheduler.waiting:
            sums["crowded_steps"] += 1
            sums["crowded_held"] += held
            sums["crowded_written"] += written
            sums["crowded_running"] += len(running)
    memory.check_invariants()
    found: dict[str, Any] = {"block_size": memory.block_size, "total_slots": total}
    found |= {"steps": num_steps, **sums}
    if with_snapshot:  # the last crowded step that has written the median amount, to 1 %
        median = statistics.median(snapshot["written"] for snapshot in snapshots)
        found["snapshot"] = [s for s in snapshots if abs(s["written"] - median) <= 0.01 * total][-1]
    return found


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
    return {
        "contiguous": contiguous,
        "first_fit": serve(jobs, make_memory(1, kind=FirstFit)),
        "paged": paged,
        "on_demand_max_num_seqs": at_once,
        "on_demand": [serve(jobs, make_memory(BLOCK_SIZE, endless, GrowOnDemand), at_once)],
    }


def measure_paged_kv(measurement: Measurement) -> dict:
    functions = stdlib_functions(NUM_REQUESTS, SEED)
    jobs = [Job(min(prompt, MAX_PROMPT), min(output, MAX_TOKENS)) for prompt, output in functions]
    config = {"seed": SEED, "num_slots": NUM_SLOTS, "max_model_len": MAX_MODEL_LEN}
    return {"config": config, "counted": count(jobs)}


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
        axis.set_title(f"{name}, {title}:\n{empty:.0%} of memory empty", loc="left")
        axis.set(xlabel="slots", xlim=(0, 2048), ylim=(len(requests) - 0.4, -0.6))
    axes[0].set_ylabel("running requests")
    figure.suptitle(
        "In blocks, the same memory holds {1} requests instead of {0}".format(*num_requests)
    )
    add_key(figure, {"written": DECODE, "reserved, empty": WASTE})
    return figure


# -- tables


def tables(record: dict) -> dict[str, str]:
    counted = record["counted"]
    return {
        "headline": _headline(counted),
        "memory": _memory_table(counted),
    }


def _headline(counted: dict) -> str:
    contiguous, paged = counted["contiguous"], counted["paged"]
    demand = _on_demand(counted)
    return (
        f"With a contiguous region of `max_model_len` slots for each request, **"
        f"{empty_share(contiguous):.0%} of the KV memory holds nothing while requests wait for "
        f"memory**. With blocks of {BLOCK_SIZE} slots it is {empty_share(paged):.0%} if each "
        f"request reserves all it may ever need, and of the blocks held "
        f"{1 - demand['written'] / demand['held']:.1%} if it takes a block when a token needs one."
    )


def _memory_table(counted: dict) -> str:
    names = {
        "contiguous": "contiguous, `max_model_len`",
        "first_fit": "contiguous, prompt + `max_tokens`, first fit",
        "paged": "paged, prompt + `max_tokens` (the engine of this chapter)",
    }
    rows = {}
    for kind, name in names.items():
        run = counted[kind]
        memory = run["crowded_steps"] * run["total_slots"]
        written, held = run["crowded_written"] / memory, run["crowded_held"] / memory
        rows[name] = run, *(f"{x:.0%}" for x in (written, held - written, 1 - held))
    demand = _on_demand(counted)
    share = demand["written"] / demand["held"]
    name = "paged, on demand (chapter 4), of the blocks it holds"
    rows[name] = demand, f"{share:.1%}", f"{1 - share:.1%}", "-"
    columns = {
        "written": lambda row: row[1],
        "reserved, empty": lambda row: row[2],
        "free": lambda row: row[3],
        "at once": lambda row: f"{row[0]['crowded_running'] / row[0]['crowded_steps']:.1f}",
        "steps": lambda row: f"{row[0]['steps']:,}",
    }
    return table("KV memory while requests wait", rows, columns)


def _on_demand(counted: dict) -> dict:
    return next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)


PARTS = {"paged_kv": Part(measure_paged_kv, {"memory_map": draw_memory_map}, tables)}

if __name__ == "__main__":
    run_lab(__file__, "02_paged_kv", PARTS)
