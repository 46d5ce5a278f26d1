"""The gain and the cost of chunks, measured in the engine with the shipped checkpoint.
`plot_chunked_prefill.py --record stall sweep adaptive attention` runs this module; alone it does
nothing.

    stall       eight users decode, one brings a long prompt: the time of each step, whole and in
                chunks
    sweep       the same for many chunk sizes: the waits of the others and of the new request,
                and the throughput of all
    adaptive    the chunk size follows a promised maximum of milliseconds a step
    attention   chapter 2's attention against this chapter's, for mixed batches

All systems share one set of weights and take turns; each round starts with a different one.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from batch_layout import Queries
from block_delta import PagedRunnerState
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import load_tokenizer
from mixed_attention import MixedAttentionBackend
from mixed_batch import compose
from paged_attention import PagedKVCache, TorchAttentionBackend
from request import SamplingParams
from scheduler_interface import NewRequestData
from step_record import StepRecord
from workshop.measure.bench.bench_record import percentiles
from workshop.measure.plot_spec_decode_engine import held_out_texts, in_turn, pieces_of

NUM_SHORT, SHORT_PROMPT, SHORT_OUTPUT = 8, 64, 96
LONG_PROMPT, LONG_OUTPUT = 1800, 8
LONG_ARRIVES = 16  # steps after the first token of the others
SIZES: tuple[int | bool, ...] = (16, 32, 64, 128, 256, 512, 1024, False)
TARGETS_MS = (10.0, 20.0, 40.0, 80.0)


@dataclass(slots=True)
class Users:
    """Token ids of the short prompts and of the long one, from held-out files."""

    short: list[list[int]]
    long: list[int]


def make_users() -> Users:
    texts = held_out_texts(load_tokenizer(SHIPPED_CHECKPOINT), longer_than=LONG_PROMPT)
    return Users(pieces_of(texts, NUM_SHORT, SHORT_PROMPT), texts[0][:LONG_PROMPT])


def make_engine(model: LoadedModel, **options) -> LLMEngine:
    config = EngineConfig(num_blocks=400, max_num_batched_tokens=2048, prefix_cache=None, **options)
    return LLMEngine(config, loaded=model)


def serve(engine: LLMEngine, users: Users) -> dict:
    """Serve all requests to the end. Times are in milliseconds."""
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    for i, prompt in enumerate(users.short):
        engine.add_request(f"short-{i}", prompt, _greedy(SHORT_OUTPUT))
    while len(steps) < LONG_ARRIVES:
        engine.step()
    arrival = time.monotonic()
    engine.add_request("long", users.long, _greedy(LONG_OUTPUT))
    while engine.has_unfinished_requests():
        engine.step()
    engine.on_step = None
    return describe(steps, arrival)


def describe(steps: list[StepRecord], arrival: float) -> dict:
    start = steps[0].start_time
    times: dict[str, list[float]] = {}
    for step in steps:
        end = step.start_time + step.step_ms / 1e3
        for name, tokens in step.new_token_ids.items():
            times.setdefault(name, []).extend([end] * len(tokens))
    gaps = [
        1e3 * (b - a)
        for name, own in times.items()
        if name != "long"
        for a, b in pairwise(own)
        if b > arrival
    ]
    seconds = max(map(max, times.values())) - start
    chunks = [step for step in steps if step.num_scheduled_tokens.get("long", 0) > 1]
    p50, p99 = percentiles(gaps, [50, 99])
    return {
        "output_tokens_per_s": round(sum(map(len, times.values())) / seconds, 2),
        "gap_ms_p50": round(p50, 3),
        "gap_ms_p99": round(p99, 3),
        "gap_ms_max": round(max(gaps), 3),
        "long_ttft_ms": round(1e3 * (times["long"][0] - arrival), 3),
        "num_steps": len(steps),
        "num_chunks": len(chunks),
        "chunk_step_ms": [round(step.step_ms, 3) for step in chunks],
        "timeline": [
            [
                round(1e3 * (step.start_time - start), 2),
                round(step.step_ms, 2),
                len(step.num_scheduled_tokens) - ("long" in step.num_scheduled_tokens),
                step.num_scheduled_tokens.get("long", 0),
            ]
            for step in steps
        ],
    }


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def take_turns(
    engines: dict[str, LLMEngine], users: Users, num_rounds: int, *, keeps_first: bool = False
) -> dict:
    """Return `num_rounds` runs of each engine, after one that warms up, which is kept if
    `keeps_first`. Only the last run keeps its timeline."""
    runs: dict[str, list[dict]] = {name: [] for name in engines}
    for name in in_turn(engines, num_rounds + 1):
        runs[name].append(serve(engines[name], users))
    for own in runs.values():
        if not keeps_first:
            del own[0]
        for run in own[:-1]:
            del run["timeline"]
    return runs


def _config(num_rounds: int) -> dict:
    short = {"num_short": NUM_SHORT, "short_prompt": SHORT_PROMPT, "short_output": SHORT_OUTPUT}
    long = {"long_prompt": LONG_PROMPT, "long_output": LONG_OUTPUT}
    return {**short, **long, "num_rounds": num_rounds, "num_threads": torch.get_num_threads()}


def _model() -> LoadedModel:
    return load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))


def measure_stall(*, tiny: bool) -> dict:
    num_rounds = 1 if tiny else 7
    model, users = _model(), make_users()
    systems = {
        "whole prompts": {"chunked_prefill": False},
        "chunks of 128": {"chunked_prefill": 128},
        "prefill first, whole": {"scheduler": "prefill_first", "chunked_prefill": False},
        "prefill first, chunks of 128": {"scheduler": "prefill_first", "chunked_prefill": 128},
        "prefill first, mixed chunks of 128": {
            "scheduler": "prefill_first",
            "chunked_prefill": 128,
            "mixing": True,
        },
    }
    engines = {name: make_engine(model, **options) for name, options in systems.items()}
    return {"config": _config(num_rounds), "runs": take_turns(engines, users, num_rounds)}


def measure_sweep(*, tiny: bool) -> dict:
    num_rounds = 1 if tiny else 5
    model, users = _model(), make_users()
    sizes = SIZES[3:5] if tiny else SIZES
    engines = {str(size or "whole"): make_engine(model, chunked_prefill=size) for size in sizes}
    runs = take_turns(engines, users, num_rounds)
    for own in runs.values():
        del own[-1]["timeline"]
    return {"config": _config(num_rounds), "runs": runs}


def measure_adaptive(*, tiny: bool) -> dict:
    num_rounds = 1 if tiny else 5
    model, users = _model(), make_users()
    targets = TARGETS_MS[1:2] if tiny else TARGETS_MS
    engines = {f"{ms:g} ms": make_engine(model, target_step_ms=ms) for ms in targets}
    # The policy learns in the first round.
    runs = take_turns(engines, users, num_rounds, keeps_first=True)
    return {"config": _config(num_rounds) | {"targets_ms": list(targets)}, "runs": runs}


# -- attention


def measure_attention(*, tiny: bool) -> dict:
    """Milliseconds of one layer's attention, both ways, for several mixes; the shape is that of the
    shipped checkpoint."""
    num_rounds = 2 if tiny else 15
    num_heads, num_kv_heads, head_dim, block_size = 4, 2, 64, 16
    backends = {"chapter 2": TorchAttentionBackend(), "chapter 6": MixedAttentionBackend()}
    mixes = {
        "32 decodes": ([], 32),
        "chunk of 256, no history": ([(0, 256)], 0),
        "chunk of 256 after 1,000": ([(1000, 256)], 0),
        "31 decodes, chunk of 256, no history": ([(0, 256)], 31),
        "31 decodes, chunk of 256 after 1,000": ([(1000, 256)], 31),
        "31 decodes, chunk of 256 after 7,000": ([(7000, 256)], 31),
        "8 decodes, four chunks of 64 after 500": ([(500, 64)] * 4, 8),
    }
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    cache = PagedKVCache(1, 2048, block_size, num_kv_heads, head_dim)
    keys, values = cache.key_cache[0], cache.value_cache[0]
    keys.normal_(generator=generator)
    values.normal_(generator=generator)
    result: dict = {}
    for name, (chunks, num_decodes) in mixes.items():
        spans = [*chunks, *((rng.randint(100, 900), 1) for _ in range(num_decodes))]
        state, params = PagedRunnerState(len(spans), 512), SamplingParams()
        free = list(range(1, 2048))
        rng.shuffle(free)
        for index, (start, num_tokens) in enumerate(spans):
            stop = start + num_tokens
            block_ids = [free.pop() for _ in range(-(-stop // 16))]
            state.admit(NewRequestData(str(index), [0] * stop, params, start, (block_ids,)))
        starts, lens = np.array(spans).T
        rows = state.rows_of([str(index) for index in range(len(spans))])
        queries = Queries(rows, starts, lens, np.ones_like(lens))
        query = torch.randn(sum(n for _, n in spans), num_heads, head_dim, generator=generator)
        times: dict[str, list[float]] = {backend: [] for backend in backends}
        for backend in in_turn(backends, num_rounds + 1):
            batch = compose(state, queries, block_size).on(torch.device("cpu"))
            begin = time.perf_counter()
            plan = backends[backend].plan(batch.attention[0], num_heads, keys)
            for _ in range(6):  # layers
                plan.attend(query, keys, values, head_dim**-0.5)
            times[backend].append(round(1e3 * (time.perf_counter() - begin) / 6, 4))
        result[name] = {backend: own[1:] for backend, own in times.items()}
    return {
        "config": {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "num_rounds": num_rounds,
            "num_threads": torch.get_num_threads(),
        },
        "layer_ms": result,
    }


def median_of(runs: list[dict], field_name: str) -> float:
    return statistics.median(run[field_name] for run in runs)
