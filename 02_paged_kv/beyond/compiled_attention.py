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

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from attention_plan import DecodeGroup
from cpp_library import try_to_compile
from decode_attention import SEES_ALL, CompiledRows, QueryRows
from paged_attention import (
    AttentionMetadata,
    Gather,
    LongQuery,
    PagedKVCache,
    PagedPlan,
    TorchAttentionBackend,
    reserve_zeros,
)
from tiled_attention import attend_in_tiles, is_for_tiles


class HeadMajorKVCache(PagedKVCache):
    """The same shapes, over memory that is `[num_blocks, num_kv_heads, block_size, head_dim]`."""

    @staticmethod
    def allocate(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        num_blocks, block_size, num_kv_heads, head_dim = shape
        memory = reserve_zeros((num_blocks, num_kv_heads, block_size, head_dim), dtype, device)
        return memory.transpose(1, 2)


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

    def attend(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output = super().attend(query, key_cache, value_cache, scale)
        if self.rows is not None:
            self.backend.attend_rows(query, key_cache, value_cache, self.rows, scale, output)
        return output


class CompiledAttentionBackend(TorchAttentionBackend):
    """An `AttentionBackend` for a CPU. `attend_rows` (a `CompiledRows`) was compiled for
    `num_heads` query heads and caches like `key_cache`. Everything else (long queries, a draft
    model) is attended as `others` do. Short queries with a window are laid out by
    `compose_windows`."""

    def __init__(
        self,
        attend_rows: Callable[..., None],
        num_heads: int,
        key_cache: torch.Tensor,
        others: TorchAttentionBackend,
    ) -> None:
        self.attend_rows = attend_rows
        self.others = others
        self.attend_group = others.attend_group
        # All that the machine code depends on: the strides determine the shape of a block.
        self._made_for = num_heads, key_cache.dtype, key_cache.stride()

    @classmethod
    def compiled_for(
        cls, num_heads: int, kv_cache: PagedKVCache, others: TorchAttentionBackend
    ) -> CompiledAttentionBackend | None:
        """Make a backend for KV tensors like those of `kv_cache`, which is a `HeadMajorKVCache` of
        any size. Takes a second or two the first time on a machine. Returns None, with a warning,
        without a C++ compiler."""
        key_cache = kv_cache.key_cache[0]
        otherwise = "decode attention is not compiled, keys are gathered"
        attend_rows = try_to_compile(partial(CompiledRows, num_heads, key_cache), otherwise)
        if attend_rows is None:
            return None
        return cls(attend_rows, num_heads, key_cache, others)

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
