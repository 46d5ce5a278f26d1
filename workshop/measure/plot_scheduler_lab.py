"""Every policy: the measurements of `plot_scheduler.py --record lab memory thrash`. Alone this
module does nothing."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from chunk_policy import ChunkedPrefill
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Scheduler, make_kv_memory
from sglang_policies import POLICIES, policy_over
from workshop.measure.scheduling_simulator import (
    CostModel,
    SimulatedRequest,
    Simulation,
    fit_cost_model,
    simulate,
)
from workshop.measure.scheduling_workloads import WORKLOADS, bursts, chat

System = Scheduler | PrefillFirstScheduler
BLOCK_SIZE = 16
LIMITS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
NUM_BLOCKS = 500  # 8,000 positions
NUM_REQUESTS = 400
LOAD = 1.05  # times the capacity of a machine with this cost model, so that queues form
MAX_TTFT_S, MAX_ITL_S = 1.0, 0.05


def systems(num_blocks: int) -> dict[str, System]:
    """Return a new system of each kind. Cheap, because nothing is computed yet."""

    def make(kind: type[System], policy: str = "fcfs", **options: Any) -> System:
        memory = make_kv_memory(num_blocks)
        return kind(policy=policy_over(memory, policy), kv_memory=memory, **LIMITS, **options)

    def prefill_first(**options: Any) -> System:
        return make(PrefillFirstScheduler, **options)

    two_phase = {f"two phases, {policy}": make(Scheduler, policy) for policy in POLICIES}
    return two_phase | {
        "prefill first, no bound (nano-vllm's rule)": prefill_first(max_consecutive_prefills=None),
        "prefill first, never two in a row": prefill_first(max_consecutive_prefills=1),
        "prefill first, mixed batches": prefill_first(mixing=True),
        "prefill first, lpm": prefill_first(policy="lpm"),
    }


def fit_to_this_machine(num_requests: int) -> dict:
    """Fit to chats and long prompts on the shipped checkpoint; each step is one sample."""
    from common.engine import LLMEngine
    from common.engine_config import EngineConfig
    from request import SamplingParams

    samples: list[tuple[int, int, int, float]] = []

    def note(record) -> None:
        scheduled = record.num_scheduled_tokens
        time_ms = record.prepare_ms + record.forward_ms + record.sample_ms
        if scheduled:
            samples.append(
                (sum(scheduled.values()), len(scheduled), record.kv_tokens_written, time_ms)
            )

    config = EngineConfig(prefix_cache=None, num_blocks=4 * NUM_BLOCKS, **LIMITS)
    engine = LLMEngine(config, on_step=note)
    for kind, rate in (("chat", 1.0), ("long", 1.0)):
        for repeat in range(2):  # once to warm up
            samples_before = len(samples)
            requests = WORKLOADS[kind](num_requests, rate, seed=7)
            prompts = [[t % engine.vocab_size for t in r.prompt_token_ids] for r in requests]
            params = [
                SamplingParams(temperature=0, max_tokens=r.num_outputs, ignore_eos=True)
                for r in requests
            ]
            engine.generate_batch(prompts, params)
            if repeat == 0:
                del samples[samples_before:]
    model, error = fit_cost_model(samples)
    return {"cost_model": asdict(model), "median_relative_error": error, "num_steps": len(samples)}


def measure_lab(*, tiny: bool) -> dict:
    fit = fit_to_this_machine(4 if tiny else 48)
    num_requests = 12 if tiny else NUM_REQUESTS
    cost_model = CostModel(**fit["cost_model"])
    workloads: dict[str, dict] = {}
    rates = {}
    for name, make in WORKLOADS.items():
        rates[name] = LOAD * most_per_second(make(num_requests, rate=1e6), cost_model)
        requests = make(num_requests, rates[name])
        workloads[name] = {
            system: summarise(simulate(scheduler, requests, cost_model), scheduler)
            for system, scheduler in systems(NUM_BLOCKS).items()
        }
    return {"config": config(num_requests) | {"rates": rates}, "fit": fit, "workloads": workloads}


def most_per_second(requests: list[SimulatedRequest], cost_model: CostModel) -> float:
    """Return the plainest system's capacity: requests a second if all are there at the start."""
    scheduler = Scheduler(kv_memory=make_kv_memory(NUM_BLOCKS), **LIMITS)
    return len(requests) / simulate(scheduler, requests, cost_model).steps[-1].end_s


def config(num_requests: int) -> dict:
    return {
        **LIMITS,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_requests": num_requests,
        "max_ttft_s": MAX_TTFT_S,
        "max_itl_s": MAX_ITL_S,
        "simulated": True,
    }


def summarise(run: Simulation, scheduler: PreemptiveScheduler) -> dict:
    stats = scheduler.get_stats()
    busy = [step for step in run.steps if step.num_tokens]
    capacity = scheduler.kv_memory.capacity
    return {
        "throughput": run.throughput,
        "ttft_s": [round(t, 5) for t in run.ttft_s],
        "itl_s": sorted(round(t, 5) for t in run.itl_s)[:: max(1, len(run.itl_s) // 500)],
        "goodput": run.goodput(MAX_TTFT_S, MAX_ITL_S),
        "fairness": run.fairness,
        "num_preemptions": stats.total_preempted,
        "num_recomputed_tokens": stats.total_recomputed_tokens,
        "num_cached_tokens": stats.total_cached_tokens,
        "kv_utilisation": sum(s.kv_blocks_in_use for s in busy)
        * scheduler.kv_memory.block_size
        / (capacity * len(busy)),
        "num_steps": len(run.steps),
    }


def measure_memory(fit: dict, *, tiny: bool) -> dict:
    """Serve the same requests, all there at the start, on one pool: reserve, fill, and fill to a
    watermark."""
    cost_model = CostModel(**fit["cost_model"])
    requests = chat(20 if tiny else 200, rate=1e6)
    ways = {
        "everything reserved": {"reserve_all": True, "watermark": 0.0},
        "filled, watermark 0": {"watermark": 0.0},
        "filled, watermark 0.01": {"watermark": 0.01},
        "filled, watermark 0.1": {"watermark": 0.1},
    }
    runs = {}
    for name, options in ways.items():
        limits = LIMITS | {"max_num_seqs": 256}
        scheduler = Scheduler(kv_memory=make_kv_memory(NUM_BLOCKS), **limits, **options)
        run = simulate(scheduler, requests, cost_model)
        busy = [step for step in run.steps if step.num_tokens]
        stats = scheduler.get_stats()
        runs[name] = {
            "end_s": [round(step.end_s, 4) for step in busy],
            "num_running": [step.num_running for step in busy],
            "num_waiting": [step.num_waiting for step in busy],
            "kv_waste": [
                round(1 - step.kv_tokens_written / (step.kv_blocks_in_use * BLOCK_SIZE), 4)
                for step in busy
                if step.kv_blocks_in_use
            ],
            "num_preemptions": stats.total_preempted,
            "num_recomputed_tokens": stats.total_recomputed_tokens,
            "num_computed_tokens": stats.total_scheduled_tokens,
            "throughput": run.throughput,
        }
    return {"config": config(len(requests)), "runs": runs}


def measure_thrash(fit: dict, *, tiny: bool) -> dict:
    """Measure Trap 26: bursts on a third of the memory, at a rate above its capacity."""
    cost_model = CostModel(**fit["cost_model"])
    requests = bursts(20 if tiny else 300, rate=30.0, seed=3)
    ways = {
        "no bound, no watermark": {"max_preemptions": 10**6, "watermark": 0.0},
        "at most 3 preemptions": {"max_preemptions": 3, "watermark": 0.0},
        "and a watermark of 0.05": {"max_preemptions": 3, "watermark": 0.05},
        "everything reserved": {"reserve_all": True, "watermark": 0.0},
        "prefill first": {},
        "prefill first, a tenth set aside": {
            "init_new_token_ratio": 0.1,
            "min_new_token_ratio": 0.1,
        },
    }
    runs = {}
    for name, options in ways.items():
        kind = PrefillFirstScheduler if name.startswith("prefill") else Scheduler
        scheduler = kind(kv_memory=make_kv_memory(NUM_BLOCKS // 3), **LIMITS, **options)
        run = simulate(scheduler, requests, cost_model)
        stats = scheduler.get_stats()
        window_s = 1.0
        counts: dict[int, int] = {}
        for step in run.steps:
            window = int(step.end_s / window_s)
            counts[window] = counts.get(window, 0) + step.num_outputs
        windows = range(max(counts) + 1)
        runs[name] = {
            "window_s": [w * window_s for w in windows],
            "tokens_per_s": [counts.get(w, 0) / window_s for w in windows],
            "throughput": run.throughput,
            "num_preemptions": stats.total_preempted,
            "num_recomputed_tokens": stats.total_recomputed_tokens,
            "num_computed_tokens": stats.total_scheduled_tokens,
            "longest_pause_s": max(
                b - a for t in run.token_times_s for a, b in pairwise([*t, t[-1]])
            ),
        }
    return {"config": config(len(requests)) | {"num_blocks": NUM_BLOCKS // 3}, "runs": runs}


RULES: dict[str, dict[str, Any]] = {
    "room for every cut prompt; waits for a prefix (ours)": {},
    "room for its own prompt": {"reserve_for_chunks": "own"},
    "computes a shared prefix again": {"defer_on_shared_prefix": False},
    "both (vLLM, across steps)": {"reserve_for_chunks": "own", "defer_on_shared_prefix": False},
}
LONGEST_CHUNK = 128  # so that several prompts are cut at one time


def measure_rules(fit: dict, *, tiny: bool) -> dict:
    """Compare two rules of admission, each as here and as in vLLM. Prompts are cut."""
    cost_model = CostModel(**fit["cost_model"])
    num_requests = 12 if tiny else NUM_REQUESTS
    workloads: dict[str, dict] = {}
    for name, make in WORKLOADS.items():
        rate = LOAD * most_per_second(make(num_requests, rate=1e6), cost_model)
        workloads[name] = {}
        for rules, options in RULES.items():
            chunks = ChunkedPrefill(LONGEST_CHUNK)
            memory = make_kv_memory(NUM_BLOCKS // 2)
            scheduler = Scheduler(kv_memory=memory, chunk_policy=chunks, **LIMITS, **options)
            run = simulate(scheduler, make(num_requests, rate), cost_model)
            workloads[name][rules] = summarise(run, scheduler)
    settings = {"num_blocks": NUM_BLOCKS // 2, "longest_chunk": LONGEST_CHUNK}
    return {"config": config(num_requests) | settings, "workloads": workloads}
