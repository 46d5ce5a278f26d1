"""`paged_attention` as Triton kernels: keys are read where they lie.

Nothing is gathered to memory first. For each key, the attention kernel looks up the block in the
table and computes the address:

    row m of a tile     query token m // num_shared, query head m % num_shared of this KV head,
                        so the heads that share a KV head also share every key that is loaded
    key n of a tile     position p -> block table[p // block_size], offset p % block_size

Softmax is *online*: with the highest score so far m, the sum of exp(score - m) and the weighted sum
of values are kept in float32 and rescaled whenever m grows. So no row of scores is ever stored, and
one kernel serves any mix of one and many query tokens, any block size, any head_dim up to 256
(padded to a power of two).

One program for all keys of a sequence would not fit a real batch: one sequence of 100,000 keys
keeps a program busy long after the others are done. So a sequence is divided twice, its queries
into tiles and its keys into splits of a fixed number of keys. The tiles of all sequences are
numbered through, with a number to spare at the end of each sequence, so that its first tile follows
from `query_start_loc` alone:

    sequence          A: 1 token, 700 keys   B: 1, 90   C: 9 tokens in tiles of 8, 300 keys
    query_start_loc   0                      1          2                              11
    first tile        0 // 8 + 0 = 0         1          2                              (4)
    splits            0-255  -511  -699      0-89       0-255  -299, for each of its two tiles

A program finds the sequence of its tile by binary search, and ends at once if there is no such
tile. So nothing is planned on the host but upper bounds, and nothing waits for the device. For
decodes the bound of splits may be far too high, because a graph of a step
(`common/runner/graphs.py`) has to work for the longest possible sequences: 256 of up to 40,960
tokens have 160 splits each, nearly all without work. So decodes have at most `MAX_PROGRAMS`, and
each takes one split after the other. Adjacent programs take the KV heads of one tile, whose keys
are adjacent in a block.

A split yields a *partial* result: attention to its own keys alone, and the log of the sum of
exp(score), in scratch memory. A second kernel merges the results of a row, each with the weight
exp(its log-sum-exp). A sequence of one split writes its output directly and is not merged.

A batch is computed in two launches, because next to a chunk of 512 tokens a decode in a tile of 64
rows would be 97 % padding (chapter 6). The host knows where the long queries begin:

    sequences          | B | C | D d d |      E: chunk of 4 | A: chunk of 6       |
    launch             short: 16 rows a tile  long: 64 rows a tile
    splits of keys     256 keys each          only if there are few tiles

The splits of decodes have a constant length, not a share of the GPU's free capacity. So the result
of a decode does not depend on the other decodes. For longer queries splits serve only to keep the
GPU busy when there are few tiles, or one history is much longer than the others, and are as long as
that allows.

Keys that every row of a tile sees need no mask; only the tiles on the diagonal, at the end, have
one. Invariants: keys that a tile must not see are never loaded, so garbage cannot reach the output,
nor whole tiles that a layer's window (`window_attention.py`) hides; scratch memory that no program
has written reaches no output; nothing here waits for the device. Caches may lie in memory in any
order in which a head's channels are neighbours.

`paged_attention.py` is what this is tested against: on a GPU, or anywhere in Triton's interpreter.
Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding; vLLM's unified Triton kernel searches
for a tile's sequence in the same way, and FlashInfer plans its work on the host (arXiv 2501.01005).

See 02_paged_kv/beyond/README.md#the-kernels"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_launch import TRITON_TYPES, AttentionShape, Launch
from paged_attention import AttentionMetadata, AttentionPlan
from triton_or_none import HAS_TRITON, IS_INTERPRETED, jit_for_any, tl, triton

MAX_HEAD_DIM = 256
SHORT_ROWS = 16  # query tokens x heads that share a KV head; more is a long query
SPLIT_KEYS = 256  # keys per split of a short query; with fewer, merging costs more than it gains
NUM_MULTIPROCESSORS = 132  # that should have work; querying the device is not worth it
MAX_SCRATCH_BYTES = 256 << 20  # with longer splits, if there would be more
MAX_PROGRAMS = 128 * NUM_MULTIPROCESSORS  # of a launch; one without work costs about a nanosecond
SPLITS_AT_ONCE = 16  # loaded by the merging kernel at a time
# Query rows and keys per tile, and warps, for head_dim up to 64, 128 and 256. The largest that the
# compiler holds in registers without spilling, in the shared memory of any GPU: see the table of
# `python -m workshop.resources`. A product of 16 rows is the smallest there is.
TILES = {
    ("16 bits", "short"): ((16, 64, 4), (16, 64, 4), (16, 32, 4)),
    ("16 bits", "long"): ((64, 64, 4), (64, 64, 8), (64, 32, 8)),
    ("float32", "short"): ((16, 32, 4), (16, 32, 8), (16, 16, 8)),
    ("float32", "long"): ((32, 32, 8), (32, 16, 8), (32, 16, 8)),
}


def choose_tile(shape: AttentionShape, is_short: bool) -> tuple[int, int, int]:
    """Query rows, keys, warps. Short queries are those that fit a tile of 16 rows."""
    kind = "float32" if shape.dtype == torch.float32 else "16 bits"
    size = (shape.head_dim > 64) + (shape.head_dim > 128)
    return TILES[kind, "short" if is_short else "long"][size]


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# -- the kernels: attend, merge


@jit_for_any()
def _find_seq(query_start_loc, place, first_seq, num_seqs, TILE_TOKENS: tl.constexpr):
    """Return the last sequence that begins at `place`, a tile, or before it. TILE_TOKENS 0: a
    token."""
    low = first_seq
    high = first_seq + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle).to(tl.int32)
        if TILE_TOKENS:
            start = start // TILE_TOKENS + middle
        if start <= place:
            low = middle
        else:
            high = middle
    return low


@jit_for_any("table_stride", "first_seq", "num_seqs", "first_token", "split_len", "max_splits")
def _attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [tokens of this launch, num_heads, max_splits, head_dim] float32
    partial_lse,  # [tokens of this launch, num_heads, max_splits] float32
    query,  # like output
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    query_start_loc,  # [all sequences + 1]
    seq_lens,  # [all sequences]
    block_tables,  # [all sequences, max_blocks]
    table_stride,
    first_seq,
    num_seqs,
    first_token,
    split_len,  # keys to a split: whole tiles
    max_splits,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,  # query heads to a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of the caches, in elements
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # query tokens to a tile
    BLOCK_M: tl.constexpr,  # TILE_TOKENS * NUM_SHARED padded to a power of two
    BLOCK_N: tl.constexpr,  # keys to a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    WINDOW: tl.constexpr,  # tokens that a query sees, itself included; 0: all before it
    LOOPS: tl.constexpr,  # there are fewer programs than splits
):
    tile = tl.program_id(0) // NUM_KV_HEADS + first_token // TILE_TOKENS + first_seq
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    seq = _find_seq(query_start_loc, tile, first_seq, num_seqs, TILE_TOKENS)
    seq_start = tl.load(query_start_loc + seq).to(tl.int32)
    query_len = tl.load(query_start_loc + seq + 1).to(tl.int32) - seq_start
    tile_start = (tile - seq_start // TILE_TOKENS - seq) * TILE_TOKENS
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    history = seq_len - query_len
    num_splits = tl.cdiv(seq_len, split_len)
    own_split = tl.program_id(1)
    if (tile_start >= query_len) | (own_split >= num_splits):
        return
    # A single iteration, which the compiler sees, unless there are fewer programs than splits.
    stop_split = own_split + 1
    num_programs = 1
    if LOOPS:
        stop_split = num_splits
        num_programs = tl.num_programs(1)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query_index = tile_start + row // NUM_SHARED
    is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    token = (seq_start + query_index).to(tl.int64)
    head = token * NUM_KV_HEADS * NUM_SHARED + kv_head * NUM_SHARED + row % NUM_SHARED
    row_place = (head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(query + row_place, mask=row_mask, other=0.0)
    if IS_INTERPRETED:  # it cannot multiply in bfloat16
        q = q.to(tl.float32)

    # Keys [0, whole_stop) are whole tiles that all rows see; those up to num_keys the diagonal.
    num_keys = history + tl.minimum(tile_start + TILE_TOKENS, query_len)
    whole_stop = (history + tile_start + 1) // BLOCK_N * BLOCK_N
    # All tiles of keys have a mask: there are few, and the first one contains a visible key.
    if WINDOW:
        whole_stop = 0
        first_tile = tl.maximum(history + tile_start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    table = block_tables + seq.to(tl.int64) * table_stride
    for split in range(own_split, stop_split, num_programs):
        split_start = split * split_len
        split_stop = tl.minimum(split_start + split_len, num_keys)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight_sum = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # Two loops, of which only the second has masks.
        for is_diagonal in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            first = split_start
            stop = tl.minimum(whole_stop, split_stop)
            if is_diagonal:
                first = tl.maximum(whole_stop, split_start)
                stop = split_stop
                if WINDOW:
                    first = tl.maximum(first, first_tile)
            for start in range(first, stop, BLOCK_N):
                position = start + tl.arange(0, BLOCK_N)
                key_mask = (dim < HEAD_DIM)[None, :]
                if is_diagonal:
                    is_key = position < num_keys
                    key_mask = key_mask & is_key[:, None]
                    block_id = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0)
                else:
                    block_id = tl.load(table + position // BLOCK_SIZE)
                place = block_id.to(tl.int64) * BLOCK_STRIDE + position % BLOCK_SIZE * SLOT_STRIDE
                offsets = (place + kv_head * HEAD_STRIDE)[:, None] + dim[None, :]
                k = tl.load(key_cache + offsets, mask=key_mask, other=0.0)
                v = tl.load(value_cache + offsets, mask=key_mask, other=0.0)
                if IS_INTERPRETED:
                    k, v = k.to(tl.float32), v.to(tl.float32)

                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                if is_diagonal:
                    is_seen = position[None, :] <= (history + query_index)[:, None]
                    if WINDOW:
                        left = (history + query_index - WINDOW)[:, None]
                        is_seen = is_seen & (position[None, :] > left)
                    scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(scores, 1))
                # A row may see no key of its split: -inf - -inf would be NaN.
                shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                weights = tl.exp(scores - shift[:, None])
                rescale = tl.exp(highest - shift)
                weight_sum = weight_sum * rescale + tl.sum(weights, 1)
                product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                weighted = weighted * rescale[:, None] + product
                highest = new_highest

        # A split without keys that this row sees: its sum is 0, its highest -inf.
        weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        result = weighted / weight_sum[:, None]
        if num_splits == 1:
            tl.store(output + row_place, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            part = (head - first_token * NUM_KV_HEADS * NUM_SHARED) * max_splits + split
            target = partial + part[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result, mask=row_mask)
            tl.store(partial_lse + part, highest + tl.log(weight_sum), mask=is_row)


@jit_for_any("first_seq", "num_seqs", "first_token", "split_len", "max_splits")
def _merge_splits_kernel(
    output,  # as above
    partial,
    partial_lse,
    query_start_loc,
    seq_lens,
    first_seq,
    num_seqs,
    first_token,
    split_len,
    max_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the results of a token and a head."""
    token = first_token + tl.program_id(0)
    seq = _find_seq(query_start_loc, token, first_seq, num_seqs, 0)
    num_splits = tl.cdiv(tl.load(seq_lens + seq).to(tl.int32), split_len)
    is_padding = token >= tl.load(query_start_loc + seq + 1)
    if is_padding | (num_splits == 1):
        return
    num_heads = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    highest = tl.full([], float("-inf"), tl.float32)
    weight_sum = tl.zeros([], tl.float32)
    weighted = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        is_split = split < num_splits
        part = row * max_splits + split
        lse = tl.load(partial_lse + part, mask=is_split, other=float("-inf"))
        mask = is_split[:, None] & (dim < HEAD_DIM)[None, :]
        result = tl.load(partial + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(lse - shift)
        rescale = tl.exp(highest - shift)
        weight_sum = weight_sum * rescale + tl.sum(weights, 0)
        weighted = weighted * rescale + tl.sum(result * weights[:, None], 0)
        highest = new_highest
    target = output + (row + first_token * num_heads) * HEAD_DIM + dim
    result = weighted / weight_sum
    tl.store(target, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


# -- what the kernels are compiled for


def make_launch(
    kernel: Any, constants: dict[str, Any], dtype: torch.dtype, num_warps: int
) -> Launch:
    """A launch of a kernel above. All arguments without a type here are integers."""
    types = dict.fromkeys(
        ("output", "query", "key_cache", "value_cache"), "*" + TRITON_TYPES[dtype]
    )
    types |= {"query_start_loc": "*i64", "seq_lens": "*i64", "block_tables": "*i32"}
    types |= {"partial": "*fp32", "partial_lse": "*fp32", "scale": "fp32"}
    names = [name for name in kernel.arg_names if name not in constants]
    arguments = {name: types.get(name, "i32") for name in names}
    return Launch(kernel, arguments, constants, num_warps)


@cache
def attention_launch(shape: AttentionShape, is_short: bool) -> Launch:
    num_rows, num_keys, num_warps = choose_tile(shape, is_short)
    tile_tokens = max(1, num_rows // shape.num_shared)
    block_stride, slot_stride, head_stride = shape.cache_strides
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "NUM_SHARED": shape.num_shared,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "TILE_TOKENS": tile_tokens,
        "BLOCK_M": max(16, next_power_of_2(tile_tokens * shape.num_shared)),
        "BLOCK_N": num_keys,
        "BLOCK_D": max(16, next_power_of_2(shape.head_dim)),
        "WINDOW": shape.window,
        "LOOPS": is_short,
    }
    return make_launch(_attention_kernel, constants, shape.dtype, num_warps)


@cache
def merge_launch(head_dim: int, dtype: torch.dtype) -> Launch:
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_SPLITS": SPLITS_AT_ONCE,
    }
    return make_launch(_merge_splits_kernel, constants, dtype, num_warps=2)


# -- a step


class RangePlan:
    """One launch over the sequences from `first_seq` on, planned once for all layers."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        first_seq: int,
        starts: np.ndarray,  # [num_seqs + 1], the sequences' first tokens
        seq_lens: np.ndarray,  # [num_seqs]
    ) -> None:
        self.metadata = metadata
        self.first_seq = first_seq
        self.num_seqs = len(seq_lens)
        self.first_token = int(starts[0])
        self.num_tokens = int(starts[-1]) - self.first_token
        query_lens = np.diff(starts)
        max_query_len = int(query_lens.max())
        max_seq_len = int(seq_lens.max())
        is_short = max_query_len * shape.num_shared <= SHORT_ROWS
        self.launch = attention_launch(shape, is_short)
        self.merge = merge_launch(shape.head_dim, shape.dtype)
        tile_tokens = self.launch.constants["TILE_TOKENS"]
        tile_keys = self.launch.constants["BLOCK_N"]
        split_len = SPLIT_KEYS
        if max_query_len > tile_tokens:
            # No split is larger than a multiprocessor's share of all keys that tiles walk, and the
            # splits of the longest sequence are equal.
            num_keys = int(query_lens @ seq_lens) * shape.num_kv_heads // tile_tokens
            num_splits = triton.cdiv(max_seq_len, max(SPLIT_KEYS, num_keys // NUM_MULTIPROCESSORS))
            split_len = max(SPLIT_KEYS, triton.cdiv(max_seq_len, num_splits))
        row_bytes = 4 * self.num_tokens * shape.num_heads * shape.head_dim
        max_splits = max(1, MAX_SCRATCH_BYTES // row_bytes)
        split_len = max(split_len, triton.cdiv(max_seq_len, max_splits))
        self.split_len = triton.cdiv(split_len, tile_keys) * tile_keys
        self.max_splits = triton.cdiv(max_seq_len, self.split_len)
        num_tiles = int(starts[-1]) // tile_tokens - self.first_token // tile_tokens + self.num_seqs
        num_programs = num_tiles * shape.num_kv_heads
        num_split_programs = self.max_splits
        if is_short:
            num_split_programs = min(num_split_programs, max(MAX_PROGRAMS // num_programs, 1))
        self.grid = num_programs, num_split_programs
        # Scratch memory, if any sequence has several splits.
        num_rows = self.num_tokens * shape.num_heads * (self.max_splits > 1)
        size = (num_rows * self.max_splits, shape.head_dim)
        self.partial = metadata.seq_lens.new_empty(size, dtype=torch.float32)
        self.partial_lse = self.partial.new_empty(size[0])

    def attend(
        self,
        output: Tensor,  # [num_tokens, num_heads, head_dim], written
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
    ) -> None:
        metadata = self.metadata
        self.launch(
            self.grid,
            output,
            self.partial,
            self.partial_lse,
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.block_tables.stride(0),
            self.first_seq,
            self.num_seqs,
            self.first_token,
            self.split_len,
            self.max_splits,
            scale,
        )
        if self.max_splits > 1:
            self.merge(
                (self.num_tokens, query.shape[1]),
                output,
                self.partial,
                self.partial_lse,
                metadata.query_start_loc,
                metadata.seq_lens,
                self.first_seq,
                self.num_seqs,
                self.first_token,
                self.split_len,
                self.max_splits,
            )


class TritonPlan(AttentionPlan):
    """A step for the kernels above: a launch for the short queries in front, and one for all
    sequences from the first long query on. (An engine's kernels write KV when they rotate it:
    `common/models/regions/kernel_regions.py`.)"""

    def __init__(self, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        self.slot_mapping = metadata.slot_mapping
        self.output: Tensor | None = None
        num_seqs = len(metadata.seq_lens)
        if metadata.query_starts:
            starts, seq_lens = metadata.on_host()
        else:  # in a graph the host knows bounds
            starts = np.arange(num_seqs + 1) * metadata.max_query_len
            seq_lens = np.full(num_seqs, metadata.max_seq_len)
        is_long = np.diff(starts) * shape.num_shared > SHORT_ROWS
        border = int(np.argmax([*is_long, True]))
        self.ranges = [
            RangePlan(metadata, shape, first, starts[first : last + 1], seq_lens[first:last])
            for first, last in ((0, border), (border, num_seqs))
            if starts[last] > starts[first]
        ]

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim], copied if it is a part of more
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,  # the same
        scale: float,
    ) -> Tensor:  # [num_tokens, num_heads, head_dim], overwritten by the next layer's
        if self.output is None:  # zeros once per step: no kernel writes padding rows
            self.output = query.new_zeros(query.shape)
        query = query.contiguous()
        for part in self.ranges:
            part.attend(self.output, query, key_cache, value_cache, scale)
        return self.output


class TritonAttentionBackend:
    """An `AttentionBackend` of the kernels above, for float16, bfloat16 and float32, whose products
    are computed without tensor cores. Raises `RuntimeError` if Triton is missing, or if there is
    neither a GPU nor the interpreter."""

    def __init__(self) -> None:
        if not HAS_TRITON:
            raise RuntimeError(
                "cannot use the Triton attention backend: the package triton is not installed; "
                "run `pip install triton`, or choose attention_backend='torch'"
            )
        if not torch.cuda.is_available() and not IS_INTERPRETED:
            raise RuntimeError(
                "cannot use the Triton attention backend: no CUDA device was found; choose "
                "attention_backend='torch', or, to try the kernels slowly on a CPU, set the "
                "environment variable TRITON_INTERPRET=1 before Python starts"
            )

    @staticmethod
    def check(dtype: torch.dtype, head_dim: int) -> None:
        """Raise `ValueError` for float64, which the kernels would round, and for a head_dim above
        256."""
        if dtype == torch.float64 or head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"KV must have 16 or 32 bits and head_dim <= {MAX_HEAD_DIM}, got {dtype} and "
                f"head_dim {head_dim}; choose attention_backend='torch'"
            )

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache: Tensor) -> TritonPlan:
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        self.check(key_cache.dtype, head_dim)
        shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            cache_strides=key_cache.stride()[:3],
            dtype=key_cache.dtype,
            window=metadata.window or 0,
        )
        return TritonPlan(metadata, shape)
