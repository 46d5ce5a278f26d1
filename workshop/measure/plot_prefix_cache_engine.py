"""The savings and the cost of a prefix cache, in the whole engine with the shipped checkpoint.
`plot_prefix_cache.py --record` runs this module; alone it does nothing.

Three engines share one set of weights: no cache, hash chain, radix tree. Every request is served by
each of them before the next one comes, each round starting with another engine. Requests come one
at a time, so time to first token is that of the prefill alone, without other requests' work. Torch
uses one thread. Random token ids cost as much as text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import LoadedModel, load_model
from request import SamplingParams
from workshop.measure.plot_prefix_cache_ops import in_turn, no_collection
from workshop.measure.prefix_workloads import PlannedRequest, PrefixWorkload

ENGINES = {"off": None, "hash": "hash", "radix": "radix"}
BLOCK_SIZE = 16
VOCAB_SIZE = 4096
PROMPT_LEN = 1920  # of the prompts with a shared prefix
SHARED_LENS = (0, 256, 512, 768, 1024, 1280, 1536, 1792)
UNIQUE_LEN, UNIQUE_OUTPUT_LEN = 832, 32


@dataclass(frozen=True, slots=True)
class Served:
    """One request: its user's wait and the machine's work."""

    answer: list[int]
    num_computed: int  # prompt tokens
    ttft_ms: float  # wall time
    first_cpu_ms: float  # processor time until the first token
    cpu_ms: float  # processor time until the last


def make_engines(loaded: LoadedModel, num_blocks: int) -> dict[str, LLMEngine]:
    return {
        name: LLMEngine(
            EngineConfig(prefix_cache=cache, num_blocks=num_blocks, block_size=BLOCK_SIZE),
            loaded=loaded,
        )
        for name, cache in ENGINES.items()
    }


def load() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))


def serve(engine: LLMEngine, request_id: str, prompt: list[int], output_len: int) -> Served:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    num_before = engine.stats().scheduled_tokens
    start, first_cpu_ms = time.process_time(), None
    engine.add_request(request_id, prompt, params)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        if first_cpu_ms is None:
            first_cpu_ms = (time.process_time() - start) * 1e3
    cpu_ms = (time.process_time() - start) * 1e3
    num_computed = len(prompt) - output.num_cached_tokens
    num_scheduled = engine.stats().scheduled_tokens - num_before
    assert num_scheduled == num_computed + output_len - 1, "the engine computed other tokens"
    ttft = output.metrics.time_to_first_token
    assert ttft is not None and first_cpu_ms is not None, "the engine returned nothing"
    answer = list(output.outputs[0].token_ids)
    return Served(answer, num_computed, ttft * 1e3, first_cpu_ms, cpu_ms)


def warm_up(engines: dict[str, LLMEngine]) -> None:
    for engine in engines.values():
        serve(engine, "warm-up", list(range(2, 600)), 8)
        engine.reset_prefix_cache()


# -- families of requests


def family_requests(scale: int) -> list[PlannedRequest]:
    workload = PrefixWorkload(VOCAB_SIZE, seed=11)
    sessions = [
        *workload.shared_system_prompts(3, 2 * scale, system_len=768, user_len=64, output_len=8),
        *workload.chats(4, 5, first_len=256, user_len=64, output_len=32),
        *workload.few_shot(
            3, 2 * scale, instruction_len=64, examples_len=512, question_len=48, output_len=8
        ),
        *workload.unique_prompts(6 * scale, UNIQUE_LEN, 8),
    ]
    return workload.arrive(sessions)


def measure_families(loaded: LoadedModel, repeats: int, scale: int) -> dict:
    """Return, by family, prompt tokens, and by engine tokens computed and times to first token."""
    engines, requests = make_engines(loaded, num_blocks=2048), family_requests(scale)
    families: dict[str, dict] = {}
    num_different = 0
    warm_up(engines)
    with no_collection():
        for round_number in range(repeats):
            answers: dict[str, dict[str, list[int]]] = {name: {} for name in engines}
            for place, request in enumerate(requests):
                kept = families.setdefault(request.family, _empty_family())
                for name in in_turn(list(engines), place + round_number):
                    prompt = request.prompt(answers[name])
                    served = serve(engines[name], request.request_id, prompt, request.output_len)
                    answers[name][request.request_id] = served.answer
                    kept["ttft_ms"][name].append(round(served.ttft_ms, 3))
                    if round_number == 0:
                        kept["num_computed"][name] += served.num_computed
                        kept["num_prompt"] += len(prompt) if name == "off" else 0
                        kept["num_requests"] += name == "off"
            num_different += sum(answers[name] != answers["off"] for name in engines)
            for engine in engines.values():
                engine.reset_prefix_cache()
    return {"families": families, "runs_with_other_tokens": num_different}


def _empty_family() -> dict:
    return {
        "num_requests": 0,
        "num_prompt": 0,
        "num_computed": dict.fromkeys(ENGINES, 0),
        "ttft_ms": {name: [] for name in ENGINES},
    }


# -- time to first token against the length of the shared prefix


def measure_shared_lens(loaded: LoadedModel, repeats: int, shared_lens: Sequence[int]) -> dict:
    """Return `{engine: {shared tokens: [ms]}}` for prompts of `PROMPT_LEN` tokens."""
    source = random.Random(23)

    def text(length: int) -> list[int]:
        return source.choices(range(2, VOCAB_SIZE), k=length)

    engines = make_engines(loaded, num_blocks=2048)
    times = {name: {str(shared): [] for shared in shared_lens} for name in engines}
    warm_up(engines)
    with no_collection():
        for round_number in range(repeats):
            prefix = text(max(shared_lens))
            for engine in engines.values():
                engine.reset_prefix_cache()
                serve(engine, "prefix", [*prefix, 1], 1)
            for shared in in_turn(shared_lens, round_number):
                # This token differs from the prefix's, so exactly `shared` tokens are shared.
                other = 2 if prefix[shared : shared + 1] != [2] else 3
                prompt = [*prefix[:shared], other, *text(PROMPT_LEN - shared - 1)]
                for name in in_turn(list(engines), round_number):
                    served = serve(engines[name], "request", prompt, 1)
                    num_cached = 0 if name == "off" else shared
                    assert served.num_computed == PROMPT_LEN - num_cached, "another prefix was hit"
                    times[name][str(shared)].append(round(served.ttft_ms, 3))
    return times


# -- the price where nothing is shared


def measure_loss(loaded: LoadedModel, num_prompts: int) -> dict:
    """Processor time of unique prompts, each served by all engines in turn. The memory holds three
    of them, so a cache also evicts at every request."""
    num_blocks = 3 * (UNIQUE_LEN + UNIQUE_OUTPUT_LEN) // BLOCK_SIZE + 1
    engines = make_engines(loaded, num_blocks)
    sessions = PrefixWorkload(VOCAB_SIZE, seed=29).unique_prompts(
        num_prompts + 4, UNIQUE_LEN, UNIQUE_OUTPUT_LEN
    )
    first, whole = ({name: [] for name in engines} for _ in range(2))
    with no_collection():
        for place, (request,) in enumerate(sessions):
            for name in in_turn(list(engines), place):
                prompt = request.prompt({})
                served = serve(engines[name], request.request_id, prompt, request.output_len)
                assert served.num_computed == len(prompt), "the cache hit a unique prompt"
                if place >= 4:  # by then the memory is full
                    first[name].append(round(served.first_cpu_ms, 3))
                    whole[name].append(round(served.cpu_ms, 3))
    return {"first_token_ms": first, "whole_ms": whole}


# -- parts of the record


def describe(loaded: LoadedModel) -> dict:
    return {
        "model": "common/checkpoints/tiny",
        "dtype": str(loaded.model.embed_weight.dtype).removeprefix("torch."),
        "block_size": BLOCK_SIZE,
        "threads": torch.get_num_threads(),
    }


def measure_engine(repeats: int, *, tiny: bool = False) -> dict:
    """Measure everything of `--record engine`."""
    loaded = load()
    shared_lens = SHARED_LENS[::4] if tiny else SHARED_LENS
    return {
        "config": {**describe(loaded), "repeats": repeats, "prompt_len": PROMPT_LEN},
        **measure_families(loaded, repeats, scale=1 if tiny else 3),
        "shared_ms": measure_shared_lens(loaded, repeats, shared_lens),
    }


def measure_engine_loss(num_prompts: int) -> dict:
    """Measure everything of `--record loss`."""
    loaded = load()
    config = {"prompt_len": UNIQUE_LEN, "output_len": UNIQUE_OUTPUT_LEN, "clock": "processor time"}
    return {"config": {**describe(loaded), **config}, **measure_loss(loaded, num_prompts)}
