"""The attention backend that computes short queries in machine code (`decode_attention.py`).

In a batch in any order:

    one query token, or a few (draft tokens)     the compiled function, nothing is gathered
    a long query, in bfloat16                    `tiled_attention.py`
    everything else                              another backend: chapter 2's, or chapter 6's

The compiled function needs a head's keys of a block in one run, so this backend has its own memory,
in which a block is stored head-major. All other code sees the same `[num_blocks, block_size,
num_kv_heads, head_dim]`. Invariant: the memory layout and the choice of function affect only speed.

See 02_paged_kv/beyond/README.md"""

from __future__ import annotations

import numpy as np
import torch

from attention_plan import DecodeGroup
from decode_attention import SEES_ALL, AttendRows, QueryRows, compile_rows
from paged_attention import (
    AttentionMetadata,
    Gather,
    LongQuery,
    PagedKVCache,
    PagedPlan,
    TorchAttentionBackend,
)
from tiled_attention import attend_in_tiles, is_for_tiles


class HeadMajorKVCache(PagedKVCache):
    """The same shapes, over memory that is `[num_blocks, num_kv_heads, block_size, head_dim]`."""

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
        super().__init__(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self.key_cache = [_head_major(cache) for cache in self.key_cache]
        self.value_cache = [_head_major(cache) for cache in self.value_cache]


def _head_major(zeros: torch.Tensor) -> torch.Tensor:
    num_blocks, block_size, num_kv_heads, head_dim = zeros.shape
    return zeros.view(num_blocks, num_kv_heads, block_size, head_dim).transpose(1, 2)


def write_kv_anywhere(
    key: torch.Tensor,  # as in `write_kv`
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv` for memory in any order."""
    is_real = slot_mapping >= 0
    if not is_real.all():
        key = key[is_real]
        value = value[is_real]
        slot_mapping = slot_mapping[is_real]
    block_size = key_cache.shape[1]
    places = slot_mapping // block_size, slot_mapping % block_size
    key_cache.index_put_(places, key)
    value_cache.index_put_(places, value)


class CompiledPlan(PagedPlan):
    """A plan whose short queries are computed in machine code, where they are."""

    backend: CompiledAttentionBackend
    rows: QueryRows | None = None

    def make_groups(self, short: np.ndarray, key_cache: torch.Tensor) -> list[DecodeGroup]:
        if not self.backend.is_made_for(self.num_heads, key_cache):
            return super().make_groups(short, key_cache)
        if len(short):
            lens = self.query_lens[short]
            sequences = np.repeat(short, lens)
            within = np.arange(len(sequences)) - np.repeat(lens.cumsum() - lens, lens)
            self.rows = QueryRows(
                key_cache.shape[1],
                self.metadata.block_tables.to(torch.int32).contiguous(),
                self.starts[sequences].astype(np.int64) + within,
                sequences,
                (self.seq_lens - self.query_lens)[sequences].astype(np.int64) + within + 1,
                SEES_ALL if self.window is None else self.window,
            )
        return []

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        write_kv_anywhere(key, value, key_cache, value_cache, self.slot_mapping)

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output = super().attend(query, key_cache, value_cache, scale)
        if self.rows is not None:
            self.backend.attend_rows(query, key_cache, value_cache, self.rows, scale, output)
        return output


class CompiledAttentionBackend(TorchAttentionBackend):
    """An `AttentionBackend` for a CPU. `attend_rows` was compiled for `num_heads` query heads and
    caches like `key_cache`. Everything else (long queries, a draft model) is attended as `others`
    do. Short queries with a window are laid out by `compose_windows`."""

    def __init__(
        self,
        attend_rows: AttendRows,
        num_heads: int,
        key_cache: torch.Tensor,
        others: TorchAttentionBackend | None = None,
    ) -> None:
        self.attend_rows = attend_rows
        self.others = others or TorchAttentionBackend()
        self.attend_group = self.others.attend_group
        # All that the machine code depends on: the strides determine the shape of a block.
        self._made_for = num_heads, key_cache.dtype, key_cache.stride()

    @classmethod
    def compiled_for(
        cls, num_heads: int, kv_cache: PagedKVCache, others: TorchAttentionBackend | None = None
    ) -> CompiledAttentionBackend | None:
        """Make a backend for KV tensors like those of `kv_cache`, which is a `HeadMajorKVCache` of
        any size. Takes a second or two the first time on a machine. Returns None, with a warning,
        without a C++ compiler."""
        key_cache = kv_cache.key_cache[0]
        attend_rows = compile_rows(num_heads, key_cache)
        return None if attend_rows is None else cls(attend_rows, num_heads, key_cache, others)

    def is_made_for(self, num_heads: int, key_cache: torch.Tensor) -> bool:
        return self._made_for == (num_heads, key_cache.dtype, key_cache.stride())

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, key_cache: torch.Tensor
    ) -> CompiledPlan:
        return CompiledPlan(metadata, num_heads, key_cache, self)

    def is_short(self, plan: PagedPlan) -> np.ndarray:
        is_short = self.others.is_short(plan)
        if self.is_made_for(plan.num_heads, plan.key_buffer):
            is_short = is_short | (plan.query_lens == 1)  # a very long sequence, too
        return is_short

    def attend_long(
        self,
        plan: PagedPlan,
        query: torch.Tensor,
        long: LongQuery,
        gather: Gather,
        scale: float,
    ) -> torch.Tensor:
        if plan.window is not None or not is_for_tiles(query, long.seq_len):
            return self.others.attend_long(plan, query, long, gather, scale)
        keys, values = (t[: long.seq_len] for t in gather(long.block_ids))
        return attend_in_tiles(query, keys, values, scale)
