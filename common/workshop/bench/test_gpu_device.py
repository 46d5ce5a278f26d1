"""The CUDA side of the report, as far as it can be seen where there is no GPU."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path

import pytest
import torch

from common.sampling.sampler import UnreadStep
from common.workshop.bench.gpu_device import count_waits, open_device, time_call

BENCH = Path(__file__).parent


def uses_of_cuda() -> set[tuple[str, str]]:
    """`torch.cuda.NAME`, in all modules of the report."""
    found = set()
    for path in BENCH.glob("gpu_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
            if is_attribute and ast.unparse(node.value) == "torch.cuda":
                found.add((path.name, node.attr))
    return found


def test_only_the_device_speaks_of_cuda_and_the_installed_torch_has_all_that_it_asks_for() -> None:
    uses = uses_of_cuda()
    assert {module for module, _ in uses} == {"gpu_device.py"}
    names = {name for _, name in uses}
    assert {"CUDAGraph", "graph", "set_sync_debug_mode"} <= names
    assert not [name for name in names if not hasattr(torch.cuda, name)]


def test_triton_times_as_the_report_asks_it_to() -> None:
    testing = pytest.importorskip("triton.testing")
    inspect.signature(testing.do_bench).bind(lambda: None, 10, 50, quantiles=(0.5, 0.0, 1.0))


def test_without_a_gpu_it_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--rehearse"):
        open_device(is_rehearsal=False)
    assert open_device(is_rehearsal=True).type == "cpu"


def test_what_cannot_be_recorded_is_timed_with_its_launches(monkeypatch) -> None:
    """Nobody reads on from there that a graph was timed."""
    testing = pytest.importorskip("triton.testing")

    def do_bench(call, warmup, rep, quantiles):
        call()
        return [2.0, 1.0, 3.0]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    for error, calls in ((RuntimeError("capturing"), ["launched"]), (None, ["replayed"])):
        seen: list[str] = []

        def record(call, error=error, seen=seen):
            if error is not None:
                raise error
            return type("Graph", (), {"replay": lambda self: seen.append("replayed")})()

        monkeypatch.setattr("common.workshop.bench.gpu_device.record_graph", record)
        timed = time_call(lambda seen=seen: seen.append("launched"), torch.device("cuda"))
        assert timed == {"ms": [2.0, 1.0, 3.0], "is_graph": error is None} and seen == calls


def test_waits_are_counted_and_everything_is_as_it_was_afterwards(monkeypatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(UnreadStep, "wait", lambda self: "tokens")
    before = UnreadStep.wait
    with count_waits(torch.device("cuda")) as waits:
        step = UnreadStep.__new__(UnreadStep)
        assert [step.wait(), step.wait()] == ["tokens"] * 2 and modes == ["warn"]
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert (waits.meant, waits.hidden) == (2, 3)
    assert list(waits.hidden_at.values()) == [3] and "test_gpu_device.py" in str(waits.hidden_at)
    assert UnreadStep.wait is before and modes == ["warn", 0]
    with pytest.raises(KeyError), count_waits(torch.device("cuda")):
        raise KeyError
    assert modes[-1] == 0 and UnreadStep.wait is before
