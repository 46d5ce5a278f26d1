"""The parts of `make gpu` that run on the device, each in a process of its own (`gpu.py`).

    tokens     greedy answers of the shipped checkpoint beside those of transformers, in each mode
    speed      whole decode steps, prefill and a mixed workload, in each mode

The floor of a call is the longer of two times: its bytes, each input read once and each output
written once, at the bandwidth of a large copy; and its operations at the rate of a large product in
bfloat16. Both are measured here, on random numbers, because zeros are faster. A share is floor /
measured time. Copy and product are timed in a replayed graph, a step by the host's clock."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.linear import linear_layers
from common.models.loader import LoadedModel, load_model
from common.models.model_config import ModelConfig
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from workshop.measure.bench.bench_record import ROOT, read_record, write_record
from workshop.measure.bench.bench_work import greedy, make_requests
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model, shape_of

BLOCK_SIZE = 16
MODES: dict[str, dict[str, Any]] = {
    "overlap": {"enforce_eager": False, "overlap_scheduling": True},
    "graphs": {"enforce_eager": False, "overlap_scheduling": False},
    "eager": {"enforce_eager": True, "overlap_scheduling": False},
}
# Of log probabilities: if the two highest logits are nearer, rounding chooses the token.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
Cost = tuple[float, float]  # minimum bytes, of 16 bits a number, and minimum operations
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    model: ModelConfig
    ceilings: tuple[int, int]  # numbers that are copied, size of the matrices
    prompts: tuple[int, int, int]  # number, longest, tokens out: what answers are compared
    cells: tuple[tuple[int, int], ...]  # of decode steps: sequences, keys of each
    workloads: dict[str, tuple[int, Range, Range]]  # requests, tokens in, tokens out
    engine: dict[str, Any]  # options


SIZES = {
    "full": Sizes(
        QWEN3_0_6B,
        ceilings=(1 << 30, 8192),
        prompts=(24, 700, 48),
        cells=((64, 2048), (64, 256), (256, 1024), (1, 256)),
        workloads={
            "prefill: 32 prompts of 1,024 tokens": (32, (1024, 1024), (1, 1)),
            "256 requests, 100-1,024 tokens in and out": (256, (100, 1024), (100, 1024)),
        },
        engine={"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 4224},
    ),
    "rehearsal": Sizes(
        shape_of(1, 32, 48, 4, 2, 16, 33, eos_token_ids=(2,)),
        ceilings=(1 << 15, 32),
        prompts=(2, 9, 3),
        cells=((2, 20),),
        workloads={"2 requests, 3-6 tokens in, 2-3 out": (2, (3, 6), (2, 3))},
        engine=dict(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=65),
    ),
}


@dataclass
class Lab:
    size: str
    result: Path

    def __post_init__(self) -> None:
        self.sizes, self.is_rehearsal = SIZES[self.size], self.size == "rehearsal"
        self.device = torch.device("cpu") if self.is_rehearsal else torch.device("cuda", 0)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Keep the result of `work`, or its error, on disk: the next step may break the device."""
        result, errors = {}, list[str]()
        try:
            result = {name: work()}
        except Exception as error:
            traceback.print_exception(error)
            errors = [f"{name}: {type(error).__name__}: {error}"[:600]]
        found = read_record(self.result)  # with the steps of this one
        found["results"] |= result
        found["errors"] += errors
        write_record(self.result, found)

    def normal(self, *shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(generator=self.generator)

    def time(self, call: Callable[[], Any]) -> float:
        """Return the median of milliseconds. `call` must not read a value on the host."""
        if self.is_rehearsal:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        from triton.testing import do_bench_cudagraph

        ms: Any = do_bench_cudagraph(call, rep=50, return_mode="median")
        return ms

    @cached_property
    def ceilings(self) -> tuple[float, float]:
        """Bytes and operations a millisecond."""
        num_copied, n = self.sizes.ceilings
        source, (a, b) = self.normal(num_copied), self.normal(2, n, n)
        copied = self.time(partial(torch.empty_like(source).copy_, source))
        multiplied = self.time(partial(torch.mm, a, b, out=torch.empty_like(a)))
        return 2 * source.nbytes / copied, 2 * n**3 / multiplied

    def beside_floor(self, ms: float, cost: Cost) -> dict[str, float]:
        floor = floor_ms(cost, self.ceilings)
        return {"ms": round(ms, 4), "floor ms": round(floor, 4), "share": round(floor / ms, 3)}


def floor_ms(cost: Cost, ceilings: tuple[float, float]) -> float:
    return max(cost[0] / ceilings[0], cost[1] / ceilings[1])


def attention_cost(model: ModelConfig, num_seqs: int, context: int) -> Cost:
    """The cost of decodes in one layer: all keys and values, queries and outputs once; a score and
    a weighted value are head_dim products each."""
    width = model.num_attention_heads * model.head_dim
    num_keys, kv_width = num_seqs * context, model.num_key_value_heads * model.head_dim
    return 4 * (num_keys * kv_width + num_seqs * width), 4 * num_keys * width


def decode_cost(model: ModelConfig, num_weights: int, num_seqs: int, context: int) -> Cost:
    """The cost of one token for each sequence: every matrix once (`num_weights` in all), the rows
    of the embedding, attention in every layer. Norms, activations and logits need not leave the
    chip."""
    attention = [model.num_hidden_layers * n for n in attention_cost(model, num_seqs, context)]
    num_bytes = 2 * num_weights + 2 * num_seqs * model.hidden_size + attention[0]
    return num_bytes, 2 * num_seqs * num_weights + attention[1]


# -- the parts


@contextmanager
def engine_of(lab: Lab, mode: str, loaded: LoadedModel, **options: Any) -> Iterator[LLMEngine]:
    """Yield an engine. One exists at a time: the KV memory of two would not fit. Raises
    `RuntimeError` if it fell back to another mode."""
    gc.collect()
    options = {"attention_backend": "triton"} | lab.sizes.engine | MODES[mode] | options
    if lab.is_rehearsal:
        options["emulate_graphs"] = not options["enforce_eager"]
    else:
        torch.cuda.empty_cache()
    config = EngineConfig(block_size=BLOCK_SIZE, check_invariants=False, **options)
    engine = LLMEngine(config, loaded=loaded)
    try:
        runner: Any = engine.core.runner
        runner = getattr(runner, "runner", runner)  # overlap on a CPU has a thread around it
        if (getattr(runner, "graphs", None) is None) != options["enforce_eager"]:
            raise RuntimeError("no graphs were captured; the engine's warning says why")
        yield engine
    finally:
        engine.close()


def answers_of(engine: LLMEngine, prompts: list[list[int]], params: Any) -> list[Any]:
    return [output.outputs[0] for output in engine.generate_batch(prompts, params).values()]


def tokens(lab: Lab) -> None:
    """The shipped checkpoint continues parts of this repository's code."""
    number, longest, num_tokens = lab.sizes.prompts
    text = "\n".join(p.read_text("utf-8") for p in sorted(ROOT.glob("0[0-9]_*/*.py"))[:6])
    ids = list(load_tokenizer(SHIPPED_CHECKPOINT).encode(text))
    step = max(1, (len(ids) - longest) // number)
    prompts = [ids[i * step : i * step + 1 + (37 * i) % longest] for i in range(number)]
    few = {"max_num_seqs": number, "max_model_len": longest + num_tokens + 8, "num_blocks": 2000}
    params = replace(greedy(num_tokens), logprobs=0)
    for dtype in TOLERANCE:
        loaded = load_model(SHIPPED_CHECKPOINT, dtype, lab.device)
        hf: Any = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=dtype)
        hf.to(lab.device)

        def compare(mode: str, loaded: Any = loaded, hf: Any = hf) -> dict[str, float]:
            with engine_of(lab, mode, loaded, **few) as engine:
                return against(hf, prompts, answers_of(engine, prompts, params))

        for mode in MODES:
            lab.attempt(f"{str(dtype)[6:]}, {mode}", partial(compare, mode))


@torch.inference_mode()
def against(model: Any, prompts: list[list[int]], answers: list[Any]) -> dict[str, float]:
    """Compare greedy answers with `model`: how many tokens are not its first choice, how far below
    that they are, and the largest error of their log probabilities. Raises `ValueError` if one is
    further than rounding explains."""
    found = {"tokens": 0, "others": 0, "below": 0.0, "error": 0.0}
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + list(answer.token_ids)], device=model.device)
        logits = model(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]
        logprobs, own = logits.double().log_softmax(-1), ids[0, len(prompt) :, None]
        right = logprobs.gather(1, own)[:, 0]
        below = logprobs.max(-1).values - right
        error = right.cpu() - torch.tensor([entry.logprob for entry in answer.logprobs])
        found["tokens"] += len(own)
        found["others"] += int((below > 0).sum())
        found["below"] = max(found["below"], below.max().item())
        found["error"] = max(found["error"], error.abs().max().item())
    if not max(found["below"], found["error"]) <= TOLERANCE[model.dtype]:
        raise ValueError(f"{found} of log probabilities: more than rounding")
    return found


def speed(lab: Lab) -> None:
    """Random weights take the same time as trained ones."""
    loaded = random_model(lab.sizes.model, 0, torch.bfloat16, lab.device)
    num_weights = sum(m.plain_weight().numel() for m in linear_layers(loaded.model))
    freeze_gc_heap()
    lab.attempt("copy GB/s, matrix TFLOP/s", lambda: [f"{c / 1e6:,.4g}" for c in lab.ceilings])

    def measure(mode: str) -> str:
        with engine_of(lab, mode, loaded) as engine:
            for cell in lab.sizes.cells:
                work = partial(time_steps, lab, engine, num_weights, *cell)
                lab.attempt("{} x {:,}, {}".format(*cell, mode), work)
            for name in lab.sizes.workloads:
                lab.attempt(f"{name}, {mode}", partial(time_workload, lab, engine, name))
            return f"{engine.kv_manager.pool.num_usable_blocks:,} blocks"

    for mode in MODES:
        lab.attempt(f"engine, {mode}", partial(measure, mode))


def time_steps(
    lab: Lab, engine: LLMEngine, num_weights: int, num_seqs: int, context: int
) -> dict[str, float]:
    """Time decode steps of `num_seqs` requests of about `context` keys. Each step ends when its
    tokens are on the host."""
    if num_seqs * (context // BLOCK_SIZE + 6) > engine.kv_manager.pool.num_usable_blocks:
        raise MemoryError(f"{num_seqs} sequences of {context} keys do not fit")
    length = context - 1, context - 1
    requests = make_requests(num_seqs, length, (1, 1), lab.sizes.model.vocab_size, 0)
    names = [f"decode-{i}" for i in range(num_seqs)]
    params = replace(greedy(engine.max_model_len - context), temperature=0.6)
    engine.reset_prefix_cache()
    running, num_warm, times = engine.scheduler.running, 3, list[float]()
    try:
        engine.add_requests((n, r.prompt_token_ids, params) for n, r in zip(names, requests))
        while num_warm:
            engine.step()
            lengths = [request.num_computed_tokens for request in running.values()]
            num_warm -= len(lengths) == num_seqs and min(lengths) >= context - 1
        for _ in range(2 if lab.is_rehearsal else 24):
            start = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - start))
    finally:
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()  # nothing is in flight after this
    cost = decode_cost(lab.sizes.model, num_weights, num_seqs, context + len(times) // 2)
    return lab.beside_floor(median(times), cost)


def time_workload(lab: Lab, engine: LLMEngine, name: str) -> dict[str, float]:
    """Time random prompts, all requests at the same time, twice: the second run is returned."""
    number, lens_in, lens_out = lab.sizes.workloads[name]
    num_ids = min(10_000, lab.sizes.model.vocab_size)
    requests = make_requests(number, lens_in, lens_out, num_ids, 0)
    prompts = [request.prompt_token_ids for request in requests]
    params = [replace(greedy(request.max_tokens), temperature=0.6) for request in requests]
    seconds, num_out = 0.0, 0
    for _ in range(2):
        engine.reset_prefix_cache()
        start = time.perf_counter()
        num_out = sum(len(answer.token_ids) for answer in answers_of(engine, prompts, params))
        seconds = time.perf_counter() - start
    num_in = sum(map(len, prompts))
    return {"tokens in/s": round(num_in / seconds, 1), "tokens out/s": round(num_out / seconds, 1)}


PARTS = {"tokens": tokens, "speed": speed}

if __name__ == "__main__":
    part, size, result = sys.argv[1:]
    PARTS[part](Lab(size, Path(result)))
