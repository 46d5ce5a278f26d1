"""The gain and the loss of speculation in the whole engine, with the shipped pair of models.
`plot_spec_decode.py --record engine formula` runs this module; alone it does nothing.

All systems share one set of weights and take turns; each round starts with a different one. Times
are of decoding: of steps that compute prompts only the proposing counts. Prompts come from files
that neither model was trained on.

    copies     greedy, boilerplate whose continuation repeats its pattern: best case of n-grams
    code       greedy, code from anywhere in a file; a small model soon repeats itself, too
    sampled    the same prompts at temperature 1: text that does not repeat
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from request import SamplingParams
from step_record import StepRecord
from workshop.training.tiny_data import corpus

SYSTEMS: dict[str, dict | None] = {
    "plain": None,
    "n-gram, 4": {"method": "ngram", "adaptive": False},
    "n-gram, adaptive": {"method": "ngram"},
    "draft, 2": {"method": "draft", "num_spec_tokens": 2, "adaptive": False},
    "draft, 4": {"method": "draft", "num_spec_tokens": 4, "adaptive": False},
    "draft, adaptive": {"method": "draft"},
}
BATCH_SIZES = {1: 2, 4: 1, 16: 1, 64: 1}  # batch size: batches of this size in a turn
PROMPT_LEN, OUTPUT_LEN = 192, 48
NAMES = ("alpha", "count", "name", "path", "size", "left", "right", "value", "width", "items")


@dataclass(slots=True)
class Models:
    target: LoadedModel
    draft: LoadedModel
    tokenizer: Tokenizer


def load_models() -> Models:
    device = torch.device("cpu")
    target, draft = (load_model(p, "auto", device) for p in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT))
    return Models(target, draft, load_tokenizer(SHIPPED_CHECKPOINT))


def held_out_texts(tokenizer: Tokenizer, longer_than: int = 0) -> list[list[int]]:
    texts = [tokenizer.encode(text) for _, text in sorted(corpus()[1].items())]
    return [ids for ids in texts if len(ids) > longer_than]


def pieces_of(texts: list[list[int]], num_pieces: int, length: int) -> list[list[int]]:
    """Return parts from anywhere in the texts, which take turns."""
    rng, pieces = random.Random(0), []
    for i in range(num_pieces):
        ids = texts[i % len(texts)]
        start = rng.randrange(len(ids) - length)
        pieces.append(ids[start : start + length])
    return pieces


def code_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[list[int]]:
    texts = held_out_texts(tokenizer, longer_than=2 * PROMPT_LEN)
    return pieces_of(texts, num_prompts, PROMPT_LEN)


def copy_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[list[int]]:
    """Return prompts with classes whose constructor stores its arguments, again and again."""
    rng = random.Random(1)
    prompts = []
    for _ in range(num_prompts):
        names = rng.sample(NAMES, 6)
        lines = [f"    def __init__(self, {', '.join(names)}):"]
        lines += [f"        self.{name} = {name}" for name in names]
        text = "".join(f"class Record{i}:\n" + "\n".join(lines) + "\n\n" for i in range(8))
        prompts.append(tokenizer.encode(text)[: PROMPT_LEN + 64])
    return prompts


GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, max_tokens=OUTPUT_LEN, ignore_eos=True)
WORKLOADS: dict[str, tuple[Callable[[Tokenizer, int], list[list[int]]], SamplingParams]] = {
    "copies": (copy_prompts, GREEDY),
    "code": (code_prompts, GREEDY),
    "sampled": (code_prompts, SAMPLED),
}


@dataclass(slots=True)
class Watch:
    """An engine's `on_step`: records the times of its steps."""

    decode_ms: float = 0.0
    num_tokens: int = 0  # of decoding
    verify_ms: list[float] = field(default_factory=list)  # of steps without a prompt
    propose_ms: list[float] = field(default_factory=list)

    def __call__(self, record: StepRecord) -> None:
        if record.admitted:
            self.decode_ms += record.propose_ms
            return
        self.decode_ms += record.step_ms
        self.num_tokens += sum(map(len, record.new_token_ids.values()))
        self.verify_ms.append(record.step_ms - record.propose_ms)
        self.propose_ms.append(record.propose_ms)


def make_engine(models: Models, speculative: dict | None) -> LLMEngine:
    config = EngineConfig(
        num_blocks=3000,
        max_num_batched_tokens=64 * (PROMPT_LEN + 64),
        prefix_cache=None,
        speculative=speculative,
    )
    return LLMEngine(config, loaded=models.target, draft=models.draft, tokenizer=models.tokenizer)


def serve(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, batch_size: int
) -> dict:
    engine.on_step = watch = Watch()
    engine.reset_stats()
    for first in range(0, len(prompts), batch_size):
        engine.generate_batch(prompts[first : first + batch_size], params)
    engine.on_step = None
    stats = engine.stats()
    tried = 0  # drafts whose predecessors were accepted
    if engine.speculation is not None:
        tried = stats.num_accepted_tokens + engine.speculation.stats.num_rejections
    return {
        "tokens_per_s": round(1e3 * watch.num_tokens / watch.decode_ms, 1),
        "tokens_per_pass": round(stats.tokens_per_pass, 4),
        "num_drafted": stats.num_drafted_tokens,
        "num_accepted": stats.num_accepted_tokens,
        "acceptance": round(stats.num_accepted_tokens / tried, 4) if tried else None,
        "acceptance_by_position": [round(a, 4) for a in stats.acceptance_by_position],
        "num_steps": len(watch.verify_ms),
        "verify_ms": round(statistics.median(watch.verify_ms), 4),
        "propose_ms": round(statistics.median(watch.propose_ms), 4),
    }


def in_turn(systems: dict, num_rounds: int):
    """Yield every system once a round, each round starting with a different one."""
    names = list(systems)
    for round_ in range(num_rounds):
        shift = round_ % len(names)
        yield from names[shift:] + names[:shift]


def measure_engine(*, tiny: bool) -> dict:
    """Return a list of turns for each workload, batch size and system."""
    models = load_models()
    num_rounds = 1 if tiny else 3
    engines = {name: make_engine(models, spec) for name, spec in SYSTEMS.items()}
    runs: dict = {}
    for workload, (make_prompts, params) in WORKLOADS.items():
        prompts = make_prompts(models.tokenizer, 64)
        for batch_size, num_batches in BATCH_SIZES.items():
            if tiny and batch_size > 4:
                continue
            turns: dict[str, list[dict]] = {name: [] for name in SYSTEMS}
            served = prompts[: batch_size * (1 if tiny else num_batches)]
            for name in in_turn(SYSTEMS, num_rounds + 1):
                turns[name].append(serve(engines[name], served, params, batch_size))
            # The first turn warms up.
            runs.setdefault(workload, {})[str(batch_size)] = {
                name: turn[1:] for name, turn in turns.items()
            }
    return {
        "config": {
            "prompt_len": PROMPT_LEN,
            "output_len": OUTPUT_LEN,
            "num_rounds": num_rounds,
            "systems": SYSTEMS,
            "num_threads": torch.get_num_threads(),
        },
        "runs": runs,
    }


def measure_formula(*, tiny: bool) -> dict:
    """Measure the formula's inputs and the actual speed, by number of draft tokens, for one request
    and for 32 at a time."""
    models = load_models()
    lengths = (1, 3) if tiny else (1, 2, 3, 4, 5, 6, 8)
    batch_sizes = (1,) if tiny else (1, 32)
    prompts = code_prompts(models.tokenizer, 32)
    points: dict = {}
    systems = {
        str(k): {"method": "draft", "num_spec_tokens": k, "adaptive": False} for k in lengths
    }
    engines = {"0": make_engine(models, None)}
    engines |= {name: make_engine(models, spec) for name, spec in systems.items()}
    for batch_size in batch_sizes:
        served = prompts[: 4 if batch_size == 1 else batch_size]
        turns: dict[str, list[dict]] = {name: [] for name in engines}
        for name in in_turn(engines, 2 if tiny else 5):
            turns[name].append(serve(engines[name], served, GREEDY, batch_size))
        points[str(batch_size)] = {name: turn[1:] for name, turn in turns.items()}
    return {
        "config": {"workload": "code", "num_threads": torch.get_num_threads()},
        "points": points,
    }
