"""Keys and values in blocks, and attention that reads them through block tables.

    key_cache[layer], value_cache[layer]    [num_blocks, block_size, num_kv_heads, head_dim]

A batch is one row of tokens, sequence after sequence, and each sequence's tokens are its last ones,
whether one or many:

    sequence of seq_len 7, query_len 3       keys      0 1 2 3 4 5 6
                                             query 4   x x x x x . .     "bottom-right aligned":
                                             query 5   x x x x x x .     the last query sees
                                             query 6   x x x x x x x     everything

This is the specification that kernels are tested against, and the fast path on a CPU. It gathers
whole blocks. Short queries are attended together (`attention_plan.py`), longer ones one by one. A
backend plans a step once, and all layers write and attend with that plan.

Invariants: nothing after a sequence's length reaches the output, not even NaN (a masked score is
not enough: 0 * NaN is NaN); a slot of -1 is no request's; a plan is used only for queries and
caches of the dtype and shape that it was made for.

vLLM and SGLang call kernels that read through the table without gathering, as does
`beyond/paged_attention_triton.py`. Source: PagedAttention, arXiv 2309.06180.

See 02_paged_kv/README.md#the-memory-and-attention"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attention_plan
from attention_plan import DecodeGroup, group_short_queries

# Query rows attended at a time in a long query that has history or a window, so that a mask is
# [QUERY_TILE, seq_len] and not [query_len, seq_len].
QUERY_TILE = 256
ALIGNMENT = 64  # bytes: a line of the processor's cache, and PyTorch's own alignment


def reserve_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:  # [*shape], contiguous
    """Allocate zeros. On a CPU the system commits each page of memory when it is first written, so
    KV memory costs only the slots that were used, not its capacity."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)  # torch.zeros would write every byte
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


class PagedKVCache:
    """The KV memory of all layers. Slot `block_id * block_size + offset` holds one position."""

    allocate = staticmethod(reserve_zeros)  # of a layer's keys, or values

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
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.key_cache = [self.allocate(shape, dtype, device) for _ in range(num_layers)]
        self.value_cache = [self.allocate(shape, dtype, device) for _ in range(num_layers)]
        # Keys and values of all layers.
        num_bytes = dtype.itemsize * block_size * num_kv_heads * head_dim
        self.kv_bytes_per_block = 2 * num_layers * num_bytes


@dataclass(slots=True, eq=False)
class AttentionMetadata:
    """Where a batch's queries, keys and new slots are. Not changed once a step is planned with it.

    Tokens past `query_start_loc[-1]` are padding; a sequence without query tokens is padding too.
    """

    query_start_loc: Tensor  # [num_seqs + 1] int, first token of each sequence
    seq_lens: Tensor  # [num_seqs] int, keys of each sequence, including this step's
    block_tables: Tensor  # [num_seqs, max_blocks] int; unused entries: any block's id
    slot_mapping: Tensor  # [num_tokens] int64, -1: padding
    max_query_len: int
    max_seq_len: int
    window: int | None = None  # last keys that a query sees, its own included (>= 1); None: all
    # On the host, if they are known there, so that no code has to wait for the device.
    query_starts: Sequence[int] = ()  # query_start_loc
    host_seq_lens: Sequence[int] = ()  # seq_lens
    skipped: Sequence[int] = ()  # with a window: positions of each sequence before its first block

    def on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return query_start_loc and seq_lens. Waits for the device if the host has no copies."""
        if self.query_starts:
            return np.asarray(self.query_starts), np.asarray(self.host_seq_lens)
        return self.query_start_loc.cpu().numpy(), self.seq_lens.cpu().numpy()


class AttentionPlan(Protocol):
    """How layers write and read their KV in one step."""

    slot_mapping: Tensor  # [num_tokens] int64, -1: padding
    places: tuple[Tensor, Tensor] | None = None  # their blocks and offsets, once a layer has asked

    def write_kv(
        self,
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
        value_cache: Tensor,  # the same
    ) -> None:
        """Write each token's key and value to its slot, those of padding to the null block."""
        if self.places is None:
            slots = self.slot_mapping.clamp(min=0)
            block_size = key_cache.shape[1]
            self.places = slots // block_size, slots % block_size
        key_cache.index_put_(self.places, key)
        value_cache.index_put_(self.places, value)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
    ) -> Tensor: ...


# Block ids -> the keys and values in these blocks, each [num_slots, num_kv_heads, head_dim].
Gather = Callable[[Tensor], tuple[Tensor, Tensor]]


class LongQuery(NamedTuple):
    query_len: int
    seq_len: int
    rows: slice  # rows of the query: the last tokens of one sequence
    block_ids: Tensor  # [blocks of the sequence] int


class PagedPlan(AttentionPlan):
    """The plan that all layers of a step share: which sequences are attended together, and buffers
    for gathered keys and values.

    Every group, every long query and every layer reuses these buffers: fresh memory for each layer
    costs more than the attention does.
    """

    def __init__(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        key_cache: Tensor,
        backend: TorchAttentionBackend,
    ) -> None:
        """Plan for queries of `num_heads` heads, and caches like `key_cache`."""
        self.metadata = metadata
        self.num_heads = num_heads
        self.backend = backend
        self.slot_mapping = metadata.slot_mapping
        self.window = metadata.window
        self.starts, self.seq_lens = metadata.on_host()
        self.query_lens = np.diff(self.starts)
        self.key_buffer = self.value_buffer = key_cache[:0]
        group_bytes = attention_plan.GROUP_KEY_BYTES[key_cache.device.type]
        self.max_slots = group_bytes // key_cache[0, 0].nbytes
        is_real = self.query_lens > 0
        is_short = backend.is_short(self)
        self.groups = self.make_groups(np.flatnonzero(is_real & is_short), key_cache)
        self.long_queries: list[LongQuery] = []
        for row in np.flatnonzero(is_real & ~is_short).tolist():
            start, stop = self.starts[row : row + 2].tolist()
            seq_len = int(self.seq_lens[row])
            block_ids = metadata.block_tables[row, : -(-seq_len // key_cache.shape[1])]
            self.long_queries.append(
                LongQuery(stop - start, seq_len, slice(start, stop), block_ids)
            )
        # The largest first: the buffer is reallocated when it is too small.
        self.groups.sort(key=lambda group: -len(group.block_ids))
        self.long_queries.sort(key=lambda long: -long.seq_len)

    def make_groups(self, short: np.ndarray, key_cache: Tensor) -> list[DecodeGroup]:
        """Group the sequences `short`."""
        groups = group_short_queries(short, self.query_lens, self.seq_lens, self.max_slots)
        return [
            DecodeGroup(
                rows=rows,
                starts=self.starts,
                seq_lens=self.seq_lens,
                block_tables=self.metadata.block_tables,
                num_heads=self.num_heads,
                key_cache=key_cache,
                window=self.window,
            )
            for rows in groups
        ]

    def gather(
        self, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor
    ) -> tuple[Tensor, Tensor]:  # in the buffers
        n = len(block_ids)
        if n > len(self.key_buffer):
            self.key_buffer = key_cache.new_empty(n, *key_cache.shape[1:])
            self.value_buffer = torch.empty_like(self.key_buffer)
        keys = torch.index_select(key_cache, 0, block_ids, out=self.key_buffer[:n])
        values = torch.index_select(value_cache, 0, block_ids, out=self.value_buffer[:n])
        return keys.flatten(0, 1), values.flatten(0, 1)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        output = torch.zeros_like(query)
        num_kv_heads = key_cache.shape[2]
        gather = partial(self.gather, key_cache, value_cache)
        for group in self.groups:
            keys, values = gather(group.block_ids)
            output[group.tokens] = group.attend(query[group.tokens], keys, values, scale)
        for long in self.long_queries:
            queries = by_kv_head(query[long.rows], num_kv_heads)
            attended = self.backend.attend_long(self, queries, long, gather, scale)
            by_kv_head(output[long.rows], num_kv_heads).copy_(attended)
        return output

    @cached_property
    def causal_mask(self) -> Tensor:
        """`[tile, num_keys]`, where the last row sees everything, or the window. The lower right
        corner `[t, k]` is the mask of t query tokens that are the last of k keys, for any smaller t
        and k."""
        tile = min(max(long.query_len for long in self.long_queries), QUERY_TILE)
        num_keys = max(long.seq_len for long in self.long_queries)
        mask = self.key_buffer.new_full((tile, num_keys), -math.inf)
        right = mask.triu(num_keys - tile + 1)
        return right if self.window is None else right + mask.tril(num_keys - tile - self.window)


def by_kv_head(tensor: Tensor, num_kv_heads: int) -> Tensor:
    """A view `[num_kv_heads, heads that share keys, num_tokens, head_dim]` of `[num_tokens,
    num_heads, head_dim]`."""
    return tensor.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def repeat_for(query: Tensor, keys: Tensor) -> Tensor:
    """Keys `[num_keys, num_kv_heads, head_dim]` as a view with the first two dimensions of such a
    query: with KV heads first, repeating keys for the heads that share them copies nothing."""
    return keys.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # the same
    metadata: AttentionMetadata,
    scale: float,
    backend: AttentionBackend | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Causal attention of every query token to its own sequence, itself included.

    The step's keys and values must have been written. `num_heads` is a multiple of `num_kv_heads`;
    adjacent query heads share one. Rows of padding tokens are zero.
    """
    plan = (backend or TorchAttentionBackend()).plan(metadata, query.shape[1], key_cache)
    return plan.attend(query, key_cache, value_cache, scale)


@runtime_checkable
class AttentionBackend(Protocol):
    """Makes plans. A plan is for one step and one number of query heads, and for all layers whose
    caches have the shape, strides and dtype of the given one."""

    @property
    def plan(self) -> Callable[[AttentionMetadata, int, Tensor], AttentionPlan]: ...


class TorchAttentionBackend:
    """The PyTorch backend, for any device. Others replace one of its methods."""

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> PagedPlan:
        return PagedPlan(metadata, num_heads, key_cache, self)

    def is_short(self, plan: PagedPlan) -> np.ndarray:
        """Return for each sequence whether its queries are attended in a group: `[num_seqs]`."""
        return plan.query_lens <= max(attention_plan.SHORT_QUERIES, default=0)

    def attend_long(
        self, plan: PagedPlan, query: Tensor, long: LongQuery, gather: Gather, scale: float
    ) -> Tensor:
        """Attend one long query. Query and output are `[num_kv_heads, heads that share keys,
        query_len, head_dim]`."""
        keys, values = (repeat_for(query, t[: long.seq_len]) for t in gather(long.block_ids))
        query_len = query.shape[2]
        if plan.window is None and query_len == long.seq_len:
            return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
        tiles = []
        for start in range(0, query_len, QUERY_TILE):
            stop = min(start + QUERY_TILE, query_len)
            num_keys = long.seq_len - query_len + stop
            first_key = 0
            if plan.window is not None:
                first_key = max(num_keys - (stop - start) - plan.window + 1, 0)
            tile = scaled_dot_product_attention(
                query[:, :, start:stop],
                keys[:, :, first_key:num_keys],
                values[:, :, first_key:num_keys],
                attn_mask=plan.causal_mask[start - stop :, first_key - num_keys :],
                scale=scale,
            )
            tiles.append(tile)
        return torch.cat(tiles, dim=2)
