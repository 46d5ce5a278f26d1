"""Keys and values in blocks, and attention that reads them through block tables.

    key_cache[layer], value_cache[layer]    [num_blocks, block_size, num_kv_heads, head_dim]

`write_kv` scatters a step's new keys and values to their slots; `paged_attention` gathers what each
sequence holds and attends to it. A batch is one row of tokens, sequence after sequence, and each
sequence's tokens are its last ones, whether one or many:

    sequence of seq_len 7, query_len 3       keys      0 1 2 3 4 5 6
                                             query 4   x x x x x . .     "bottom-right aligned":
                                             query 5   x x x x x x .     the last query sees
                                             query 6   x x x x x x x     everything

This module is the specification that kernels are tested against, and the fast path on a CPU. It
gathers whole blocks, never single tokens. Short queries are attended together, longer ones one
sequence at a time; what all layers share is worked out once a step (`attention_plan.py`).

Invariants: nothing beyond a sequence's length reaches the output, not even NaN (a masked score is
not enough: 0 * NaN is NaN); a slot of -1 is not written; the input's dtype is kept throughout.

vLLM and SGLang call kernels that read through the table without gathering; see
`beyond/paged_attention_triton.py`. Source: PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_plan import AttentionPlan, group_short_queries, is_short_query

# Query rows attended at a time in a long query that has history, so that a mask is [QUERY_TILE,
# seq_len] and not [query_len, seq_len].
QUERY_TILE = 256


class PagedKVCache:
    """The KV memory of all layers. Slot `block_id * block_size + offset` holds one position."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.key_cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.value_cache = [torch.zeros_like(key_cache) for key_cache in self.key_cache]

        self.num_blocks = num_blocks
        # Keys and values of one block in all layers.
        self.kv_bytes_per_block = (
            2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
        )


@dataclass(slots=True, eq=False)
class AttentionMetadata:
    """Where a batch's queries, keys and new slots lie. Not changed once it has been attended with.

    Tokens past `query_start_loc[-1]` are padding; so is a sequence without query tokens.
    """

    query_start_loc: torch.Tensor  # [num_seqs + 1] int, first token of each sequence
    seq_lens: torch.Tensor  # [num_seqs] int, keys of each sequence, this step's included
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int, anything beyond a sequence's blocks
    slot_mapping: torch.Tensor  # [num_tokens] int64, -1: padding
    max_query_len: int
    max_seq_len: int
    # What the first layer worked out for the others, if the backend plans.
    plan: AttentionPlan | None = field(default=None, init=False, repr=False)


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
    value_cache: torch.Tensor,  # the same
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1: not written
) -> None:
    """Put each token's key and value in its slot."""
    is_real = slot_mapping >= 0
    if not is_real.all():
        key, value, slot_mapping = key[is_real], value[is_real], slot_mapping[is_real]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # the same
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Causal attention of every query token to its own sequence, itself included.

    The step's keys and values must have been written. `num_heads` is a multiple of `num_kv_heads`;
    neighbouring query heads share one. Rows of padding tokens are zero. Raises `ValueError` if the
    metadata contradicts itself.
    """
    plan = metadata.plan
    if not isinstance(plan, PagedPlan) or not plan.fits(query, key_cache):
        plan = metadata.plan = PagedPlan(metadata, query, key_cache)
    output = torch.zeros_like(query)
    plan.attend_groups(output, query, key_cache, value_cache, scale)
    for long in plan.long_queries:
        keys, values = plan.gather(key_cache, value_cache, long.block_ids)
        keys, values = keys[: long.seq_len], values[: long.seq_len]
        tokens = slice(long.start, long.stop)
        output[tokens] = _attend_long(query[tokens], keys, values, plan.causal_mask, scale)
    return output


class AttentionBackend(Protocol):
    """How a model writes and reads KV. The parameters are those of the functions above."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor: ...


class TorchAttentionBackend:
    """PyTorch on any device."""

    write_kv = staticmethod(write_kv)
    attend = staticmethod(paged_attention)


# -- queries that are too long for a group


@dataclass(frozen=True, slots=True)
class LongQuery:
    """Rows `[start, stop)` of the query are the last tokens of one sequence."""

    start: int
    stop: int
    seq_len: int
    block_ids: torch.Tensor  # [its blocks] int


class PagedPlan(AttentionPlan):
    def __init__(
        self, metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor
    ) -> None:
        block_size, tables = key_cache.shape[1], metadata.block_tables
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        is_short = [is_short_query(stop - start) for start, stop in pairwise(starts)]
        groups, rows = group_short_queries(starts, seq_lens, is_short, tables, query, key_cache)
        self.long_queries: list[LongQuery] = []
        tile, num_keys = 0, 0
        for row in rows:
            start, stop, seq_len = starts[row], starts[row + 1], seq_lens[row]
            block_ids = tables[row, : -(-seq_len // block_size)]
            self.long_queries.append(LongQuery(start, stop, seq_len, block_ids))
            if stop - start < seq_len:  # it has history
                tile, num_keys = max(tile, min(stop - start, QUERY_TILE)), max(num_keys, seq_len)
        self.causal_mask = _causal_mask(tile, num_keys, query)
        super().__init__(groups, (long.block_ids for long in self.long_queries), query, key_cache)


def _causal_mask(tile: int, num_keys: int, query: torch.Tensor) -> torch.Tensor:
    """`[tile, num_keys]`, the last row sees everything. Its lower right corner `[t, k]` is the mask
    of t query tokens that are the last of k keys, for any smaller t and k."""
    mask = torch.full((tile, num_keys), -math.inf, dtype=query.dtype, device=query.device)
    return mask.triu_(num_keys - tile + 1)


def _attend_long(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor,  # the same
    causal_mask: torch.Tensor,  # of any size that is large enough
    scale: float,
) -> torch.Tensor:  # [query_len, num_heads, head_dim]
    query_len, num_heads, head_dim = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    shared = num_heads // num_kv_heads
    # KV heads stand in the batch dimension, so that repeating keys for the heads that share them is
    # a view: [num_kv_heads, shared, length, head_dim].
    query = query.view(query_len, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    values = values.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    if query_len == seq_len:
        output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        return output.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
    tiles = []
    for start in range(0, query_len, len(causal_mask)):
        stop = min(start + len(causal_mask), query_len)
        num_keys = seq_len - query_len + stop
        tiles.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                keys[:, :, :num_keys],
                values[:, :, :num_keys],
                attn_mask=causal_mask[start - stop :, -num_keys:],
                scale=scale,
            )
        )
    return torch.cat(tiles, dim=2).permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
