"""The small operations between the matrices of a model, plain; `compiled_regions.py` has them fast.

In every dtype the numbers follow `transformers`: norms are computed in float32. That holds in
float64 too, where tests compare tokens one by one. In bfloat16 a fused norm rounds once where
`transformers` rounds twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from common.rotary import rotate

if TYPE_CHECKING:
    from common.model import DecoderModel


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor | None,  # [size]
    eps: float,
) -> torch.Tensor:  # like x
    """Over the last dimension, in float32 or below."""
    if x.dtype != torch.float64:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    single = x.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return single.to(x.dtype) if weight is None else single.to(x.dtype) * weight


def norm_and_rotate(
    qk: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    weight: torch.Tensor | None,  # [num_heads, head_dim], None: there is no norm
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],  # `rotary_factors` of the tokens
) -> torch.Tensor:  # like qk
    """Norm of each head, and rotary embedding."""
    return rotate(qk if weight is None else rms_norm(qk, None, eps).mul_(weight), rotary)


class Regions(NamedTuple):
    """Those above, or what they were compiled to."""

    rms_norm: Callable[..., torch.Tensor] = rms_norm
    norm_and_rotate: Callable[..., torch.Tensor] = norm_and_rotate


def set_regions(model: DecoderModel, is_compiled: bool) -> None:
    """Compile what `model` computes with, or make it plain again. Without a C++ compiler it stays
    plain, and a warning says so."""
    regions = Regions()
    if is_compiled and model.embed_weight.device.type == "cpu":
        from common.kernels.compiled_regions import compile_regions  # brings the compiler

        regions = compile_regions(model)
    for part in (model, *model.layers):
        part.regions = regions
