"""The engine in the GPU report: the published workload, and how often the host waits.

    mode      graphs   overlap
    eager     no       no
    graphs    yes      no
    overlap   yes      yes

There is one engine at a time: the KV memory of two would not fit. The model has the shape of
Qwen3-0.6B and random weights, which take the same time as trained ones.

**Workload**: 256 requests at once, 100 to 1,024 random tokens in and as many out, temperature 0.6,
end of text ignored: what nano-vllm publishes its throughput with (its `bench.py`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from common.collector import spare_what_is_loaded
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.loader import LoadedModel
from common.runner.model_runner import PagedModelRunner
from common.workshop.bench.bench_work import BenchRequest, make_requests
from common.workshop.bench.gpu_budget import Section
from common.workshop.bench.gpu_device import Device
from common.workshop.bench.gpu_inputs import BLOCK_SIZE, Lab
from common.workshop.bench.random_weights import random_model
from paged_attention import PagedKVCache
from request import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "overlap_scheduling": False},
    "graphs": {"enforce_eager": False, "overlap_scheduling": False},
    "overlap": {"enforce_eager": False, "overlap_scheduling": True},
}
TEMPERATURE = 0.6
ENDED_EARLY = "a run was ended before all requests were: its rate is of what it did"
WORKLOAD_IDS = 10_000  # token ids are below


@dataclass(slots=True)
class Engines:
    """One model, and one engine at a time."""

    lab: Lab
    made: tuple[str, int] | None = None  # mode, and positions of the longest request
    _engine: LLMEngine | None = None
    _loaded: LoadedModel | None = None

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            lab, where = self.lab, self.lab.device.torch_device
            self._loaded = random_model(lab.sizes.model, lab.seed, lab.dtype, where)
        return self._loaded

    def get(self, mode: str, max_model_len: int) -> LLMEngine:
        """Raises `RuntimeError` if the engine fell back to another mode."""
        if self._engine is not None and self.made == (mode, max_model_len):
            return self._engine
        self.drop()
        options: dict[str, Any] = dict(MODES[mode])
        sizes, is_rehearsal = self.lab.sizes, self.lab.device.is_rehearsal
        if is_rehearsal and not options["enforce_eager"]:
            options["emulate_graphs"] = True
        config = EngineConfig(
            attention_backend="triton",
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=65 if is_rehearsal else None,
            block_size=BLOCK_SIZE,
            **options,
        )
        spare_what_is_loaded()
        engine = self._engine = LLMEngine(config, loaded=self.loaded)
        self.made = mode, max_model_len
        if options.get("enforce_eager") is False and not has_graphs(engine):
            raise RuntimeError("no graphs were captured; the engine's warning says why")
        kv_cache = cast(PagedKVCache, engine.kv_cache)  # of this process
        for cache in (*kv_cache.key_cache, *kv_cache.value_cache):
            cache.normal_(generator=self.lab.generator)
        return engine

    def drop(self) -> None:
        """Its memory is free afterwards: the next one takes all there is."""
        engine, self._engine, self.made = self._engine, None, None
        if engine is not None:
            caches = cast(PagedKVCache, engine.kv_cache)
            try:
                engine.close()
            finally:
                caches.key_cache.clear()
                caches.value_cache.clear()
        del engine
        gc.unfreeze()  # the first engine of a process froze itself, cycles and all
        self.lab.device.release()


def has_graphs(engine: LLMEngine) -> bool:
    return getattr(paged_runner(engine), "graphs", None) is not None


def paged_runner(engine: LLMEngine) -> PagedModelRunner:
    """Without its thread, which an overlapped engine on a CPU has."""
    runner: Any = engine.core.runner
    return getattr(runner, "runner", runner)


# -- the workload


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    output_tokens: int
    is_complete: bool

    def as_record(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 4),
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 2),
            "is_complete": self.is_complete,
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
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()


def serve(
    engine: LLMEngine, device: Device, requests: Sequence[BenchRequest], deadline: float
) -> Run:
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
    return Run(seconds, stats.output_tokens, is_complete)


def measure_workload(engines: Engines, mode: str, section: Section) -> None:
    """As often as there is time for, at most `num_runs` times."""
    lab, engine = engines.lab, engines.get(mode, engines.lab.sizes.workload_model_len)
    requests = requests_of(lab, 0)
    few = [BenchRequest(r.prompt_token_ids, 4) for r in requests[:16]]
    serve(engine, lab.device, few, section.deadline)
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
        "runs": [],
    }
    runs = section.results["runs"]
    while len(runs) < lab.sizes.num_runs:
        needed_s = runs[-1]["seconds"] if runs else 0.0
        if runs and section.seconds_left() < needed_s:
            break
        if not section.has_time("the workload"):
            break
        served = serve(engine, lab.device, requests, section.deadline)
        stats = engine.stats()
        counts = {"num_steps": stats.num_steps, "num_preemptions": stats.num_preemptions}
        runs.append(served.as_record() | counts)
        if not served.is_complete:
            section.cut(ENDED_EARLY)
            break


# -- waits


def count_waits(engines: Engines, mode: str, section: Section) -> None:
    """Of a few requests, from their prompts to their ends."""
    lab, engine = engines.lab, engines.get(mode, engines.lab.sizes.workload_model_len)
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
