"""What fills a pipeline: two stages on this machine, step by step, and a cost model of more.

    python workshop/measure/parallel/lab/plot_pipeline.py --record stages simulated --tables

`stages` serves requests with a model of random weights in two processes, and notes when each of
them computed. It is larger than the shipped one, so that a stage takes longer than a message.
`simulated` counts the order of things on a clock of its own (`simulated_pipeline.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from common.engine import LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT, EngineConfig
from common.parallel import remote_launch
from common.tokenizer import load_tokenizer
from request import SamplingParams
from workshop.book.palette import DECODE, INK, PAPER, PROMPT, add_key, tint
from workshop.measure.bench.bench_record import markdown_table
from workshop.measure.lab_frame import Measurement, Part, run_lab
from workshop.measure.parallel.lab.logged_worker import FOLDER
from workshop.measure.parallel.lab.simulated_pipeline import (
    Arrival,
    Costs,
    Outcome,
    all_at_once,
    simulate,
    trickling,
)

SHAPES = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
HEADS = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
NUM_SHOWN = 20  # steps in the picture
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUTS, LONG_PROMPT, CHUNK = 8, 24, 24, 240, 48
LONG_AFTER = 8  # steps
WAYS = {"all that are ready in one plan": 1, "a half in each plan": 2}


# -- two processes on this machine


def measure_stages(measurement: Measurement) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), measurement.tiny)
        runs = {name: run_stages(Path(folder), num, measurement.tiny) for name, num in WAYS.items()}
    config = {
        "model": {**(TINY if measurement.tiny else SHAPES), **HEADS, "weights": "random"},
        "requests": NUM_REQUESTS,
        "prompt_tokens": NUM_PROMPT,
        "output_tokens": NUM_OUTPUTS,
        "long_prompt_tokens": LONG_PROMPT,
        "chunk": CHUNK,
        "long_prompt_after_step": LONG_AFTER,
        "dtype": "float32",
        "clock": "time.monotonic: one clock for all processes of a machine",
    }
    return {"config": config, "runs": runs}


def save_model(path: Path, tiny: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shapes: dict[str, Any] = {**(TINY if tiny else SHAPES), **HEADS}
    config = Qwen3Config(vocab_size=4096, max_position_embeddings=1024, **shapes)
    Qwen3ForCausalLM(config).save_pretrained(path)


def run_stages(model: Path, num_micro_batches: int, tiny: bool) -> dict:
    """Intervals of both stages, in milliseconds from the first: start, end, tokens, new prompts."""
    with tempfile.TemporaryDirectory() as folder:
        module, before = remote_launch.WORKER_MODULE, os.environ.get(FOLDER)
        remote_launch.WORKER_MODULE = "workshop.measure.parallel.lab.logged_worker"
        os.environ[FOLDER] = folder
        try:
            steps, num_warm_up = serve(model, num_micro_batches, tiny)
        finally:
            remote_launch.WORKER_MODULE = module
            os.environ.pop(FOLDER) if before is None else os.environ.update({FOLDER: before})
        stages = [json.loads((Path(folder) / f"{s}.json").read_text("utf-8")) for s in range(2)]
    first = min(start for stage in stages for start, *_ in stage)
    shown = [
        [[round((a - first) * 1e3, 3), round((b - first) * 1e3, 3), n] for a, b, n in stage]
        for stage in stages
    ]
    assert all([n for *_, n in stage] == [step["tokens"] for step in steps] for stage in shown)
    return {"num_warm_up": num_warm_up, "steps": steps, "stages": shown}


def serve(model: Path, num_micro_batches: int, tiny: bool) -> tuple[list[dict], int]:
    """Of each step that computed something: tokens, those of prompts, and who was in it. And how
    many of them were to warm up."""
    steps: list[dict] = []

    def note(record) -> None:
        if record.num_scheduled_tokens:
            names, num_tokens = list(record.num_scheduled_tokens), record.num_scheduled_tokens
            prompts = sum(n for n in num_tokens.values() if n > 1)
            tokens = sum(num_tokens.values())
            steps.append({"requests": names, "tokens": tokens, "prompt_tokens": prompts})

    config = EngineConfig(
        model=model,
        pipeline_parallel_size=2,
        num_blocks=400,
        num_threads=1,
        dtype="float32",
        chunked_prefill=CHUNK,
        prefix_cache=None,
    )
    num_outputs = 4 if tiny else NUM_OUTPUTS
    params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
    engine = LLMEngine(config, tokenizer=load_tokenizer(SHIPPED_CHECKPOINT))
    try:
        scheduler: Any = engine.scheduler
        scheduler.num_micro_batches = num_micro_batches
        for warm_up in (True, False):
            num_warm_up = num_before = len(steps)
            engine.on_step = note
            for i in range(NUM_REQUESTS):
                engine.add_request(f"{i}", [5 + i] * NUM_PROMPT, params)
            while engine.has_unfinished_requests():
                if len(steps) == num_before + LONG_AFTER and not warm_up:
                    engine.add_request("long", [3] * LONG_PROMPT, SamplingParams(max_tokens=2))
                engine.step()
    finally:
        engine.close()
    return steps, num_warm_up


def draw_stages(record: dict) -> Figure:
    """The first steps behind the warm-up."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.6), sharex=True, layout="constrained")
    for axis, (name, run) in zip(axes, record["runs"].items(), strict=True):
        steps, stages, begin = run["steps"], run["stages"], run["num_warm_up"]
        origin = stages[0][begin][0]
        parity: dict[str, int] = {}
        for number, step in enumerate(steps[begin : begin + NUM_SHOWN]):
            decodes = [r for r in step["requests"] if r != "long"] or step["requests"]
            half = parity.setdefault(decodes[0], 0 if decodes[0] in ("0", "long") else 1)
            for y, stage in enumerate(stages):
                start, end, _ = stage[begin + number]
                colour = PROMPT if step["prompt_tokens"] else DECODE
                axis.broken_barh(
                    [(start - origin, end - start)],
                    (y - 0.36, 0.72),
                    facecolor=tint(colour, 1.0 if half else 0.55),
                    edgecolor=INK,
                    linewidth=0.6,
                )
        busy = [share_busy(stage[begin:]) for stage in stages]
        axis.set_title(f"{name}: busy for {busy[0]:.0%} and {busy[1]:.0%} of the run")
        axis.set(yticks=[0, 1], yticklabels=["stage 0", "stage 1"], ylim=(1.5, -0.5))
        axis.set_facecolor(PAPER)
    axes[-1].set(xlabel="ms", xlim=(0, None))
    add_key(
        figure,
        {
            "prompts, or a chunk": tint(PROMPT, 0.55),
            "decodes": tint(DECODE, 0.55),
            "the other half": DECODE,
            "a bubble": PAPER,
        },
    )
    return figure


def share_busy(intervals: list[list[float]]) -> float:
    length = intervals[-1][1] - intervals[0][0]
    return sum(end - start for start, end, _ in intervals) / length


def stages_tables(record: dict) -> dict[str, str]:
    rows = []
    for name, run in record["runs"].items():
        begin = run["num_warm_up"]
        busy = [share_busy(stage[begin:]) for stage in run["stages"]]
        took = [end - start for stage in run["stages"] for start, end, _ in stage[begin:]]
        shares = [f"{share:.0%}" for share in busy]
        rows.append(
            [name, str(len(run["steps"]) - begin), *shares, f"{statistics.median(took):.1f} ms"]
        )
    head = ["a plan takes", "steps", "stage 0 busy", "stage 1 busy", "a stage's step, median"]
    return {"pipeline_stages": markdown_table(head, rows)}


# -- simulated

READS, TOKENS = Costs(), Costs(step_ms=2.0, token_ms=0.25)
LONG_CHUNKS = [Arrival(0.0, 8192, 1)]


def measure_simulated(measurement: Measurement) -> dict:
    outputs = 10 if measurement.tiny else 200
    crowd = 8

    def decodes(num: int) -> list[Arrival]:
        return all_at_once(num, 8, outputs)

    arrivals = trickling(10 if measurement.tiny else 200, gap_ms=25.0)
    rows = {
        "decodes": [
            cell(costs, decodes(crowd * times), num_stages, num_micro_batches, num_in_flight)
            for costs in (READS, TOKENS)
            for num_stages, times, num_micro_batches, num_in_flight in (
                (1, 1, 1, 1),
                (4, 1, 1, 4),
                (4, 1, 4, 4),
                (4, 4, 4, 4),
            )
        ],
        "trickling": [
            cell(READS, arrivals, num_stages, num_micro_batches, num_in_flight)
            for num_stages, num_micro_batches, num_in_flight in (
                (1, 1, 1),
                (2, 1, 2),
                (2, 2, 2),
                (2, 2, 3),
                (4, 1, 4),
                (4, 4, 4),
                (4, 4, 5),
            )
        ],
        "one_prompt": [cell(READS, LONG_CHUNKS, 4, 4, num) for num in (1, 4)],
    }
    return {"config": {"clock": "simulated"}, **rows}


def cell(
    costs: Costs,
    arrivals: list[Arrival],
    num_stages: int,
    num_micro_batches: int,
    num_in_flight: int,
) -> dict:
    found = simulate(arrivals, num_stages, num_micro_batches, num_in_flight, costs)
    return {
        "step_ms": costs.step_ms,
        "token_ms": costs.token_ms,
        "host_ms": costs.host_ms,
        "requests": len(arrivals),
        "stages": num_stages,
        "micro_batches": num_micro_batches,
        "in_flight": num_in_flight,
        **numbers(found),
    }


def numbers(found: Outcome) -> dict:
    return {
        "duration_ms": found.duration_ms,
        "steps": found.num_steps,
        "busy": found.busy,
        "outputs_per_s": found.outputs_per_s,
        "mean_ttft_ms": statistics.mean(found.ttft_ms),
        "mean_itl_ms": statistics.mean(found.itl_ms) if found.itl_ms else None,
    }


def simulated_tables(record: dict) -> dict[str, str]:
    def taken(row: dict) -> str:
        if row["micro_batches"] == 1:
            return "all"
        return f"1/{row['micro_batches']}"

    def common(row: dict) -> list[str]:
        busy = statistics.mean(row["busy"])
        itl = "" if row["mean_itl_ms"] is None else f"{row['mean_itl_ms']:.1f}"
        return [f"{busy:.0%}", f"{row['outputs_per_s']:,.0f}", itl]

    decodes = [
        [
            f"{row['step_ms']:g} + {row['token_ms']:g} a token",
            str(row["stages"]),
            f"{row['requests']}, {taken(row)} in a plan",
            *common(row),
        ]
        for row in record["decodes"]
    ]
    trickle = [
        [str(row["stages"]), taken(row), str(row["in_flight"]), *common(row)]
        for row in record["trickling"]
    ]
    last = ["busy", "tokens/s", "ms between tokens"]
    alone, followed = (row["mean_ttft_ms"] for row in record["one_prompt"])
    return {
        "pipeline_decodes": markdown_table(["a step, ms", "stages", "requests", *last], decodes),
        "pipeline_trickling": markdown_table(
            ["stages", "decodes in a plan", "plans under way", *last], trickle
        ),
        "pipeline_chunks": (
            f"A prompt of 8,192 tokens in chunks of 512, four stages (simulated): {alone:.0f} ms "
            f"when each chunk waits for the end of the one before it, {followed:.0f} ms when they "
            "follow each other."
        ),
    }


PARTS = {
    "stages": Part(measure_stages, {"pipeline_stages": draw_stages}, stages_tables),
    "simulated": Part(measure_simulated, tables=simulated_tables),
}

if __name__ == "__main__":
    run_lab(__file__, PARTS)
