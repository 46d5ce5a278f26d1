"""Attention of a long query on a CPU, in bfloat16: two matrix products and a softmax, by tiles.

PyTorch's fused attention does not use the processor's bfloat16 multiplication well; its batched
matrix product does. So the scores of a tile of queries are stored, which a GPU would avoid:

    query tile     keys seen by it
     0-95          |  0 ... 95 |                             the last square of a tile is masked,
    96-191         |  0 ............ 191 |                   later keys are not multiplied
    192-250        |  0 ...................... 250 |

Query heads that share keys are rows of one product. Scores, and weights after the softmax, are
rounded to bfloat16, as in the "eager" attention of `transformers`; sums are in float32. Invariant:
nothing after a query's own position reaches its output, if a sequence's keys and values are finite.

See 02_paged_kv/beyond/README.md#prompts-by-tiles"""

from __future__ import annotations

import math

import torch
from torch import Tensor

QUERY_TILE = 96
MAX_KEYS = 4096  # the scores of a tile and 8 KV heads are then 12 MiB
# The dtype of the products; for others, PyTorch's fused attention is as fast.
DTYPE = torch.bfloat16


def is_for_tiles(query: Tensor, num_keys: int) -> bool:
    return query.dtype == DTYPE and query.device.type == "cpu" and num_keys <= MAX_KEYS


def attend_in_tiles(
    query: Tensor,  # [num_kv_heads, heads that share keys, query_len, head_dim]
    keys: Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: Tensor,  # the same
    scale: float,
) -> Tensor:  # like query
    """Attend a query whose tokens are the last ones of the sequence."""
    num_kv_heads, num_shared, query_len, head_dim = query.shape
    history = len(keys) - query_len
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    causal = query.new_full((QUERY_TILE, QUERY_TILE), -math.inf).triu_(1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, query_len, QUERY_TILE):
        stop = min(start + QUERY_TILE, query_len)
        num_keys = history + stop
        size = stop - start
        tile = query[:, :, start:stop].reshape(num_kv_heads, -1, head_dim)
        seen = keys[:, :num_keys].contiguous()  # the product would copy them too, more slowly
        mask = query.new_zeros(size, num_keys)
        mask[:, -size:] = causal[:size, :size]
        mask = mask.repeat(num_shared, 1)
        scores = torch.baddbmm(mask, tile, seen.transpose(1, 2), alpha=scale)  # the mask is added
        attended = torch.bmm(scores.softmax(-1), values[:, :num_keys])
        output[:, :, start:stop] = attended.view(num_kv_heads, num_shared, size, head_dim)
    return output
