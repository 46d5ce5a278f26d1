"""How long an exchange takes, and how long the reading that it spares would have taken.

    python -m workshop.parallel.measure_communication          2 ranks over Gloo, here
    python -m workshop.parallel.measure_communication --table  the record that is there
    ... --write                                                       into README.md

An exchange is an all-reduce of [32, hidden_size] in bfloat16. Reading is a matrix-vector product
that only reads: its bandwidth is measured in the same run, before the ranks start. Each rank has
one thread."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common.parallel.collectives import connect, dist
from common.parallel.ranks import Ranks
from workshop.measure.bench.bench_record import (
    describe_environment,
    made_on,
    read_record,
    table_of,
    write_between_markers,
    write_record,
)
from workshop.measure.bench.bench_roofline import measure_bandwidth
from workshop.measure.parallel.communication import (
    NUM_REQUESTS,
    README,
    models,
    spared_bytes,
    step_communication,
)

RECORD = Path(__file__).parent / "records" / "communication.json"
NUM_RANKS, TIMEOUT_S = 2, 60.0


def time_exchanges(folder: Path, rank: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds, by model. All ranks take part, and each measures."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    collectives = connect(Ranks(NUM_RANKS, 1, rank), store, torch.device("cpu"), TIMEOUT_S)
    hidden = {
        name: torch.zeros(NUM_REQUESTS, config.hidden_size, dtype=torch.bfloat16)
        for name, config in models().items()
    }
    times: dict[str, list[float]] = {name: [] for name in hidden}
    for r in range(repeats + 1):  # the first is not counted
        for name, tensor in hidden.items():
            start = time.perf_counter()
            collectives.all_reduce(tensor)
            times[name] += [round(1e6 * (time.perf_counter() - start), 1)] * (r > 0)
    collectives.least(0)
    collectives.close()
    return times


def measure(repeats: int, mebibytes: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    bandwidth = measure_bandwidth(mebibytes, 5)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "workshop.parallel.measure_communication"]
        command += ["--repeats", str(repeats), "--folder", folder]
        other = subprocess.Popen([*command, "--rank", "1"])
        try:
            times = time_exchanges(Path(folder), 0, repeats)
            other.wait(TIMEOUT_S)
        finally:
            other.kill()
            other.wait()
    return {"config": {"clock": "wall", "repeats": repeats}, "bandwidth": bandwidth, "us": times}


def table(record: dict[str, Any]) -> str:
    speed = statistics.median(record["bandwidth"]["matvec_gb_per_s"])
    rows = []
    for name, config in models().items():
        ranks = Ranks(NUM_RANKS)
        said = step_communication(config, ranks, NUM_REQUESTS, NUM_REQUESTS, 2)
        num_exchanges = said.num_all_reduces + said.num_all_gathers
        spared_us = spared_bytes(config, ranks) / num_exchanges / speed / 1e3
        times = record["us"][name]
        rows.append(
            {
                "model, 2 ranks": name,
                "an exchange, µs": f"{statistics.median(times):,.0f}",
                "from": f"{min(times):,.0f}",
                "to": f"{max(times):,.0f}",
                "the reading it spares, µs": f"{spared_us:,.0f}",
            }
        )
    return f"{table_of(rows)}\n\nRead at {speed:.1f} GB/s. {made_on(record)}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="What an exchange between ranks takes")
    parser.add_argument("--table", action="store_true", help="of the record that is there")
    parser.add_argument("--write", action="store_true", help="the table into README.md")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--mebibytes", type=int, default=512, help="what is read at a time")
    parser.add_argument("--record", type=Path, default=RECORD, help="where the record is")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where the ranks meet
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        time_exchanges(options.folder, options.rank, options.repeats)
        return
    if not options.table:
        where, command = (
            describe_environment(),
            "python -m workshop.parallel.measure_communication",
        )
        measured = measure(options.repeats, options.mebibytes)
        write_record(options.record, {"command": command, "environment": where, **measured})
    found = table(read_record(options.record))
    if options.write:
        write_between_markers(README, "exchange", found)
    print(found)


if __name__ == "__main__":
    main(sys.argv[1:])
