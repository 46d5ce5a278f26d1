"""One model's measurement: every system once a round, each round starting with a different one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workshop.measure.bench import bench_systems
from workshop.measure.bench.bench_models import BenchModels
from workshop.measure.bench.bench_work import BenchRequest, Limits
from workshop.measure.rounds import rotated


@dataclass(slots=True)
class Bench:
    """One model's measurement. `record` has all its keys from the start and grows run by run."""

    models: BenchModels
    limits: Limits
    requests: list[BenchRequest]
    warm_up: list[BenchRequest]
    record: dict[str, Any]

    def run_system(self, name: str, round_number: int, place: int) -> None:
        """Set the system up, time it once and record it. A failure is recorded and not tried
        again."""
        entry = self.record["systems"][name]
        requests = self.requests[: entry["num_requests"]]
        try:
            with bench_systems.SYSTEMS[name](self.models, self.limits) as serve:
                serve(self.warm_up)
                gc.collect()
                start, cpu_start = time.perf_counter(), time.process_time()
                served = serve(requests)
                seconds = served.seconds or time.perf_counter() - start
                cpu_seconds = time.process_time() - cpu_start
                details = served.describe()
        except Exception as error:
            entry["error"] = _one_line(error)
            entry["is_unavailable"] = type(error).__name__ == "CannotRunError"
            return
        finally:
            gc.collect()
        num_useful = sum(request.max_tokens for request in requests)
        lengths = [len(tokens) for tokens in served.token_ids]
        if lengths != [request.max_tokens for request in requests]:
            entry["error"] = "it did not give every request the number of tokens it asked for"
            return
        entry["runs"].append(
            {
                "round": round_number,
                "place": place,
                "seconds": round(seconds, 4),
                "cpu_seconds": round(cpu_seconds, 4),  # of all threads of the serving process
                "useful_tokens_per_s": round(num_useful / seconds, 3),
                **details,
            }
        )


def run_rounds(bench: Bench, repeats: int, deadline: float | None = None) -> Iterator[str]:
    """Run all systems of the record, interleaved. Yields a system's name after each of its runs.

    No run is started after `deadline`, in seconds of `time.monotonic()`."""
    systems = bench.record["systems"]
    for round_number in range(repeats):
        for place, name in enumerate(rotated(systems, round_number)):
            if deadline is not None and time.monotonic() > deadline:
                return
            if systems[name]["error"] is None:
                bench.run_system(name, round_number, place)
            yield name


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    name = "" if type(error).__name__ == "CannotRunError" else f"{type(error).__name__}: "
    return (name + text)[:300].replace("|", "/")
