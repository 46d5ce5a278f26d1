"""A kernel's launch as an operation of PyTorch, for whoever watches operations.

A launch is Python that puts a kernel on a queue: nobody else hears of it. While a
`TorchDispatchMode` is on, somebody wants to: fake tensors, which have shapes and a device and no
memory, so that a launch on them fails; or the recorder of `common/runner/graph_emulator.py`. Then
`Launch.__call__` comes here, and the same launch is an operation with a schema:

    kernels::_merge_splits_kernel_1f0c3a(int[] grid, Tensor(a!) output, ..., int num_seqs) -> ()

on real tensors     the launch
on fake ones        nothing is computed; what a GPU would stumble over is checked

The constants belong to the operation, as they do to the machine code. Which tensors a kernel writes
is not told: it may be each of them. Without such a mode none of this is imported, and no step pays.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch

from kernel_launch import TRITON_TYPES, Launch

_DTYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}
_INTEGERS = ("i32", "i64")
_TURN_OFF = torch._C.DisableTorchFunction  # of function modes too: a kernel is not Python's


def launch_as_op(launch: Launch, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """`launch(grid, *arguments)`, visible. Raises `ValueError` if on fake tensors an argument is
    not what the kernel is compiled for, or on another device than the others."""
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
    """Registered once in a process: a kernel has a few sets of constants."""
    fixed, kind_of = dict(constants) | dict(options), dict(kinds)
    # A launch knows them by name, a call by their order in the kernel.
    names = [name for name in kernel.arg_names if name in kind_of]
    arguments, name = [(name, kind_of[name]) for name in names], kernel.__name__
    told = repr((arguments, constants, options)).encode()
    name = f"kernels::{name}_{hashlib.blake2b(told, digest_size=6).hexdigest()}"

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
                    f"{name}: {argument} is {value.dtype}, and the kernel is compiled for {kind}"
                )
        if len(places) > 1:
            raise ValueError(f"{name}: its tensors are on {sorted(map(str, places))}")

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
