"""The small operations between the matrices, each as one compiled loop on a CPU.

`F.rms_norm` is 13 operations there, and every one of them reads and writes the whole tensor; so it
is with rotary embedding. Compiled, a region reads its input once and writes its result once:

    rms_norm           before attention, before the MLP and at the end
    norm_and_rotate    the norm of queries and keys by head, and their rotary embedding

What is computed is written down in `regions.py`, and here once more, in a form that the compiler
makes one loop of. SiLU is not among them: its time is that of `exp` and of reading, which stay.
What the whole gains: chapter 2's `lab/plot_compile_border.py`.

Each is compiled once, for all layers and any number of tokens. A call costs some ten microseconds
more than one of PyTorch's own, so few tokens go the plain way (`FROM_TOKENS`). In float32
and bfloat16 intermediate results are not rounded, so last bits differ from those of the plain
functions; in float64 the norm is computed in float32 here as there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from common.kernels.regions import Regions
from common.model import DecoderModel
from common.rotary import rotary_factors
from decode_attention import compile_for_these_threads

logger = logging.getLogger(__name__)

# Tokens from which on the compiled one is faster. At least 2: the compiler takes a size of one for
# another kind of thing.
FROM_TOKENS = 128, 8  # of the two `Regions`


def rms_norm_region(
    x: torch.Tensor,  # [num_tokens, hidden_size]
    weight: torch.Tensor,  # [hidden_size]
    eps: float,
) -> torch.Tensor:  # like x
    is_double = weight.dtype == torch.float64
    return _rms_norm(x, eps, weight.dtype) * weight if is_double else _fused(x, weight, eps)


def _rms_norm(x: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    single = x.float()
    return (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def _fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    single = x.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return (single * weight).to(x.dtype)


def norm_and_rotate_region(
    qk: torch.Tensor,  # [num_tokens, num_heads, head_dim], a part of something larger
    weight: torch.Tensor | None,  # [num_heads, head_dim]
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],  # `cos | cos` and `-sin | sin`, of each token
) -> torch.Tensor:  # like qk, contiguous
    if weight is not None:
        qk = (_rms_norm(qk, eps, weight.dtype) * weight).to(qk.dtype)
    half = qk.shape[-1] // 2
    cos, sin = rotary[0][..., :half], rotary[1][..., half:]
    a, b = qk.split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def compile_regions(model: DecoderModel) -> Regions:
    """Machine code for a model like this one. Takes some 10 seconds the first time on a machine,
    and one or two when its files are there. Without a C++ compiler: the plain functions, and a
    warning."""
    logger.warning("compiling norms and rotary embedding (some 10 s the first time) ...")
    start = time.perf_counter()
    norm = compile_for_these_threads(rms_norm_region)
    rotate = compile_for_these_threads(norm_and_rotate_region)
    plain = Regions()
    uncompiled = plain.rms_norm, plain.norm_and_rotate
    compiled = Regions(*map(_from_tokens, FROM_TOKENS, (norm, rotate), uncompiled))
    try:
        # There may be engines of many shapes, and the compiler gives up at the ninth.
        with torch._dynamo.config.patch(recompile_limit=256):
            _first_call(model, norm, rotate)
    except Exception as error:  # whatever a compiler that is missing or broken raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("norms and rotary embedding are not compiled: %s", reason)
        return plain
    logger.info("norms and rotary embedding compiled in %.1f s", time.perf_counter() - start)
    return compiled


def _from_tokens(least: int, compiled: Callable, plain: Callable) -> Callable:
    return lambda x, *rest: (compiled if len(x) >= least else plain)(x, *rest)


# The compiler takes tensors made in inference mode and others for two kinds: as the model does it.
@torch.inference_mode()
def _first_call(model: DecoderModel, norm: Callable, rotate: Callable) -> None:
    """Show the compiler typical sizes, and which of them varies."""
    layer, num_tokens = model.layers[0].attention, 64
    hidden = model.embed_weight.new_zeros(num_tokens, model.config.hidden_size)
    qkv = torch.zeros(num_tokens, sum(layer.head_counts), layer.head_dim, dtype=hidden.dtype)
    qk, _ = qkv.split((layer.num_qk_heads, layer.num_kv_heads), dim=1)
    rotary = rotary_factors(model.rotary_table, torch.zeros(num_tokens, dtype=torch.int64))
    for tensor in (hidden, qk, *rotary):
        torch._dynamo.mark_dynamic(tensor, 0)
    norm(hidden, model.norm_weight, layer.eps)
    rotate(qk, layer.qk_norm_weight, layer.eps, rotary)
