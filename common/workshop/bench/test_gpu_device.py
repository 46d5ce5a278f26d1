"""The CUDA side of the report's device, on a `torch.cuda` that is pretended.

What it asks of the real one is checked against the installed torch, which has all of it even where
there is no GPU: names, methods and their parameters."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.workshop.bench import gpu_device
from common.workshop.bench.gpu_device import CudaDevice, RehearsedDevice, Replay

BENCH = Path(__file__).parent


class PretendCuda:
    """Calls in their order, and a clock that only kernels move."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms, self.debug_mode = 0.0, 0
        self.is_broken = False
        self.names = {
            "is_available": lambda: True,
            "set_device": lambda device: None,
            "get_device_properties": lambda device: self.properties,
            "synchronize": self.synchronize,
            "Event": self.make_event_type(),
            "Stream": self.make_stream_type(),
            "stream": lambda stream: _Noted(self, "aside"),
            "current_stream": self.current_stream,
            "CUDAGraph": lambda keep_graph=False: SimpleNamespace(
                replay=lambda: self.log.append("replay")
            ),
            "graph": lambda cuda_graph, pool=None: _Noted(self, "capture"),
            "mem_get_info": lambda device=None: (1000, 5000),
            "memory_reserved": lambda device=None: 300,
            "memory_allocated": lambda device=None: 100,
            "empty_cache": lambda: self.log.append("empty"),
            "get_sync_debug_mode": lambda: self.debug_mode,
            "set_sync_debug_mode": self.set_debug_mode,
        }
        self.properties = SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
            total_memory=5000, L2_cache_size=64,
        )  # fmt: skip

    def synchronize(self, device=None) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.log.append("synchronize")

    def set_debug_mode(self, debug_mode) -> None:
        if debug_mode == "warn":  # as the real one does, once
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.debug_mode = debug_mode

    def make_event_type(self):
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.is_timed, self.at = enable_timing, 0.0

            def record(self, stream=None) -> None:
                self.at = cuda.now_ms
                cuda.log.append("record")

            def elapsed_time(self, end_event) -> float:
                assert self.is_timed and end_event.is_timed and "synchronize" in cuda.log[-1:]
                return end_event.at - self.at

            def synchronize(self) -> None:
                cuda.log.append("wait")

        return Event

    def make_stream_type(self):
        cuda = self

        class Stream:
            def wait_stream(self, stream) -> None:
                cuda.log.append("wait_stream")

            def synchronize(self) -> None:
                cuda.log.append("wait for stream")

        return Stream

    def current_stream(self, device=None):
        return torch.cuda.Stream()

    def kernel(self, name: str, ms: float):
        def call() -> str:
            self.log.append(name)
            self.now_ms += ms
            return f"what {name} made"

        return call


class _Noted:
    def __init__(self, cuda: PretendCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __enter__(self) -> None:
        self.cuda.log.append(self.name)

    def __exit__(self, *_) -> None:
        self.cuda.log.append(f"end of {self.name}")


@pytest.fixture
def cuda(monkeypatch) -> PretendCuda:
    pretended = PretendCuda()
    for name, value in pretended.names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_device, "FLUSH_BYTES", 1024)
    return pretended


@pytest.fixture
def device(cuda, monkeypatch) -> CudaDevice:
    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "device", lambda *_: cpu)
        return CudaDevice()


def uses_of_cuda() -> set[str]:
    """`torch.cuda.NAME`, in all modules of the report."""
    found = set()
    for path in BENCH.glob("gpu_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
            if is_attribute and ast.unparse(node.value) == "torch.cuda":
                found.add((path.name, node.attr))
    return found


def test_only_the_device_speaks_of_cuda_and_the_installed_torch_has_all_that_it_asks_for():
    uses = uses_of_cuda()
    assert {module for module, _ in uses} == {"gpu_device.py"}
    names = {name for _, name in uses}
    assert {"Event", "CUDAGraph", "graph", "set_sync_debug_mode"} <= names
    assert not [name for name in names if not hasattr(torch.cuda, name)]


def test_what_is_pretended_takes_what_the_real_one_takes():
    """A parameter or a method that only the pretended one has would be found on a GPU."""
    pretended = PretendCuda().names
    assert {name for _, name in uses_of_cuda()} == set(pretended)
    for name in ("Event", "Stream"):
        own, real = pretended[name], getattr(torch.cuda, name)
        for method in [m for m in vars(own) if not m.startswith("__")]:
            assert _parameters(getattr(own, method)) <= _parameters(getattr(real, method)), method
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    functions = set(pretended) - {"Event", "Stream", "CUDAGraph", "stream", "graph"}
    for name in functions:
        assert _parameters(pretended[name]) <= _parameters(getattr(torch.cuda, name)), name
    assert {"cuda_graph", "pool"} <= _parameters(torch.cuda.graph.__init__)
    assert {"replay", "capture_begin"} <= set(dir(torch.cuda.CUDAGraph))


def _parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "device"}


def test_it_says_what_it_is(device):
    assert device.describe() | {"cuda": None} == {
        "name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132,
        "memory_bytes": 5000, "l2_bytes": 64, "cuda": None,
    }  # fmt: skip
    assert device.free_bytes() == 1000 + 300 - 100


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--rehearse"):
        CudaDevice()


def test_calls_are_timed_in_turn_between_events_behind_a_flushed_cache(device, cuda, monkeypatch):
    """The flush is outside of what is timed, and the host waits once, at the end."""
    monkeypatch.setattr(CudaDevice, "flush_cache", lambda self: cuda.kernel("flush", 100.0)())
    calls = {"a": cuda.kernel("a", 2.0), "b": cuda.kernel("b", 3.0)}
    assert device.time_in_turn(calls, 2) == {"a": [2.0, 2.0], "b": [3.0, 3.0]}
    timed = "flush record a record flush record b record flush record b record flush record a"
    assert cuda.log == ["a", "b", *timed.split(), "record", "synchronize"]
    cuda.log.clear()
    device.time_in_turn(calls, 1, flushes=False)
    assert "flush" not in cuda.log


def test_the_cache_is_flushed_by_reading(device):
    """What is written would have to leave the cache while the next call is timed."""
    assert device._flushed.nbytes == 1024
    before = device._flushed.clone()
    device.flush_cache()
    assert torch.equal(device._flushed, before) and device._sum.item() == 256


def test_a_call_is_warm_before_it_is_recorded_and_keeps_what_it_made(device, cuda):
    replay = device.record_graph(cuda.kernel("call", 1.0))
    assert cuda.log == [
        "wait_stream", "aside", "call", "call", "end of aside", "wait_stream",
        "capture", "call", "end of capture",
    ]  # fmt: skip
    replay()
    assert cuda.log[-1] == "replay"
    assert isinstance(replay, Replay) and replay.result == "what call made"


def test_waits_are_counted_and_everything_is_as_it_was_afterwards(device, cuda):
    before = [vars(torch.cuda)["synchronize"], torch.cuda.Event.synchronize]
    with device.count_waits() as waits:
        torch.cuda.Event().synchronize()
        torch.cuda.Stream().synchronize()
        torch.cuda.synchronize()
        assert cuda.debug_mode == "warn"
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert (waits.meant, waits.hidden) == (3, 2)
    assert list(waits.hidden_at.values()) == [2] and "test_gpu_device.py" in str(waits.hidden_at)
    assert cuda.log == ["wait", "wait for stream", "synchronize"]
    assert before == [vars(torch.cuda)["synchronize"], torch.cuda.Event.synchronize]
    assert cuda.debug_mode == 0
    with pytest.raises(KeyError), device.count_waits():
        raise KeyError
    assert cuda.debug_mode == 0 and torch.cuda.Event.synchronize is before[1]


def test_a_device_that_fails_is_noticed(device, cuda):
    assert device.is_usable()
    cuda.is_broken = True
    assert not device.is_usable()


def test_the_rehearsed_one_answers_the_same_questions():
    device = RehearsedDevice()
    assert {name for name in vars(CudaDevice) if not name.startswith("_")} <= set(dir(device))
    times = device.time_in_turn({"a": device.record_graph(lambda: None)}, 3)
    assert len(times["a"]) == 3 and all(ms >= 0 for ms in times["a"])
    assert device.is_usable() and device.is_rehearsal and not CudaDevice.is_rehearsal
