"""The token of a row where nothing is drawn, and what stands in place of one."""

from __future__ import annotations

import torch

BAD, REJECTED = -1, -2  # in place of a row's token: no finite maximum; behind a rejected draft


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's lowest id [R]; `BAD` where the highest is not finite."""
    highest, tokens = highest_logits(logits)
    return tokens.masked_fill_(is_bad(highest), BAD)


def as_float(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def highest_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit [R] of each row, and the lowest id [R] that has it."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
        return highest, tokens
    # NumPy's argmax is vectorised and ten times as quick; both take the first of equals.
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, tokens[:, None])[:, 0], tokens


def is_bad(highest: torch.Tensor) -> torch.Tensor:
    """Whether it is not finite, in two launches (`isfinite` takes four)."""
    return (highest - highest) != 0
