"""Chapter 2's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    paged_kv          counts KV memory without a model
    compile_border    the model size from which compiling pays: the whole engine, both ways
    threads           the model size from which a second thread pays

The counts depend on lengths alone, those of functions of Python's standard library, so a scripted
runner replaces the model. Calls that do the same work are made in turn, and every repeat is kept.

`COMPILE_FROM_PARAMETERS` and `THREADS_FROM_PARAMETERS` in `common/engine_config.py` are chosen from
the last two parts. Compiling costs time at every start, also when the machine code is on the disk
already. The longer start is paid back after this many output tokens:

    start_s / (seconds a token, plain - seconds a token, compiled)

`threads` serves one request at a time and 16 together, on a quiet machine and next to a process
that keeps one core busy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from block_pool import Block, BlockPool
from common.engine import LLMEngine
from common.models.model_config import ModelConfig
from engine_core import EngineCore
from kv_cache_manager import KVCacheManager
from paged_fcfs_scheduler import PagedFCFSScheduler
from request import Request, SamplingParams
from scheduler_interface import FinishedStep, RunnerInput, SchedulerOutput, StepOutput
from workshop.book.palette import DECODE, WASTE, add_key
from workshop.measure.bench.bench_models import choose_dtype
from workshop.measure.bench.bench_record import read_record, table_of
from workshop.measure.bench.bench_table import times_the_floor
from workshop.measure.bench.bench_work import BenchRequest, Limits, greedy, make_requests
from workshop.measure.bench.random_weights import random_model, shape_of
from workshop.measure.lab_frame import Measurement, Part, run_lab, table
from workshop.measure.plot_batching import BENCH_RECORD, stdlib_functions
from workshop.measure.rounds import run_in_turn

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


def stdlib_jobs() -> list[Job]:
    """Return chapter 1's functions of the standard library, cut to length."""
    functions = stdlib_functions(NUM_REQUESTS, SEED)
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
    torch.set_num_threads(1)
    jobs = stdlib_jobs()
    config = {"seed": SEED, "num_slots": NUM_SLOTS, "max_model_len": MAX_MODEL_LEN}
    config["threads"] = 1
    return {
        "config": config,
        "jobs": [[job.prompt_len, job.output_len, job.max_tokens] for job in jobs],
        "counted": count(jobs),
    }


# -- the whole engine, compiled or not, with one thread or two

# layers, hidden, inner, heads, KV heads, head dim, vocabulary; the middle ones are of common shapes
SHAPES = {
    "8 layers of 256": (8, 256, 768, 4, 2, 64, 4096),
    "12 layers of 384": (12, 384, 1152, 6, 2, 64, 8192),
    "30 layers of 576": (30, 576, 1536, 9, 3, 64, 49152),
    "32 layers of 960": (32, 960, 2560, 15, 5, 64, 49152),
    "28 layers of 1024": (28, 1024, 3072, 16, 8, 128, 151936),
}
TINY_SHAPES = {"2 layers of 64": (2, 64, 96, 2, 1, 32, 89)}
PROMPT_LENS, OUTPUT_LENS = (32, 256), (16, 32)
MODES = {"plain": False, "compiled": True}
# The part `threads`.
THREAD_SIZES = ("8 layers of 256", "12 layers of 384", "30 layers of 576")
NUM_TOGETHER, NUM_THREADS = (1, 16), (1, 2)
SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS = (8, 16), (6, 10)


def make_engine(
    config: ModelConfig, dtype: torch.dtype, max_num_seqs: int, longest: int, is_compiled: bool
) -> tuple[LLMEngine, float]:
    """Return an engine with separate weights, and the seconds to make it without them."""
    loaded, limits = random_model(config, 0, dtype), Limits(max_num_seqs, longest=longest)
    start = time.perf_counter()
    engine = LLMEngine(limits.engine_config(compile=is_compiled), loaded=loaded)
    return engine, time.perf_counter() - start


def serve_engine(engine: LLMEngine, requests: list[BenchRequest]) -> float:
    params = [greedy(request.max_tokens) for request in requests]
    start = time.perf_counter()
    engine.generate_batch([request.prompt_token_ids for request in requests], params)
    return round(time.perf_counter() - start, 4)


def plain_and_compiled(
    config: ModelConfig, dtype: torch.dtype, num_seqs: int, repeats: int
) -> dict[str, Any]:
    requests = make_requests(num_seqs, PROMPT_LENS, OUTPUT_LENS, config.vocab_size, seed=0)
    longest, engines, start_s = PROMPT_LENS[1] + OUTPUT_LENS[1], {}, {}
    for name, is_compiled in MODES.items():
        settings = config, dtype, num_seqs, longest, is_compiled
        make_engine(*settings)  # puts its files on the disk
        engines[name], start_s[name] = make_engine(*settings)
        serve_engine(engines[name], requests[:2])
    return {
        "num_parameters": engines["plain"].num_parameters,
        "num_output_tokens": sum(request.max_tokens for request in requests),
        "start_s": {name: round(value, 3) for name, value in start_s.items()},
        "seconds": run_in_turn(engines, lambda n: serve_engine(engines[n], requests), repeats, 0),
    }


def measure_border(measurement: Measurement) -> dict:
    dtype, shapes = choose_dtype("auto"), measurement.of(TINY_SHAPES, SHAPES)
    torch.set_num_threads(2)
    repeats, num_seqs = measurement.of((1, 2), (3, 32))
    sizes = {
        name: plain_and_compiled(shape_of(*shape), dtype, num_seqs, repeats)
        for name, shape in shapes.items()
    }
    config = {
        "threads": 2, "repeats": repeats, "seed": 0,
        "dtype": str(dtype).removeprefix("torch."), "num_requests": num_seqs,
        "prompt_lens": PROMPT_LENS, "output_lens": OUTPUT_LENS,
    }  # fmt: skip
    return {"config": config, "sizes": sizes}


def measure_threads(measurement: Measurement) -> dict:
    dtype, repeats = choose_dtype("auto"), measurement.of(1, 3)
    shapes = measurement.of(TINY_SHAPES, {name: SHAPES[name] for name in THREAD_SIZES})
    config = {
        "compile": False, "seed": 0, "dtype": str(dtype).removeprefix("torch."),
        "prompt_lens": SHORT_PROMPT_LENS, "output_lens": SHORT_OUTPUT_LENS,
    }  # fmt: skip
    sizes = {name: threads_of(shape_of(*s), dtype, repeats) for name, s in shapes.items()}
    return {"config": config, "sizes": sizes}


def threads_of(config: ModelConfig, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Return seconds of the same requests with each number of threads."""
    longest = SHORT_PROMPT_LENS[1] + SHORT_OUTPUT_LENS[1]
    engine, _ = make_engine(config, dtype, 32, longest, is_compiled=False)
    runs = {}
    for n in NUM_TOGETHER:
        lens = SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS
        requests = make_requests(n, *lens, config.vocab_size, seed=0)
        serve_engine(engine, requests)

        def run(number: str, requests: list[BenchRequest] = requests) -> float:
            torch.set_num_threads(int(number))
            return serve_engine(engine, requests)

        num_tokens = sum(request.max_tokens for request in requests)
        for name in ("quiet", "busy"):
            with keep_a_core_busy() if name == "busy" else nullcontext():
                seconds = run_in_turn(map(str, NUM_THREADS), run, repeats, 0)
            runs[f"{n} together, {name}"] = {"num_output_tokens": num_tokens, "seconds": seconds}
    engine.close()
    return {"num_parameters": engine.num_parameters, "runs": runs}


@contextmanager
def keep_a_core_busy() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


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


# -- tables


def tables(record: dict) -> dict[str, str]:
    counted = record["counted"]
    return {
        "headline": _headline(counted),
        "memory": _memory_table(counted),
        "floor": _floor_table(read_record(BENCH_RECORD)),
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


def _floor_table(bench: dict) -> str:
    """The floor of the bench's run by its parts, and the paged engine's multiple of it."""
    floor, roofline = bench["floor"], bench["roofline"]
    num_rows = roofline["prefill"]["num_rows"]
    matrices_ms = statistics.median(roofline["prefill"]["ms"])
    bandwidth = statistics.median(roofline["bandwidth"]["matvec_gb_per_s"])
    took = statistics.median(run["seconds"] for run in bench["systems"]["paged"]["runs"])
    seconds = {
        f"{floor['num_prompt_tokens']:,} prompt tokens; {num_rows:,} rows take "
        f"{matrices_ms:,.0f} ms": floor["prompts_s"],
        f"{floor['num_decode_steps']} decode steps; the matrices alone": floor["decodes_s"],
        f"KV read once in each; {roofline['kv_bytes_per_token']:,} bytes a token at "
        f"{bandwidth:.1f} GB/s": floor["kv_s"],
        "the floor": floor["seconds"],
        f"measured: **{times_the_floor(bench, 'paged'):.2f} times the floor**": took,
    }
    machine = bench["environment"]
    return (
        table("part", seconds, {"seconds": "{:.1f}".format})
        + f"\n\n<sub>`workshop/measure/bench/records/bench_qwen3-0.6b.json`, {machine['cpu']}, "
        f"{machine['cores']} cores, commit `{machine['commit'][:10]}`: `{bench['command']}`</sub>"
    )


def _pace(run: dict) -> dict[str, str]:
    at_once = run["crowded_running"] / run["crowded_steps"]
    return {"at once": f"{at_once:.1f}", "steps": f"{run['steps']:,}"}


def _memory_table(counted: dict) -> str:
    def row(name: str, run: dict, *shares: str) -> dict[str, str]:
        head = ("KV memory while requests wait", "written", "reserved, empty", "free")
        return dict(zip(head, (name, *shares), strict=True)) | _pace(run)

    rows = []
    for name, kind in (
        ("contiguous, `max_model_len`", "contiguous"),
        ("contiguous, prompt + `max_tokens`, first fit", "first_fit"),
        ("paged, prompt + `max_tokens` (the engine of this chapter)", "paged"),
    ):
        run = counted[kind]
        memory = run["crowded_steps"] * run["total_slots"]
        written, held = run["crowded_written"] / memory, run["crowded_held"] / memory
        rows.append(row(name, run, *(f"{x:.0%}" for x in (written, held - written, 1 - held))))
    demand = _on_demand(counted)
    share = demand["written"] / demand["held"]
    name = "paged, on demand (chapter 4), of the blocks it holds"
    return table_of([*rows, row(name, demand, f"{share:.1%}", f"{1 - share:.1%}", "-")])


def _on_demand(counted: dict) -> dict:
    return next(run for run in counted["on_demand"] if run["block_size"] == BLOCK_SIZE)


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
        measure_paged_kv,
        {"memory_map": draw_memory_map},
        tables,
    ),
    "compile_border": Part(measure_border, tables=tables_of_border, clock="wall"),
    "threads": Part(measure_threads, tables=tables_of_threads, clock="wall"),
}


if __name__ == "__main__":
    run_lab(__file__, "02_paged_kv", PARTS)
