"""Chapter 5's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    engine       the gain and the loss in the whole engine, with the shipped pair of models

Times want a quiet machine. Systems share one set of weights and take turns.
Times are of decoding: of steps that compute prompts only the proposing counts. Prompts come from
files that neither model was trained on.

    copies     greedy, boilerplate whose continuation repeats its pattern: best case of n-grams
    code       greedy, code from anywhere in a file; a small model soon repeats itself, too
    sampled    the same prompts at temperature 1: text that does not repeat
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig
from common.models.loader import load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from request import SamplingParams
from step_record import StepRecord
from workshop.book.palette import BASELINE, DRAFT, NGRAM, label_line
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.rounds import run_in_turn
from workshop.training.tiny_data import corpus

SYSTEMS: dict[str, dict | None] = {
    "plain": None,
    "n-gram, 4": {"method": "ngram", "adaptive": False},
    "n-gram, adaptive": {"method": "ngram"},
    "draft, 2": {"method": "draft", "num_spec_tokens": 2, "adaptive": False},
    "draft, 4": {"method": "draft", "num_spec_tokens": 4, "adaptive": False},
    "draft, adaptive": {"method": "draft"},
}
PROMPT_LEN, OUTPUT_LEN = 192, 48
NAMES = ("alpha", "count", "name", "path", "size", "left", "right", "value", "width", "items")
CPU = torch.device("cpu")


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


GREEDY = greedy(OUTPUT_LEN)
SAMPLED = replace(GREEDY, temperature=1)
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


def make_engines(tokenizer: Tokenizer) -> dict[str, LLMEngine]:
    loaded, draft = (load_model(p, "auto", CPU) for p in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT))
    config = EngineConfig(
        num_blocks=3000, max_num_batched_tokens=64 * (PROMPT_LEN + 64), prefix_cache=None
    )
    return {
        name: LLMEngine(
            replace(config, speculative=s), loaded=loaded, draft=draft, tokenizer=tokenizer
        )
        for name, s in SYSTEMS.items()
    }


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
    if (drafts := engine.parts.drafts) is not None:
        tried = stats.num_accepted_tokens + drafts.stats.num_rejections
    return {
        "tokens_per_s": round(1e3 * watch.num_tokens / watch.decode_ms, 1),
        "tokens_per_pass": round(stats.tokens_per_pass, 4),
        "acceptance": round(stats.num_accepted_tokens / tried, 4) if tried else None,
        "acceptance_by_position": [round(a, 4) for a in stats.acceptance_by_position],
        "verify_ms": round(statistics.median(watch.verify_ms), 4),
        "propose_ms": round(statistics.median(watch.propose_ms), 4),
    }


def measure_engine(measurement: Measurement) -> dict:
    """Return a list of turns for each workload, batch size and system."""
    tokenizer, num_rounds = load_tokenizer(SHIPPED_CHECKPOINT), measurement.of(1, 3)
    engines = make_engines(tokenizer)
    runs: dict = {}
    for workload, (make_prompts, params) in WORKLOADS.items():
        prompts, runs[workload] = make_prompts(tokenizer, 64), {}
        for batch_size in measurement.of((1, 4), (1, 4, 16, 64)):
            work = prompts[: max(2, batch_size)], params, batch_size
            runs[workload][str(batch_size)] = run_in_turn(
                engines, lambda name, work=work: serve(engines[name], *work), num_rounds
            )
    return {"config": {"num_threads": torch.get_num_threads()}, "runs": runs}


# -- the figure


def speedup(turns: Sequence[dict], plain: Sequence[dict]) -> float:
    """Return the median of the rounds' speeds relative to the same round's plain decoding."""
    pairs = zip(turns, plain, strict=True)
    return statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)


def draw_engine(record: dict) -> Figure:
    """Draw the fixed lengths; the adaptive ones are in the record."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained", sharey=True)
    for axis, (workload, batches) in zip(axes, record["runs"].items(), strict=True):
        for name, color, marker in (("n-gram, 4", NGRAM, "o"), ("draft, 4", DRAFT, "s")):
            ratios = [speedup(systems[name], systems["plain"]) for systems in batches.values()]
            axis.plot(range(len(batches)), ratios, color=color, marker=marker, label=name)
        axis.axhline(1, color=BASELINE, linewidth=1.5)
        axis.set(title=workload, xlabel="requests at a time", ylim=0)
        axis.set_xticks(range(len(batches)), list(batches))
        axis.grid()
    label_line(axes[-1], len(batches) - 1, 1, "plain = 1", BASELINE, ha="right", offset=(0, 9))
    axes[0].set_ylabel("times as fast as plain decoding")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    return figure


PARTS = {"engine": Part(measure_engine, {"engine": draw_engine}, clock="time.perf_counter")}

if __name__ == "__main__":
    run_lab(__file__, "05_spec_decode", PARTS)
