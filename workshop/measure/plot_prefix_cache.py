"""Chapter 3's measurements, figures and tables. The command line: `workshop/measure/lab_frame.py`.

    engine    time to first token in the whole engine: none, hash chain and radix tree in turn

Engines share one set of weights. A request is served by each of them before the next one comes, one
at a time, so time to first token is that of the prefill alone. Torch uses one thread, and random
token ids cost as much as text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.loader import load_model
from common.requests.gc_utils import freeze_gc_heap
from workshop.book.palette import BASELINE, CACHED, label_axes, label_line, shade
from workshop.measure.bench.bench_work import greedy
from workshop.measure.lab_frame import Measurement, Part, plot_band, run_lab
from workshop.measure.rounds import rotated

BLOCK_SIZE = 16
NAMES = {"off": "no cache", "hash": "hash chain", "radix": "radix tree"}


# -- the whole engine, with the shipped checkpoint

ENGINE_VOCAB_SIZE = 4096
SHARED_PROMPT_LEN = 1920
SHARED_LENS = (0, 256, 512, 768, 1024, 1280, 1536, 1792)


Engines = dict[str, LLMEngine]


def make_engines() -> Engines:
    """Return warm engines, which share one set of weights."""
    torch.set_num_threads(1)
    loaded = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    engines: Engines = {}
    for name in NAMES:
        cache: Any = None if name == "off" else name
        config = EngineConfig(prefix_cache=cache, num_blocks=2048, block_size=BLOCK_SIZE)
        engines[name] = LLMEngine(config, loaded=loaded)
        serve(engines[name], "warm-up", list(range(2, 600)), 8)
        engines[name].reset_prefix_cache()
    freeze_gc_heap()
    return engines


def serve(
    engine: LLMEngine, request_id: str, prompt: list[int], output_len: int
) -> tuple[int, float]:
    """Serve one request. Returns the prompt tokens that were computed, and the milliseconds to its
    first token."""
    num_before = engine.stats().scheduled_tokens
    engine.add_request(request_id, prompt, greedy(output_len))
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    num_computed = len(prompt) - output.num_cached_tokens
    num_scheduled = engine.stats().scheduled_tokens - num_before
    assert num_scheduled == num_computed + output_len - 1, "the engine computed other tokens"
    ttft = output.metrics.time_to_first_token
    assert ttft is not None, "the engine returned nothing"
    return num_computed, round(1e3 * ttft, 3)


# -- time to first token against the length of the shared prefix


def measure_shared_lens(engines: Engines, repeats: int, shared_lens: Sequence[int]) -> dict:
    """Return `{engine: {shared tokens: [ms]}}` for prompts of `SHARED_PROMPT_LEN` tokens."""
    source = random.Random(23)

    def text(length: int) -> list[int]:
        return source.choices(range(2, ENGINE_VOCAB_SIZE), k=length)

    times = {name: {str(shared): [] for shared in shared_lens} for name in engines}
    for round_number in range(repeats):
        prefix = text(max(shared_lens))
        for engine in engines.values():
            engine.reset_prefix_cache()
            serve(engine, "prefix", [*prefix, 1], 1)
        for shared in rotated(shared_lens, round_number):
            # This token differs from the prefix's, so exactly `shared` tokens are shared.
            other = 2 if prefix[shared : shared + 1] != [2] else 3
            prompt = [*prefix[:shared], other, *text(SHARED_PROMPT_LEN - shared - 1)]
            for name in rotated(engines, round_number):
                num_computed, ttft_ms = serve(engines[name], "request", prompt, 1)
                num_cached = 0 if name == "off" else shared
                assert num_computed == SHARED_PROMPT_LEN - num_cached, "another prefix was hit"
                times[name][str(shared)].append(ttft_ms)
    return times


def measure_engine(measurement: Measurement) -> dict:
    engines, repeats = make_engines(), measurement.of(1, 4)
    shared_lens = SHARED_LENS[:: measurement.of(4, 1)]
    return {
        "config": {"repeats": repeats, "prompt_len": SHARED_PROMPT_LEN, "threads": 1},
        "shared_ms": measure_shared_lens(engines, repeats, shared_lens),
    }


# -- figures

COLORS = {"off": BASELINE, "hash": CACHED, "radix": shade(CACHED, 0.45)}


def draw_shared(record: dict) -> Figure:
    """Draw medians as a line over an area from the 10th to the 90th percentile."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    places = {"off": (4, "left", -16), "hash": (1, "right", -26), "radix": (1, "right", -44)}
    for (name, times), marker in zip(record["shared_ms"].items(), "os^"):
        lengths, color = [int(length) for length in times], COLORS[name]
        middle = plot_band(axis, lengths, list(times.values()), color, f"{marker}-", 10, 90)
        index, side, down = places[name]  # where nothing else is drawn
        index %= len(lengths)
        place = {"ha": side, "offset": (0, down)}
        label_line(axis, lengths[index], middle[index], NAMES[name], color, **place)
    title = f"Prompts of {record['config']['prompt_len']:,} tokens: only what is new costs time"
    label_axes(axis, title, "shared prefix, tokens", "time to first token, ms", ylim=0)
    return figure


PARTS = {"engine": Part(measure_engine, {"shared_prefix": draw_shared})}

if __name__ == "__main__":
    run_lab(__file__, "03_prefix_cache", PARTS)
