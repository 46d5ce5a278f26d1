"""A device that is none: tensors in the host's memory of which some are said to be a GPU's.

What a program would copy to a GPU and read back from it can so be counted where there is none, and
the branches that it takes on one (`is_cuda`) are those that run. A result is on the device if an
argument is. Numbers made from nothing (`arange`, `zeros`) may be on either side, and an operation
with tensors of both sides fails, as on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_FROM_NOTHING = {"arange", "zeros", "ones", "empty", "full", "scalar_tensor"}
_DATA_DEPENDENT = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
_READS = ("tolist", "numpy", "__bool__", "__array__", "cpu", "item")


class PretendDevice(TorchDispatchMode):
    """`reads` and `uploads` are counted while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.uploads = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.place = "device"
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {place_of(x) for x in tensors if x.dim()}
        assert not {"host", "device"} <= places, f"{func} of tensors on both sides"
        name = func.__name__.split(".")[0]
        if "device" in {place_of(x) for x in tensors}:
            places.add("device")
            has_mask = name.startswith("index") and any(x.dtype == torch.bool for x in tensors[1:])
            self.reads += name in _DATA_DEPENDENT or (has_mask and name in ("index", "index_put"))
        found = func(*args, **(kwargs or {}))
        known = places - {"either"}
        if known or name in _FROM_NOTHING or (tensors and places == {"either"}):
            for x in tree_leaves(found):
                if isinstance(x, torch.Tensor):
                    x.place = next(iter(known), "either")
        return found


def place_of(tensor: torch.Tensor) -> str:
    return getattr(tensor, "place", "host")


def replace_everywhere(patch: pytest.MonkeyPatch, *functions: Callable) -> None:
    """Put each function in the place of the one of its name, in every module that holds it.

    A module is not asked for the name: a lazy one of transformers would import what it may have."""
    for function in functions:
        name = function.__name__
        for module in list(sys.modules.values()):
            if name in getattr(module, "__dict__", {}):
                patch.setattr(module, name, function)


@contextmanager
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """While it lasts, `all_to_device` copies to this device."""
    device = PretendDevice()

    def all_to_device(_: torch.device, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        device.uploads += any(array.size for array in arrays)
        return [device.put(torch.from_numpy(array)) for array in arrays]

    def from_device(tensor: torch.Tensor):
        return lambda: tensor.cpu().numpy()  # a read, when somebody waits for it

    with monkeypatch.context() as patch:
        replace_everywhere(patch, all_to_device, from_device)
        on_device = property(lambda tensor: place_of(tensor) == "device")
        patch.setattr(torch.Tensor, "is_cuda", on_device, raising=False)
        for name in _READS:
            patch.setattr(torch.Tensor, name, _counted(device, getattr(torch.Tensor, name)))
        with device:
            yield device


def _counted(device: PretendDevice, read):
    def counted(tensor, *args, **kwargs):
        if place_of(tensor) != "device":
            return read(tensor, *args, **kwargs)
        device.reads += 1
        with _disable_current_modes():  # it is one read, whatever it does
            return read(tensor.clone(), *args, **kwargs)

    return counted
