"""Which of the three kinds of `Regions` a model computes with."""

from __future__ import annotations

import torch

from common.kernels.regions import Regions
from common.model import DecoderModel


def set_regions(model: DecoderModel, is_compiled: bool, is_triton: bool = False) -> None:
    """Choose what `model` computes with from now on: kernels where attention is one, what was
    compiled for a CPU, or the plain functions. Without a C++ compiler it is those, and a warning
    says so. In float64 it is never kernels."""
    regions, weight = Regions(), model.embed_weight
    if is_triton and weight.dtype != torch.float64:
        from common.kernels.kernel_regions import KernelRegions

        regions = KernelRegions()
    elif is_compiled and weight.device.type == "cpu":
        from common.kernels.compiled_regions import compile_regions  # brings the compiler

        regions = compile_regions(model)
    model.regions = regions
