"""A GPU that is not there: `FakeTensorMode`, with tensors on "cuda" that have no memory.

Every operation says what it would return and on which device; kernels are operations too
(`02_paged_kv/beyond/kernel_launch.py`). So a step of a model of any size runs in a second, and
these raise, in whatever line does it:

    tensors of two devices in one operation    as on a GPU
    the host reads a tensor                    item, tolist, bool, ...: it would wait
    tensors go to the host, or come from it    unless `to_device` brings them

A build of PyTorch without CUDA cannot index tensors that say they are there, or copy between them,
in Python: `FakeGPU` does that by the operations behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_launch
from common.runner.graph_emulator import NoReads, check_no_wait
from common.tests.pretend_device import replace_everywhere

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class Moved(Exception):
    """A tensor went from one side to the other."""


class _Watcher(TorchDispatchMode):
    """Counts launches, and sees copies between the two sides."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[str, int] = {}
        self.uploads = 0
        self.is_serving = False  # before that, tables are made on the host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kernels":
            name = func.__name__.split(".")[0].rpartition("_")[0]
            self.launches[name] = self.launches.get(name, 0) + 1
        if func.overloadpacket is not aten.lift_fresh:  # the layout is made on the host
            check_no_wait(func, tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.to, aten._to_copy, aten.copy_):
            sides = {x.device.type for x in (*args[:2], result) if isinstance(x, torch.Tensor)}
            if len(sides) > 1 and self.is_serving:
                raise Moved(f"{func} from one device to another")
        return result


_BY_OPERATION = {torch.Tensor.copy_: aten.copy_, torch.Tensor.__invert__: aten.bitwise_not}


class _Indexing(TorchFunctionMode):
    """`x[...]`, `x[...] = y` and the like by operations."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _index(*args)
        if func is torch.Tensor.__setitem__:
            x, key, value = args
            if isinstance(key, torch.Tensor):
                return aten.index_put_(x, [key], value)
            part = _index(x, key)
            return (aten.copy_ if isinstance(value, torch.Tensor) else aten.fill_)(part, value)
        return _BY_OPERATION.get(func, func)(*args, **(kwargs or {}))


def _index(x: torch.Tensor, key: Any) -> torch.Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    missing = x.dim() - sum(k is not None and k is not Ellipsis for k in keys)
    indices: dict[int, torch.Tensor] = {}
    dim = 0
    for k in keys:
        if k is Ellipsis:
            dim += missing
        elif k is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(k, slice):
            x, dim = aten.slice(x, dim, k.start, k.stop, k.step or 1), dim + 1
        elif isinstance(k, torch.Tensor):
            indices[dim], dim = k, dim + 1
        else:
            x = aten.select(x, dim, k)
    return aten.index(x, [indices.get(i) for i in range(max(indices) + 1)]) if indices else x


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watcher]:
    """While it lasts, new tensors are fake, and `to_device` brings arrays to the GPU. Whoever is
    yielded counts uploads, and launches by kernel."""
    watcher = _Watcher()

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        watcher.uploads += 1
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    def from_device(tensor: torch.Tensor):
        return lambda: pytest.fail("a step was read: there is nothing to read")

    def row_uniforms(sampling, stream: int) -> np.ndarray:  # all of it is the host's
        return np.zeros(len(sampling.rows))

    with monkeypatch.context() as patch:
        replace_everywhere(patch, to_device, from_device, row_uniforms)
        patch.setattr(kernel_launch, "architecture_of", lambda device: 90)
        with FakeTensorMode(), torch.inference_mode(), _Indexing(), NoReads(), watcher:
            yield watcher
