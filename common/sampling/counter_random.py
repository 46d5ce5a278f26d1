"""Counter-based random numbers: a token's uniform number is a hash of (seed, position, stream).

No generator has state that could depend on other requests in the batch, slots, preemption or the
number of drafts, and every rank and restart draws the same numbers. vLLM keeps a `torch.Generator`
for each seeded request and draws a whole row of exponential noise from it. The hash is splitmix64
(Steele et al. 2014).

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

import torch

from inverse_cdf import draw

# Uses of a number: to draw a position's token, its draft token, or to accept the draft token.
TOKEN_STREAM, DRAFT_STREAM, ACCEPT_STREAM = range(3)
BLOCK = 128  # tokens per block, drawn first as a whole


def sample_from_probs(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the token [R] whose interval of the cumulative distribution contains `u` [R], float64
    in [0, 1).

    `probs` [R, V] sum to about 1. Intervals are closed on the left and open on the right, so no `u`
    draws a token of probability 0 (or below 2**-52). The block of tokens is found first, then the
    token in it, so that only [R, V / 128] and [R, 128] numbers need a cumulative sum."""
    vocab_size = probs.shape[1]
    mass = block_mass(probs)
    block, u = draw(mass, u)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(1, ids.clamp(max=vocab_size - 1)).to(torch.float64)
    inside = inside.masked_fill(ids >= vocab_size, 0.0)
    token, _ = draw(inside / mass.gather(1, block[:, None]), u)
    return (block * BLOCK + token).clamp(max=vocab_size - 1)  # a row of NaN gives any token


def block_mass(probs: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block of probabilities, `[R, V // 128 + 1]`."""
    num_whole = probs.shape[1] // BLOCK
    whole = probs[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK))
    tail = probs[:, num_whole * BLOCK :]
    sums = whole.sum(dim=-1), tail.sum(dim=-1, keepdim=True)
    return torch.cat(sums, dim=1)


def uniforms(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor = TOKEN_STREAM
) -> torch.Tensor:
    """Return uniform numbers in [0, 1), float64 [R]: a pure function of (seed, position, stream),
    the same on every device. `seeds`, `positions`, and several streams are [R] int64."""
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + (positions + 1) * _GOLDEN)
    state = _mix(state ^ _mix(torch.zeros_like(state) + (stream + 1)))
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


_GOLDEN, *_MULTIPLIERS = (  # as int64
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64, which relies on int64 arithmetic that wraps."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift as if unsigned: fill with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
