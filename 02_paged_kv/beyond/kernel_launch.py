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

A launch is Python that puts a kernel on a queue, so PyTorch does not see it. While a
`TorchDispatchMode` is on, PyTorch has to see it: fake tensors have shapes and a device but no
memory, so a kernel cannot run on them; the recorder of `common/tests/graph_emulator.py` records
operations. Then the same launch is an operation of PyTorch with a schema:

    kernels::_merge_splits_kernel_1f0c3a(int[] grid, Tensor(a!) output, ..., int num_seqs) -> ()

    on real tensors     it launches the kernel
    on fake ones        it computes nothing and checks what a GPU would fail on

The constants belong to the operation, as they do to the machine code. The schema does not say which
tensors a kernel writes: it may be each of them. Without such a mode a launch makes no operation.

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

import hashlib
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
_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
_INTEGERS = ("i32", "i64")
# Function modes are switched off too: a kernel is not Python.
_TURN_OFF = torch._C.DisableTorchFunction
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
    num_stages: int = 3  # iterations of a loop whose loads are in flight at the same time
    enable_fp_fusion: bool = True  # a * b + c rounded once
    unaligned: tuple[str, ...] = ()  # tensors that need not begin at multiples of 16 bytes

    @property
    def options(self) -> dict[str, Any]:
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        return {name: getattr(self, name) for name in names}

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if torch._C._len_torch_dispatch_stack():  # a TorchDispatchMode is on
            launch_as_op(self, grid, arguments)
        else:
            self.kernel[grid](*arguments, **self.constants, **self.options)


class DecodeTuning(NamedTuple):
    """Constants of decode attention that depend on the GPU: any setting is correct. A backend has
    one as its attribute `tuning`."""

    split_keys: int = 256  # keys per split; with fewer, merging costs more than it gains
    tile_keys: int | None = None  # keys per tile; None: by head_dim and dtype, as are warps
    num_warps: int | None = None
    # Half of the stages are the table's and half the keys': 4 compiles to the same code as 3, and 5
    # has two tiles of keys in flight.
    num_stages: int = 3
    # Adjacent programs take the KV heads of one item, which are adjacent in each block.
    heads_fastest: bool = True
    # Programs of a launch that loops, all KV heads together: whole waves of 132 multiprocessors,
    # whether each holds 2, 3, 4 or 6 programs.
    num_programs: int = 12 * 132


class AttentionShape(NamedTuple):
    """Everything for which the attention kernels are compiled. Strides are in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_stride: int  # from token to token
    cache_strides: tuple[int, int, int]  # from block to block, slot to slot, KV head to KV head
    dtype: torch.dtype
    float32_precision: str = "ieee"
    is_interpreted: bool = False
    architecture: int = DEFAULT_ARCHITECTURE
    window: int = 0  # tokens that a query sees, itself included; 0: all before it
    tuning: DecodeTuning = DecodeTuning()

    @classmethod
    def of(
        cls,
        num_heads: int,  # of concatenated queries
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        float32_precision: str,
        is_interpreted: bool,
        window: int = 0,
        tuning: DecodeTuning | None = None,  # None: the default
    ) -> AttentionShape:
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        block, slot, head, _ = key_cache.stride()
        return cls(
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_heads * head_dim,
            (block, slot, head),
            key_cache.dtype,
            float32_precision,
            is_interpreted,
            architecture_of(key_cache.device),
            window,
            tuning or DecodeTuning(),
        )

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


# -- launches as operations of PyTorch


def launch_as_op(launch: Launch, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Call `launch(grid, *arguments)` as an operation. Raises `ValueError` if, on fake tensors, an
    argument is not what the kernel is compiled for, or is on another device than the others."""
    kinds, constants, options = (
        tuple(d.items()) for d in (launch.arguments, launch.constants, launch.options)
    )
    _op(launch.kernel, kinds, constants, options)(list(grid), *arguments)


@cache
def _op(
    kernel: Any,
    kinds: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
) -> Any:
    """Register the operation once per process: a kernel has a few sets of constants."""
    fixed = dict(constants) | dict(options)
    kind_of = dict(kinds)
    # A launch has the arguments by name, a call by their order in the kernel.
    names = [name for name in kernel.arg_names if name in kind_of]
    arguments = [(name, kind_of[name]) for name in names]
    name = kernel.__name__
    signature = repr((arguments, constants, options)).encode()
    name = f"kernels::{name}_{hashlib.blake2b(signature, digest_size=6).hexdigest()}"

    def run(grid, *values):
        with _TURN_OFF():
            kernel[tuple(grid)](*values, **fixed)

    def check(grid, *values):
        places = set()
        for (argument, kind), value in zip(arguments, values, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            places.add(value.device)
            if value.dtype != _DTYPES[kind[1:]]:
                raise ValueError(
                    f"{name}: {argument} must be {kind}, as compiled, got {value.dtype}"
                )
        if len(places) > 1:
            raise ValueError(f"{name}: tensors must share a device, got {sorted(map(str, places))}")

    tensors = [argument for argument, kind in arguments if kind.startswith("*")]
    op = torch.library.custom_op(name, run, mutates_args=tensors, schema=_schema(arguments))
    op.register_fake(check)
    return op


def _schema(arguments: list[tuple[str, str]]) -> str:
    parts = ["int[] grid"]
    for i, (name, kind) in enumerate(arguments):
        if kind.startswith("*"):
            parts.append(f"Tensor(a{i}!) {name}")
        else:
            parts.append(f"{'int' if kind in _INTEGERS else 'float'} {name}")
    return f"({', '.join(parts)}) -> ()"
