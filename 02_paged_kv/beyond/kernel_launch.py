"""The constants for which a Triton kernel is compiled: decided in one place, from shapes alone.

A kernel is compiled once for each set of constants (tile sizes, warps, head sizes, strides) and of
argument types. A set that first occurs while serving costs a second or more in the middle of a
step, and may be one for which the compiler runs out of registers, which shows only as a slow GPU.
So a launch does not choose its constants. It takes a `Launch`, which is a function of the model's
shapes, the dtype and the GPU's architecture:

    attention_launch(shape, is_short) -> Launch         what the backend calls
                                      -> Launch         what is compiled ahead of time, for any
                                                        GPU, where there is none

`workshop/measure/launch_configurations.py` lists all of an engine's, and its test compiles them.

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

TRITON_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
# Used in the interpreter, where nothing is compiled: the tiles are those of this architecture.
DEFAULT_ARCHITECTURE = 90


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and everything that decides its machine code."""

    kernel: Any
    # Arguments of a call, by name, with Triton's types: "*bf16", "i32".
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    enable_fp_fusion: bool = True  # a * b + c rounded once
    unaligned: tuple[str, ...] = ()  # tensors that need not begin at multiples of 16 bytes

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": self.enable_fp_fusion}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        self.kernel[grid](*arguments, **self.constants, **self.options)


class AttentionShape(NamedTuple):
    """Everything for which the attention kernels are compiled. Strides are in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    cache_strides: tuple[int, int, int]  # from block to block, slot to slot, KV head to KV head
    dtype: torch.dtype
    is_interpreted: bool = False
    architecture: int = DEFAULT_ARCHITECTURE
    window: int = 0  # tokens that a query sees, itself included; 0: all before it

    @property
    def num_shared(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@cache
def architecture_of(device: torch.device) -> int:
    """90 for a Hopper GPU of compute capability 9.0."""
    if device.type != "cuda":
        return DEFAULT_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
