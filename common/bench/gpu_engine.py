"""The engine on a GPU: the published workload, a decode step, and how often the host waits.

    mode      graphs   overlap
    eager     no       no
    graphs    yes      no
    overlap   yes      yes

One engine of a mode is made and used for all its sections; the KV memory of two would not fit. The
model has the shape of Qwen3-0.6B and random weights, which take the same time as trained ones.

**Workload**: 256 requests at once, 100 to 1,024 random tokens in and as many out, temperature 0.6,
end of text ignored: what nano-vllm publishes its throughput with (its `bench.py`).

**A decode step** of N sequences with C keys each: prompts of C tokens are taken in without
computing them (`SkippedPrompts`), over keys and values that are random numbers already. From there
every step is the real one: planned, laid out, launched, sampled and read.

**The model alone**: the same step without anything of the host, as one recorded graph; what is left
of the roofline there, kernels lose.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from common.bench.bench_work import BenchRequest, make_requests
from common.bench.gpu_arithmetic import decode_cost, kv_bytes_per_token
from common.bench.gpu_budget import Section, UnavailableError
from common.bench.gpu_device import Device
from common.bench.gpu_inputs import BLOCK_SIZE, Cell, Lab, decode_lengths, paged_inputs
from common.bench.random_weights import random_model
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.loader import LoadedModel
from common.runner.model_runner import PagedModelRunner
from common.sampling.sampler import as_float, greedy
from request import SamplingParams
from scheduler_interface import FinishedStep, SchedulerOutput, StepOutput
from step_record import RecordingEngineCore

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "overlap_scheduling": False},
    "graphs": {"enforce_eager": False, "overlap_scheduling": False},
    "overlap": {"enforce_eager": False, "overlap_scheduling": True},
}
TEMPERATURE = 0.6
MOST_RUNS = 3  # of the workload
NUM_WARM_STEPS = 3
ENDED_EARLY = "a run was ended before all requests were: its rate is of what it did"
WORKLOAD_IDS = 10_000  # token ids are below


@dataclass(slots=True)
class Engines:
    """One model, and one engine at a time."""

    lab: Lab
    mode: str | None = None
    _engine: LLMEngine | None = None
    _loaded: LoadedModel | None = None

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            lab, where = self.lab, self.lab.device.torch_device
            self._loaded = random_model(lab.sizes.model, lab.seed, lab.dtype, where)
        return self._loaded

    def get(self, mode: str) -> LLMEngine:
        """Raises `UnavailableError` for a mode that this version of the engine does not have."""
        if self._engine is not None and self.mode == mode:
            return self._engine
        self.drop()
        options = mode_options(mode)
        sizes = self.lab.sizes
        config = EngineConfig(
            attention_backend="triton",
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=65 if self.lab.device.is_rehearsal else None,
            block_size=BLOCK_SIZE,
            **options,
        )
        self._engine, self.mode = LLMEngine(config, loaded=self.loaded), mode
        for cache in (*self._engine.kv_cache.key_cache, *self._engine.kv_cache.value_cache):
            cache.normal_(generator=self.lab.generator)
        return self._engine

    def drop(self) -> None:
        """After an error nobody knows what is in it."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self.mode = None
        self.lab.device.release()


def mode_options(mode: str) -> dict[str, Any]:
    options = dict(MODES[mode])
    if "enforce_eager" not in {f.name for f in fields(EngineConfig)}:
        if mode == "graphs":
            raise UnavailableError("this version of the engine has no graphs")
        del options["enforce_eager"]
    return options


# -- the workload


@dataclass(slots=True)
class Served:
    seconds: float
    output_tokens: int
    is_complete: bool
    num_steps: int
    num_preemptions: int

    def as_record(self) -> dict[str, Any]:
        speed = self.output_tokens / self.seconds
        return {
            "seconds": round(self.seconds, 4),
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": round(speed, 2),
            "is_complete": self.is_complete,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
        }


def requests_of(lab: Lab, seed: int) -> list[BenchRequest]:
    num_requests, prompt_lens, output_lens = lab.sizes.workload
    num_ids = min(WORKLOAD_IDS, lab.sizes.model.vocab_size)
    return make_requests(num_requests, prompt_lens, output_lens, num_ids, seed)


def drive(engine: LLMEngine, requests: Sequence[BenchRequest], deadline: float) -> bool:
    """Serve them all. False: there was no time to, and the rest was aborted."""
    names = [f"bench-{i}" for i in range(len(requests))]
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=r.max_tokens, ignore_eos=True)
        for r in requests
    ]
    prompts = [r.prompt_token_ids for r in requests]
    engine.add_requests(zip(names, prompts, params, strict=True))
    while engine.has_unfinished_requests():
        if time.monotonic() > deadline:
            finish(engine, names)
            return False
        engine.step()
    return True


def finish(engine: LLMEngine, names: Sequence[str]) -> None:
    """Whatever of them is unfinished is aborted, and nothing is under way any more."""
    for name in names:
        engine.abort_request(name)
    engine.core.drain()
    while engine.has_unfinished_requests():
        engine.step()


def serve(
    engine: LLMEngine, device: Device, requests: Sequence[BenchRequest], deadline: float
) -> Served:
    engine.reset_prefix_cache()
    engine.reset_stats()
    device.synchronize()
    start = time.perf_counter()
    is_complete = drive(engine, requests, deadline)
    device.synchronize()
    seconds, stats = time.perf_counter() - start, engine.stats()
    wanted = sum(request.max_tokens for request in requests)
    if is_complete and stats.output_tokens != wanted:
        raise AssertionError(f"{stats.output_tokens} tokens were served, and {wanted} asked for")
    return Served(
        seconds, stats.output_tokens, is_complete, stats.num_steps, stats.num_preemptions
    )


def measure_workload(engines: Engines, mode: str, section: Section) -> None:
    """As often as there is time for, at most `MOST_RUNS` times."""
    lab, engine = engines.lab, engines.get(mode)
    requests = requests_of(lab, 0)
    few = [BenchRequest(r.prompt_token_ids, 4) for r in requests[:16]]
    serve(engine, lab.device, few, section.deadline)
    section.results |= {
        "engine": {
            **mode_options(mode),
            "max_num_seqs": engine.config.max_num_seqs,
            "max_num_batched_tokens": engine.config.max_num_batched_tokens,
            "num_blocks": engine.kv_cache.num_blocks,
        },
        "num_requests": len(requests),
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in requests),
        "runs": [],
    }
    runs = section.results["runs"]
    while len(runs) < MOST_RUNS:
        needed_s = runs[-1]["seconds"] if runs else 0.0
        if runs and section.seconds_left() < needed_s:
            break
        if not section.has_time("the workload"):
            break
        served = serve(engine, lab.device, requests, section.deadline)
        runs.append(served.as_record())
        if not served.is_complete:
            section.cut(ENDED_EARLY)
            break


# -- waits


def count_waits(engines: Engines, mode: str, section: Section) -> None:
    """Of a few requests, from their prompts to their ends."""
    lab, engine = engines.lab, engines.get(mode)
    requests = [
        BenchRequest(r.prompt_token_ids, min(r.max_tokens, 32)) for r in requests_of(lab, 1)[:32]
    ]
    serve(engine, lab.device, requests, section.deadline)  # nothing new is compiled after that
    engine.reset_prefix_cache()
    engine.reset_stats()
    with lab.device.count_waits() as waits:
        is_complete = drive(engine, requests, section.deadline)
    section.results |= {
        "num_steps": engine.stats().num_steps,
        "meant": waits.meant,
        "hidden": waits.hidden,
        "hidden_at": waits.hidden_at,
    }
    if not is_complete:
        section.cut("ended before all requests were")


# -- a decode step


@dataclass(frozen=True, slots=True)
class SkippedPrompts:
    """A `ModelRunner` that takes in prompts, and computes nothing: their tokens are 0."""

    runner: PagedModelRunner

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        self.runner.prepare(plan)
        counts = plan.num_scheduled_tokens.values()
        planned = zip(plan.scheduled_requests, plan.start_positions, counts, strict=True)
        ended = [r.request_id for r, start, n in planned if start + n == r.num_tokens]
        return FinishedStep(StepOutput({name: [0] for name in ended}, times=dict(_NO_TIME)))


_NO_TIME = {"prepare_ms": 0.0, "forward_ms": 0.0, "sample_ms": 0.0}


def paged_runner(engine: LLMEngine) -> PagedModelRunner:
    """Without its thread, which an overlapped engine on a CPU has."""
    runner: Any = engine.core.runner
    return getattr(runner, "runner", runner)


def take_in(
    engine: LLMEngine, lab: Lab, names: Sequence[str], context: int, num_steps: int
) -> None:
    """Requests of these names that are about to decode at `context` keys, for `num_steps`."""
    prompts = lab.integers(lab.sizes.model.vocab_size, len(names), context - 1).tolist()
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_steps + 2, ignore_eos=True)
    engine.reset_prefix_cache()
    engine.add_requests((name, prompt, params) for name, prompt in zip(names, prompts))
    core: Any = engine.core
    runner = core.runner
    core.runner = SkippedPrompts(paged_runner(engine))
    core.step = partial(RecordingEngineCore.step, core)  # one after the other, in every mode
    try:
        while not all(request.num_output_tokens for request in engine.scheduler.requests.values()):
            engine.step()
    finally:
        core.runner = runner
        del core.step


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
    lab, engine = engines.lab, engines.get(mode)
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
    lab, engine = engines.lab, engines.get("eager")
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

            def call(given: tuple = (ids, positions, cache, metadata, indices)) -> torch.Tensor:
                return greedy(as_float(runner.model(*given, runner.backend)))

            calls = {"forward": lab.device.record_graph(call)}
            times = lab.device.time_in_turn(calls, lab.sizes.repeats)["forward"]
            rows.append(decode_row(lab, cell, cell.context, times))
            del calls
            lab.device.release()


# -- transformers


def measure_transformers(engines: Engines, section: Section) -> None:
    """Its `generate`, on the same weights: padded batches, each until its longest is done. What
    nobody asked for is not counted. The batch is halved until it fits in memory."""
    from common.bench.bench_models import make_twin

    engines.drop()
    lab, twin = engines.lab, make_twin(engines.loaded)
    requests = requests_of(lab, 0)
    hf_generate(twin, requests[:4], 2, None)
    num_at_once = len(requests)
    results = section.results
    results |= {"num_requests": len(requests), "num_at_once": num_at_once, "runs": []}
    while section.has_time("a run of transformers"):
        try:
            lab.device.synchronize()
            start, counts = time.perf_counter(), []
            for first in range(0, len(requests), num_at_once):
                batch = requests[first : first + num_at_once]
                if section.seconds_left() <= 0:
                    break
                longest = max(r.max_tokens for r in batch)
                made = hf_generate(twin, batch, longest, section.seconds_left())
                counts += [min(made, r.max_tokens) for r in batch]
            lab.device.synchronize()
        except torch.OutOfMemoryError:
            if num_at_once == 1:
                raise
            num_at_once = results["num_at_once"] = num_at_once // 2
            lab.device.release()
            continue
        seconds = time.perf_counter() - start
        is_complete = sum(counts) == sum(r.max_tokens for r in requests)
        run = Served(seconds, sum(counts), is_complete, 0, 0).as_record()
        results["runs"].append({k: v for k, v in run.items() if not k.startswith("num")})
        if not is_complete:
            section.cut(ENDED_EARLY)
        break


def hf_generate(
    twin: Any, requests: Sequence[BenchRequest], max_tokens: int, max_time: float | None
) -> int:
    """How many tokens each row got."""
    from transformers import GenerationConfig

    from static_batching import pad_left

    ids, mask = pad_left([r.prompt_token_ids for r in requests])
    generation = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=True, temperature=TEMPERATURE, top_k=0,
        pad_token_id=0, eos_token_id=None, max_time=max_time,
    )  # fmt: skip
    where = twin.device
    output = twin.generate(
        ids.to(where), attention_mask=mask.to(where), generation_config=generation
    )
    return output.shape[1] - ids.shape[1]
