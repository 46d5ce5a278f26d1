"""The systems that `workshop.bench` and `workshop.ladder` compare, all doing the same work.

Work is a list of requests (`bench_work.py`), which arrive at their times. A system is a context
manager that sets itself up and yields a function `serve(requests) -> Served`; only that call is
timed. A token counts for its user when its step has ended. Where an answer is shorter than its
`max_tokens`, the request is stopped from outside, as an end of text would stop it. (`static` and
`padded` know the length, and still reserve the longest.)

    one-at-a-time             our paged engine, one request in flight
    static                    chapter 1's baseline: arrived requests join the next batch
    padded                    chapter 1: joins the next step; caches stacked and padded
    paged                     chapters 1 and 2: more requests, because none reserves the longest
    prefix-cache              and chapter 3: prefixes are kept, and shared within a round
    two-phase                 and chapter 4: memory is filled, and taken back when it runs out
    speculative               and chapter 5: n-grams propose as many draft tokens as pay
    chunked                   and chapter 6: long prompts in chunks
    transformers-generate     one left-padded batch of everything
    vllm                      vLLM's CPU build, if it is installed: a separate process

The last two serve what is there at the start. All but vLLM read the same weights: the
`transformers` model is a second view of our model's memory. The KV memory is that of `Limits`.
Without pages it holds as many requests as it holds of the longest, with pages as many as fit.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import fmean
from typing import Any

from transformers import GenerationConfig

from common.engine import LLMEngine
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request
from static_batching import generate_static, pad_left
from step_record import StepRecord, make_record
from workshop.measure.bench.bench_models import BenchModels
from workshop.measure.bench.bench_work import (
    BenchRequest,
    Limits,
    Serve,
    Served,
    greedy,
)
from workshop.measure.bench.vllm_system import vllm

System = Callable[[BenchModels, Limits], AbstractContextManager[Serve]]
CHUNK = 128  # tokens: about the knee of the curve in chapter 6


# -- our systems


@contextmanager
def paged(models: BenchModels, limits: Limits, **options: Any) -> Iterator[Serve]:
    """The engine. Each round starts with an empty cache, because all rounds bring the same
    prompts."""
    steps: list[StepRecord] = []
    config = limits.engine_config(**options)
    engine = LLMEngine(config, loaded=models.loaded, on_step=steps.append)

    def serve(requests: Sequence[BenchRequest]) -> Served:
        engine.reset_prefix_cache()
        engine.reset_stats()

        def add(index: int, request: BenchRequest) -> None:
            params = greedy(request.max_tokens)
            engine.add_request(str(index), request.prompt_token_ids, params)

        def step() -> None:
            for output in engine.step():
                wanted = requests[int(output.request_id)].num_outputs
                if len(output.outputs[0].token_ids) >= wanted:
                    engine.abort_request(output.request_id)

        served = _drive(requests, add, step, engine.has_unfinished_requests, steps)
        stats = engine.stats()
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        served.details |= {
            "kv_waste": stats.kv_waste,
            "most_tokens_of_one": max(n for s in steps for n in s.num_scheduled_tokens.values()),
            "prefix_hits": stats.cached_tokens / num_prompt_tokens,
            "tokens_per_pass": stats.tokens_per_pass,
        }
        return served

    yield serve


def _drive(
    requests: Sequence[BenchRequest],
    add: Callable[[int, BenchRequest], None],
    step: Callable[[], Any],
    has_unfinished: Callable[[], bool],
    steps: list[StepRecord],
) -> Served:
    """Add each request at its arrival time, and step while requests are unfinished. Each step adds
    its record to `steps`, which begins empty."""
    steps.clear()
    pending, start = deque(enumerate(requests)), time.monotonic()
    while pending or has_unfinished():
        now = time.monotonic() - start
        while pending and pending[0][1].arrival_time <= now:
            add(*pending.popleft())
        if has_unfinished():
            step()
        else:
            time.sleep(max(0.0, pending[0][1].arrival_time - now))
    seconds = time.monotonic() - start
    token_ids, token_times = ([[] for _ in requests] for _ in range(2))
    for record in steps:
        end = record.start_time + record.step_ms / 1e3 - start
        for request_id, new_token_ids in record.new_token_ids.items():
            index = int(request_id)
            num_wanted = requests[index].num_outputs - len(token_ids[index])
            token_ids[index] += new_token_ids[:num_wanted]
            token_times[index] += [end] * len(new_token_ids[:num_wanted])
    return Served(token_ids, token_times, {"num_steps": len(steps)}, seconds)


def _request_of(index: int, request: BenchRequest) -> Request:
    params = greedy(request.num_outputs)
    return Request(str(index), request.prompt_token_ids, params, arrival_time=0.0)


@contextmanager
def padded(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    """Chapter 1's engine."""

    def serve(requests: Sequence[BenchRequest]) -> Served:
        steps: list[StepRecord] = []
        scheduler = FCFSScheduler(limits.num_contiguous, limits.max_num_batched_tokens)
        runner = HFModelRunner(models.hf, batched=True)
        core = EngineCore(scheduler, runner)

        def add(index: int, request: BenchRequest) -> None:
            core.add_request(_request_of(index, request))

        def step() -> None:
            core.step()
            steps.append(make_record(core, len(steps)))

        served = _drive(requests, add, step, core.has_unfinished_requests, steps)
        held = [len(step.num_scheduled_tokens) * limits.longest for step in steps]
        written = [step.kv_tokens_written for step in steps]
        served.details["kv_waste"] = 1 - fmean(w / h for w, h in zip(written, held) if h)
        return served

    yield serve


@contextmanager
def static(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    def serve(requests: Sequence[BenchRequest]) -> Served:
        token_ids, token_times = ([[] for _ in requests] for _ in range(2))
        waiting, wastes = list(enumerate(requests)), []
        start = time.monotonic()
        while waiting:
            time.sleep(max(0.0, start + waiting[0][1].arrival_time - time.monotonic()))
            now = time.monotonic() - start
            here = [request for request in waiting if request[1].arrival_time <= now]
            own = [_request_of(*request) for request in here[: limits.num_contiguous]]
            del waiting[: len(own)]
            ends: list[float] = []  # of the forward passes
            with models.hf.register_forward_hook(
                lambda *_, ends=ends: ends.append(time.monotonic())
            ):
                generate_static(models.hf, own, len(own))
            for request in own:
                index = int(request.request_id)
                token_ids[index] = request.output_token_ids
                token_times[index] = [t - start for t in ends[: request.num_output_tokens]]
            for step in range(len(ends)):
                written = sum(r.num_prompt_tokens + min(step, r.num_output_tokens) for r in own)
                wastes.append(1 - written / (len(own) * limits.longest))
        return Served(token_ids, token_times, {"num_steps": len(wastes), "kv_waste": fmean(wastes)})

    yield serve


# -- transformers' own


@contextmanager
def transformers_generate(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    def serve(requests: Sequence[BenchRequest]) -> Served:
        ids, mask = pad_left([r.prompt_token_ids for r in requests])
        longest = max(r.num_outputs for r in requests)
        output = models.hf.generate(  # pyright: ignore[reportAttributeAccessIssue]
            ids.to(models.hf.device),
            attention_mask=mask.to(models.hf.device),
            generation_config=GenerationConfig(
                max_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None
            ),
        )
        rows = output[:, ids.shape[1] :].tolist()
        token_ids = [row[: r.num_outputs] for row, r in zip(rows, requests, strict=True)]
        utilisation = sum(map(len, token_ids)) / (len(requests) * longest)
        return Served(token_ids, details={"num_steps": longest, "slot_utilisation": utilisation})

    yield serve


_TWO_PHASE = {"prefix_cache": "hash", "scheduler": "two_phase"}
_GUESSING = _TWO_PHASE | {"speculative": {"method": "ngram"}}
SYSTEMS: dict[str, System] = {
    "one-at-a-time": partial(paged, max_num_seqs=1),
    "static": static,
    "padded": padded,
    "paged": paged,
    "prefix-cache": partial(paged, prefix_cache="hash"),
    "two-phase": partial(paged, **_TWO_PHASE),
    "speculative": partial(paged, **_GUESSING),
    "chunked": partial(paged, **_GUESSING, chunked_prefill=CHUNK),
    "transformers-generate": transformers_generate,
    "vllm": vllm,
}


def serve_timed(
    name: str,
    models: BenchModels,
    limits: Limits,
    warm_up: Sequence[BenchRequest],
    requests: Sequence[BenchRequest],
) -> Served:
    """Set a system up, let it serve `warm_up`, which is not counted, and then time `requests`. Its
    details get the processor seconds of all threads, if it has none of its own."""
    with SYSTEMS[name](models, limits) as serve:
        serve(warm_up)
        gc.collect()
        start, cpu_start = time.perf_counter(), time.process_time()
        served = serve(requests)
        served.seconds = served.seconds or time.perf_counter() - start
        served.details = {"cpu_seconds": time.process_time() - cpu_start} | served.details
    return served
