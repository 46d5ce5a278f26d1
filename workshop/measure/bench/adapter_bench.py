"""The cost of adapters: batches in which no, half or all requests use 1 to 8 different adapters.

    python -m workshop.bench.adapter_bench           measures (minutes), writes the record
    python -m workshop.bench.adapter_bench --tables  writes the table of ADAPTERS.md

All runs use one engine, one after another in each round, so a ratio compares adjacent runs. One
thread computes. Times are processor time, so other programs on this machine do not count.
`answers` are tokens of decode steps, `prompts` tokens of prompts. For comparison, `peft` computes
one request at a time. The adapters are the shipped one with eight different scales."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_ADAPTER, SHIPPED_CHECKPOINT
from common.requests.gc_utils import freeze_gc_heap
from request import SamplingParams
from workshop.measure.bench.bench_record import (
    describe_environment,
    markdown_table,
)
from workshop.measure.bench.side_by_side import measure_and_tell, spread

RECORD = Path(__file__).parent / "records" / "adapters.json"
PAGE = Path(__file__).parents[3] / "04_scheduler" / "beyond" / "ADAPTERS.md"
NUM_REQUESTS, NUM_PROMPT, NUM_ANSWER = 32, 64, 32
NUM_BY_PEFT = 2  # requests
NUMBERS = (1, 2, 4, 8)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True)
NOBODY = "nobody"


def copies(folder: Path, number: int) -> dict[str, Path]:
    """Write copies of the shipped adapter, each with a different scale and so different content."""
    found = {}
    for i in range(number):
        path = shutil.copytree(SHIPPED_ADAPTER, folder / str(i))
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16 - i}))
        found[str(i)] = path
    return found


def batches() -> dict[str, list[str | None]]:
    """Return the adapter of each request, by batch."""
    found: dict[str, list[str | None]] = {NOBODY: [None] * NUM_REQUESTS}
    for who, every in (("half", 2), ("everybody", 1)):
        for number in NUMBERS:
            found[f"{who}, {number} different"] = [
                None if i % every else str(i // every % number) for i in range(NUM_REQUESTS)
            ]
    return found


def prompt(i: int) -> list[int]:
    return [5 + (31 * i + 7 * j) % 4000 for j in range(NUM_PROMPT)]


def run(engine: LLMEngine, adapters: Sequence[str | None]) -> dict[str, float]:
    """Return the processor seconds until all have their first token, and from there to the end."""
    for i, adapter in enumerate(adapters):
        engine.add_request(str(i), prompt(i), PARAMS, adapter=adapter)
    started = time.process_time()
    while engine.stats().num_waiting:
        engine.step()
    begun = time.process_time()
    while engine.has_unfinished_requests():
        engine.step()
    return {"prompts": begun - started, "answers": time.process_time() - begun}


def run_by_peft(model: Any) -> dict[str, float]:
    seconds = {"prompts": 0.0, "answers": 0.0}
    for i in range(NUM_BY_PEFT):
        ids = torch.tensor([prompt(i)])
        for what, length in (("prompts", 1), ("answers", NUM_ANSWER)):
            started = time.process_time()
            model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)
            seconds[what] += time.process_time() - started
    return {"prompts": seconds["prompts"], "answers": seconds["answers"] - seconds["prompts"]}


def measure(rounds: int) -> dict:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    freeze_gc_heap()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, list[dict]] = {name: [] for name in (*batches(), "peft")}
    with TemporaryDirectory() as folder:
        config = EngineConfig(
            device="cpu",
            dtype="float32",
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=NUM_REQUESTS * NUM_PROMPT,
            num_blocks=400,
            prefix_cache=None,
            overlap_scheduling=False,
            max_loras=max(NUMBERS),
            adapters=copies(Path(folder), max(NUMBERS)),
        )
        engine = LLMEngine(config)
        base = AutoModelForCausalLM.from_pretrained(SHIPPED_CHECKPOINT, dtype=torch.float32)
        peft = PeftModel.from_pretrained(base, SHIPPED_ADAPTER).float().eval()
        for number in range(1 + rounds):
            runs = {name: run(engine, adapters) for name, adapters in batches().items()}
            runs["peft"] = run_by_peft(peft)
            for name, seconds in runs.items() if number else ():  # the first one warms up
                found[name].append({k: round(s, 6) for k, s in seconds.items()})
    torch.set_num_threads(threads_before)
    return {
        "command": "python -m workshop.bench.adapter_bench",
        "environment": describe_environment(),
        "config": {
            "dtype": "float32",
            "rank": 8,
            "num_requests": NUM_REQUESTS,
            "num_prompt": NUM_PROMPT,
            "num_answer": NUM_ANSWER,
            "num_by_peft": NUM_BY_PEFT,
            "clock": "time.process_time",
            "threads": 1,
            "rounds": rounds,
        },
        "seconds": found,
    }


def table_of(record: dict) -> str:
    """The table: speed of each batch, and its share of the round's speed without adapters."""
    config, seconds = record["config"], record["seconds"]
    sizes = {"prompts": config["num_prompt"], "answers": config["num_answer"] - 1}

    def per_second(name: str, what: str) -> list[float]:
        number = config["num_by_peft" if name == "peft" else "num_requests"]
        return [number * sizes[what] / found[what] for found in seconds[name]]

    def row(name: str) -> list[str]:
        shown = name.replace(NOBODY, "none").replace("everybody", "all")
        cells = [shown if name != "peft" else "`peft`, one request at a time"]
        for what in ("answers", "prompts"):
            own, base = per_second(name, what), per_second(NOBODY, what)
            shares = [one / other for one, other in zip(own, base, strict=True)]
            cells += [f"{statistics.median(own):,.0f}", "1" if name == NOBODY else spread(shares)]
        return cells

    head = ["with an adapter", "answers, tok/s", "of none's", "prompts, tok/s", "of none's"]
    return markdown_table(head, [row(name) for name in seconds])


def main() -> None:
    measure_and_tell(__doc__, RECORD, PAGE, "adapters", measure, table_of)


if __name__ == "__main__":
    main()
