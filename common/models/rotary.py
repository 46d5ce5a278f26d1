"""Rotary position embedding: the angles of every position, computed once per model.

Each pair of channels (i, i + head_dim / 2) of a query or key is turned by position * inv_freq[i].
The tables hold cosines and sines in float32, cast to the model's dtype, exactly as `transformers`
computes them. A step looks its rows up by `positions`, so the tables have no state that could
disagree with a cache.

Source: RoFormer, arXiv 2104.09864. Angles for texts longer than in training (linear, llama3, yarn)
are computed by `transformers`. Not supported: "dynamic", whose angles change when a text grows, so
that keys in the KV cache would have to be rotated again; "longrope", which has two lists of factors
and switches in the middle of a text.

See common/README.md#which-models"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]  # a layer's rotary factors, from `Regions.rotary`


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary parameters. `rope_type` is "default", which uses `theta` alone, or a kind whose angles
    are `inv_freq`."""

    theta: float = 10_000.0
    rope_type: str = "default"
    inv_freq: tuple[float, ...] = ()  # radians per position, for each pair of channels
    attention_factor: float = 1.0  # of cosines and sines


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Return the radians per position, `[head_dim / 2]` float32."""
    if rope.inv_freq:
        return torch.tensor(rope.inv_freq, dtype=torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / rope.theta**exponents


def rotary_table(
    rope: RopeParameters, head_dim: int, num_positions: int, dtype: torch.dtype
) -> torch.Tensor:  # [num_positions, head_dim]: head_dim / 2 cosines, then as many sines
    """Compute the table on the CPU, so that it does not depend on the device."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor).to(dtype)


def rotary_factors(
    table: torch.Tensor,  # [num_positions, head_dim]
    positions: torch.Tensor,  # [num_tokens] int64
) -> tuple[torch.Tensor, torch.Tensor]:  # each [num_tokens, 1, head_dim]
    """Return the factors that `rotate` multiplies with: `cos | cos` and `-sin | sin`."""
    cos, sin = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    factors: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate every channel pair: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = factors
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (a, b) -> (b, a)
    return (x * cos).addcmul_(swapped, sin)
