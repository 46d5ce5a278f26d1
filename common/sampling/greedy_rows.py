"""The token of a row where nothing is drawn, and what stands in place of one."""

from __future__ import annotations

import torch

BAD, REJECTED = -1, -2  # in place of a row's token: no finite maximum; behind a rejected draft


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's lowest id [R]; `BAD` where the highest is not finite."""
    if logits.is_cuda:
        highest, tokens = logits.max(dim=-1)
    else:  # NumPy's argmax is vectorised and ten times as quick; both take the first of equals
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(highest.isfinite(), tokens, BAD)
