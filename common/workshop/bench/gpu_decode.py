"""A decode step against the roofline, for the GPU report: the engine's, and the model's alone.

**A decode step** of N sequences with C keys each: prompts of C tokens are taken in without
computing them (`SkippedPrompts`), over keys and values that are random numbers already. From there
every step is the real one: planned, laid out, launched, sampled and read.

**The model alone**: the same step without anything of the host, as one recorded graph; what is left
of the roofline there, kernels lose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from batch_layout import ComposedBatch
from common.engine import LLMEngine
from common.runner.model_runner import PagedModelRunner
from common.sampling.greedy_rows import greedy
from common.sampling.sampler import as_float
from common.workshop.bench.gpu_arithmetic import decode_cost, kv_bytes_per_token
from common.workshop.bench.gpu_budget import Section
from common.workshop.bench.gpu_engine import TEMPERATURE, Engines, finish, paged_runner
from common.workshop.bench.gpu_inputs import BLOCK_SIZE, Cell, Lab, decode_lengths, paged_inputs
from engine_core import EngineCore
from request import SamplingParams
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput

NUM_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class SkippedPrompts:
    """A `ModelRunner` that takes in prompts, and computes nothing. Their first tokens are 0."""

    runner: PagedModelRunner

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        self.runner.state.apply(plan)
        counts = plan.num_scheduled_tokens.values()
        planned = zip(plan.scheduled_requests, plan.start_positions, counts, strict=True)
        ended = [r.request_id for r, start, n in planned if start + n == r.num_tokens]
        return FinishedStep(StepOutput({name: [0] for name in ended}, times=dict(_NO_TIME)))


_NO_TIME = {"prepare_ms": 0.0, "forward_ms": 0.0, "sample_ms": 0.0}


def take_in(
    engine: LLMEngine, lab: Lab, names: Sequence[str], context: int, num_steps: int
) -> None:
    """Requests of these names that are about to decode at `context` keys, for `num_steps`."""
    prompts = lab.integers(lab.sizes.model.vocab_size, len(names), context - 1).tolist()
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_steps + 2, ignore_eos=True)
    engine.reset_prefix_cache()
    engine.add_requests((name, prompt, params) for name, prompt in zip(names, prompts))
    core: Any = engine.core
    scheduler: Any = engine.scheduler
    runner, budget = core.runner, scheduler.max_num_batched_tokens
    core.runner = SkippedPrompts(paged_runner(engine))
    core.step = partial(EngineCore.step, core)  # over before it returns, in every mode
    scheduler.max_num_batched_tokens = len(names) * context  # all of them in one step
    try:
        engine.step()
    finally:
        core.runner, scheduler.max_num_batched_tokens = runner, budget
        del core.step
    num_computed = [request.num_computed_tokens for request in scheduler.running.values()]
    if num_computed != [context - 1] * len(names):
        raise RuntimeError(f"{len(names)} prompts of {context} tokens were not taken in at once")


def fits(engine: LLMEngine, lab: Lab, cell: Cell, section: Section) -> bool:
    longest = cell.context + lab.sizes.num_decode_steps + NUM_WARM_STEPS + 2
    needed = cell.num_seqs * -(-longest // BLOCK_SIZE)
    usable = engine.kv_manager.pool.num_usable_blocks
    if cell.num_seqs <= engine.config.max_num_seqs and needed <= 0.98 * usable:
        return True
    gigabytes = needed * BLOCK_SIZE * kv_bytes_per_token(lab.sizes.model, lab.dtype.itemsize) / 1e9
    section.note(f"left out, its {gigabytes:,.1f} GB of KV do not fit: {cell}")
    return False


def measure_decode(engines: Engines, mode: str, section: Section) -> None:
    """Whole steps of the engine, by the host's clock: each ends with its tokens on the host."""
    lab, engine = engines.lab, engines.get(mode, engines.lab.sizes.max_model_len)
    rows = section.results["steps"] = []
    num_steps = lab.sizes.num_decode_steps
    for cell in lab.sizes.forward_cells:
        if not section.has_time(str(cell)) or not fits(engine, lab, cell, section):
            continue
        with section.attempt(str(cell)):
            times = time_decode(engine, lab, cell, num_steps)
            mean_context = cell.context + NUM_WARM_STEPS + num_steps // 2
            rows.append(decode_row(lab, cell, mean_context, times))


def time_decode(engine: LLMEngine, lab: Lab, cell: Cell, num_steps: int) -> list[float]:
    """Milliseconds of each step."""
    names = [f"decode-{i}" for i in range(cell.num_seqs)]
    times = []
    try:
        take_in(engine, lab, names, cell.context, num_steps + NUM_WARM_STEPS)
        for _ in range(NUM_WARM_STEPS):
            engine.step()
        lab.device.synchronize()
        for _ in range(num_steps):
            start = time.perf_counter()
            engine.step()
            times.append(round(1e3 * (time.perf_counter() - start), 4))
        lab.device.synchronize()
    finally:
        finish(engine, names)
    return times


def decode_row(lab: Lab, cell: Cell, context: int, times: list[float]) -> dict[str, Any]:
    cost = decode_cost(lab.sizes.model, lab.dtype.itemsize, [context] * cell.num_seqs)
    return {"cell": list(cell), "ms": times, **lab.measured.describe(cost)}


def measure_forward(engines: Engines, section: Section) -> None:
    """The model and the highest logit, recorded as one graph: no host. Work items of attention,
    which a step plans once for all layers, are planned before."""
    lab, engine = engines.lab, engines.get("eager", engines.lab.sizes.max_model_len)
    runner = paged_runner(engine)
    cache = runner.kv_cache
    rows = section.results["steps"] = []
    for cell in lab.sizes.forward_cells:
        if not section.has_time(str(cell)) or not fits(engine, lab, cell, section):
            continue
        with section.attempt(str(cell)):
            caches = cache.key_cache[0], cache.value_cache[0]
            metadata = paged_inputs(lab, decode_lengths(cell), caches).metadata()
            ids = lab.integers(lab.sizes.model.vocab_size, cell.num_seqs)
            positions = torch.full_like(ids, cell.context - 1)
            indices = torch.arange(cell.num_seqs, device=ids.device)

            batch = ComposedBatch(ids, positions, (metadata,), indices)
            batch.plan_attention(runner.backend, runner.model.num_heads, cache)

            def call(batch: ComposedBatch = batch) -> torch.Tensor:
                return greedy(as_float(runner.model(batch, cache)))

            calls = {"forward": lab.device.record_graph(call)}
            times = lab.device.time_in_turn(calls, lab.sizes.repeats)["forward"]
            rows.append(decode_row(lab, cell, cell.context, times))
            del calls
            lab.device.release()
