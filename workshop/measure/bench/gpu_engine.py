"""The engine checks of `make gpu`: correctness (`check_tokens`), speed (`time_engine`), and the
time of each kernel (`profile`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity
from transformers import AutoModelForCausalLM

from common.assembly.assembly import Attention
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import load_tokenizer
from common.runner.graph_maker import GraphMaker
from common.runner.graphs import DecodeGraphs, EagerGraphs
from request import SamplingParams
from workshop.measure.bench.bench_models import make_twin
from workshop.measure.bench.bench_record import ROOT
from workshop.measure.bench.bench_work import make_requests
from workshop.measure.bench.gpu_kernels import attention_of, time_attention
from workshop.measure.bench.gpu_lab import BLOCK_SIZE, Lab, Part, decode_cost

MODES: dict[str, dict[str, Any]] = {
    "overlap": {"enforce_eager": False, "overlap_scheduling": True},
    "graphs": {"enforce_eager": False, "overlap_scheduling": False},
    "eager": {"enforce_eager": True, "overlap_scheduling": False},
}
# For log probabilities. If the two highest logits are nearer, rounding chooses the token.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@contextmanager
def engine_of(
    lab: Lab, mode: str, loaded: LoadedModel | None = None, **options: Any
) -> Iterator[LLMEngine]:
    """Yield an engine. One exists at a time: the KV memory of two would not fit. Raises
    `RuntimeError` if the engine fell back to another mode."""
    gc.collect()
    options = {"attention_backend": "triton"} | lab.sizes.engine | MODES[mode] | options
    if lab.is_rehearsal:
        options["emulate_graphs"] = not options["enforce_eager"]
    else:
        torch.cuda.empty_cache()
    config = EngineConfig(block_size=BLOCK_SIZE, check_invariants=False, **options)
    engine = LLMEngine(config, loaded=loaded or lab.loaded)
    try:
        runner: Any = engine.core.runner
        runner = getattr(runner, "runner", runner)  # overlap on a CPU has a thread around it
        if (getattr(runner, "graphs", None) is None) != options["enforce_eager"]:
            raise RuntimeError("no graphs were captured; the engine's warning says why")
        yield engine
    finally:
        engine.close()


def in_each_mode(lab: Lab, part: Part, work: Callable[[str, LLMEngine], None]) -> None:
    def run(mode: str) -> str:
        with engine_of(lab, mode) as engine:
            work(mode, engine)
            return f"{engine.kv_manager.pool.num_usable_blocks:,} blocks"

    for mode in MODES:
        part.attempt("engine", mode, partial(run, mode), 5)


def params_of(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.6, **options}, max_tokens=num_tokens, ignore_eos=True)


def answers_of(engine: LLMEngine, prompts: list[list[int]], params: Any) -> list[Any]:
    return [output.outputs[0] for output in engine.generate_batch(prompts, params).values()]


def check_tokens(lab: Lab, part: Part) -> None:
    """Compare answers with those of transformers on the device: the shipped checkpoint continues
    parts of this repository's code, in every mode. Then do the same with a model of real size."""
    number, longest, num_tokens = lab.sizes.prompts
    text = "\n".join(p.read_text("utf-8") for p in sorted(ROOT.glob("0[0-9]_*/*.py"))[:6])
    ids = list(load_tokenizer(SHIPPED_CHECKPOINT).encode(text))
    step = max(1, (len(ids) - longest) // number)
    prompts = [ids[i * step : i * step + 1 + (37 * i) % longest] for i in range(number)]
    few = {"max_num_seqs": number, "max_model_len": longest + num_tokens + 8, "num_blocks": 2000}
    ways: dict[str, tuple[str, dict[str, Any]]] = {mode: (mode, {}) for mode in MODES}
    if not lab.is_rehearsal:
        ways["whole prompts"] = "graphs", {"chunked_prefill": False}
        ways["attention in PyTorch"] = "eager", {"attention_backend": "torch"}
        ways["preempted"] = "overlap", {"num_blocks": 150, "preempt_every": 9}
    for dtype in TOLERANCE:
        loaded = load_model(SHIPPED_CHECKPOINT, dtype, lab.device)
        hf: Any = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=dtype)
        hf.to(lab.device)

        def compare(name: str, loaded: Any = loaded, hf: Any = hf) -> dict[str, float]:
            (mode, options), greedy = ways[name], params_of(num_tokens, temperature=0, logprobs=0)
            with engine_of(lab, mode, loaded, **few | options) as engine:
                return against(part, hf, prompts, answers_of(engine, prompts, greedy))

        for name in ways:
            part.attempt("tokens", f"{dtype}, {name}", partial(compare, name), 3)
    compare_ways(lab, part)


@torch.inference_mode()
def against(part: Part, model: Any, prompts: list[list[int]], answers: list[Any]) -> Any:
    """Count the tokens of greedy answers that differ from `model`'s. Returns how far they lie below
    its highest log probability, and the largest error of their log probabilities, too."""
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
    allowed = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    if not max(found["below"], found["error"]) <= allowed:
        part.fail("tokens", f"{found}, allowed {allowed} in {model.dtype}")
    return found


def compare_ways(lab: Lab, part: Part) -> None:
    """Compare bitwise: a graph replay with a call of the captured function (the same launches), and
    sampling by kernels with PyTorch. Compare greedy answers with float64. Short requests have one
    split, long ones many; they end one after the other, so steps fill many buckets."""
    number, longest, num_tokens = lab.sizes.prompts
    most = 4 * longest
    prompts = lab.prompts(*(1 + 37 * i % (most if i % 2 else longest) for i in range(number)))
    narrow = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
    kinds = {"temperature": 0, "logprobs": 0}, narrow, {"top_p": 0.9, "seed": 8}
    params = [params_of(2 + 5 * i % num_tokens, **kinds[i % 3]) for i in range(number)]
    few: dict[str, Any] = {"max_num_seqs": number, "max_model_len": most + num_tokens + 8}
    few["num_blocks"] = number * (few["max_model_len"] // BLOCK_SIZE + 1)
    runs: list[dict[str, list[Any]]] = []

    def compare(*patches: Any) -> dict[str, list[int]]:
        """Return how many tensors equal the first run's, and of how many: tokens, logits of all
        replays, and the KV cache without block 0, which is the padding's."""
        logits, replay, found = [], DecodeGraphs.replay, {}

        def spy(graphs: DecodeGraphs, *sizes: int) -> torch.Tensor:
            logits.append(replay(graphs, *sizes).clone())
            return logits[-1]

        with ExitStack() as stack:
            for patch in (mock.patch.object(DecodeGraphs, "replay", spy), *patches):
                stack.enter_context(patch)
            engine: Any = stack.enter_context(engine_of(lab, "graphs", **few))
            caches = *engine.kv_cache.key_cache, *engine.kv_cache.value_cache
            for cache in caches:
                cache.zero_()
            answers = answers_of(engine, prompts, params)
            run = {"answers": answers, "tokens": [torch.tensor(x.token_ids) for x in answers]}
            run |= {"logits": logits, "KV": [cache[1:].clone() for cache in caches]}
        runs.append(run)
        for what in ("tokens", "logits", "KV"):
            same = [torch.equal(*pair) for pair in zip(runs[0][what], run[what], strict=True)]
            found[what] = [sum(same), len(same)]
            if not same or not all(same):
                part.fail(f"bits of {what}", f"{found[what]} are equal")
        del runs[1:]
        return found

    part.attempt("bits", "graphs", compare, 8)
    called = mock.patch.object(GraphMaker, "_make", lambda maker: EagerGraphs())
    part.attempt("bits", "graphs, and their functions called", partial(compare, called), 8)
    in_torch = mock.patch.object(Attention, "rules", None)
    part.attempt("bits", "sampling by kernels, and in PyTorch", partial(compare, in_torch), 8)

    def errors() -> dict[str, float]:
        greedy = runs.pop()["answers"][::3]
        return against(part, make_twin(lab.loaded).double(), prompts[::3], greedy)

    part.attempt("numbers", "bfloat16 against float64", errors, 3)


def time_engine(lab: Lab, part: Part) -> None:
    if not lab.is_rehearsal:
        freeze_gc_heap()
    part.attempt("ceilings", "engine", lambda: lab.ceilings)

    def work(mode: str, engine: LLMEngine) -> None:
        for cell in lab.sizes.cells:
            steps = partial(while_decoding, lab, engine, cell, partial(time_steps, lab, cell))
            part.attempt(f"{mode}: steps", "{} x {:,}".format(*cell), steps, 3)
        for name in lab.sizes.workloads:
            serve = partial(time_workload, lab, engine, name)
            part.attempt(f"{mode}: workload", name, serve, 8)
        part.attempt("hidden waits", mode, partial(refuse_hidden_waits, lab, engine), 2)

    in_each_mode(lab, part, work)


def while_decoding(
    lab: Lab, engine: LLMEngine, cell: tuple[int, int], work: Callable[[LLMEngine], Any]
) -> Any:
    """Return `work(engine)`, called when `num_seqs` requests of about `context` keys decode."""
    (num_seqs, context), running, num_warm = cell, engine.scheduler.running, 3
    needed, usable = num_seqs * (context // 16 + 6), engine.kv_manager.pool.num_usable_blocks
    if num_seqs > engine.config.max_num_seqs or needed > usable:
        raise MemoryError(f"{num_seqs} sequences of {context} keys do not fit")
    names = [f"decode-{i}" for i in range(num_seqs)]
    prompts = lab.prompts(*[context - 1] * num_seqs)
    params = params_of(engine.max_model_len - context)
    engine.reset_prefix_cache()
    try:
        engine.add_requests((name, prompt, params) for name, prompt in zip(names, prompts))
        while num_warm:
            engine.step()
            lengths = [request.num_computed_tokens for request in running.values()]
            num_warm -= len(lengths) == num_seqs and min(lengths) >= context - 1
        return work(engine)
    finally:
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()  # nothing is in flight after this


def time_steps(lab: Lab, cell: tuple[int, int], engine: LLMEngine) -> dict[str, Any]:
    """Time whole steps by the host's clock. Each step ends when its tokens are on the host."""
    num_keys, times = sum(r.num_computed_tokens for r in engine.scheduler.running.values()), []
    for _ in range(2 if lab.is_rehearsal else 24):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    each = num_keys // cell[0] + len(times) // 2 + 1
    ms = [round(f(times), 4) for f in (median, min, max)]
    cost = decode_cost(lab.sizes.model, lab.num_weights, cell[0], each)
    return {"cell": list(cell), "keys": each} | lab.beside_floor(ms, cost)


def time_workload(lab: Lab, engine: LLMEngine, name: str) -> list[dict[str, float]]:
    """Time random prompts, all requests at the same time, after a few short answers."""
    (number, lens_in, lens_out), runs = lab.sizes.workloads[name], []
    num_ids = min(10_000, lab.sizes.model.vocab_size)
    requests = make_requests(number, lens_in, lens_out, num_ids, 0)
    prompts = [request.prompt_token_ids for request in requests]
    params = [params_of(request.max_tokens) for request in requests]
    answers_of(engine, prompts[:16], params_of(2))
    for _ in range(2):
        engine.reset_prefix_cache()
        engine.reset_stats()
        start = time.perf_counter()
        num_out = sum(len(answer.token_ids) for answer in answers_of(engine, prompts, params))
        seconds = time.perf_counter() - start
        counts = {"in": sum(map(len, prompts)), "out": num_out, "requests": number}
        run = {f"{what}/s": round(count / seconds, 2) for what, count in counts.items()}
        runs.append(run | {"seconds": round(seconds, 3), "steps": engine.stats().num_steps})
    return runs


def refuse_hidden_waits(lab: Lab, engine: LLMEngine) -> str:
    """Allow only waits for sampled tokens, by an event; else torch raises and names the place."""
    prompts: Any = lab.prompts(20, 20)
    answers_of(engine, prompts, params_of(4))  # compiles everything
    engine.reset_prefix_cache()
    set_mode = print if lab.is_rehearsal else torch.cuda.set_sync_debug_mode
    set_mode("error")
    try:
        answers_of(engine, prompts, params_of(4))
    finally:
        set_mode("default")
    return "none"


def profile(lab: Lab, part: Part) -> None:
    part.attempt("ceilings", "profile", lambda: lab.ceilings)
    for cell in lab.sizes.cells:
        work = lambda x=cell: time_attention(lab, x, attention_of(lab, *x)())  # noqa: E731
        part.attempt("attention", "{} x {:,}".format(*cell), work)

    def look(mode: str, engine: LLMEngine) -> None:
        for cell in lab.sizes.cells[: 1 if lab.is_rehearsal or mode != "graphs" else 4]:
            found = partial(while_decoding, lab, engine, cell, partial(by_kernel, lab))
            part.attempt(f"{mode}: profile", "{} x {:,}".format(*cell), found, 5)

    in_each_mode(lab, part, look)


def by_kernel(lab: Lab, engine: LLMEngine) -> dict[str, Any]:
    """Return the time and number of kernels in a step, in all and by name. A step that takes longer
    without a profiler (`time_steps`) leaves the GPU idle for the difference."""
    kinds, num_steps, rows = [ProfilerActivity.CPU], 1 if lab.is_rehearsal else 4, []
    if not lab.is_rehearsal:
        kinds.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as prof:
        for _ in range(num_steps):
            engine.step()
    for e in prof.key_averages():
        if lab.is_rehearsal or str(e.device_type) == "DeviceType.CUDA":
            us = e.self_cpu_time_total if lab.is_rehearsal else e.self_device_time_total
            rows.append([round(us / num_steps, 2), e.count / num_steps, e.key[:100]])
    found = {"busy_us": sum(row[0] for row in rows), "launches": sum(row[1] for row in rows)}
    return found | {"kernels": sorted(rows, reverse=True)[:40]}
