"""Short queries, attended together in groups.

Attention on a CPU gathers keys and values before it attends to them. Which blocks to gather, and
which mask to use, depends only on lengths and tables, so it is computed on the host, once per step.
Sequences with one query token, or with a few (draft tokens to be verified, chapter 5), are grouped
with others of similar length:

    lengths 100 60 51 50 | 49 | 7 | 3 | 1      no more than twice the shortest, within a budget of
                                               bytes that stays in the processor's cache

Invariant: a group's unused slots are overwritten before they are read (0 * NaN is NaN).

See 02_paged_kv/README.md#decodes-together"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Bytes of keys gathered at a time in decoding: as many as stay in a CPU's cache (measured), or
# many.
GROUP_KEY_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
# Query lengths that are attended in groups: up to each of these together, longer ones alone.
SHORT_QUERIES = (1, 8, 16)


def group_short_queries(
    rows: np.ndarray,  # indices into the two arrays below
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    max_slots: int,
) -> list[np.ndarray]:
    """Split `rows` into groups. Sequences with 1, 2 to 8, and 9 to 16 query tokens are kept
    apart."""
    kinds = np.searchsorted(SHORT_QUERIES, query_lens[rows])
    alike = [rows[kinds == kind] for kind in np.unique(kinds)]
    return [group for rows in alike for group in split_by_length(rows, seq_lens, max_slots)]


def split_by_length(rows: np.ndarray, seq_lens: np.ndarray, max_slots: int) -> list[np.ndarray]:
    """Sort by length, longest first, and split into groups of at most `max_slots` slots, padding
    included (one sequence may exceed that). No sequence is shorter than half of its group's
    longest."""
    rows = rows[np.argsort(-seq_lens[rows], kind="stable")]
    shorter_by = -seq_lens[rows]  # ascending, for the binary search
    groups = []
    start = 0
    while start < len(rows):
        longest = seq_lens[rows[start]]
        half = np.searchsorted(shorter_by, -longest / 2, side="right")
        stop = min(start + max(max_slots // longest, 1), half)
        groups.append(rows[start:stop])
        start = stop
    return groups


class DecodeGroup:
    """Sequences of similar length with a few query tokens each, attended in one call. The call
    needs `query_len` tokens of each, the maximum in the group, so a sequence with fewer repeats its
    first one, which gives the same result each time. Computed on the host, without waiting for the
    device."""

    def __init__(
        self,
        rows: np.ndarray,  # longest first
        starts: np.ndarray,  # `query_start_loc`
        seq_lens: np.ndarray,
        block_tables: Tensor,
        num_heads: int,  # of the query
        key_cache: Tensor,
        window: int | None = None,
    ) -> None:
        to_device = partial(Tensor.to, device=key_cache.device, non_blocking=True)
        block_size = key_cache.shape[1]
        num_shared = num_heads // key_cache.shape[2]
        bounds = np.stack([starts[rows], starts[rows + 1], seq_lens[rows]])
        first, stop, seq_len = torch.from_numpy(bounds)[:, :, None]  # each [n, 1]
        query_len = int((bounds[1] - bounds[0]).max())
        self.num_seqs = len(rows)
        self.num_keys = int(seq_lens[rows[0]])
        num_blocks = -(-self.num_keys // block_size)
        slots = torch.arange(num_blocks * block_size)
        unused = (slots >= seq_len).flatten().nonzero().flatten()
        # [n, query_len], rows of the query: with `query_len` 4, a sequence that has rows 5 and 6
        # gets 5 5 5 6.
        tokens = (stop - torch.arange(query_len, 0, -1)).maximum(first)
        positions = tokens - stop + seq_len
        hidden = slots[: self.num_keys] > positions[:, :, None]  # [n, query_len, num_keys]
        if window is not None:
            hidden |= slots[: self.num_keys] <= positions[:, :, None] - window
        self.mask = None  # or [n, 1, num_shared * query_len, num_keys], 0 or -inf
        if hidden.any():
            hidden = hidden.repeat(1, num_shared, 1)[:, None]
            mask = torch.zeros(hidden.shape, dtype=key_cache.dtype).masked_fill_(hidden, -math.inf)
            self.mask = to_device(mask)
        # [n * query_len] int64, rows of the query; [num_unused] int64, slots of the gathered keys
        self.tokens = to_device(tokens.flatten())
        self.unused = to_device(unused)
        # [n * num_blocks] int; after a sequence's own blocks, any block's id
        self.block_ids = block_tables[to_device(torch.from_numpy(rows)), :num_blocks].flatten()

    def attend(
        self,
        query: Tensor,  # [n * query_len, num_heads, head_dim]
        keys: Tensor,  # [n * slots, num_kv_heads, head_dim], unused slots are overwritten
        values: Tensor,  # the same
        scale: float,
    ) -> Tensor:  # [n * query_len, num_heads, head_dim]
        n = self.num_seqs
        (_, num_kv_heads, head_dim) = keys.shape
        keys = keys.index_fill_(0, self.unused, 0).view(n, -1, num_kv_heads, head_dim)
        values = values.index_fill_(0, self.unused, 0).view(n, -1, num_kv_heads, head_dim)
        keys, values = (t[:, : self.num_keys].transpose(1, 2) for t in (keys, values))
        # Query heads that share a KV head become query rows of that head, so keys are read once.
        rows = query.view(n, -1, num_kv_heads, query.shape[1] // num_kv_heads, head_dim)
        rows = rows.permute(0, 2, 3, 1, 4)
        output = scaled_dot_product_attention(
            rows.flatten(2, 3), keys, values, attn_mask=self.mask, scale=scale
        )
        return output.view(rows.shape).permute(0, 3, 1, 2, 4).reshape(query.shape)
