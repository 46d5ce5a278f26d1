"""What may be sampled: each constraint of `SamplingParams` as a function of logits.

Each takes logits [R, V] and one value for each row, and returns new logits. One order ranks tokens
everywhere: the higher logit first, of equals the lower id. So `top_k=1` and a tiny `top_p` are
exactly greedy, and top-k keeps exactly k.

Repetition penalty: Keskar et al. 2019 (arXiv 1909.05858); top-p: Holtzman et al. 2019 (arXiv
1904.09751); min-p: Nguyen et al. 2024 (arXiv 2407.01082)."""

from __future__ import annotations

import torch

NEG_INF = float("-inf")


def apply_penalties(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    """`is_known` [R, V]: the token is in the prompt or the output; its logit is divided by the
    repetition penalty if positive, else multiplied. `output_counts` [R, V]: how often it is in the
    output; presence is subtracted if at all, frequency times the count. Penalties [R]."""
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    repetition, presence, frequency = (p.to(logits.dtype)[:, None] for p in penalties)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_known, repeated, logits)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`(logits - their maximum) / temperature` [R] > 0. The highest logit becomes 0, so that no
    temperature, however small, overflows. A row without a finite maximum becomes NaN."""
    limits = torch.finfo(logits.dtype)
    temperature = temperature.clamp(limits.tiny, limits.max).to(logits.dtype)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least `min_p` [R] times as probable as the most probable one."""
    lowest = logits.amax(dim=-1, keepdim=True) + min_p.log().to(logits.dtype)[:, None]
    return logits.masked_fill(logits < lowest, NEG_INF)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep exactly the `top_k` [R] highest; 0 or more than V keeps all. Of equal logits the lower
    ids stay."""
    vocab_size = logits.shape[1]
    num_kept = top_k.to(torch.int64).clamp(max=vocab_size)
    num_kept = torch.where(num_kept == 0, vocab_size, num_kept)
    highest = logits.topk(int(num_kept.max())).values
    return _keep_highest(logits, num_kept, highest)


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens, most probable first, whose probabilities sum to `top_p` [R] or more:
    the token that reaches it stays. Of equal logits the lower ids come first. 1 keeps all."""
    vocab_size = logits.shape[1]
    probs = logits.softmax(dim=-1)
    # Few tokens usually suffice, and finding a few is much quicker than sorting all on a CPU.
    width = vocab_size if logits.is_cuda else min(64, vocab_size)
    while True:
        highest, ids = logits.topk(width)
        reached = probs.gather(1, ids).to(torch.float64).cumsum(dim=-1)
        if width == vocab_size or bool(((reached[:, -1] >= top_p) | (top_p >= 1)).all()):
            break
        width = min(16 * width, vocab_size)
    num_kept = 1 + (reached[:, :-1] < top_p[:, None]).sum(dim=-1)
    kept = _keep_highest(logits, num_kept, highest)
    return torch.where(top_p[:, None] >= 1, logits, kept)


def _keep_highest(
    logits: torch.Tensor, num_kept: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    is_masked = ~_highest_mask(logits, num_kept, highest)
    return logits.masked_fill(is_masked & ~highest[:, :1].isnan(), NEG_INF)  # NaN must show


def _highest_mask(
    logits: torch.Tensor, num_kept: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    """True for the `num_kept` [R] highest of each row. `highest` [R, >= num_kept]: a row's highest
    logits, descending. (topk itself does not say which of equal ones it takes.)"""
    last = highest.gather(1, num_kept[:, None] - 1)
    above, equal = logits > last, logits == last
    num_equal_kept = num_kept[:, None] - above.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) > num_equal_kept).any()):
        equal &= equal.cumsum(dim=-1) <= num_equal_kept
    return above | equal


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ids of the `k` <= V highest logits of each row [R, k], ascending. Of equal logits the
    lower ids. A row without a finite maximum gives any ids."""
    highest, ids = logits.topk(min(k + 1, logits.shape[1]))
    if k < logits.shape[1]:
        ids = ids[:, :k].clone()
        is_tie = (highest[:, k - 1] == highest[:, k]) & highest[:, 0].isfinite()
        if tied := is_tie.nonzero()[:, 0].tolist():
            num_kept = torch.full((len(tied),), k, device=logits.device)
            mask = _highest_mask(logits[tied], num_kept, highest[tied])
            ids[tied] = mask.nonzero()[:, 1].view(len(tied), k)
    return ids.sort(dim=-1).values
