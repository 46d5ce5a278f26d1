"""The attention backend that computes short queries in machine code (`decode_attention.py`).

In a batch in any order:

    one query token, or a few (draft tokens)     the compiled function, nothing is gathered
    a long query, in bfloat16                    `tiled_attention.py`
    everything else                              chapter 2's plan

The compiled function needs a head's keys of a block in one run, so this backend has its own memory,
in which a block is stored head-major. All other code sees the same `[num_blocks, block_size,
num_kv_heads, head_dim]`. Invariant: the memory layout and the choice of function affect only speed.
"""

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
)
from tiled_attention import attend_in_tiles, is_for_tiles
from window_attention import WindowMetadata, WindowPlan


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
        sizes = num_layers, num_blocks, block_size, num_kv_heads, head_dim
        super().__init__(*sizes, dtype, device)
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
        key, value, slot_mapping = key[is_real], value[is_real], slot_mapping[is_real]
    block_size = key_cache.shape[1]
    places = slot_mapping // block_size, slot_mapping % block_size
    key_cache.index_put_(places, key)
    value_cache.index_put_(places, value)


class CompiledPlan(PagedPlan):
    """A plan whose short queries are computed in machine code. A mix-in for any other plan."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        key_cache: torch.Tensor,
        backend: CompiledAttentionBackend,
    ) -> None:
        self.backend = backend
        self.rows: QueryRows | None = None
        self.is_compiled = backend.is_made_for(num_heads, key_cache)
        self.window = metadata.window if isinstance(metadata, WindowMetadata) else SEES_ALL
        super().__init__(metadata, num_heads, key_cache)

    def lengths(
        self, metadata: AttentionMetadata, key_cache: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts, seq_lens, is_short = super().lengths(metadata, key_cache)
        if self.is_compiled:
            is_short = is_short | (np.diff(starts) == 1)  # a very long sequence, too
        return starts, seq_lens, is_short

    def make_groups(
        self,
        short: np.ndarray,
        query_lens: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        tables: torch.Tensor,
        key_cache: torch.Tensor,
    ) -> list[DecodeGroup]:
        """Lengths and tables are known to be consistent."""
        if not self.is_compiled:
            return super().make_groups(short, query_lens, starts, seq_lens, tables, key_cache)
        if len(short):
            lens = query_lens[short]
            sequences = np.repeat(short, lens)
            within = np.arange(len(sequences)) - np.repeat(lens.cumsum() - lens, lens)
            self.rows = QueryRows(
                key_cache.shape[1],
                tables.to(torch.int32).contiguous(),
                starts[sequences].astype(np.int64) + within,
                sequences,
                (seq_lens - query_lens)[sequences].astype(np.int64) + within + 1,
                self.window,
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

    def attend_long(
        self, query: torch.Tensor, long: LongQuery, gather: Gather, scale: float
    ) -> torch.Tensor:
        if not is_for_tiles(query, long.seq_len):
            return super().attend_long(query, long, gather, scale)
        keys, values = (t[: long.seq_len] for t in gather(long.block_ids))
        return attend_in_tiles(query, keys, values, scale)

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output = super().attend(query, key_cache, value_cache, scale)
        if self.rows is not None:
            self.backend.attend_rows(query, key_cache, value_cache, self.rows, scale, output)
        return output


class CompiledWindowPlan(CompiledPlan, WindowPlan):
    """A `WindowPlan` whose short queries are computed in machine code."""

    def attend_long(
        self, query: torch.Tensor, long: LongQuery, gather: Gather, scale: float
    ) -> torch.Tensor:
        return WindowPlan.attend_long(self, query, long, gather, scale)


class CompiledAttentionBackend:
    """An `AttentionBackend` for a CPU. `attend_rows` was compiled for `num_heads` query heads and
    caches like `key_cache`; other models (a draft model) use chapter 2's plan. Short queries with a
    window are laid out by `compose_windows`."""

    plan_type: type[CompiledPlan] = CompiledPlan

    def __init__(self, attend_rows: AttendRows, num_heads: int, key_cache: torch.Tensor) -> None:
        self.attend_rows = attend_rows
        # All that the machine code depends on: the strides determine the shape of a block.
        self._made_for = num_heads, key_cache.dtype, key_cache.stride()

    @classmethod
    def compiled_for(
        cls, num_heads: int, kv_cache: PagedKVCache
    ) -> CompiledAttentionBackend | None:
        """Make a backend for KV tensors like those of `kv_cache`, which is a `HeadMajorKVCache` of
        any size. Takes a second or two the first time on a machine. Returns None, with a warning,
        without a C++ compiler."""
        key_cache = kv_cache.key_cache[0]
        attend_rows = compile_rows(num_heads, key_cache)
        return None if attend_rows is None else cls(attend_rows, num_heads, key_cache)

    def is_made_for(self, num_heads: int, key_cache: torch.Tensor) -> bool:
        return self._made_for == (num_heads, key_cache.dtype, key_cache.stride())

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, key_cache: torch.Tensor
    ) -> CompiledPlan:
        kind = CompiledWindowPlan if isinstance(metadata, WindowMetadata) else self.plan_type
        return kind(metadata, num_heads, key_cache, self)
