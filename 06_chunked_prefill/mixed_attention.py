"""Attention for decodes and chunks in one batch: a separate method for each, and no row computed
twice.

A decode is one query against a long history: it is bound by reading keys, and many are attended
together as in chapter 2. A chunk is many queries against one history: it is bound by arithmetic,
and needs a mask only for its own keys. Its keys are read in spans, each of them once:

    tokens 10-15 of a sequence   | history, spans of KEY_TILE | own keys, spans of QUERY_TILE |
                         queries |   0-3   |   4-7   |  8-9   |   10-11  |   12-13  |  14-15  |
                          10-11  |    x    |    x    |   x    | diagonal |          |         |
                          12-13  |    x    |    x    |   x    |    x     | diagonal |         |
                          14-15  |    x    |    x    |   x    |    x     |    x     | diagonal|

Only the diagonal is masked; empty cells are neither gathered nor multiplied. Each span yields a
*partial* result: attention to its own keys alone, and the log of the sum of exp(score). Two partial
results merge into the result for both spans, each with the weight exp(its log-sum-exp). Span after
span this is the online softmax of FlashAttention-2, whose running maximum and sum are one number
here; with the spans on several workers it is FlashDecoding. A decode whose keys exceed the budget
of a group is computed in the same way.

Invariants: those of chapter 2, NaN in unused slots included; the amount gathered at a time is
bounded by a span or a group, never by the history; with the lengths on the host no code waits for
the device.

vLLM's FlashInfer and MLA backends treat the two sides with two kernels, in the order of
`mixed_batch.py`; its Triton and FlashAttention backends have one kernel for both, as has
`paged_attention_triton.py`. Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding.

See 06_chunked_prefill/README.md#attention-for-both-kinds"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paged_attention import (
    Gather,
    LongQuery,
    PagedPlan,
    TorchAttentionBackend,
    paged_attention,
    repeat_for,
)

KEY_TILE = 4096  # history keys gathered at a time
QUERY_TILE = 1024  # queries attended at a time, and keys of the diagonal
# PyTorch's fused attention returns the log-sum-exp only from a private operator, and on a CPU. None
# if PyTorch has no such operator.
FUSED_ATTENTION = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class MixedAttentionBackend(TorchAttentionBackend):
    """Chapter 2's groups of short queries; long queries (and decodes with very many keys) are
    computed span by span of their keys. A window has few keys: all is as in chapter 2."""

    def is_short(self, plan: PagedPlan) -> np.ndarray:
        if plan.window is not None:
            return super().is_short(plan)
        is_short = plan.query_lens == 1
        if plan.metadata.num_short is not None:
            is_short = np.arange(len(is_short)) < plan.metadata.num_short
        return is_short & (plan.seq_lens <= plan.max_slots)

    def attend_long(
        self, plan: PagedPlan, query: Tensor, long: LongQuery, gather: Gather, scale: float
    ) -> Tensor:
        if plan.window is not None:
            return super().attend_long(plan, query, long, gather, scale)
        query = query.to(torch.promote_types(query.dtype, torch.float32))
        history = long.seq_len - long.query_len
        size = plan.key_buffer.shape[1]
        tile_starts = range(history, long.seq_len, QUERY_TILE)
        parts: dict[int, Partial] = {}  # by the first query of each tile
        for start, stop in pairwise([*range(0, history, KEY_TILE), *tile_starts, long.seq_len]):
            block = start // size
            gathered = gather(long.block_ids[block : -(-stop // size)])
            span = slice(start - block * size, stop - block * size)
            keys, values = (repeat_for(query, t[span].to(query.dtype)) for t in gathered)
            first_tile = max(0, start - history)  # tiles before it do not see the span
            for first in range(first_tile, long.query_len, QUERY_TILE):
                tile = query[:, :, first : first + QUERY_TILE]
                is_causal = start == history + first
                part = _attend_tile(tile, keys, values, scale, is_causal)
                if first in parts:
                    parts[first].merge(part)
                else:
                    parts[first] = part
        outputs = [part.output for part in parts.values()]  # every tile sees the first span
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


# The same result as `paged_attention`, faster for mixed batches.
mixed_attention = partial(paged_attention, backend=MixedAttentionBackend())


@dataclass(slots=True, eq=False)
class Partial:
    """Attention of a tile of queries to some of its keys, in float32 or float64."""

    output: Tensor  # [num_kv_heads, heads that share keys, query_len, head_dim]
    lse: Tensor  # [num_kv_heads, heads that share keys, query_len, 1], log of the sum of exp(score)

    def merge(self, other: Partial) -> None:
        """Merge the attention of the same queries to other keys into this one."""
        # Each side has the weight exp(its lse); its share of both is a sigmoid of the difference.
        self.output.lerp_(other.output, torch.sigmoid(other.lse - self.lse))
        torch.logaddexp(self.lse, other.lse, out=self.lse)


def _attend_tile(
    query: Tensor,  # [num_kv_heads, heads that share keys, query_len, head_dim]
    keys: Tensor,  # [num_kv_heads, heads that share keys, num_keys, head_dim]
    values: Tensor,  # the same
    scale: float,
    is_causal: bool,  # query token i sees keys 0 to i; there are as many of both
) -> Partial:
    if FUSED_ATTENTION is not None and query.device.type == "cpu":
        output, lse = FUSED_ATTENTION(query, keys, values, 0.0, is_causal, scale=scale)
    else:
        scores = (query @ keys.mT).mul_(scale)
        if is_causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
            scores.masked_fill_(hidden, -math.inf)
        lse = scores.logsumexp(-1)
        output = scores.sub_(lse[..., None]).exp_() @ values
    return Partial(output, lse[..., None])
