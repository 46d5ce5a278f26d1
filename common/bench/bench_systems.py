"""The systems that `common.bench` compares, each doing exactly the same work.

Work is a list of `BenchRequest`s, all there at time 0: token ids in, and a fixed number of greedy
tokens out (end of text is ignored). A system is a context manager that sets itself up and yields a
function `serve(requests) -> Served`; only the call of that function is timed. What a user gets is
counted, nothing else: tokens computed past a request's own `max_tokens` are not useful.

    one-at-a-time             our paged engine, one request in flight
    static                    chapter 1's baseline: batches that run until their longest ends
    padded                    chapter 1: continuous batching over stacked and padded caches
    paged                     chapters 1 and 2: the paged engine
    prefix-cache              and chapter 3: prefixes are kept, and shared within a round
    two-phase                 and chapter 4: memory is filled, and preempted
    speculative               and chapter 5: n-grams are looked up, as many guesses as pay
    chunked                   and chapter 6: at most 128 tokens of a prompt in a step
    transformers-generate     one left-padded batch of everything
    transformers-continuous   transformers' own continuous batching over its paged cache

All read the very same weights: the `transformers` model is a second view of our model's memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from common.bench.bench_record import percentile
from common.engine import LLMEngine
from common.engine_config import EngineConfig
from common.loader import LoadedModel
from common.model_config import ModelConfig
from fcfs_scheduler import FCFSScheduler
from hf_model_runner import HFModelRunner
from request import Request, SamplingParams
from static_batching import generate_static, pad_left
from step_record import RecordingEngineCore, StepRecord

STAGES = ("schedule_ms", "prepare_ms", "forward_ms", "sample_ms", "update_ms")


class CannotRunError(RuntimeError):
    """This system does not exist here. The message says precisely why."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    max_tokens: int

    @property
    def num_positions(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What every system may use."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    longest: int = 2048  # positions of the longest request
    num_positions: int | None = None  # of KV memory; None: `max_num_seqs` of the longest

    @property
    def num_contiguous(self) -> int:
        """Requests that the memory holds if each reserves the longest."""
        if self.num_positions is None:
            return self.max_num_seqs
        return self.num_positions // self.longest

    def engine_config(self, **options: Any) -> EngineConfig:
        """The engine within these limits, with no more than chapters 1 and 2 unless `options` say
        so."""
        blocks_per_request = -(-self.longest // self.block_size)
        num_blocks = self.max_num_seqs * blocks_per_request
        if self.num_positions is not None:
            num_blocks = self.num_positions // self.block_size
        parts: dict[str, Any] = {
            "scheduler": "fcfs",
            "prefix_cache": None,
            "chunked_prefill": False,
            "block_size": self.block_size,
            "num_blocks": 1 + num_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.longest,
        }
        return EngineConfig(**parts | options)


@dataclass(frozen=True, slots=True)
class BenchModels:
    """One set of weights in two guises."""

    loaded: LoadedModel
    hf: Qwen3ForCausalLM


@dataclass(slots=True)
class Served:
    """The tokens of each request, in order. `describe` is called when time is no longer taken."""

    token_ids: list[list[int]]
    describe: Callable[[], dict[str, Any]] = field(default=dict)


Serve = Callable[[Sequence[BenchRequest]], Served]
System = Callable[[BenchModels, Limits], AbstractContextManager[Serve]]


def make_requests(
    num_requests: int,
    prompt_lens: tuple[int, int],
    output_lens: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Lengths and token ids uniform, both ends included."""
    rng = random.Random(seed)
    lengths = [(rng.randint(*prompt_lens), rng.randint(*output_lens)) for _ in range(num_requests)]
    return [
        BenchRequest([rng.randrange(vocab_size) for _ in range(prompt)], output)
        for prompt, output in lengths
    ]


# -- one set of weights


def make_twin(loaded: LoadedModel) -> Qwen3ForCausalLM:
    """The same model as `transformers` computes it. Its parameters are views of `loaded`'s."""
    config = loaded.config
    with torch.device("meta"):
        twin = Qwen3ForCausalLM(_hf_config(config))
    weights = {}
    for name, tensor in loaded.model.checkpoint_tensors().items():
        # A norm that we hold once per head is one tensor there.
        is_per_head = tuple(tensor.target.shape) != tensor.shape
        weights[name] = tensor.target[0] if is_per_head else tensor.target
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding)
    twin.load_state_dict(weights, strict=True, assign=True)
    # The one thing that is not in a checkpoint.
    rotary = type(twin.model.rotary_emb)(config=twin.config)
    twin.model.rotary_emb = rotary.to(embedding.device)
    return twin.requires_grad_(False).eval()


def _hf_config(config: ModelConfig) -> Qwen3Config:
    if config.architecture != "Qwen3ForCausalLM" or config.rope.rope_type != "default":
        raise ValueError(
            f"architecture is {config.architecture}, rope_type {config.rope.rope_type}: "
            "the benchmark knows Qwen3ForCausalLM with default rotary embedding"
        )
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.qkv_bias,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


# -- our systems


@contextmanager
def paged(models: BenchModels, limits: Limits, **options: Any) -> Iterator[Serve]:
    """The engine on a pool that holds `max_num_seqs` of the longest requests. Each round begins
    with an empty cache: rounds bring the same prompts."""
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

        def describe() -> dict[str, Any]:
            stats = engine.stats()
            memory = {
                "kv_waste": round(stats.kv_waste, 4),
                "kv_blocks_peak": stats.kv_blocks_peak,
                "kv_blocks_total": stats.kv_blocks_total,
            }
            return describe_steps(steps, start) | memory

        return Served([o.outputs[0].token_ids for o in outputs.values()], describe)

    yield serve


@contextmanager
def one_at_a_time(models: BenchModels, limits: Limits) -> Iterator[Serve]:
    alone = Limits(1, limits.max_num_batched_tokens, limits.block_size, limits.longest)
    with paged(models, alone) as serve:
        yield serve


def padded_core(
    runner: HFModelRunner, max_num_seqs: int, max_num_batched_tokens: int, steps: list[StepRecord]
) -> RecordingEngineCore:
    """Chapter 1's engine; `steps` grows by a record a step."""
    scheduler = FCFSScheduler(max_num_seqs, max_num_batched_tokens)
    return RecordingEngineCore(scheduler, runner, [steps.append])


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

        def describe() -> dict[str, Any]:
            copied = {
                "kv_bytes_copied": runner.num_bytes_copied,
                "kv_bytes_new": runner.num_bytes_new,
            }
            return describe_steps(steps, start) | copied

        return Served([request.output_token_ids for request in own], describe)

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
    """`generate_batch` has one `max_new_tokens` for all, so requests go to its manager one by one.

    Attention is `sdpa` over the paged cache, which is what it chooses on a CPU. Pages have its own
    default size; their number, the requests in flight and the tokens in a step are ours."""
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
    "one-at-a-time": one_at_a_time,
    "static": static,
    "padded": padded,
    "paged": paged,
    "prefix-cache": partial(paged, prefix_cache="hash"),
    "two-phase": partial(paged, prefix_cache="hash", scheduler="two_phase"),
    "speculative": partial(paged, **_GUESSING),
    "chunked": partial(paged, **_GUESSING, chunked_prefill=128),
    "transformers-generate": transformers_generate,
    "transformers-continuous": transformers_continuous,
}
TITLES = {
    "one-at-a-time": "one at a time (paged engine, one request in flight)",
    "static": "static batches (chapter 1's baseline)",
    "padded": "chapter 1: continuous batching, padded caches",
    "paged": "chapters 1 + 2: the paged engine",
    "prefix-cache": "chapters 1 to 3: and a prefix cache",
    "two-phase": "chapters 1 to 4: and preemption instead of reservation",
    "speculative": "chapters 1 to 5: and guesses, looked up in the text so far",
    "chunked": "**chapters 1 to 6: and prompts in pieces of 128**",
    "transformers-generate": "`transformers` generate, one static batch",
    "transformers-continuous": "`transformers` continuous batching",
}


# -- what a run tells about itself


def describe_latency(token_times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From the seconds, counted from the start, at which each request's tokens came out."""
    first = [1e3 * times[0] for times in token_times if times]
    gaps = [1e3 * (b - a) for times in token_times for a, b in pairwise(times)]
    return {"ttft_ms": p50_p99(first), "inter_token_ms": p50_p99(gaps)}


def arrivals_of(
    steps: Sequence[StepRecord], start: float
) -> Iterator[tuple[str, list[int], float]]:
    """Request, the tokens it got in a step, and the end of that step in seconds after `start`."""
    for step in steps:
        end = step.start_time + step.step_ms / 1e3 - start
        for request_id, token_ids in step.new_token_ids.items():
            yield request_id, token_ids, end


def describe_steps(steps: Sequence[StepRecord], start: float) -> dict[str, Any]:
    """Latencies, number of steps, and what a pure decode step of the fullest batch takes.

    `start` is the moment of arrival, in seconds of `time.monotonic()`."""
    times: dict[str, list[float]] = {}
    for request_id, token_ids, end in arrivals_of(steps, start):
        times.setdefault(request_id, []).extend([end] * len(token_ids))
    described = {"num_steps": len(steps)} | describe_latency(list(times.values()))
    decodes = [step for step in steps if _is_decode(step)]
    if decodes:
        num_rows = max(len(step.num_scheduled_tokens) for step in decodes)
        full = [step for step in decodes if len(step.num_scheduled_tokens) == num_rows]
        described["decode"] = {
            "num_rows": num_rows,
            "num_steps": len(full),
            "step_ms": round(median(step.step_ms for step in full), 4),
            "stages": {s: round(median(getattr(step, s) for step in full), 4) for s in STAGES},
            "kv_tokens": round(fmean(step.kv_tokens_written for step in full)),
        }
    return described


def _is_decode(step: StepRecord) -> bool:
    """A token for everybody, and guesses: no piece of a prompt."""
    scheduled = step.num_scheduled_tokens
    num_drafts = {name: drafted for name, (drafted, _) in step.drafts.items()}
    is_single = all(n == 1 + num_drafts.get(name, 0) for name, n in scheduled.items())
    return bool(scheduled) and not step.admitted and is_single


def p50_p99(values: Sequence[float]) -> dict[str, float | None]:
    """None of nothing."""
    found = {f"p{p}": percentile(values, p) for p in (50, 99)}
    return {name: None if value is None else round(value, 3) for name, value in found.items()}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
