"""Chapter 5's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    engine       the gain and the loss in the whole engine, with the shipped pair of models
    formula      the formula's inputs and the actual speed, by number of draft tokens
    rules        the chance that a draft token is accepted, computed exactly and not sampled
    proposers    the proposing of one step, for histories of different lengths

All but `rules` are times and want a quiet machine. Systems share one set of weights and take turns.
Times are of decoding: of steps that compute prompts only the proposing counts. Prompts come from
files that neither model was trained on.

    copies     greedy, boilerplate whose continuation repeats its pattern: best case of n-grams
    code       greedy, code from anywhere in a file; a small model soon repeats itself, too
    sampled    the same prompts at temperature 1: text that does not repeat
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from acceptance import expected_tokens
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, SHIPPED_DRAFT, EngineConfig
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.runner.kv_sizing import allocate_kv_cache
from draft_acceptance import acceptance_probability
from draft_model_proposer import DraftModelProposer
from input_batch import RunnerRequest
from kv_memory import SharingRunnerState
from ngram_index import BulkNgramProposer
from paged_attention import TorchAttentionBackend
from proposers import ProposerInput
from request import SamplingParams
from scheduler_interface import NewRequestData
from step_record import StepRecord
from workshop.book.palette import BASELINE, DRAFT, INK, NGRAM, label_axes, label_line
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, run_lab, table
from workshop.measure.rounds import median_of, run_in_turn, spread
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


def load_models() -> dict[str, Any]:
    """Return the arguments of every engine."""
    loaded, draft = (load_model(p, "auto", CPU) for p in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT))
    return {"loaded": loaded, "draft": draft, "tokenizer": load_tokenizer(SHIPPED_CHECKPOINT)}


def make_engine(models: dict[str, Any], speculative: dict | None) -> LLMEngine:
    config = EngineConfig(
        num_blocks=3000,
        max_num_batched_tokens=64 * (PROMPT_LEN + 64),
        prefix_cache=None,
        speculative=speculative,
    )
    return LLMEngine(config, **models)


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


def serve_in_turn(
    engines: dict[str, LLMEngine], *work: Any, num_rounds: int
) -> dict[str, list[dict]]:
    return run_in_turn(engines, lambda name: serve(engines[name], *work), num_rounds)


def measure_engine(measurement: Measurement) -> dict:
    """Return a list of turns for each workload, batch size and system."""
    models, num_rounds = load_models(), measurement.of(1, 3)
    engines = {name: make_engine(models, spec) for name, spec in SYSTEMS.items()}
    runs: dict = {}
    for workload, (make_prompts, params) in WORKLOADS.items():
        prompts, runs[workload] = make_prompts(models["tokenizer"], 64), {}
        for batch_size, num_batches in BATCH_SIZES.items():
            if batch_size > measurement.of(4, 64):
                continue
            served = prompts[: batch_size * measurement.of(1, num_batches)]
            work = engines, served, params, batch_size
            runs[workload][str(batch_size)] = serve_in_turn(*work, num_rounds=num_rounds)
    config = {
        "prompt_len": PROMPT_LEN,
        "output_len": OUTPUT_LEN,
        "num_rounds": num_rounds,
        "systems": SYSTEMS,
        "num_threads": torch.get_num_threads(),
    }
    return {"config": config, "runs": runs}


def measure_formula(measurement: Measurement) -> dict:
    """Measure one request, and 32 at a time."""
    models = load_models()
    prompts = code_prompts(models["tokenizer"], 32)
    engines = {"0": make_engine(models, None)}
    for k in measurement.of((1, 3), (1, 2, 3, 4, 5, 6, 8)):
        spec = {"method": "draft", "num_spec_tokens": k, "adaptive": False}
        engines[str(k)] = make_engine(models, spec)
    num_rounds = measurement.of(1, 4)
    points = {
        str(size): serve_in_turn(
            engines, prompts[: max(4, size)], GREEDY, size, num_rounds=num_rounds
        )
        for size in measurement.of((1,), (1, 32))
    }
    config = {"workload": "code", "num_threads": torch.get_num_threads()}
    return {"config": config, "points": points}


# -- without an engine

RULES = ("rejection", "shared", "argmax", "matching")
TEMPERATURES = (0.5, 0.7, 1.0, 1.3)
TEXT_LEN = 512
HISTORY_LENS = (64, 256, 512, 1024, 1984)
LONG_HISTORY_LENS = (*HISTORY_LENS, 8192, 32768)


@torch.inference_mode()
def measure_rules(measurement: Measurement) -> dict:
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        for path in (SHIPPED_CHECKPOINT, SHIPPED_DRAFT)
    ]
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    texts = [ids[:TEXT_LEN] for ids in held_out_texts(tokenizer)][: measurement.of(1, None)]
    sums: dict[str, dict[str, float]] = {str(t): dict.fromkeys(RULES, 0.0) for t in TEMPERATURES}
    num_positions = num_equal = 0
    for ids in texts:
        logits = [model(torch.tensor([ids])).logits[0] for model in models]
        num_positions += len(ids)
        num_equal += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        for temperature in TEMPERATURES:
            p, q = (x.div(temperature).softmax(-1) for x in logits)
            for rule in RULES:
                sums[str(temperature)][rule] += float(acceptance_probability(p, q, rule).sum())
    return {
        "config": {"num_texts": len(texts), "num_positions": num_positions, "dtype": "float64"},
        "greedy": round(num_equal / num_positions, 4),
        "acceptance": {
            t: {rule: round(total / num_positions, 4) for rule, total in by_rule.items()}
            for t, by_rule in sums.items()
        },
    }


def _history(length: int) -> RunnerRequest:
    rng = random.Random(length)
    tokens = [rng.randrange(2000) for _ in range(length)]
    return RunnerRequest(str(length), SamplingParams(max_tokens=10**6), tokens, [])


def _follow(request: RunnerRequest) -> ProposerInput:
    """Return the input after a decode step: the proposer lags by the last token."""
    return ProposerInput(request, request.num_tokens - 2, request.num_tokens - 1)


def search_anew(tokens: list[int], longest: int, shortest: int, k: int) -> list[int]:
    """Search without an index: the whole history, in each step."""
    for n in range(longest, shortest - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


def _time_us(step: Callable[[], object], num_steps: int) -> float:
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return round(1e6 * (time.perf_counter() - start) / num_steps, 2)


def measure_proposers(measurement: Measurement) -> dict:
    """Return microseconds of a step with one new token that proposes four draft tokens."""
    num_rounds, num_steps = measurement.of((1, 3), (7, 30))
    lengths = LONG_HISTORY_LENS[: measurement.of(2, None)]
    loaded = load_model(SHIPPED_DRAFT, "auto", CPU)
    runs: dict[str, dict[str, list[float]]] = {}
    for length in lengths:
        steps: dict[str, Callable[[], object]] = {}
        indexed, searched = _history(length), _history(length)
        ngram = BulkNgramProposer(num_spec_tokens=4)
        ngram.propose([_follow(indexed)], [4])

        def step_indexed(request=indexed, proposer=ngram) -> None:
            request.output_token_ids.append(2000 + request.num_tokens % 7)
            proposer.propose([_follow(request)], [4])

        def step_searched(tokens=searched.prompt_token_ids) -> None:
            tokens.append(2000 + len(tokens) % 7)
            search_anew(tokens, 4, 2, 4)

        steps |= {"n-gram, indexed": step_indexed, "n-gram, searched again": step_searched}
        if length in HISTORY_LENS:
            steps["draft model, 4 rounds"] = _draft_step(loaded, length)
        few = num_steps if length <= 2048 else max(1, num_steps // 5)
        found = run_in_turn(steps, lambda n, s=steps, f=few: _time_us(s[n], f), num_rounds, 0)
        for name, times in found.items():
            runs.setdefault(name, {})[str(length)] = times
    config = {"num_rounds": num_rounds, "num_steps": num_steps}
    return {"config": config | {"num_threads": torch.get_num_threads()}, "step_us": runs}


def _draft_step(loaded: LoadedModel, length: int) -> Callable[[], object]:
    """Return a step that feeds one known token and three draft tokens: no token is accepted."""
    state = SharingRunnerState(max_num_seqs=1, max_blocks_per_request=200)
    history = _history(length - 1)
    block_ids = list(range(1, 1 + -(-(length + 50) // 16)))
    tokens, params = history.prompt_token_ids, history.params
    state.admit(NewRequestData(history.req_id, tokens, params, 0, (block_ids,)))
    request, rows = state.requests[history.req_id], state.rows_of([history.req_id])
    cache = allocate_kv_cache(loaded, 200, 16)
    proposer = DraftModelProposer(loaded.model, cache, TorchAttentionBackend(), state)

    def step() -> object:
        if request.num_tokens < length + 40:
            state.num_tokens[rows] = state.write_tokens(rows, state.num_tokens[rows], [[5]])
        return proposer.propose([_follow(request)], [4])

    step()
    return step


# -- tables

RULE_NAMES = {
    "rejection": "rejection: accept with min(1, p/q)",
    "shared": "matching, draft drawn with the same random number",
    "argmax": "matching, the draft model's likeliest token",
    "matching": "matching, draft and token drawn independently",
}


def speedups(turns: Sequence[dict], plain: Sequence[dict]) -> list[float]:
    """Return each round's speed relative to the same round's plain decoding."""
    pairs = zip(turns, plain, strict=True)
    return [turn["tokens_per_s"] / other["tokens_per_s"] for turn, other in pairs]


def tables_of_engine(record: dict) -> dict[str, str]:
    tables, accepted = {}, {}
    for workload, batches in record["runs"].items():
        columns = {
            size: lambda name, size=size, b=batches: _speed(b[size], name) for size in batches
        }
        systems = {name: name for name in record["config"]["systems"]}
        tables[f"engine_{workload}"] = table(workload, systems, columns)
        for name in ("n-gram, 4", "draft, 4"):
            accepted[f"{workload}: {name}"] = batches["1"][name]
    columns = {
        "accepted, of those tried": lambda turns: f"{median_of(turns, 'acceptance'):.0%}",
        "accepted at position 1, 2, ...": lambda turns: " ".join(
            f"{share:.0%}" for share in turns[len(turns) // 2]["acceptance_by_position"]
        ),
    }
    return tables | {"acceptance": table("one at a time", accepted, columns)}


def _speed(systems: dict[str, list[dict]], name: str) -> str:
    turns = systems[name]
    speed = f"{median_of(turns, 'tokens_per_s'):,.0f}"
    if name == "plain":
        return speed
    middle, extremes = spread(speedups(turns, systems["plain"])).split(" ")
    return f"{speed}, **{middle}×** {extremes}, {median_of(turns, 'tokens_per_pass'):.2f}"


def predict(points: dict[str, list[dict]], k: int) -> tuple[float, float]:
    """Return `(tokens per pass, speed-up)` by the formula, from separate measurements: acceptance,
    and the times of a pass over 1 + k tokens and of k rounds, in units of a plain step."""
    turns, plain_ms = points[str(k)], median_of(points["0"], "verify_ms")
    tokens = expected_tokens(median_of(turns, "acceptance"), k)
    cost = (median_of(turns, "verify_ms") + median_of(turns, "propose_ms")) / plain_ms
    return tokens, tokens / cost


def tables_of_formula(record: dict) -> dict[str, str]:
    rows = []
    for size, points in record["points"].items():
        plain_ms = median_of(points["0"], "verify_ms")
        for k in (int(name) for name in points if name != "0"):
            turns = points[str(k)]
            tokens, speedup = predict(points, k)
            measured = statistics.median(speedups(turns, points["0"]))
            rows.append(
                [
                    f"{size}, {k}",
                    f"{median_of(turns, 'acceptance'):.2f}",
                    f"{median_of(turns, 'verify_ms') / plain_ms:.2f}",
                    f"{median_of(turns, 'propose_ms') / plain_ms / k:.2f}",
                    f"{tokens:.2f} ({median_of(turns, 'tokens_per_pass'):.2f})",
                    f"{speedup:.2f} ({measured:.2f})",
                ]
            )
    head = ["requests, k", "acceptance a", "target pass v(k)", "draft pass c"]
    head += ["tokens a pass: formula (measured)", "speed-up: formula (measured)"]
    return {"formula": markdown_table(head, rows)}


def tables_of_rules(record: dict) -> dict[str, str]:
    columns = {
        f"temperature {t}": lambda rule, rates=rates: f"{rates[rule]:.1%}"
        for t, rates in record["acceptance"].items()
    }
    rules = {name: rule for rule, name in RULE_NAMES.items()}
    note = (
        f"Exact, not sampled: the mean over {record['config']['num_positions']:,} positions of "
        f"{record['config']['num_texts']} files that neither model has seen. Greedy, the two agree "
        f"on {record['greedy']:.1%} of them."
    )
    return {"rules": table("chance that a draft is accepted", rules, columns), "rules_note": note}


def tables_of_proposers(record: dict) -> dict[str, str]:
    columns = {
        f"{int(n):,}": lambda by, n=n: f"{statistics.median(by[n]):,.0f}" if n in by else ""
        for n in next(iter(record["step_us"].values()))
    }
    return {"proposers": table("µs a step, tokens so far:", record["step_us"], columns)}


# -- figures


def draw_engine(record: dict) -> Figure:
    """Draw the fixed lengths; the adaptive ones are in the tables."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 4.2), layout="constrained", sharey=True)
    for axis, (workload, batches) in zip(axes, record["runs"].items(), strict=True):
        for name, color, marker in (("n-gram, 4", NGRAM, "o"), ("draft, 4", DRAFT, "s")):
            ratios = [
                statistics.median(speedups(systems[name], systems["plain"]))
                for systems in batches.values()
            ]
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


def draw_rules(record: dict) -> Figure:
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    temperatures = list(record["acceptance"])
    xs = [float(t) for t in temperatures]
    styles = ((INK, "o-"), (BASELINE, "s-"), (BASELINE, "^--"), (BASELINE, "D:"))
    for (rule, name), (color, style) in zip(RULE_NAMES.items(), styles):
        rates = [100 * record["acceptance"][t][rule] for t in temperatures]
        axis.plot(xs, rates, style, color=color, linewidth=2, label=name)
    title = "All four are exact; they do not accept alike"
    label_axes(axis, title, "temperature", "drafts accepted, %", ylim=0)
    figure.legend(loc="outside lower center")
    return figure


CLOCK = "time.perf_counter"
PARTS = {
    "engine": Part(measure_engine, {"engine": draw_engine}, tables_of_engine, CLOCK),
    "formula": Part(measure_formula, tables=tables_of_formula, clock=CLOCK),
    "rules": Part(measure_rules, {"rules": draw_rules}, tables_of_rules),
    "proposers": Part(measure_proposers, tables=tables_of_proposers, clock=CLOCK),
}

if __name__ == "__main__":
    run_lab(__file__, "05_spec_decode", PARTS)
