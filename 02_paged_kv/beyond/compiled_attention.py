"""The backend that leaves decodes to the compiled function of `decode_attention.py`.

What goes where, in a batch in any order:

    one query token, and together enough keys    the compiled function, nothing is gathered
    a long query, in bfloat16                    `tiled_attention.py`
    everything else                              the plan of the chapter, as ever

Below `MIN_KEY_ELEMENTS` the call costs more than the gathering. The compiled loop wants a head's
keys of a block in one run, so this backend comes with memory of its own, in which a block lies
head-major. Everybody else sees the same `[num_blocks, block_size, num_kv_heads, head_dim]`.

Invariant: where a sequence's keys lie, and who computes, is a matter of speed only.
"""

from __future__ import annotations

import numpy as np
import torch

from attention_plan import DecodeGroup
from decode_attention import (
    DecodeAttention,
    DecodeSplits,
    compile_decode_attention,
    split_sequences,
)
from paged_attention import (
    AttentionMetadata,
    Gather,
    LongQuery,
    PagedKVCache,
    PagedPlan,
)
from tiled_attention import attend_in_tiles, is_for_tiles
from window_attention import WindowMetadata, WindowPlan

# Keys, KV heads and channels of all decodes of a step, multiplied: 512 keys of Qwen3-0.6B.
# Measured: `python 02_paged_kv/lab/plot_decode_attention.py --record decode_attention --threads 1`
MIN_KEY_ELEMENTS = 1 << 19


class HeadMajorKVCache(PagedKVCache):
    """The same shapes, in memory that is `[num_blocks, num_kv_heads, block_size, head_dim]`."""

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
    """`write_kv` for memory of any order."""
    is_real = slot_mapping >= 0
    if not is_real.all():
        key, value, slot_mapping = key[is_real], value[is_real], slot_mapping[is_real]
    block_size = key_cache.shape[1]
    places = slot_mapping // block_size, slot_mapping % block_size
    key_cache.index_put_(places, key)
    value_cache.index_put_(places, value)


class CompiledPlan(PagedPlan):
    """A plan that takes the decodes out, if they are worth it. Mixed into any other plan."""

    window: int | None = None  # of all sequences; `WindowPlan` has one

    def __init__(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        key_cache: torch.Tensor,
        backend: CompiledAttentionBackend,
    ) -> None:
        self.backend = backend
        self.splits: DecodeSplits | None = None
        super().__init__(metadata, num_heads, key_cache)

    def lengths(
        self, metadata: AttentionMetadata, key_cache: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts, seq_lens, is_short = super().lengths(metadata, key_cache)
        is_decode = np.diff(starts) == 1
        num_keys = int(seq_lens[is_decode].sum())
        is_decode &= self.backend.takes(self.num_heads, key_cache, num_keys)
        self.decodes = np.flatnonzero(is_decode)
        return starts, seq_lens, is_short | is_decode  # also a very long sequence

    def make_groups(
        self,
        short: np.ndarray,
        query_lens: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        tables: torch.Tensor,
        key_cache: torch.Tensor,
    ) -> list[DecodeGroup]:
        """Lengths and tables are known not to contradict each other."""
        rows = self.decodes
        if len(rows):
            lens = torch.from_numpy(seq_lens[rows])
            where = tables[_as_slice(rows)], key_cache.shape[1]
            self.splits = split_sequences(lens, *where, self.window)
            self.tokens = _as_slice(starts[rows])
            short = np.setdiff1d(short, rows, assume_unique=True)
        return super().make_groups(short, query_lens, starts, seq_lens, tables, key_cache)

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
        if self.splits is not None:
            decodes, caches = query[self.tokens], (key_cache, value_cache)
            output[self.tokens] = self.backend.decode(decodes, *caches, self.splits, scale)
        return output


def _as_slice(indices: np.ndarray) -> slice | torch.Tensor:
    """What selects them; neighbours without a copy."""
    first, n = int(indices[0]), len(indices)
    if indices[-1] - first == n - 1:  # they ascend
        return slice(first, first + n)
    return torch.from_numpy(indices)


class CompiledWindowPlan(CompiledPlan, WindowPlan):
    """Without its decodes, a `WindowPlan`."""

    def attend_long(
        self, query: torch.Tensor, long: LongQuery, gather: Gather, scale: float
    ) -> torch.Tensor:
        return WindowPlan.attend_long(self, query, long, gather, scale)


class CompiledAttentionBackend:
    """An `AttentionBackend` for a CPU. `decode` was compiled for `num_heads` query heads and caches
    like `key_cache`; other models (a draft model) are attended to as ever. With
    `min_key_elements=0` it computes all decodes, however few. Decodes that see a window are laid
    out by `compose_windows`."""

    plan_type: type[CompiledPlan] = CompiledPlan

    def __init__(
        self,
        decode: DecodeAttention,
        num_heads: int,
        key_cache: torch.Tensor,
        min_key_elements: int | None = None,  # None: `MIN_KEY_ELEMENTS`
    ) -> None:
        self.decode = decode
        # All that the machine code depends on: the strides tell the shape of a block.
        self._made_for = num_heads, key_cache.dtype, key_cache.stride()
        self._min = MIN_KEY_ELEMENTS if min_key_elements is None else min_key_elements

    @classmethod
    def compiled_for(
        cls, num_heads: int, kv_cache: PagedKVCache
    ) -> CompiledAttentionBackend | None:
        """For KV tensors like those of `kv_cache`, which is a `HeadMajorKVCache` of any size.

        Takes some 20 seconds, a few once the machine code is on the disk, and says so. None, and
        a warning, where there is no C++ compiler."""
        key_cache, value_cache = kv_cache.key_cache[0], kv_cache.value_cache[0]
        decode = compile_decode_attention(num_heads, key_cache, value_cache)
        return None if decode is None else cls(decode, num_heads, key_cache)

    def takes(self, num_heads: int, key_cache: torch.Tensor, num_keys: int) -> bool:
        """Whether decodes with so many keys together are for the compiled function."""
        is_known = self._made_for == (num_heads, key_cache.dtype, key_cache.stride())
        return is_known and num_keys * key_cache.shape[2:].numel() >= self._min

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, key_cache: torch.Tensor
    ) -> CompiledPlan:
        kind = CompiledWindowPlan if isinstance(metadata, WindowMetadata) else self.plan_type
        return kind(metadata, num_heads, key_cache, self)
