"""The systems that `workshop.bench` compares, each doing exactly the same work.

Work is a list of requests (`bench_work.py`), all there at time 0. A system is a context manager
that sets itself up and yields a function `serve(requests) -> Served`; only that call is timed.

    one-at-a-time             our paged engine, one request in flight
    static                    chapter 1's baseline: batches that run until their longest ends
    padded                    chapter 1: continuous batching over stacked and padded caches
    paged                     chapters 1 and 2: the paged engine
    prefix-cache              and chapter 3: prefixes are kept, and shared within a round
    two-phase                 and chapter 4: memory is filled, requests are preempted
    speculative               and chapter 5: n-grams propose as many draft tokens as pay
    chunked                   and chapter 6: at most 128 tokens of a prompt in a step
    transformers-generate     one left-padded batch of everything
    transformers-continuous   transformers' own continuous batching over its paged cache
    vllm, vllm-eager          vLLM's CPU build, if it is installed: a separate process

All but vLLM read the same weights: the `transformers` model is a second view of our model's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from transformers import GenerationConfig

from common.engine import LLMEngine
from engine_core import EngineCore
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request
from static_batching import generate_static, pad_left
from step_record import RecordedScheduler, StepRecord
from workshop.measure.bench.bench_latency import describe_latency, describe_steps
from workshop.measure.bench.bench_models import BenchModels
from workshop.measure.bench.bench_work import (
    BenchRequest,
    CannotRunError,
    Limits,
    Serve,
    Served,
    greedy,
)
from workshop.measure.bench.vllm_system import vllm

System = Callable[[BenchModels, Limits], AbstractContextManager[Serve]]


# -- our systems


@contextmanager
def paged(models: BenchModels, limits: Limits, **options: Any) -> Iterator[Serve]:
    """The engine on a pool that holds `max_num_seqs` of the longest requests. Each round starts
    with an empty cache, because all rounds bring the same prompts."""
    steps: list[StepRecord] = []
    config = limits.engine_config(**options)
    engine = LLMEngine(config, loaded=models.loaded, on_step=steps.append)

    def serve(requests: Sequence[BenchRequest]) -> Served:
        engine.reset_prefix_cache()
        start = time.monotonic()
        steps.clear()
        engine.reset_stats()
        params = [greedy(request.max_tokens) for request in requests]
        outputs = engine.generate_batch([r.prompt_token_ids for r in requests], params)

        tokens = [list(output.outputs[0].token_ids) for output in outputs.values()]
        return Served(tokens, lambda: describe_steps(steps, start))

    yield serve


@contextmanager
def exclusive(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    alone = Limits(1, limits.max_num_batched_tokens, limits.block_size, limits.longest)
    with paged(models, alone) as serve:
        yield serve


def padded_core(
    runner: HFModelRunner, max_num_seqs: int, max_num_batched_tokens: int, steps: list[StepRecord]
) -> EngineCore:
    """Build chapter 1's engine. `steps` grows by one record a step."""
    scheduler = FCFSScheduler(max_num_seqs, max_num_batched_tokens)
    return EngineCore(RecordedScheduler(scheduler, [steps.append]), runner)


@contextmanager
def padded(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    def serve(requests: Sequence[BenchRequest]) -> Served:
        start = time.monotonic()
        steps: list[StepRecord] = []
        runner = HFModelRunner(models.hf, batched=True)
        core = padded_core(runner, limits.max_num_seqs, limits.max_num_batched_tokens, steps)
        own = [
            Request(str(i), r.prompt_token_ids, greedy(r.max_tokens))
            for i, r in enumerate(requests)
        ]
        for request in own:
            core.add_request(request)
        while core.has_unfinished_requests():
            core.step()

        tokens = [request.output_token_ids for request in own]
        return Served(tokens, lambda: describe_steps(steps, start))

    yield serve


@contextmanager
def static(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    def serve(requests: Sequence[BenchRequest]) -> Served:
        own = [
            Request(str(i), r.prompt_token_ids, greedy(r.max_tokens), arrival_time=0.0)
            for i, r in enumerate(requests)
        ]
        report = generate_static(models.hf, own, limits.max_num_seqs)

        def describe() -> dict[str, Any]:
            return {
                "num_steps": report.num_steps,
                "slot_utilisation": round(report.slot_utilisation, 4),
            }

        return Served([request.output_token_ids for request in own], describe)

    yield serve


# -- transformers' own


@contextmanager
def transformers_generate(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    def serve(requests: Sequence[BenchRequest]) -> Served:
        ids, mask = pad_left([r.prompt_token_ids for r in requests])
        longest = max(r.max_tokens for r in requests)
        output = models.hf.generate(  # pyright: ignore[reportAttributeAccessIssue]
            ids.to(models.hf.device),
            attention_mask=mask.to(models.hf.device),
            generation_config=GenerationConfig(
                max_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None
            ),
        )
        rows = output[:, ids.shape[1] :].tolist()
        num_useful = sum(r.max_tokens for r in requests)

        def describe() -> dict[str, Any]:
            utilisation = num_useful / (len(requests) * longest)
            return {"num_steps": longest, "slot_utilisation": round(utilisation, 4)}

        token_ids = [row[: r.max_tokens] for row, r in zip(rows, requests, strict=True)]
        return Served(token_ids, describe)

    yield serve


@contextmanager
def transformers_continuous(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    """Serve with `generate_batch`'s manager, one request at a time, because `generate_batch` itself
    has one `max_new_tokens` for all.

    Attention is `sdpa` over the paged cache, which is its choice on a CPU. Pages have its default
    size; their number, the requests in flight and the tokens in a step are ours."""
    try:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        open_manager = models.hf.continuous_batching_context_manager
    except (ImportError, AttributeError) as error:
        raise CannotRunError(
            f"this transformers has no continuous batching manager ({error})"
        ) from error
    page_size = ContinuousBatchingConfig.page_size
    batching = ContinuousBatchingConfig(
        num_blocks=limits.max_num_seqs * -(-limits.longest // page_size) + 1,
        max_batch_tokens=limits.max_num_batched_tokens,
        max_requests_per_batch=limits.max_num_seqs,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with open_manager(generation_config=generation, continuous_batching_config=batching) as manager:
        yield lambda requests: _serve_with(manager, requests)


def _serve_with(manager: Any, requests: Sequence[BenchRequest]) -> Served:
    first_step = getattr(manager, "current_batch", 0)
    names = [
        manager.add_request(r.prompt_token_ids, max_new_tokens=r.max_tokens, record_timestamps=True)
        for r in requests
    ]
    results: dict[str, Any] = {}
    while len(results) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise CannotRunError(f"transformers' generation loop failed: {result.error}")
        if result is not None and result.is_finished():
            results[result.request_id] = result
        elif result is None and not manager.is_running():
            raise CannotRunError("transformers' generation thread ended before its requests did")

    def describe() -> dict[str, Any]:
        start = min(result.created_time for result in results.values())
        times = [[t - start for t in results[name].timestamps] for name in names]
        num_steps = manager.current_batch - first_step
        return {"num_steps": num_steps} | describe_latency(times)

    return Served([list(results[name].generated_tokens) for name in names], describe)


_GUESSING = {
    "prefix_cache": "hash",
    "scheduler": "two_phase",
    "speculative": {"method": "ngram"},
}
SYSTEMS: dict[str, System] = {
    "one-at-a-time": exclusive,
    "static": static,
    "padded": padded,
    "paged": paged,
    "prefix-cache": partial(paged, prefix_cache="hash"),
    "two-phase": partial(paged, prefix_cache="hash", scheduler="two_phase"),
    "speculative": partial(paged, **_GUESSING),
    "chunked": partial(paged, **_GUESSING, chunked_prefill=128),
    "transformers-generate": transformers_generate,
    "transformers-continuous": transformers_continuous,
    "vllm": partial(vllm, enforce_eager=False),
    "vllm-eager": partial(vllm, enforce_eager=True),
}
TITLES = {
    "one-at-a-time": "one at a time (paged engine, one request in flight)",
    "static": "static batches (chapter 1's baseline)",
    "padded": "chapter 1: continuous batching, padded caches",
    "paged": "chapters 1 + 2: the paged engine",
    "prefix-cache": "chapters 1 to 3: with a prefix cache",
    "two-phase": "chapters 1 to 4: with preemption instead of reservation",
    "speculative": "chapters 1 to 5: with n-gram draft tokens",
    "chunked": "**chapters 1 to 6: with prompts in chunks of 128**",
    "transformers-generate": "`transformers` generate, one static batch",
    "transformers-continuous": "`transformers` continuous batching",
    "vllm": "vLLM's CPU build, compiled",
    "vllm-eager": "vLLM's CPU build, eager",
}
