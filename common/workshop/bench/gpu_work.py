"""What a kernel of the GPU report gave and should have given, and what is timed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.workshop.bench.gpu_arithmetic import Cost
from common.workshop.bench.gpu_inputs import Cell, Lab, Sizes

# Of the whole result's size; the largest single error may be so large relative to the largest
# number of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One result of a kernel. `expected` is float64, or integers, which have to be equal."""

    kernel: str
    dtype: torch.dtype
    what: str
    found: torch.Tensor
    expected: torch.Tensor

    def judge(self) -> dict[str, Any]:
        """`error`: the norm of the difference relative to the expected; of integers, how many are
        others. NaN where nothing is expected to be is an error of infinity, written as None."""
        row = {"kernel": self.kernel, "dtype": str(self.dtype)[6:], "what": self.what}
        if self.found.shape != self.expected.shape:
            shapes = f"{tuple(self.found.shape)}, not {tuple(self.expected.shape)}"
            return row | {"error": None, "tolerance": 0, "is_right": False, "why": shapes}
        if not self.expected.is_floating_point():
            num_others = int((self.found != self.expected).sum())
            return row | {"error": num_others, "tolerance": 0, "is_right": num_others == 0}
        if self.found.dtype != self.dtype:
            why = f"the result is {self.found.dtype}"
            return row | {"error": None, "tolerance": 0, "is_right": False, "why": why}
        difference = self.found.double() - self.expected
        norm = difference.norm().item() / max(self.expected.norm().item(), 1e-30)
        largest = max(self.expected.abs().max().item(), 1e-30)
        worst = difference.abs().max().item() / largest
        tolerance = TOLERANCE[self.dtype]
        is_number = norm == norm and norm != float("inf")
        return row | {
            "error": norm if is_number else None,
            "largest_error": worst if is_number else None,
            "tolerance": tolerance,
            "is_right": is_number and norm <= tolerance and worst <= 2 * tolerance,
        }


@dataclass(frozen=True, slots=True)
class TimedCall:
    """`call` reads no value on the host, and can be repeated."""

    call: Callable[[], Any]
    cost: Cost
    check: Callable[[], Iterator[Comparison]] | None = None  # of a sample, before it is timed


Makes = Mapping[str, TimedCall]


@dataclass(frozen=True, slots=True)
class KernelGroup:
    name: str
    covers: tuple[str, ...]  # functions of Triton that run in it: none of the book's is forgotten
    check: Callable[[Lab], Iterator[Comparison]]
    cells: Callable[[Sizes], Sequence[Cell]]
    make: Callable[[Lab, Cell], Makes]
    num_bytes: Callable[[Lab, Cell], int] = lambda lab, cell: 0  # of memory that a cell takes
    describe: Callable[[Sizes, Cell], str] = lambda sizes, cell: str(cell)
