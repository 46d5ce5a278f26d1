"""The model size from which compiling and a second thread pay. The whole engine, both ways.

    python -m workshop.plot_compile_border --record compile_border [--threads 2]
    python -m workshop.plot_compile_border --record threads [--sizes NAME ...]

Models of five sizes with random weights serve the same requests, all there at the start, with
`compile=False` and with `compile=True`. Compiling costs time at every start, also when the machine
code is on the disk already: that time is `start_s` with compiling, in wall time. With one thread,
the times of serving are processor time, which other programs disturb least. The longer start is
paid back after this many output tokens:

    start_s / (seconds a token, plain - seconds a token, compiled)

`COMPILE_FROM_PARAMETERS` in `common/engine_config.py` is chosen from this. A repeat takes some two
minutes.

The part `threads` serves short prompts with one thread and with two, in turn: one request at a time
and 16 together, on a quiet machine and next to a process that keeps one core busy.
`THREADS_FROM_PARAMETERS` is chosen from this. It takes five minutes; `--sizes` measures only some
of the models and keeps the others from the last record."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from common.engine import LLMEngine
from common.models.model import DecoderModel
from common.models.model_config import ModelConfig
from workshop.measure.bench.bench_models import choose_dtype
from workshop.measure.bench.bench_record import table_of
from workshop.measure.bench.bench_work import BenchRequest, Limits, greedy, make_requests
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.lab_frame import Measurement, Part, run_lab

# layers, hidden, inner, heads, KV heads, head dim, vocabulary; the middle ones are of common shapes
SHAPES = {
    "8 layers of 256": (8, 256, 768, 4, 2, 64, 4096),
    "12 layers of 384": (12, 384, 1152, 6, 2, 64, 8192),
    "30 layers of 576": (30, 576, 1536, 9, 3, 64, 49152),
    "32 layers of 960": (32, 960, 2560, 15, 5, 64, 49152),
    "28 layers of 1024": (28, 1024, 3072, 16, 8, 128, 151936),
}
PROMPT_LENS, OUTPUT_LENS = (32, 256), (16, 32)
Clock = Callable[[], float]
MODES = {"plain": False, "compiled": True}
# The part `threads`.
THREAD_SIZES = ("8 layers of 256", "12 layers of 384", "30 layers of 576", "28 layers of 1024")
NUM_TOGETHER, NUM_THREADS = (1, 16), (1, 2)
SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS = (8, 16), (6, 10)


def config_of(shape: Sequence[int]) -> ModelConfig:
    layers, hidden, inner, heads, kv_heads, head_dim, vocab = shape
    return replace(
        QWEN3_0_6B, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        vocab_size=vocab, eos_token_ids=(),
    )  # fmt: skip


def make_engine(config: ModelConfig, dtype: torch.dtype, limits: Limits, is_compiled: bool):
    """Return an engine with separate weights, and the seconds to make it without them. The machine
    code is on the disk and not in this process."""
    loaded = random_model(config, seed=0, dtype=dtype)
    start = time.perf_counter()
    engine = LLMEngine(limits.engine_config(compile=is_compiled), loaded=loaded)
    return engine, time.perf_counter() - start


def serve(engine: LLMEngine, requests: list[BenchRequest], clock: Clock) -> float:
    params = [greedy(request.max_tokens) for request in requests]
    start = clock()
    engine.generate_batch([request.prompt_token_ids for request in requests], params)
    return clock() - start


def measure_shape(
    shape: Sequence[int], dtype: torch.dtype, num_seqs: int, repeats: int, clock: Clock
) -> dict:
    config = config_of(shape)
    with torch.device("meta"):
        num_parameters = DecoderModel(config, dtype, "meta").num_parameters
    requests = make_requests(num_seqs, PROMPT_LENS, OUTPUT_LENS, config.vocab_size, seed=0)
    limits = Limits(max_num_seqs=num_seqs, longest=sum((PROMPT_LENS[1], OUTPUT_LENS[1])))
    engines, start_s = {}, {}
    for name, is_compiled in MODES.items():
        make_engine(config, dtype, limits, is_compiled)  # puts its files on the disk
        engines[name], start_s[name] = make_engine(config, dtype, limits, is_compiled)
        serve(engines[name], requests[:2], clock)
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    for r in range(repeats):
        for name in list(MODES)[:: 1 if r % 2 == 0 else -1]:
            seconds[name].append(round(serve(engines[name], requests, clock), 4))
    return {
        "num_parameters": num_parameters,
        "num_output_tokens": sum(request.max_tokens for request in requests),
        "start_s": {name: round(value, 3) for name, value in start_s.items()},
        "seconds": seconds,
    }


def measure(measurement: Measurement) -> dict:
    options = measurement.options
    torch.set_num_threads(options.threads)
    dtype, shapes, repeats, num_seqs = choose_dtype("auto"), SHAPES, options.repeats, 32
    if measurement.tiny:
        shapes, repeats, num_seqs = {"2 layers of 64": (2, 64, 96, 2, 1, 32, 89)}, 1, 2
    clock = time.process_time if options.threads == 1 else time.perf_counter
    sizes = {
        name: measure_shape(shape, dtype, num_seqs, repeats, clock)
        for name, shape in shapes.items()
    }
    config = {
        "threads": options.threads, "repeats": repeats, "seed": 0,
        "clock": "processor time" if options.threads == 1 else "wall",
        "dtype": str(dtype).removeprefix("torch."), "num_requests": num_seqs,
        "prompt_lens": PROMPT_LENS, "output_lens": OUTPUT_LENS,
    }  # fmt: skip
    return {"config": config, "sizes": sizes}


def measure_threads(measurement: Measurement) -> dict:
    options, dtype = measurement.options, choose_dtype("auto")
    names, repeats = options.sizes, options.repeats
    shapes = {name: SHAPES[name] for name in names or THREAD_SIZES}
    if measurement.tiny:
        shapes, repeats = {"2 layers of 64": (2, 64, 96, 2, 1, 32, 89)}, 1
    before = measurement.records.get("threads", {}).get("sizes", {}) if names else {}
    config = {
        "compile": False, "seed": 0, "clock": "wall", "dtype": str(dtype).removeprefix("torch."),
        "prompt_lens": SHORT_PROMPT_LENS, "output_lens": SHORT_OUTPUT_LENS,
    }  # fmt: skip
    measured = {name: threads_of_shape(shape, dtype, repeats) for name, shape in shapes.items()}
    return {"config": config, "sizes": before | measured}


def threads_of_shape(shape: Sequence[int], dtype: torch.dtype, repeats: int) -> dict:
    """Return seconds of the same requests with each number of threads."""
    config = config_of(shape)
    limits = Limits(max_num_seqs=32, longest=sum((SHORT_PROMPT_LENS[1], SHORT_OUTPUT_LENS[1])))
    loaded = random_model(config, seed=0, dtype=dtype)
    engine = LLMEngine(limits.engine_config(compile=False), loaded=loaded)
    found: dict = {"num_parameters": engine.num_parameters, "runs": {}}
    for n in NUM_TOGETHER:
        lens = SHORT_PROMPT_LENS, SHORT_OUTPUT_LENS
        requests = make_requests(n, *lens, config.vocab_size, seed=0)
        serve(engine, requests, time.perf_counter)
        num_tokens = sum(request.max_tokens for request in requests)
        for name in ("quiet", "busy"):
            with keep_a_core_busy() if name == "busy" else nullcontext():
                seconds = time_each(engine, requests, repeats)
            run = {"num_output_tokens": num_tokens, "seconds": seconds}
            found["runs"][f"{n} together, {name}"] = run
    engine.close()
    return found


def time_each(engine: LLMEngine, requests: list[BenchRequest], repeats: int) -> dict:
    seconds: dict[str, list[float]] = {str(number): [] for number in NUM_THREADS}
    for r in range(repeats):
        for number in NUM_THREADS[:: 1 if r % 2 == 0 else -1]:
            torch.set_num_threads(number)
            seconds[str(number)].append(round(serve(engine, requests, time.perf_counter), 4))
    return seconds


@contextmanager
def keep_a_core_busy() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def tokens_to_win_back(size: dict) -> float | None:
    """Return the output tokens after which compiling has paid for itself. None: never."""
    plain, compiled = (statistics.median(size["seconds"][name]) for name in MODES)
    saved = (plain - compiled) / size["num_output_tokens"]
    extra = size["start_s"]["compiled"] - size["start_s"]["plain"]
    return extra / saved if saved > 0 else None


def tables(record: dict) -> dict[str, str]:
    rows = []
    for name, size in record["sizes"].items():
        plain, compiled = (statistics.median(size["seconds"][mode]) for mode in MODES)
        back = tokens_to_win_back(size)
        rows.append(
            {
                "model": f"{name}, {size['num_parameters'] / 1e6:,.0f} M",
                "plain tok/s": f"{size['num_output_tokens'] / plain:,.0f}",
                "compiled tok/s": f"{size['num_output_tokens'] / compiled:,.0f}",
                "longer start, s": f"{size['start_s']['compiled'] - size['start_s']['plain']:.1f}",
                "won back after, tokens": "never" if back is None else f"{back:,.0f}",
            }
        )
    return {"compile_border": table_of(rows)}


def thread_tables(record: dict) -> dict[str, str]:
    """Return tables of output tokens a second with one thread, then with two; medians."""
    rows = []
    for name, size in record["sizes"].items():
        row = {"model": f"{name}, {size['num_parameters'] / 1e6:,.0f} M"}
        for title, run in size["runs"].items():
            medians = map(statistics.median, run["seconds"].values())
            row[title] = " → ".join(f"{run['num_output_tokens'] / s:,.1f}" for s in medians)
        rows.append(row)
    return {"threads": table_of(rows)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=THREAD_SIZES, default=[], metavar="NAME")


def main(arguments: Sequence[str] | None = None) -> None:
    parts = {
        "compile_border": Part(measure, tables=tables),
        "threads": Part(measure_threads, tables=thread_tables),
    }
    run_lab(__file__, "02_paged_kv", parts, arguments, add_options=add_options)


if __name__ == "__main__":
    main()
