"""One workload, served with any settings of the engine, in float32 and bfloat16: what is compared
with each request alone is every token, and every bit of its log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.output_processor import RequestOutput
from common.tests.equivalence import make_config
from common.tests.equivalence_axes import Combination
from request import SamplingParams

# The longest ones fill a span of keys, and leave it with their outputs. One is another's beginning.
PROMPT_LENGTHS = (1, 5, 16, 33, 70, 112, 127, 128)
NUM_OUTPUTS = 10
Seen = list[tuple[int, float, dict[int, float]]]  # token, its log-probability, the likeliest ones


@dataclass(frozen=True)
class Models:
    loaded: LoadedModel
    draft: LoadedModel


@cache
def models(dtype: torch.dtype, batch_invariant: bool) -> Models:
    """A model that was made batch-invariant stays it: those without are others."""
    device = torch.device("cpu")
    load = (load_model(path, dtype, device) for path in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT))
    return Models(*load)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    phrase = [rng.randrange(2, 4000) for _ in range(6)]
    trunk: list[int] = []
    while len(trunk) < max(PROMPT_LENGTHS):  # half of it returns: a look-up finds something
        trunk += [*phrase, *(rng.randrange(2, 4000) for _ in range(6))]
    tails = [[rng.randrange(2, 4000) for _ in range(n // 3)] for n in PROMPT_LENGTHS]
    return [trunk[: n - len(tail)] + tail for n, tail in zip(PROMPT_LENGTHS, tails, strict=True)]


def params_of(index: int) -> SamplingParams:
    """Every second request is greedy, the others have a seed and each its own constraints."""
    options: dict = {"temperature": 0} if index % 2 == 0 else {"temperature": 0.9, "seed": index}
    options |= {"top_k": (0, 20, 50)[index % 3], "top_p": (1.0, 0.9)[index // 2 % 2]}
    options |= {"repetition_penalty": 1.2} if index % 4 == 3 else {}
    return SamplingParams(**options, max_tokens=NUM_OUTPUTS, logprobs=3, ignore_eos=True)


def seen(output: RequestOutput) -> Seen:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    entries = [(e.token_id, e.logprob, e.top) for e in completion.logprobs]
    assert [token for token, _, _ in entries] == completion.token_ids
    return entries


def make_engine(dtype: torch.dtype, config: EngineConfig) -> LLMEngine:
    which = models(dtype, config.batch_invariant)
    return LLMEngine(config, loaded=which.loaded, draft=which.draft)


@cache
def alone(dtype: torch.dtype, batch_invariant: bool) -> list[Seen]:
    """Nobody else, no cache, whole prompts."""
    found = []
    config = EngineConfig(
        num_blocks=30,
        prefix_cache=None,
        chunked_prefill=False,
        max_num_seqs=1,
        batch_invariant=batch_invariant,
    )
    engine = make_engine(dtype, config)
    for i, prompt in enumerate(prompts()):
        (output,) = engine.generate_batch([prompt], params_of(i)).values()
        found.append(seen(output))
    return found


def config_of(combination: Combination, batch_invariant: bool) -> EngineConfig:
    """The combination's, with memory for these prompts and steps that the longest one fits."""
    settings, config = combination.as_dict(), make_config(combination)
    size = config.block_size
    longest = max(PROMPT_LENGTHS) + NUM_OUTPUTS
    num_positions = 1500 if settings["pool"] == "ample" else longest + size
    return replace(
        config,
        num_blocks=1 + -(-num_positions // size),
        batch_invariant=batch_invariant,
        compile=False,
        max_model_len=None,  # what it was for, graphs, is not to be had here
        emulate_graphs=False,
        adapters=None,
        max_loras=None,
    )


def serve(
    dtype: torch.dtype,
    config: EngineConfig,
    seed: int,
    only: Sequence[int] = range(len(PROMPT_LENGTHS)),
) -> list[Seen]:
    """The prompts, arriving over some steps in an order of `seed`."""
    rng, engine = random.Random(seed), make_engine(dtype, config)
    order = list(only)
    rng.shuffle(order)
    arrivals = [(rng.randrange(6), i) for i in order]
    finished: dict[int, Seen] = {}
    for step in range(20_000):
        for when, i in arrivals:
            if when == step:
                engine.add_request(str(i), prompts()[i], params_of(i), priority=rng.randint(0, 2))
        finished |= {int(o.request_id): seen(o) for o in engine.step() if o.finished}
        if len(finished) == len(order):
            return [found for _, found in sorted(finished.items())]
    raise AssertionError("the engine hangs")
