"""Greedy tokens, and the placeholders of rows without a token.

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

import torch

BAD, REJECTED = -1, -2  # instead of a token: no finite maximum; after a rejected draft


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the lowest id [R] of the highest logit; `BAD` where that logit is not finite."""
    highest, tokens = highest_logits(logits)
    return tokens.masked_fill_(is_bad(highest), BAD)


def as_float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def highest_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit [R] of each row, and the lowest id [R] that has it."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
        return highest, tokens
    # NumPy's argmax is vectorised and ten times as fast; both return the first of equals.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, tokens[:, None])[:, 0], tokens


def is_bad(highest: torch.Tensor) -> torch.Tensor:
    """Whether `highest` is not finite, in two launches (`isfinite` takes four)."""
    return (highest - highest) != 0
