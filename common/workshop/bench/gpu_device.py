"""The only place of the GPU report that speaks of CUDA: clock, graphs, waits.

    time     Triton's `do_bench`: between two events on the device, behind a flushed cache
    a call   as a replayed graph: a launch from Python takes longer than many a kernel runs
    waits    of the host for the device: those that the engine means, and hidden ones, which
             torch.cuda's debug mode tells of

A rehearsal has a CPU in the GPU's place. Its times mean nothing."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from common.sampling.sampler import UnreadStep

HIDDEN_WAIT = "called a synchronizing"  # so begins what the debug mode says
WARM_MS, REPEAT_MS = 10, 50


def open_device(is_rehearsal: bool) -> torch.device:
    """Raises `RuntimeError` where there is no CUDA device."""
    if is_rehearsal:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "there is no CUDA device: run this on a machine with one, or try it here with "
            "--rehearse, which measures nothing"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": "rehearsal", "memory_bytes": psutil.virtual_memory().total}
    it = torch.cuda.get_device_properties(device)
    return {
        "name": it.name,
        "capability": f"{it.major}.{it.minor}",
        "multiprocessors": it.multi_processor_count,
        "memory_bytes": it.total_memory,
        "l2_bytes": it.L2_cache_size,
        "cuda": torch.version.cuda,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back the memory of what nobody holds any more."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 64 << 20


def time_call(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Milliseconds: median, lowest, highest. `call` reads no value on the host. Where it cannot be
    recorded it is timed with its launches, and `is_graph` says so."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return {"ms": [round(1e3 * (time.perf_counter() - start), 5)] * 3, "is_graph": False}
    from triton.testing import do_bench

    try:
        timed, is_graph = record_graph(call).replay, True
    except RuntimeError:
        timed, is_graph = call, False
    found: Any = do_bench(timed, WARM_MS, REPEAT_MS, quantiles=(0.5, 0.0, 1.0))
    return {"ms": [round(ms, 5) for ms in found], "is_graph": is_graph}


def record_graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Compiled and warm before it is captured, on a stream of its own, as PyTorch asks."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@dataclass(slots=True)
class Waits:
    """Of the host, while `count_waits` lasted."""

    meant: int = 0
    hidden: int = 0
    hidden_at: dict[str, int] = field(default_factory=dict)  # file:line -> how often


@contextmanager
def count_waits(device: torch.device) -> Iterator[Waits]:
    """Complete when it ends. Meant is the reading of sampled tokens."""
    waits, read = Waits(), UnreadStep.wait

    def wait(step: UnreadStep) -> Any:
        waits.meant += 1
        return read(step)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(UnreadStep, "wait", wait))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if device.type == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        yield waits
    hidden = [w for w in caught if HIDDEN_WAIT in str(w.message)]
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in hidden)
    waits.hidden, waits.hidden_at = len(hidden), dict(places.most_common(10))
