"""Chapter 4's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

fit        a cost model of this machine's steps, with which the others are simulated
lab        every policy and both schedulers
memory     the same requests on one pool: reserved, and filled as needed"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from common.engine import LLMEngine
from common.engine_config import EngineConfig
from preemptive_scheduler import PreemptiveScheduler
from prefill_first_scheduler import PrefillFirstScheduler
from scheduler import Scheduler, make_kv_memory
from sglang_policies import POLICIES, policy_by_name
from step_record import StepRecord
from workshop.book.palette import INK, WASTE, label_axes, label_line
from workshop.measure.bench.bench_record import percentiles
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, run_lab, table
from workshop.measure.scheduling_simulator import (
    CostModel,
    SimulatedRequest,
    Simulation,
    fit_cost_model,
    simulate,
)
from workshop.measure.scheduling_workloads import WORKLOADS, chat

BLOCK_SIZE = 16
LIMITS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
NUM_BLOCKS = 500  # 8,000 positions
NUM_REQUESTS = 400
# Times the plainest system's requests a second if all are there at the start: queues form.
LOAD = 1.05
MAX_TTFT_S, MAX_ITL_S = 1.0, 0.05

# -- simulated


def systems() -> dict[str, Scheduler | PrefillFirstScheduler]:
    """Return a new system of each kind. Cheap, because nothing is computed yet."""

    def make(kind: type, policy: str = "fcfs", **options: Any) -> Any:
        memory = make_kv_memory(NUM_BLOCKS)
        return kind(policy=policy_by_name(policy, memory), kv_memory=memory, **LIMITS, **options)

    # Never more than 128 requests wait here, so "lpm-first" is "lpm".
    policies = [policy for policy in POLICIES if policy != "lpm-first"]
    two_phase = {f"two phases, {policy}": make(Scheduler, policy) for policy in policies}
    first = PrefillFirstScheduler
    return two_phase | {
        "prefill first, no bound (nano-vllm's rule)": make(first, max_consecutive_prefills=None),
        "prefill first, never two in a row": make(first, max_consecutive_prefills=1),
        "prefill first, mixed batches": make(first, mixing=True),
        "prefill first, lpm": make(first, "lpm"),
    }


def measure_fit(measurement: Measurement) -> dict:
    """Fit to chats and long prompts on the shipped checkpoint; each step is one sample."""
    samples: list[tuple[int, int, int, float]] = []

    def note(record: StepRecord) -> None:
        if scheduled := record.num_scheduled_tokens:
            time_ms = record.prepare_ms + record.forward_ms + record.sample_ms
            work = sum(scheduled.values()), len(scheduled), record.kv_tokens_written
            samples.append((*work, time_ms))

    config = EngineConfig(prefix_cache=None, num_blocks=4 * NUM_BLOCKS, **LIMITS)
    engine = LLMEngine(config)
    for kind in ("chat", "long"):
        requests = WORKLOADS[kind](measurement.of(4, 48), 1.0, seed=7)
        prompts = [[t % engine.vocab_size for t in r.prompt_token_ids] for r in requests]
        params = [greedy(request.num_outputs) for request in requests]
        for engine.on_step in (None, note):  # the first time warms up
            engine.generate_batch(prompts, params)
    model, error = fit_cost_model(samples)
    return {
        "config": {},
        "cost_model": asdict(model),
        "median_relative_error": error,
        "num_steps": len(samples),
    }


def cost_model_of(measurement: Measurement) -> CostModel:
    """The cost model that `--record fit` has fitted. Raises `ValueError` if there is none."""
    if "fit" not in measurement.records:
        raise ValueError("cannot simulate without the cost model; run --record fit first")
    return CostModel(**measurement.records["fit"]["cost_model"])


def config(num_requests: int) -> dict:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_requests": num_requests}
    return LIMITS | sizes | {"max_ttft_s": MAX_TTFT_S, "max_itl_s": MAX_ITL_S, "simulated": True}


def summarise(run: Simulation, scheduler: PreemptiveScheduler) -> dict:
    return {
        "throughput": run.throughput,
        "ttft_s": [round(t, 5) for t in run.ttft_s],
        "itl_s": sorted(round(t, 5) for t in run.itl_s)[:: max(1, len(run.itl_s) // 500)],
        "goodput": run.goodput(MAX_TTFT_S, MAX_ITL_S),
        "num_preemptions": sum(step.num_preempted for step in run.steps),
        "num_recomputed_tokens": scheduler.num_recomputed_tokens,
        "num_computed_tokens": sum(step.num_tokens for step in run.steps),
    }


def run_with(
    requests: list[SimulatedRequest], cost_model: CostModel, **options: Any
) -> tuple[Simulation, dict]:
    scheduler = Scheduler(kv_memory=make_kv_memory(NUM_BLOCKS), **LIMITS | options)
    run = simulate(scheduler, requests, cost_model)
    return run, summarise(run, scheduler)


def measure_lab(measurement: Measurement) -> dict:
    num_requests, cost_model = measurement.of(12, NUM_REQUESTS), cost_model_of(measurement)
    workloads, rates = {}, {}
    for name, make in WORKLOADS.items():
        at_once, _ = run_with(make(num_requests, rate=1e6), cost_model)
        rates[name] = LOAD * num_requests / at_once.steps[-1].end_s
        requests = make(num_requests, rates[name])
        workloads[name] = {
            system: summarise(simulate(scheduler, requests, cost_model), scheduler)
            for system, scheduler in systems().items()
        }
    return {"config": config(num_requests) | {"rates": rates}, "workloads": workloads}


def measure_memory(measurement: Measurement) -> dict:
    """Serve the same requests, all there at the start, on one pool: reserve, fill, and fill to a
    watermark."""
    requests, cost_model = chat(measurement.of(20, 200), 1e6), cost_model_of(measurement)
    ways = {
        "everything reserved": {"max_preemptions": 0, "watermark": 0.0},
        "filled, watermark 0": {"watermark": 0.0},
        "filled, watermark 0.01": {"watermark": 0.01},
        "filled, watermark 0.1": {"watermark": 0.1},
    }
    runs = {}
    for name, options in ways.items():
        run, summary = run_with(requests, cost_model, **options, max_num_seqs=256)
        busy = [step for step in run.steps if step.num_tokens]
        runs[name] = summary | {
            "end_s": [round(step.end_s, 4) for step in busy],
            "num_running": [step.num_running for step in busy],
            "num_waiting": [step.num_waiting for step in busy],
        }
    return {"config": config(len(requests)), "runs": runs}


# -- tables


def _percentiles_of(name: str, form: str, scale: float = 1) -> Callable[[dict], str]:
    """Return a cell: the median and the 99th percentile of a run's times."""
    return lambda run: form.format(*(scale * x for x in percentiles(run[name], [50, 99])))


SPEED = {"tok/s": lambda run: f"{run['throughput']:,.0f}"}
SHOWN = {  # of the workloads with queues, the systems that differ most
    "long": ("two phases, fcfs", "two phases, random", "prefill first, mixed batches"),
    "shared": ("two phases, fcfs", "two phases, lpm", "prefill first, lpm"),
    "burst": ("two phases, fcfs", "prefill first, no bound (nano-vllm's rule)"),
}


def tables_of_lab(record: dict) -> dict[str, str]:
    columns = SPEED | {
        "TTFT s p50 / p99": _percentiles_of("ttft_s", "{:.2f} / {:.2f}"),
        "between ms p50 / p99": _percentiles_of("itl_s", "{:.0f} / {:.0f}", 1e3),
        "goodput": lambda run: f"{run['goodput']:.0%}",
        "preempted": lambda run: f"{run['num_preemptions']}",
    }
    runs = {
        f"{workload}: {name}": record["workloads"][workload][name]
        for workload, names in SHOWN.items()
        for name in names
    }
    config = record["config"]
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in config["rates"].items())
    note = (
        f"Simulated: {config['num_requests']} requests ({rates} a second), "
        f"{config['num_blocks'] - 1} blocks of {config['block_size']}, "
        f"{config['max_num_seqs']} slots, a budget of {config['max_num_batched_tokens']} tokens. "
        "Goodput: the share of requests with a first token within "
        f"{config['max_ttft_s']:g} s and {1e3 * config['max_itl_s']:g} ms a token after it."
    )
    return {"lab": table("simulated", runs, columns), "lab_note": note}


def mean_while_others_wait(run: dict) -> float:
    both = zip(run["num_running"], run["num_waiting"], strict=True)
    return statistics.mean([running for running, waiting in both if waiting] or [0])


# -- figures


def draw_memory(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    reserved, filled, *_ = record["runs"].values()
    for run, color in ((filled, INK), (reserved, WASTE)):
        axis.plot(run["end_s"], run["num_running"], color=color, linewidth=2)
    peak = max(filled["num_running"])
    at = filled["end_s"][filled["num_running"].index(peak)]
    label_line(axis, at, peak, "filled as needed", INK, offset=(40, -8))
    label_line(axis, 1, max(reserved["num_running"]), "everything reserved", WASTE, offset=(0, -26))
    few, many = map(mean_while_others_wait, (reserved, filled))
    title = f"Filled as needed, {many / few:.1f} times as many requests run (simulated)"
    label_axes(axis, title, "time, s", "requests that run", ylim=0)
    return figure


PARTS = {
    "fit": Part(measure_fit, clock="time.perf_counter"),
    "lab": Part(measure_lab, tables=tables_of_lab),
    "memory": Part(measure_memory, {"memory": draw_memory}),
}

if __name__ == "__main__":
    run_lab(__file__, "04_scheduler", PARTS)
