"""Decode attention on a CPU that reads keys and values without gathering them.

`paged_attention.py` gathers the keys of each sequence and then attends to them, so keys travel
through the memory three times. `decode_attention.cpp` gathers nothing, and reads each key once. Its
unit is a query *row*: one query token that sees the first `num_keys` keys of a sequence. A decode
is one row; each of five tokens to be verified is a row that sees one key more than the last.

A row's keys come in *splits* of `SPLIT_KEYS`. Each yields a partial result, and the results of a
row are merged, so many threads have work even if there is one long sequence:

    row    keys    splits 0  1  2      order of the work
    A      600            A0 A1 A2     A0 B0 C0 A1 C1 A2     by split number, so that rows with a
    B      100            B0                                 common prefix read it one after another
    C      400            C0 C1

Memory is head-major, `[num_blocks, num_kv_heads, block_size, head_dim]`: a head's keys of a block
are one run. Callers see the transposed view, so nothing changes for them.

Invariants: memory that is not a row's own does not reach its output, not even NaN; a result is
bitwise independent of the other sequences in the batch and of which blocks a sequence has, because
splits are counted from key 0, have one size and are merged in order. Sources: FlashDecoding; the
merge is that of FlashAttention-2, arXiv 2307.08691.

See 02_paged_kv/beyond/README.md#decode-attention-compiled"""

from __future__ import annotations

from ctypes import c_double, c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch

from cpp_library import SCALARS, load_library

SPLIT_KEYS = 256
SEES_ALL = 1 << 60  # a window that hides nothing


class QueryRows:
    """The rows that all layers of a step share, and their splits in order of the work. Arrays are
    int64."""

    def __init__(
        self,
        block_size: int,
        tables: torch.Tensor,  # [num_seqs, max_blocks] int32, rows of it contiguous
        tokens: np.ndarray,  # [num_rows], rows of the query
        sequences: np.ndarray,  # [num_rows], rows of `tables`
        num_keys: np.ndarray,  # [num_rows], keys of the sequence that the row sees,
        window: int = SEES_ALL,  # but at most this many of the last ones
    ) -> None:
        self.tables = tables
        self.tokens = tokens
        self.sequences = sequences
        self.num_keys = num_keys
        self.window = window
        counts = -(-num_keys // (split_blocks(block_size) * block_size))
        # [num_rows + 1], the first split of each row, counted row by row.
        self.first_splits = np.append(0, counts.cumsum())
        owners = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(owners)) - self.first_splits[owners]
        order = numbers.argsort(kind="stable")
        self.owners = owners[order]  # [num_splits], the row
        self.numbers = numbers[order]  # [num_splits], index within its row
        # Addresses and sizes of all these, for the machine code.
        arrays = tokens, sequences, num_keys, self.first_splits, self.owners, self.numbers
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        self.arguments = [tables.data_ptr(), tables.stride(0)]
        self.arguments += [array.ctypes.data for array in arrays]
        self.arguments += [len(tokens), len(owners), window]


def split_blocks(block_size: int) -> int:
    return -(-SPLIT_KEYS // block_size)


class CompiledRows:
    """Attends each row to its keys in machine code, for `num_heads` query heads and caches like
    `key_cache`, with as many threads as torch has at the time of a call; their number does not
    change a bit."""

    def __init__(self, num_heads: int, key_cache: torch.Tensor) -> None:
        """Raises `RuntimeError` if nothing can be compiled."""
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        constants = dict(
            SCALAR=SCALARS[key_cache.dtype],
            KV_HEADS=num_kv_heads,
            SHARED=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            SPLIT_BLOCKS=split_blocks(block_size),
        )
        library = load_library(Path(__file__).with_suffix(".cpp"), constants)
        self._function = library.attend_rows
        self._function.restype = None
        self._function.argtypes = (
            c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3,  # query to strides
            c_void_p, c_int64, *[c_void_p] * 6, *[c_int64] * 3,  # `QueryRows.arguments`
            c_double, c_void_p, c_int,
        )  # fmt: skip
        library.partial_bytes.restype = c_int64
        self._bytes_a_split = num_kv_heads * library.partial_bytes()
        self._partials = torch.empty(0, dtype=torch.uint8)  # for all layers and steps

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,  # the same
        rows: QueryRows,
        scale: float,
        output: torch.Tensor,  # like query; the rows' tokens are written
    ) -> None:
        num_bytes = len(rows.owners) * self._bytes_a_split
        if num_bytes > len(self._partials):
            self._partials = torch.empty(num_bytes, dtype=torch.uint8)
        if not query[0].is_contiguous():
            query = query.contiguous()
        self._function(
            query.data_ptr(), query.stride(0), output.data_ptr(), key_cache.data_ptr(),
            value_cache.data_ptr(), *key_cache.stride()[:3], *rows.arguments, scale,
            self._partials.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
