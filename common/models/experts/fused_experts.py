"""Checkpoints with one fused tensor for all experts, read as one tensor per expert.

    per expert   mlp.experts.3.gate_proj.weight   [inner, hidden]
    fused        mlp.experts.gate_up_proj         [num_experts, 2 * inner, hidden]

`transformers` 5 computes with the second and writes either. The loader's rule, that every tensor is
used and every parameter filled once, applies to tensors per expert. So the loader sees a fused
tensor as slices, which are read only on access.

See common/models/experts/README.md#what-depends-on-it-here"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from common.models.experts.expert_config import ExpertNames

_FUSED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)$")
_ROUTER = re.compile(r"(.*\.)mlp\.gate\.weight$")


@dataclass(frozen=True, slots=True)
class Slice:
    """One expert's matrix [out, in] in a fused tensor. Has the interface of safetensors' slices."""

    fused: Any
    expert: int
    first: int  # of its rows
    num_rows: int

    def get_shape(self) -> list[int]:
        return [self.num_rows, self.fused.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.fused.get_dtype()

    def __getitem__(self, part: tuple[slice, ...]) -> Any:
        start, stop, _ = part[0].indices(self.num_rows)
        return self.fused[(self.expert, slice(self.first + start, self.first + stop), *part[1:])]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A file that holds a tensor under another name."""

    file: Any
    name: str
    of: tuple[int, int, int] | None = None  # of a fused one: the expert, its first row, how many

    def get_slice(self, _: str) -> Any:
        found = self.file.get_slice(self.name)
        if self.of is None:
            return found
        expert, first, num_rows = self.of
        return Slice(fused=found, expert=expert, first=first, num_rows=num_rows)


def per_expert(files: dict[str, Any], names: ExpertNames) -> dict[str, Any]:
    """Return files by per-expert tensor names. Raises `ValueError` for a fused tensor with a wrong
    shape, and for a tensor that is stored both ways."""
    found: dict[str, Any] = {}

    def put(tensor_name: str, file: Any) -> None:
        if tensor_name in found:
            raise ValueError(
                f"the checkpoint has {tensor_name} twice: as such and as a part or renamed"
            )
        found[tensor_name] = file

    for name, file in files.items():
        if router := _ROUTER.match(name):
            put(f"{router[1]}{names.block}.gate.weight", Renamed(file, name))
        elif fused := _FUSED.match(name):
            shape = tuple(file.get_slice(name).get_shape())
            kinds = [names.gate, names.up] if fused[2] == "gate_up_proj" else [names.down]
            if len(shape) != 3 or shape[1] % len(kinds):
                dims = "experts, twice the rows" if len(kinds) == 2 else "experts, rows"
                raise ValueError(f"{name} must have shape ({dims}, columns), got {shape}")
            size = shape[1] // len(kinds)
            for expert in range(shape[0]):
                for i, kind in enumerate(kinds):
                    tensor_name = f"{fused[1]}{names.block}.experts.{expert}.{kind}.weight"
                    put(tensor_name, Renamed(file, name, (expert, i * size, size)))
        else:
            put(name, file)
    return found
