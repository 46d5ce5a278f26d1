"""The rules of `sampling_rules.py` that rank tokens or count them, each as a function of logits.

Each function takes logits [R, V] and one value for each row, and returns new logits; the grammar's
function takes bits for some of the rows (`forbid`). All functions rank tokens in the same order:
higher logit first, and lower id first among equals. So `top_k=1` and a tiny `top_p` are exactly
greedy, and top-k keeps exactly k.

Repetition penalty: Keskar et al. 2019 (arXiv 1909.05858); top-p: Holtzman et al. 2019 (arXiv
1904.09751); min-p: Nguyen et al. 2024 (arXiv 2407.01082).

See common/README.md#what-a-request-may-ask-for"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.sampling.sampling_rules import NEG_INF
from inverse_cdf import SCALE

_BLOCK = 64  # tokens whose maximum is compared first


def forbid(logits: torch.Tensor, at: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return logits [R, V] with -inf, in the rows `at`, for each token whose bit is 0. `bits`
    [len(at), W] int32, lowest bit first; tokens after the last bit are forbidden."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_allowed = ((bits[:, :, None] >> places) & 1).flatten(1).bool()
    vocab_size = logits.shape[1]
    is_allowed = F.pad(is_allowed, (0, max(0, vocab_size - is_allowed.shape[1])))[:, :vocab_size]
    rows = logits.index_select(0, at).masked_fill(~is_allowed, NEG_INF)
    return logits.index_copy(0, at, rows)


def apply_penalties(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    output_counts: torch.Tensor,
    penalties: torch.Tensor,
) -> torch.Tensor:
    """Apply the `penalties` [3, R]: repetition, presence, frequency. `is_known` [R, V]: the token
    is in the prompt or the output; its logit is divided by the repetition penalty if positive, else
    multiplied. `output_counts` [R, V]: its count in the output. Frequency is subtracted times the
    count, presence once if above 0."""
    repetition, presence, frequency = penalties.to(logits.dtype)[:, :, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_known, repeated, logits)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def apply_temperature(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return `(logits - highest) / temperature`; `highest` and `temperature` > 0 are [R]. The
    highest logit becomes 0, so that no temperature, however small, overflows. A row without a
    finite maximum becomes NaN."""
    limits = torch.finfo(logits.dtype)
    temperature = temperature.clamp(limits.tiny, limits.max).to(logits.dtype)
    return (logits - highest[:, None]).div_(temperature[:, None])


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Keep exactly the `top_k` [R] highest logits, each in [1, max_top_k]. Among equal logits the
    lower ids are kept."""
    ids = ranked_ids(logits, max_top_k)
    is_kept = torch.arange(max_top_k, device=ids.device) < top_k[:, None]
    is_masked = torch.ones_like(logits, dtype=torch.bool).scatter_(1, ids, ~is_kept)
    return logits.masked_fill(is_masked, NEG_INF)


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens, most probable first, whose probabilities sum to `top_p` [R] or more:
    the token that reaches the sum is kept. Among equal logits lower ids come first. 1 keeps all.

    Probabilities are rounded to integers, as in chapter 5's `draw`, so that their sums do not
    depend on the order of addition."""
    vocab_size = logits.shape[1]
    top_p = top_p[:, None]
    probs = logits.softmax(dim=-1)
    bound = (top_p * SCALE).clamp(min=1)
    # Few tokens usually suffice. A CPU can check that; on a GPU the host would have to wait.
    width = vocab_size if logits.is_cuda else min(64, vocab_size)
    while True:
        ids = ranked_ids(logits, width)
        weights = probs.gather(1, ids).to(torch.float64).mul_(SCALE).add_(0.5)
        reached = weights.to(torch.int64).cumsum(dim=-1)
        if width == vocab_size or ((reached[:, -1:] >= bound) | (top_p >= 1)).numpy().all():
            break
        width = min(16 * width, vocab_size)
    is_kept = torch.ones_like(ids, dtype=torch.bool)
    is_kept[:, 1:] = (reached[:, :-1] < bound) | (top_p >= 1)
    is_masked = (top_p < 1).repeat(1, vocab_size).scatter_(1, ids, ~is_kept)
    return logits.masked_fill(is_masked, NEG_INF)


def ranked_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids [R, k] of the `k` <= V highest logits of each row, best first. Among equal
    logits the lower ids are first. A row without a finite maximum gives any ids.

    Only the k blocks with the highest maxima can contain one of the k best tokens, because each of
    them has a better token than any other block. So most blocks of a large vocabulary are only read
    for their maximum."""
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks <= 2 * k:
        return _order(logits, k)
    next_offset = num_blocks * _BLOCK
    blocks = logits[:, :next_offset].unflatten(1, (num_blocks, _BLOCK))
    best = ranked_ids(blocks.amax(dim=-1), k).sort(dim=-1).values
    columns = torch.arange(logits.shape[1], device=logits.device)
    ids = (best[:, :, None] * _BLOCK + columns[:_BLOCK]).flatten(1)
    ids = torch.cat([ids, columns[next_offset:].expand(len(ids), -1)], dim=1)
    return ids.gather(1, _order(logits.gather(1, ids), k))


def _order(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return `ranked_ids` by comparing all logits. PyTorch's stable sort of floats costs a CPU 2 ms
    for 8 rows of 4,096, more than all of a small model's step."""
    if logits.dtype == torch.float64:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # Integer keys, lowest for the highest logit; the id in the low bits makes all keys different.
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    inverse = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_not_()
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = inverse.to(torch.int64).bitwise_left_shift_(32).add_(ids)
    if logits.is_cuda or 8 * k < logits.shape[1]:
        return keys.topk(k, largest=False).values & 0xFFFFFFFF
    keys.numpy().sort(axis=-1)  # in place, and vectorised
    return keys[:, :k] & 0xFFFFFFFF
