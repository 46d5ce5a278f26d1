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
gathers whole blocks, never single tokens, and into one small buffer that stays in the processor's
cache and is reused by every layer: fresh memory for each layer costs more than the attention does.
Sequences with one query token, or with a few (guesses to be verified, chapter 5), are attended
together in groups of similar length; longer queries one sequence at a time. What all layers share
is worked out once a step, in a plan.

Invariants: nothing beyond a sequence's length reaches the output, not even NaN (a masked score is
not enough: 0 * NaN is NaN); a slot of -1 is not written; the input's dtype is kept throughout.

vLLM and SGLang call kernels that read through the table without gathering; see
`paged_attention_triton.py`. Source: PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

# Keys gathered at a time in decoding: on a CPU what stays in its cache (measured), else plenty.
GROUP_KEY_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
# Query rows attended at a time in a chunk that has history, so that a mask is [QUERY_TILE, seq_len]
# and not [query_len, seq_len].
QUERY_TILE = 256
# Query lengths that are attended in groups: up to each of these together, longer ones alone.
SHORT_QUERIES = (1, 8, 16)


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

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks `(src, dst)` in all layers, as if all at once: sources are read first."""
        if not copies:
            return
        src, dst = torch.tensor(copies, device=self.key_cache[0].device).unbind(1)
        for cache in (*self.key_cache, *self.value_cache):
            cache[dst] = cache[src]


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
    _plan: object = field(default=None, init=False, repr=False)  # of the backend that attends


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
    plan = metadata._plan
    if not isinstance(plan, _Plan) or not plan.fits(query, key_cache):
        plan = metadata._plan = _make_plan(metadata, query, key_cache)
    output = torch.zeros_like(query)
    for group in plan.decodes:
        keys = plan.gather(key_cache, group.block_ids, plan.key_buffer)
        values = plan.gather(value_cache, group.block_ids, plan.value_buffer)
        output[group.tokens] = attend_group(query[group.tokens], keys, values, group, scale)
    for chunk in plan.chunks:
        keys = plan.gather(key_cache, chunk.block_ids, plan.key_buffer)[: chunk.seq_len]
        values = plan.gather(value_cache, chunk.block_ids, plan.value_buffer)[: chunk.seq_len]
        tokens = slice(chunk.start, chunk.stop)
        output[tokens] = _attend_chunk(query[tokens], keys, values, plan.causal_mask, scale)
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


# -- what all layers of a step share


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length with a few query tokens each. Who has fewer than `query_len` of
    them has its first one several times."""

    tokens: torch.Tensor  # [n * query_len] int64, their rows in the query
    block_ids: torch.Tensor  # [n * blocks of the longest] int, 0 beyond a sequence's own
    num_seqs: int
    num_keys: int  # of the longest
    unused: torch.Tensor  # [num_unused] int64, gathered slots that are not the sequence's
    mask: torch.Tensor | None  # [n, 1, heads that share keys * query_len, num_keys], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with several query tokens: rows `[start, stop)` of the query."""

    start: int
    stop: int
    seq_len: int
    block_ids: torch.Tensor  # [its blocks] int


@dataclass(slots=True, eq=False)
class _Plan:
    decodes: list[DecodeGroup]
    chunks: list[_Chunk]
    causal_mask: torch.Tensor | None  # [tile, longest history + tile], its lower right corner used
    dtype: torch.dtype
    num_heads: int  # a group's mask has a row for each of them
    key_buffer: torch.Tensor  # [most blocks gathered at once, block_size, num_kv_heads, head_dim]
    value_buffer: torch.Tensor

    def fits(self, query: torch.Tensor, key_cache: torch.Tensor) -> bool:
        is_same_query = self.dtype == query.dtype and self.num_heads == query.shape[1]
        return is_same_query and self.key_buffer.shape[1:] == key_cache.shape[1:]

    @staticmethod
    def gather(
        cache: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor
    ) -> torch.Tensor:  # [num_slots, num_kv_heads, head_dim], in the buffer
        blocks = torch.index_select(cache, 0, block_ids, out=buffer[: len(block_ids)])
        return blocks.view(-1, *cache.shape[2:])


def _make_plan(metadata: AttentionMetadata, query: torch.Tensor, key_cache: torch.Tensor) -> _Plan:
    block_size = key_cache.shape[1]
    starts = metadata.query_start_loc.tolist()
    seq_lens = metadata.seq_lens.tolist()
    chunks, longest_tile, longest_history = [], 0, 0
    short_rows: dict[int, list[int]] = {}  # by the number of query tokens, rounded up
    for row, seq_len in enumerate(seq_lens):
        query_len = starts[row + 1] - starts[row]
        if query_len == 0:
            continue
        check_lengths(row, query_len, seq_len, metadata.block_tables, block_size)
        rounded = next((n for n in SHORT_QUERIES if query_len <= n), None)
        if rounded is not None:
            short_rows.setdefault(rounded, []).append(row)
            continue
        block_ids = metadata.block_tables[row, : -(-seq_len // block_size)]
        chunks.append(_Chunk(starts[row], starts[row + 1], seq_len, block_ids))
        if query_len < seq_len:
            longest_tile = max(longest_tile, min(query_len, QUERY_TILE))
            longest_history = max(longest_history, seq_len)
    groups = [
        make_decode_group(rows, starts, seq_lens, metadata.block_tables, query, key_cache)
        for short in short_rows.values()
        for rows in split_by_length(short, seq_lens, max_group_slots(key_cache))
    ]
    most_blocks = max([len(part.block_ids) for part in (*groups, *chunks)], default=0)
    buffer_shape = (most_blocks, *key_cache.shape[1:])
    return _Plan(
        groups,
        chunks,
        _causal_mask(longest_tile, longest_history, query) if longest_tile else None,
        query.dtype,
        query.shape[1],
        key_cache.new_empty(buffer_shape),
        key_cache.new_empty(buffer_shape),
    )


def check_lengths(
    row: int, query_len: int, seq_len: int, block_tables: torch.Tensor, block_size: int
) -> None:
    if not 0 < query_len <= seq_len or -(-seq_len // block_size) > block_tables.shape[1]:
        raise ValueError(
            f"sequence {row}: query_len is {query_len}, seq_len {seq_len}, block_tables "
            f"{tuple(block_tables.shape)} of {block_size}: they contradict each other"
        )


def max_group_slots(key_cache: torch.Tensor) -> int:
    return GROUP_KEY_BYTES[key_cache.device.type] // key_cache[0, 0].nbytes


def split_by_length(rows: list[int], seq_lens: list[int], max_slots: int) -> list[list[int]]:
    """Longest first, into groups of at most `max_slots` slots, padding included, unless it is one
    sequence, and without sequences shorter than half the group's longest."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=seq_lens.__getitem__, reverse=True):
        longest = seq_lens[groups[-1][0]] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest <= max_slots
        if fits and 2 * seq_lens[row] >= longest:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def make_decode_group(
    rows: list[int],  # longest first
    starts: list[int],  # query_start_loc
    seq_lens: list[int],
    block_tables: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
) -> DecodeGroup:
    """All that depends on lengths is worked out on the host: nobody waits for the device."""
    device, block_size = query.device, key_cache.shape[1]
    lens = torch.tensor([seq_lens[row] for row in rows])[:, None]
    first = torch.tensor([starts[row] for row in rows])[:, None]
    last = torch.tensor([starts[row + 1] - 1 for row in rows])[:, None]
    query_len = max(starts[row + 1] - starts[row] for row in rows)
    num_keys = seq_lens[rows[0]]
    num_blocks = -(-num_keys // block_size)
    positions = torch.arange(num_blocks * block_size)
    is_unused = positions >= lens
    # Aligned to the last one; rows that a sequence has not are its first once more.
    tokens = (last - torch.arange(query_len - 1, -1, -1)).maximum(first)
    # A query sees all keys but those of the queries behind it.
    hidden = positions[:num_keys] >= (lens - (last - tokens))[:, :, None]  # [n, query_len, keys]
    mask = None
    if hidden.any():
        hidden = hidden.repeat(1, query.shape[1] // key_cache.shape[2], 1)[:, None]
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -math.inf)
        mask = mask.to(device, non_blocking=True)
    block_ids = block_tables[torch.tensor(rows).to(device, non_blocking=True), :num_blocks]
    is_foreign = is_unused[:, ::block_size].to(device, non_blocking=True)
    return DecodeGroup(
        tokens=tokens.flatten().to(device, non_blocking=True),
        block_ids=block_ids.masked_fill(is_foreign, 0).flatten(),
        num_seqs=len(rows),
        num_keys=num_keys,
        unused=is_unused.flatten().nonzero().flatten().to(device, non_blocking=True),
        mask=mask,
    )


def _causal_mask(tile: int, num_keys: int, query: torch.Tensor) -> torch.Tensor:
    """`[tile, num_keys]`, the last row sees everything. Its lower right corner `[t, k]` is the mask
    of t query tokens that are the last of k keys, for any smaller t and k."""
    mask = torch.full((tile, num_keys), -math.inf, dtype=query.dtype, device=query.device)
    return mask.triu_(num_keys - tile + 1)


# -- attention over gathered keys and values


def attend_group(
    query: torch.Tensor,  # [n * query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [n * slots, num_kv_heads, head_dim], unused ones are overwritten
    values: torch.Tensor,  # the same
    group: DecodeGroup,
    scale: float,
) -> torch.Tensor:  # [n * query_len, num_heads, head_dim]
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = group.num_seqs, keys.shape[1]
    shared = num_heads // num_kv_heads
    keys.index_fill_(0, group.unused, 0)
    values.index_fill_(0, group.unused, 0)
    # Query heads that share a KV head become query rows of that head: keys are read once.
    query = query.view(num_seqs, -1, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(num_seqs, num_kv_heads, -1, head_dim)
    keys = keys.view(num_seqs, -1, num_kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
    values = values.view(num_seqs, -1, num_kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
    output = scaled_dot_product_attention(query, keys, values, attn_mask=group.mask, scale=scale)
    output = output.view(num_seqs, num_kv_heads, shared, -1, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_tokens, num_heads, head_dim)


def _attend_chunk(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor,  # the same
    causal_mask: torch.Tensor | None,  # of any size that is large enough; None: no history
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
