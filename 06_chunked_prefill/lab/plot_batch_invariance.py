"""The price of `batch_invariant=True`: the same requests with it and without, in turn.

    python 06_chunked_prefill/lab/plot_batch_invariance.py --record batch_invariance [--threads 1]

Of the shipped checkpoint, and of a model of Qwen3-0.6B's shapes with random weights (`--models
tiny` leaves it out). All requests of a cell run at once; each round begins with the other engine,
and every repeat is kept. Then the first ones are served alone, greedy as before: how many have
other tokens than in company?
With one thread, times are processor time, which other programs disturb least; else the wall's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.loader import LoadedModel, load_model
from common.workshop.bench.bench_record import markdown_table
from common.workshop.bench.random_weights import QWEN3_0_6B, random_model
from common.workshop.tools.lab_frame import Measurement, Part, run_lab
from request import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_ALONE = 8  # requests of a cell that are served alone, too
# Name: dtypes, requests at once, tokens of a prompt (from, to), output tokens, repeats
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
    """An engine of its own model, without a prefix cache: every repeat computes everything."""

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
        servers = {  # a model stays batch-invariant: two of them
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


def tables(record: dict) -> dict[str, str]:
    rows = []
    for cell in record["cells"]:
        num_tokens = cell["num_requests"] * cell["num_outputs"]
        speeds = {name: [num_tokens / s for s in cell["seconds"][name]] for name in cell["seconds"]}
        ratios = [b / a for a, b in zip(cell["seconds"]["without"], cell["seconds"]["with"])]
        other, num = cell["num_other_tokens"], cell["num_alone"]
        rows.append(
            [
                f"{cell['model']}, {cell['dtype']}, {cell['num_requests']} at once",
                *(f"{statistics.median(speeds[name]):,.1f} tok/s" for name in ("without", "with")),
                f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} - {max(ratios):.2f})",
                *(f"{other[name]} of {num}" for name in ("without", "with")),
            ]
        )
    head = ["requests", "without", "with", "times as long", "other tokens than alone, without"]
    return {"batch_invariance": markdown_table([*head, "with"], rows)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", default="", help="those whose name begins so: tiny, Qwen3")


def main(arguments: Sequence[str] | None = None) -> None:
    parts = {"batch_invariance": Part(measure, tables=tables)}
    run_lab(__file__, parts, arguments, add_options=add_options)


if __name__ == "__main__":
    main()
