"""Drawing with one uniform number, in integers.

Lay the weights of all tokens end to end; the token drawn is the one under the point `u * total`.
In floating point the ends depend on the order of summation, so two programs (PyTorch, a Triton
kernel, two ranks) can disagree about a point that lies near one. Here weights become integers
first, whose sums are exact in any order:

    weights     0.5     0      0.25   0.25
    integers    2**51   0      2**50  2**50        weight * 2**52, rounded down
    ends        2**51   2**51  ...                 cumulative sums
    u = 0.5     floor(u * total) = 2**51           the first end above it: token 2

Intervals are closed left and open right: a token of weight 0 is never drawn, for no `u`.
"""

from __future__ import annotations

import torch

SCALE = 2.0**52


def draw(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index [R] int64 whose interval holds `u` [R] float64 in [0, 1), and where in the interval
    it lies, [R] float64 in [0, 1).

    `weights` [R, N] float, >= 0, of sum up to about 1; they need not sum to 1. Of a row of zeros or
    NaN, some index."""
    ends = (weights.to(torch.float64) * SCALE).to(torch.int64).cumsum(dim=-1)
    # u < 1 and integers below 2**53: the product rounds to less than the total.
    target = (u * ends[:, -1].to(torch.float64)).to(torch.int64)
    index = torch.searchsorted(ends, target[:, None], right=True)
    index = index.clamp(max=weights.shape[1] - 1)
    end = ends.gather(1, index)
    start = torch.where(index > 0, ends.gather(1, (index - 1).clamp(min=0)), 0)
    within = (target[:, None] - start).to(torch.float64) / (end - start).to(torch.float64)
    return index[:, 0], within[:, 0]
