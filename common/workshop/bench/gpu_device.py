"""The only place of the GPU report that speaks of CUDA: clock, graphs, memory, waits.

`CudaDevice` is the machine. `RehearsedDevice` is a CPU that answers the same questions, so that a
rehearsal takes the same path through everything else. What a GPU report measures:

    time      between two events on the device, not on the host: launches are asynchronous
    a call    as a replayed graph: a launch from Python takes longer than many a kernel runs
    cache     before each call a buffer is read that is larger than the L2: read and not written,
              because what is written still has to leave the cache while the call is timed
    rounds    every round calls all that is compared, each round beginning with another
    waits     of the host for the device: those that the engine means, and hidden ones, which
              torch.cuda's debug mode tells of
"""

from __future__ import annotations

import gc
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

FLUSH_BYTES = 256 << 20  # at least, and four times the L2
HIDDEN_WAIT = "called a synchronizing"  # so begins what the debug mode says


@dataclass(slots=True)
class Waits:
    """Of the host, while `Device.count_waits` lasted."""

    meant: int = 0
    hidden: int = 0
    hidden_at: dict[str, int] = field(default_factory=dict)  # file:line -> how often


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], Any]
    result: Any

    def __call__(self) -> None:
        self.graph.replay()


class Device(ABC):
    """What is measured on. All times are milliseconds."""

    is_rehearsal: bool
    torch_device: torch.device

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, capability, memory, caches, versions."""

    @abstractmethod
    def mark(self) -> Any:
        """A moment on the device, behind all that was begun before."""

    @abstractmethod
    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Between two marks, after `synchronize`."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def record_graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """What does on the device what `call` does, with the least from the host. `call` is run a
        few times for it; it must read no value on the host. What it made stays where it is as long
        as the result is kept."""

    @abstractmethod
    def flush_cache(self) -> None: ...

    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def is_usable(self) -> bool:
        """Not after an illegal access: every later call of the process fails then."""

    @abstractmethod
    def count_waits(self) -> Any:
        """A context manager that gives `Waits`, complete when it ends."""

    def release(self) -> None:
        """Give back the memory of what nobody holds any more."""
        gc.collect()

    def time_in_turn(
        self, calls: dict[str, Callable[[], Any]], repeats: int, flushes: bool = True
    ) -> dict[str, list[float]]:
        """Milliseconds of each call, `repeats` times after one that is not counted."""
        names, spans = list(calls), []
        for call in calls.values():
            call()
        for r in range(repeats):
            first = r % len(names)
            for name in names[first:] + names[:first]:
                if flushes:
                    self.flush_cache()
                start = self.mark()
                calls[name]()
                spans.append((name, start, self.mark()))
        self.synchronize()
        times: dict[str, list[float]] = {name: [] for name in names}
        for name, start, stop in spans:
            times[name].append(round(self.elapsed_ms(start, stop), 5))
        return times


class CudaDevice(Device):
    """The first CUDA device. Raises `RuntimeError` where there is none."""

    is_rehearsal = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "there is no CUDA device: run this on a machine with one, or try it here with "
                "--rehearse, which measures nothing"
            )
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch_device)
        num_bytes = max(FLUSH_BYTES, 4 * self._properties().L2_cache_size)
        self._flushed = torch.ones(num_bytes // 4, device=self.torch_device)
        self._sum = torch.empty((), device=self.torch_device)

    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(self.torch_device)

    def describe(self) -> dict[str, Any]:
        it = self._properties()
        return {
            "name": it.name,
            "capability": f"{it.major}.{it.minor}",
            "multiprocessors": it.multi_processor_count,
            "memory_bytes": it.total_memory,
            "l2_bytes": it.L2_cache_size,
            "cuda": torch.version.cuda,
        }

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return start.elapsed_time(stop)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def record_graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Compiled and warm before it is captured, on a stream of its own, as PyTorch asks."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        return Replay(graph, call, kept)

    def flush_cache(self) -> None:
        torch.sum(self._flushed, 0, out=self._sum)

    def free_bytes(self) -> int:
        """Nobody's, and what PyTorch keeps unused."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return free + reserved - torch.cuda.memory_allocated(self.torch_device)

    def is_usable(self) -> bool:
        try:
            self.flush_cache()
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()

    @contextmanager
    def count_waits(self) -> Iterator[Waits]:
        waits = Waits()
        before = torch.cuda.get_sync_debug_mode()
        with ExitStack() as stack:
            for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
                stack.enter_context(_counted(waits, owner, "synchronize"))
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("warn")
            yield waits
        hidden = [w for w in caught if HIDDEN_WAIT in str(w.message)]
        waits.hidden = len(hidden)
        places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in hidden)
        waits.hidden_at = dict(places.most_common(10))


class RehearsedDevice(Device):
    """A CPU in a GPU's place. Its times mean nothing."""

    is_rehearsal = True
    torch_device = torch.device("cpu")

    def describe(self) -> dict[str, Any]:
        return {"name": "rehearsal", "memory_bytes": psutil.virtual_memory().total}

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, stop: float) -> float:
        return 1e3 * (stop - start)

    def synchronize(self) -> None:
        pass

    def record_graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        call()
        return call

    def flush_cache(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 64 << 20

    def is_usable(self) -> bool:
        return True

    @contextmanager
    def count_waits(self) -> Iterator[Waits]:
        """Where the host would wait for sampled tokens."""
        from common.sampling.sampler import UnreadStep

        waits = Waits()
        with _counted(waits, UnreadStep, "wait"):
            yield waits


@contextmanager
def _counted(waits: Waits, owner: Any, name: str) -> Iterator[None]:
    """While it lasts, calls of `owner.name` are counted as meant."""
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        waits.meant += 1
        return original(*arguments, **options)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)
