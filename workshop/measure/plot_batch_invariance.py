"""The price of `batch_invariant=True`: the same requests with it and without, in turn.

    python -m workshop.plot_batch_invariance --record batch_invariance [--threads 1]

The models are the shipped checkpoint and one of Qwen3-0.6B's shapes with random weights (`--models
tiny` leaves it out). All requests of a cell run at the same time; each round begins with the other
engine, and every repeat is kept. Then the first ones are served alone, greedy as before, to count
those whose tokens differ from the batch's.
With one thread, times are processor time, which other programs disturb least; else wall time.

`--record calls`: the packed products of one layer in calls of exactly one tile of rows.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from batch_invariance import CALL_TILES
from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.models.linear import Linear, reason_not_packed
from common.models.loader import LoadedModel, load_model
from request import SamplingParams
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.bench.random_weights import QWEN3_0_6B, random_model
from workshop.measure.lab_frame import Measurement, Part, run_lab

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_ALONE = 8  # requests of a cell, also served alone
# Name: dtypes, concurrent requests, tokens of a prompt (from, to), output tokens, repeats
CELLS = {
    "tiny": (("bfloat16", "float32"), (1, 32, 128), (16, 96), 32, 5),
    "Qwen3-0.6B shapes": (("bfloat16",), (1, 8), (32, 128), 12, 3),
}
Load = Callable[[torch.dtype], LoadedModel]


def load_tiny(dtype: torch.dtype) -> LoadedModel:
    return load_model(SHIPPED_CHECKPOINT, dtype, torch.device("cpu"))


def load_random(dtype: torch.dtype) -> LoadedModel:
    return random_model(QWEN3_0_6B, 0, dtype)


LOADERS: dict[str, Load] = {"tiny": load_tiny, "Qwen3-0.6B shapes": load_random}


class Server:
    """An engine with its own model and no prefix cache, so every repeat computes everything."""

    def __init__(self, loaded: LoadedModel, batch_invariant: bool, num_tokens: int) -> None:
        config = EngineConfig(
            num_blocks=1 + num_tokens // 16,
            prefix_cache=None,
            batch_invariant=batch_invariant,
        )
        self.engine = LLMEngine(config, loaded=loaded)

    def serve(self, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
        outputs = self.engine.generate_batch(prompts, params)
        return [output.outputs[0].token_ids for output in outputs.values()]


def measure_model(name: str, measurement: Measurement) -> list[dict]:
    dtypes, sizes, lengths, num_outputs, repeats = CELLS[name]
    if measurement.tiny:
        dtypes, sizes, num_outputs, repeats = dtypes[:1], (2,), 2, 1
    clock = time.process_time if measurement.options.threads == 1 else time.perf_counter
    rng, cells = random.Random(0), []
    most = max(sizes)
    prompts = [[rng.randrange(2, 4000) for _ in range(rng.randint(*lengths))] for _ in range(most)]
    num_tokens = sum(-(-(len(p) + num_outputs) // 16) * 16 for p in prompts)
    for dtype in dtypes:
        servers = {  # two models, because one stays batch-invariant
            is_on: Server(LOADERS[name](DTYPES[dtype]), is_on, num_tokens)
            for is_on in (False, True)
        }
        for server in servers.values():
            server.serve(prompts[:2], 2)
        for size in sizes:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            together: dict[bool, list[list[int]]] = {}
            for repeat in range(repeats):
                for is_on in (False, True) if repeat % 2 else (True, False):
                    start = clock()
                    together[is_on] = servers[is_on].serve(prompts[:size], num_outputs)
                    seconds[is_on].append(round(clock() - start, 4))
            few = prompts[: min(size, NUM_ALONE)]
            alone = {on: [s.serve([p], num_outputs)[0] for p in few] for on, s in servers.items()}
            cells.append(
                {
                    "model": name,
                    "dtype": dtype,
                    "num_requests": size,
                    "num_outputs": num_outputs,
                    "seconds": {"without": seconds[False], "with": seconds[True]},
                    "num_alone": len(few),
                    "num_other_tokens": {
                        "without": sum(a != b for a, b in zip(alone[False], together[False])),
                        "with": sum(a != b for a, b in zip(alone[True], together[True])),
                    },
                }
            )
            print(cells[-1], flush=True)
    return cells


def measure(measurement: Measurement) -> dict:
    options = measurement.options
    torch.set_num_threads(options.threads)
    models = ["tiny"] if measurement.tiny else [n for n in CELLS if n.startswith(options.models)]
    cells = [cell for name in models for cell in measure_model(name, measurement)]
    clock = "processor time" if options.threads == 1 else "wall"
    config = {"threads": options.threads, "clock": clock, "seed": 0, "compile": "auto"}
    return {"config": config, "cells": cells}


LAYERS = {  # the matrices of one layer, [out, in]
    "shipped checkpoint": ((768, 256), (256, 256), (1536, 256), (256, 704)),
    "Qwen3-0.6B shapes": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
}
WEIGHED_ROWS = (1, 32, 512)


def measure_calls(measurement: Measurement) -> dict:
    torch.set_num_threads(1)
    repeats, cells = 1 if measurement.tiny else 15, []
    dtypes = [d for d in DTYPES if reason_not_packed(DTYPES[d], torch.device("cpu")) is None]
    for dtype, (name, shapes) in itertools.product(dtypes, LAYERS.items()):
        weights = [torch.randn(shape).to(DTYPES[dtype]) for shape in shapes]
        layer = [Linear(nn.Parameter(weight, requires_grad=False)) for weight in weights]
        for matrix in layer:
            matrix.pack()
        numbers = sorted({*CALL_TILES[torch.float32], *WEIGHED_ROWS})
        times: dict[str, list[float]] = {str(number): [] for number in numbers}
        rows = {n: [torch.randn(n, s[1]).to(DTYPES[dtype]) for s in shapes] for n in numbers}
        for _, number in itertools.product(range(repeats), numbers):
            start = time.process_time()
            for _ in range(20 if shapes[0][1] < 1000 else 2):
                for matrix, x in zip(layer, rows[number], strict=True):
                    matrix(x)
            times[str(number)].append(time.process_time() - start)
        cells.append({"model": name, "dtype": dtype, "seconds": times})
    return {"config": {"threads": 1, "clock": "processor time"}, "cells": cells}


def call_tables(record: dict) -> dict[str, str]:
    rows = []
    for cell in record["cells"]:
        call = {int(n): statistics.median(times) for n, times in cell["seconds"].items()}
        for tile in sorted(CALL_TILES[torch.float32]):
            costs = [-(-n // tile) * call[tile] / call[n] for n in WEIGHED_ROWS]
            mean = f"**{statistics.geometric_mean(costs):.2f}**"
            rows.append(
                [f"{cell['model']}, {cell['dtype']}, {tile}", *map("{:.2f}".format, costs), mean]
            )
    head = ["rows of a call", *(f"{n} rows" for n in WEIGHED_ROWS), "geometric mean"]
    return {"batch_invariance_calls": markdown_table(head, rows)}


def tables(record: dict) -> dict[str, str]:
    rows = []
    for cell in record["cells"]:
        num_tokens = cell["num_requests"] * cell["num_outputs"]
        speeds = {name: [num_tokens / s for s in cell["seconds"][name]] for name in cell["seconds"]}
        ratios = [b / a for a, b in zip(cell["seconds"]["without"], cell["seconds"]["with"])]
        other, num = cell["num_other_tokens"], cell["num_alone"]
        rows.append(
            [
                f"{cell['model']}, {cell['dtype']}, {cell['num_requests']}",
                *(f"{statistics.median(speeds[name]):,.1f}" for name in ("without", "with")),
                f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}-{max(ratios):.2f})",
                *(f"{other[name]} of {num}" for name in ("without", "with")),
            ]
        )
    head = ["model, dtype, requests at once", "without, tok/s", "with, tok/s", "times as long"]
    head += ["other tokens than alone, without", "with"]
    return {"batch_invariance": markdown_table(head, rows)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="", help="those whose name begins so: tiny, Qwen3")


def main(arguments: Sequence[str] | None = None) -> None:
    parts = {
        "batch_invariance": Part(measure, tables=tables),
        "calls": Part(measure_calls, tables=call_tables),
    }
    run_lab(__file__, "06_chunked_prefill", parts, arguments, add_options=add_options)


if __name__ == "__main__":
    main()
