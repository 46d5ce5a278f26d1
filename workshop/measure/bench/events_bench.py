"""The cost of recording an engine's events: the same work with events and without, in turn.

    python -m workshop.bench.events_bench --record  measures (a minute), writes the record
    python -m workshop.bench.events_bench           measures, and prints the tables only
    python -m workshop.bench.events_bench --tables  writes the tables of common/events

`host`   a model that returns the same token immediately: milliseconds of host work a step
`cpu`    the shipped model, which produces text: tokens a second
`off` is the engine without events, `off again` the same engine once more in each round: their
difference is the noise of this machine. `on` writes to a file in a temporary folder."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from common.engine import EngineConfig, LLMEngine
from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from common.requests.gc_utils import freeze_gc_heap
from common.requests.tokenizer import Tokenizer, load_tokenizer
from request import SamplingParams
from workshop.measure.bench.bench_record import (
    describe_environment,
    markdown_table,
    read_record,
    write_record,
)
from workshop.measure.bench.side_by_side import add_requests, ms_per_step, spread, write_table
from workshop.measure.bench.stub_model import VOCAB_SIZE, stub_model

RECORD = Path(__file__).parent / "records" / "events.json"
PAGE = Path(__file__).parents[3] / "common" / "events" / "README.md"
KINDS = ("off", "on", "off again")
NUM_RUNNING = (1, 32, 256)
MAX_TOKENS = 48


def make_engine(
    loaded: LoadedModel, tokenizer: Tokenizer | None, num_running: int, events: Path | None
) -> LLMEngine:
    config = EngineConfig(
        device="cpu",
        max_num_seqs=num_running,
        num_blocks=8 * num_running + 20,
        overlap_scheduling=False,
        events=events,
    )
    return LLMEngine(config, loaded=loaded, tokenizer=tokenizer)


def run(engine: LLMEngine, num_running: int, vocab_size: int) -> dict:
    """Seconds from the arrival of all requests to the end of the last, and the counts."""
    engine.reset_prefix_cache()
    engine.reset_stats()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    add_requests(engine, num_running, vocab_size, params)
    while engine.has_unfinished_requests():
        engine.step()
    seconds = time.perf_counter() - start
    stats = engine.stats()
    return {
        "seconds": round(seconds, 6),
        "num_steps": stats.num_steps,
        "output_tokens": stats.output_tokens,
    }


def compare(
    loaded: LoadedModel, tokenizer: Tokenizer | None, num_running: int, rounds: int
) -> dict[str, list[dict]]:
    """Run the kinds in turn; each round starts with a different one."""
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        off = make_engine(loaded, tokenizer, num_running, None)
        engines = {"off": off, "on": make_engine(loaded, tokenizer, num_running, path)}
        engines["off again"] = off
        for engine in engines.values():
            run(engine, num_running, loaded.config.vocab_size)
        for i in range(rounds):
            first = i % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                num_before = path.stat().st_size
                done = run(engines[kind], num_running, loaded.config.vocab_size)
                if kind == "on":
                    done["file_bytes"] = path.stat().st_size - num_before
                found[kind].append(done)
        for engine in engines.values():
            engine.close()
    return found


def measure(rounds: int) -> dict:
    freeze_gc_heap()
    torch.set_num_threads(torch.get_num_threads())  # chosen, so the engine keeps it
    shipped = load_model(SHIPPED_CHECKPOINT, "auto", torch.device("cpu"))
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    return {
        "command": "python -m workshop.bench.events_bench --record",
        "environment": describe_environment(),
        "config": {
            "clock": "time.perf_counter",
            "num_threads": torch.get_num_threads(),
            "vocab_size_of_the_stub": VOCAB_SIZE,
            "dtype": str(shipped.model.embed_weight.dtype),
            "max_tokens": MAX_TOKENS,
            "rounds": rounds,
        },
        "host": {f"{n} running": compare(stub_model(n), None, n, rounds) for n in NUM_RUNNING},
        "cpu": {f"{n} running": compare(shipped, tokenizer, n, rounds) for n in NUM_RUNNING},
    }


# -- tables


def _tokens_per_second(runs: list[dict]) -> float:
    return statistics.median(run["output_tokens"] / run["seconds"] for run in runs)


def _ratio(found: dict[str, list[dict]], kind: str) -> str:
    """The ratio of a kind's time to `off`'s."""
    pairs = zip(found["off"], found[kind], strict=True)
    return spread([other["seconds"] / off["seconds"] for off, other in pairs])


def _bytes_per_step(found: dict[str, list[dict]]) -> str:
    runs = found["on"]
    return f"{sum(r['file_bytes'] for r in runs) / sum(r['num_steps'] for r in runs):,.0f}"


def table_of_all(record: dict) -> str:
    tail = ["on, times the time", "off again, times the time", "bytes a step"]

    def row(name: str, found: dict, figures: list[str]) -> list[str]:
        ratios = [_ratio(found, kind) for kind in ("on", "off again")]
        return [name, *figures, *ratios, _bytes_per_step(found)]

    host = [
        row(name, found, [f"{ms_per_step(found[kind]):.3f}" for kind in ("off", "on")])
        for name, found in record["host"].items()
    ]
    cpu = [
        row(name, found, [f"{_tokens_per_second(found[kind]):.0f}" for kind in ("off", "on")])
        for name, found in record["cpu"].items()
    ]
    host_head = ["host work alone", "off, ms a step", "on, ms a step", *tail]
    cpu_head = ["shipped model", "off, tok/s", "on, tok/s", *tail]
    return "\n\n".join([markdown_table(host_head, host), markdown_table(cpu_head, cpu)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the record and the tables")
    parser.add_argument("--tables", action="store_true", help="from the record, without measuring")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    record = read_record(RECORD) if arguments.tables else measure(arguments.rounds)
    if arguments.record:
        write_record(RECORD, record)
    print(table_of_all(record))
    if arguments.record or arguments.tables:
        write_table(PAGE, "events", table_of_all(record), record)


if __name__ == "__main__":
    main()
