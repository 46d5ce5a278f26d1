"""The engine in the GPU report: the published workload, its waits, and decode steps.

    mode      graphs   overlap
    eager     no       no
    graphs    yes      no
    overlap   yes      yes

**Workload**: 256 requests at once, 100 to 1,024 random tokens in and as many out, temperature 0.6,
end of text ignored: what nano-vllm publishes its throughput with (its `bench.py`).

**A decode step** of N sequences with C keys each: prompts of C tokens are taken in without
computing them (`SkippedPrompts`), over keys and values that are random numbers already. From there
every step is the real one: planned, laid out, launched, sampled and read.

**The model alone**: the same step without anything of the host, as one recorded graph; what is left
of the roofline there, kernels lose."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from batch_layout import ComposedBatch
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.runner.model_runner import PagedModelRunner
from common.sampling.greedy_rows import greedy
from common.sampling.sampler import as_float
from common.workshop.bench.bench_models import BenchModels, make_twin
from common.workshop.bench.bench_systems import transformers_generate
from common.workshop.bench.bench_work import BenchRequest, Limits, make_requests
from common.workshop.bench.gpu_arithmetic import decode_cost
from common.workshop.bench.gpu_budget import Section
from common.workshop.bench.gpu_device import (
    count_waits,
    free_bytes,
    release,
    synchronize,
    time_call,
)
from common.workshop.bench.gpu_inputs import (
    BLOCK_SIZE,
    Batch,
    Lab,
    describe_batch,
    num_blocks_of,
    paged_inputs,
)
from engine_core import EngineCore
from request import SamplingParams
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "overlap_scheduling": False},
    "graphs": {"enforce_eager": False, "overlap_scheduling": False},
    "overlap": {"enforce_eager": False, "overlap_scheduling": True},
}
TEMPERATURE = 0.6
WORKLOAD_IDS = 10_000  # token ids are below
NUM_WARM_STEPS = 3
ROOM = 1.3  # of a padded batch's KV: the cache of transformers grows by copying a layer at a time


@dataclass(slots=True)
class Engines:
    """One model, and one engine at a time: the KV memory of two would not fit."""

    lab: Lab
    mode: str | None = None
    engine: LLMEngine | None = None

    def get(self, mode: str) -> LLMEngine:
        """Raises `RuntimeError` if the engine fell back to another mode."""
        engine = self.engine
        if engine is not None and self.mode == mode and not engine.has_unfinished_requests():
            return engine  # else an error has left it in the middle of something
        self.drop()
        lab, sizes, options = self.lab, self.lab.sizes, dict(MODES[mode])
        if lab.is_rehearsal:
            options |= {"num_blocks": 65, "emulate_graphs": not options["enforce_eager"]}
        config = EngineConfig(
            attention_backend="triton",
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            block_size=BLOCK_SIZE,
            **options,
        )
        engine = self.engine = LLMEngine(config, loaded=lab.loaded)
        self.mode = mode
        if has_graphs(engine) == options["enforce_eager"]:
            self.drop()
            raise RuntimeError("no graphs were captured; the engine's warning says why")
        kv_cache: Any = engine.kv_cache
        for cache in (*kv_cache.key_cache, *kv_cache.value_cache):
            cache.normal_(generator=lab.generator)
        return engine

    def drop(self) -> None:
        """Its memory is free afterwards: the next one takes all there is."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
        del engine
        gc.collect()
        release(self.lab.device)


def has_graphs(engine: LLMEngine) -> bool:
    return getattr(paged_runner(engine), "graphs", None) is not None


def paged_runner(engine: LLMEngine) -> PagedModelRunner:
    """Without its thread, which an overlapped engine on a CPU has."""
    runner: Any = engine.core.runner
    return getattr(runner, "runner", runner)


# -- the workload


def requests_of(lab: Lab, seed: int) -> list[BenchRequest]:
    num_requests, prompt_lens, output_lens = lab.sizes.workload
    num_ids = min(WORKLOAD_IDS, lab.sizes.model.vocab_size)
    return make_requests(num_requests, prompt_lens, output_lens, num_ids, seed)


def serve(engine: LLMEngine, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """All of them, anew, and their tokens on the host: a run, as the record has it."""
    engine.reset_prefix_cache()
    engine.reset_stats()
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=r.max_tokens, ignore_eos=True)
        for r in requests
    ]
    start = time.perf_counter()
    engine.generate_batch([r.prompt_token_ids for r in requests], params)
    run = as_run(time.perf_counter() - start, sum(r.max_tokens for r in requests))
    stats = engine.stats()
    if stats.output_tokens != run["output_tokens"]:
        raise AssertionError(f"{stats.output_tokens} tokens were served; wanted: {run}")
    return run | {"num_steps": stats.num_steps, "num_preemptions": stats.num_preemptions}


def as_run(seconds: float, num_tokens: int) -> dict[str, Any]:
    speed = round(num_tokens / seconds, 2)
    return {"seconds": round(seconds, 4), "output_tokens": num_tokens, "output_tokens_per_s": speed}


def measure_workload(engines: Engines, mode: str, section: Section) -> None:
    """As often as there is time for, at most `num_runs` times, after a few short answers."""
    engine, requests = engines.get(mode), requests_of(engines.lab, 0)
    serve(engine, [BenchRequest(r.prompt_token_ids, 4) for r in requests[:16]])
    runs: list[dict[str, Any]] = []
    section.results |= {
        "engine": {
            **MODES[mode],
            "max_num_seqs": engine.config.max_num_seqs,
            "max_num_batched_tokens": engine.config.max_num_batched_tokens,
            "max_model_len": engine.max_model_len,
            "num_blocks": engine.kv_cache.num_blocks,
            "has_graphs": has_graphs(engine),
        },
        "num_requests": len(requests),
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in requests),
        "runs": runs,
    }
    while len(runs) < engines.lab.sizes.num_runs:
        if not section.has_time("another run", runs[-1]["seconds"] if runs else 0.0):
            break
        runs.append(serve(engine, requests))


def count_waits_of(engines: Engines, mode: str, section: Section) -> None:
    """Of a few requests, from their prompts to their ends."""
    engine = engines.get(mode)
    few = [
        BenchRequest(r.prompt_token_ids, min(r.max_tokens, 32))
        for r in requests_of(engines.lab, 1)[:32]
    ]
    serve(engine, few)  # nothing new is compiled after that
    with count_waits(engines.lab.device) as waits:
        num_steps = serve(engine, few)["num_steps"]
    section.results |= {"num_steps": num_steps, **asdict(waits)}


def measure_transformers(engines: Engines, section: Section) -> None:
    """Padded batches as large as memory allows, each until its longest request is done, and greedy.
    What nobody asked for is not counted."""
    engines.drop()
    lab, requests = engines.lab, requests_of(engines.lab, 0)
    models = BenchModels(lab.loaded, make_twin(lab.loaded))
    longest = sum(max(lengths) for lengths in lab.sizes.workload[1:])
    row_bytes = ROOM * longest * lab.sizes.model.num_hidden_layers * lab.heads.kv_bytes
    num_at_once = max(1, min(len(requests), int(free_bytes(lab.device) / row_bytes)))
    with transformers_generate(models, Limits()) as serve_batch:
        serve_batch([BenchRequest(r.prompt_token_ids, 2) for r in requests[:4]])
        start, counted = time.perf_counter(), 0
        for first in range(0, len(requests), num_at_once):
            if section.has_time(f"requests from {first:,} on"):
                served = serve_batch(requests[first : first + num_at_once])
                counted += sum(map(len, served.token_ids))
        seconds = time.perf_counter() - start
    section.results |= {"num_at_once": num_at_once, "runs": [as_run(seconds, counted)]}


# -- decode steps


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


def take_in(engine: LLMEngine, lab: Lab, names: Sequence[str], context: int) -> None:
    """Requests of these names that are about to decode at `context` keys."""
    prompts = lab.integers(lab.sizes.model.vocab_size, len(names), context - 1).tolist()
    num_tokens = NUM_WARM_STEPS + lab.sizes.num_decode_steps + 2
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True)
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


def fits(engine: LLMEngine, lab: Lab, batch: Batch, section: Section) -> bool:
    num_more = lab.sizes.num_decode_steps + NUM_WARM_STEPS + 2
    needed = num_blocks_of([(1, context + num_more) for _, context in batch])
    usable = engine.kv_manager.pool.num_usable_blocks
    if len(batch) <= engine.config.max_num_seqs and needed <= 0.98 * usable:
        return True
    section.notes.append(f"left out, {needed:,} blocks do not fit: {describe_batch(batch)}")
    return False


def measure_decode(engines: Engines, mode: str, section: Section) -> None:
    """Whole steps of the engine, by the host's clock: each ends with its tokens on the host."""
    lab, engine = engines.lab, engines.get(mode)
    steps = section.results["steps"] = []
    for batch in lab.sizes.steps:
        what = describe_batch(batch)
        if section.has_time(what) and fits(engine, lab, batch, section):
            with section.attempt(what):
                times = time_decode(engine, lab, batch)
                ms = [round(f(times), 4) for f in (statistics.median, min, max)]
                num_passed = NUM_WARM_STEPS + len(times) // 2
                steps.append(decode_row(lab, batch, num_passed) | {"ms": ms})


def time_decode(engine: LLMEngine, lab: Lab, batch: Batch) -> list[float]:
    """Milliseconds of each step."""
    names, times = [f"decode-{i}" for i in range(len(batch))], []
    try:
        take_in(engine, lab, names, batch[0][1])
        for i in range(-NUM_WARM_STEPS, lab.sizes.num_decode_steps):
            if i == 0:
                synchronize(lab.device)
            start = time.perf_counter()
            engine.step()
            if i >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        synchronize(lab.device)
    finally:
        finish(engine, names)
    return times


def finish(engine: LLMEngine, names: Sequence[str]) -> None:
    """Whatever of them is unfinished is aborted, and nothing is under way any more."""
    for name in names:
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()


def decode_row(lab: Lab, batch: Batch, num_passed: int) -> dict[str, Any]:
    """Of a step, so many after the first."""
    seq_lens = [context + num_passed for _, context in batch]
    cost = decode_cost(lab.sizes.model, lab.num_weights, lab.dtype.itemsize, seq_lens)
    return {"cell": [len(batch), batch[0][1]]} | lab.ceilings.describe(cost)


def measure_forward(engines: Engines, section: Section) -> None:
    """The model and the highest logit, recorded as one graph: no host. Work items of attention,
    which a step plans once for all layers, are planned before."""
    lab, engine = engines.lab, engines.get("eager")
    runner = paged_runner(engine)
    cache: Any = runner.kv_cache
    steps = section.results["steps"] = []
    for lengths in lab.sizes.steps:
        what = describe_batch(lengths)
        if not section.has_time(what) or not fits(engine, lab, lengths, section):
            continue
        with section.attempt(what):
            inputs = paged_inputs(lab, lengths, (cache.key_cache[0], cache.value_cache[0]))
            ids = lab.integers(lab.sizes.model.vocab_size, len(lengths))
            positions = torch.full_like(ids, lengths[0][1] - 1)
            indices = torch.arange(len(lengths), device=ids.device)
            batch = ComposedBatch(ids, positions, (inputs.metadata(),), indices)
            batch.plan_attention(runner.backend, runner.model.num_heads, cache)

            def call(batch: ComposedBatch = batch) -> torch.Tensor:
                return greedy(as_float(runner.model(batch, cache)))

            steps.append(decode_row(lab, lengths, 0) | time_call(call, lab.device))
