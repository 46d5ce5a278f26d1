"""Sampling from a distribution with one uniform random number, in integers.

Put the weights of all tokens end to end; the sampled token is the one at the point `u * total`. In
floating point the ends depend on the order of summation, so two programs (PyTorch, a Triton kernel,
two ranks) can disagree about a point that is close to one. Here the weights are converted to
integers first, whose sums are exact in any order:

    weights     0.5     0      0.25   0.25
    integers    2**51   0      2**50  2**50        weight * 2**52, rounded down
    ends        2**51   2**51  ...                 cumulative sums
    u = 0.5     floor(u * total) = 2**51           the first end above it: token 2

Intervals are closed on the left and open on the right, so a token of weight 0 is never sampled, for
any `u`.

See 05_spec_decode/README.md#drawing-a-token"""

from __future__ import annotations

import torch

SCALE = 2.0**52


def draw(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index [R] int64 whose interval holds `u` [R] float64 in [0, 1), and the position
    of `u` within the interval, [R] float64 in [0, 1).

    `weights` is [R, N] float, >= 0, with a sum of about 1 (not exactly). For a row of zeros or NaN,
    the result is some valid index.
    """
    ends = (weights.to(torch.float64) * SCALE).to(torch.int64).cumsum(dim=-1)
    # u < 1 and the integers are below 2**53, so the product rounds to less than the total.
    target = (u * ends[:, -1].to(torch.float64)).to(torch.int64)
    index = torch.searchsorted(ends, target[:, None], right=True)
    index = index.clamp(max=weights.shape[1] - 1)
    end = ends.gather(1, index)
    start = torch.where(index > 0, ends.gather(1, (index - 1).clamp(min=0)), 0)
    within = (target[:, None] - start).to(torch.float64) / (end - start).to(torch.float64)
    return index[:, 0], within[:, 0]
