"""`paged_attention` and `write_kv` as Triton kernels: keys are read where they lie.

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
into tiles and its keys into splits of a fixed number of keys, and the work items of all sequences
are concatenated:

    sequence       A: 1 token, 700 keys   B: 1, 90   C: 9 tokens in tiles of 8, 300 keys
    tiles, splits  1 x 3                  1 x 1      2 x 2
    items          0      1      2        3          4       5       6       7
    first_item     0                      3          4                                  8
    keys           0-255  -511   -699     0-89       0-255   -299    0-255   -299

No item is larger than the others, however the lengths are distributed: the longest sequence has the
most items. The sequence of an item is looked up: `first_item` is a prefix sum over the sequences,
`item_seq` its inverse. Both are computed on the device, by one kernel per step for all layers, and
nothing waits for them: the grid needs only an upper bound, and programs after the last item end
immediately. For decodes that bound may be far too high, because a graph of a step
(`common/runner/graphs.py`) has to work for the longest possible sequences: 256 of up to 40,960
tokens are 40,960 items for each KV head and layer, nearly all without work. So there are at most
as many programs as keep the GPU busy, and each loops over several items. Adjacent programs take the
KV heads of one item, whose keys are adjacent in a block.

A split yields a *partial* result: attention to its own keys alone, and the log of the sum of
exp(score), in scratch memory. A second kernel merges the results of a row, each with the weight
exp(its log-sum-exp). A sequence of one split writes its output directly and is not merged.

Queries of one tile, decodes above all, have splits of a constant length, not of a share of the
GPU's free capacity. So the result of a decode does not depend on the other decodes. For longer
queries splits serve only to keep the GPU busy when there are few tiles, or one history is much
longer than the others, and are as long as that allows.

Keys that every row of a tile sees need no mask; only the tiles on the diagonal, at the end, have
one. Invariants: keys that a tile must not see are never loaded, so garbage cannot reach the output,
nor whole tiles that a layer's window (`window_attention.py`) hides; scratch memory that no program
has written reaches no output; nothing here waits for the device. Caches may lie in memory in any
order in which a head's channels are neighbours.

`paged_attention.py` is what this is tested against: on a GPU, or anywhere in Triton's interpreter.
Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding; FlashInfer plans such items on the host
(arXiv 2501.01005); vLLM's unified Triton kernel searches for an item's sequence in each program.

See 02_paged_kv/beyond/README.md#the-kernels-in-versions"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from kernel_launch import TRITON_TYPES, AttentionShape, Launch, architecture_of
from paged_attention import AttentionMetadata
from triton_or_none import HAS_TRITON, jit, jit_for_any, tl, triton

MAX_HEAD_DIM = 256
FLOAT32_PRECISIONS = ("ieee", "tf32x3")
SHORT_ROWS = 16  # query tokens x heads that share a KV head; more is a long query
SPLIT_KEYS = 256  # keys per split of a short query; with fewer, merging costs more than it gains
NUM_MULTIPROCESSORS = 132  # that should have work; querying the device is not worth it
# Programs of a launch that loops, all KV heads together: whole waves of the multiprocessors,
# whether each holds 2, 3, 4 or 6 programs.
NUM_PROGRAMS = 12 * NUM_MULTIPROCESSORS
SPLITS_AT_ONCE = 16  # loaded by the merging kernel at a time
PLANNED_AT_ONCE = 1024  # sequences, items and tokens in one program of the planning kernel
# Query rows and keys per tile, and warps, for head_dim up to 64, 128 and 256. The largest that the
# compiler holds in registers without spilling, in the shared memory of any GPU: see the table of
# `python -m workshop.resources`. "ieee" and "tf32x3" are float32 without and with the tensor cores;
# a product of 16 rows is the smallest there is.
TILES = {
    ("16 bits", "short"): ((16, 64, 4), (16, 64, 4), (16, 32, 4)),
    ("16 bits", "long"): ((64, 64, 4), (64, 64, 4), (64, 32, 8)),
    ("ieee", "short"): ((16, 32, 4), (16, 32, 8), (16, 16, 8)),
    ("ieee", "long"): ((32, 32, 8), (32, 16, 8), (32, 16, 8)),
    ("tf32x3", "short"): ((16, 32, 4), (16, 32, 4), (16, 16, 8)),
    ("tf32x3", "long"): ((32, 32, 8), (32, 32, 8), (16, 16, 8)),
}
# Hopper's and datacenter Blackwell's tensor cores read from shared memory and leave registers free.
# Elsewhere, in 16 bits, for a long query and head_dim 65 to 128: up to sm_89, and sm_120.
TILES_WITHOUT_WARPGROUPS = ((64, 32, 8), (64, 64, 8))
HAS_WARPGROUPS = (90, 100, 103)


def choose_tile(shape: AttentionShape, is_short: bool) -> tuple[int, int, int]:
    """Query rows, keys, warps. Short queries are those that fit a tile of 16 rows."""
    length = "short" if is_short else "long"
    kind = shape.float32_precision if shape.dtype == torch.float32 else "16 bits"
    size = (shape.head_dim > 64) + (shape.head_dim > 128)
    has_few_registers = kind == "16 bits" and shape.architecture not in HAS_WARPGROUPS
    if has_few_registers and size == 1 and not is_short:
        return TILES_WITHOUT_WARPGROUPS[shape.architecture > 100]
    return TILES[kind, length][size]


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# -- writing


@jit
def _write_kv_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim], heads lie end to end
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    slot_mapping,  # [num_tokens]
    KEY_STRIDE: tl.constexpr,  # from token to token
    VALUE_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of the caches, in elements
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,  # NUM_KV_HEADS * HEAD_DIM padded to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    lane = tl.arange(0, WIDTH)
    is_written = lane < NUM_KV_HEADS * HEAD_DIM
    place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * SLOT_STRIDE
    target = place + lane // HEAD_DIM * HEAD_STRIDE + lane % HEAD_DIM
    new_key = tl.load(key + token * KEY_STRIDE + lane, mask=is_written)
    new_value = tl.load(value + token * VALUE_STRIDE + lane, mask=is_written)
    tl.store(key_cache + target, new_key, mask=is_written)
    tl.store(value_cache + target, new_value, mask=is_written)


# -- attending: plan, attend, merge


@jit_for_any("table_stride", "first_seq", "num_seqs", "split_tiles", "tile_rows")
def _attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [num_items, num_kv_heads, tile_rows, head_dim] float32
    partial_lse,  # [num_items, num_kv_heads, tile_rows] float32
    query,  # the same
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    query_start_loc,  # [all sequences + 1]
    seq_lens,  # [all sequences]
    block_tables,  # [all sequences, max_blocks]
    first_item,  # [num_seqs + 1]
    item_seq,  # [num_items], a sequence of this launch
    table_stride,
    first_seq,
    num_seqs,
    split_tiles,  # tiles of keys to a split
    tile_rows,  # rows of a tile that scratch has room for
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
    PRECISION: tl.constexpr,  # of a product of float32: "ieee" or "tf32x3"
    UPCAST: tl.constexpr,  # multiply in float32: the interpreter cannot in bfloat16
    LOOPS: tl.constexpr,  # the grid is smaller than the number of items may be
):
    own_item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    num_items = tl.load(first_item + num_seqs)
    if own_item >= num_items:
        return
    # A single iteration, which the compiler sees, unless the grid is smaller than the items may be.
    stop_item = own_item + 1
    num_programs = 1
    if LOOPS:
        stop_item = num_items
        num_programs = tl.num_programs(0) // NUM_KV_HEADS
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    for item in range(own_item, stop_item, num_programs):
        own_seq = tl.load(item_seq + item)
        seq = (first_seq + own_seq).to(tl.int64)
        first_token = tl.load(query_start_loc + seq).to(tl.int32)
        query_len = tl.load(query_start_loc + seq + 1).to(tl.int32) - first_token
        seq_len = tl.load(seq_lens + seq).to(tl.int32)
        history = seq_len - query_len
        num_splits = tl.cdiv(seq_len, split_tiles * BLOCK_N)
        seq_item = item - tl.load(first_item + own_seq)
        tile_start = seq_item // num_splits * TILE_TOKENS
        split = seq_item % num_splits

        query_index = tile_start + row // NUM_SHARED
        is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
        head = kv_head * NUM_SHARED + row % NUM_SHARED
        row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        token = (first_token + query_index).to(tl.int64)
        row_place = ((token * NUM_KV_HEADS * NUM_SHARED + head) * HEAD_DIM)[:, None] + dim[None, :]
        q = tl.load(query + row_place, mask=row_mask, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)

        # Keys [0, whole_stop) are whole tiles that all rows see; those up to num_keys the diagonal.
        num_keys = history + tl.minimum(tile_start + TILE_TOKENS, query_len)
        whole_stop = (history + tile_start + 1) // BLOCK_N * BLOCK_N
        split_start = split * split_tiles * BLOCK_N
        split_stop = tl.minimum(split_start + split_tiles * BLOCK_N, num_keys)
        # All tiles of keys have a mask: there are few, and the first one contains a visible key.
        if WINDOW:
            whole_stop = 0
            first_tile = tl.maximum(history + tile_start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight_sum = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table = block_tables + seq * table_stride
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
                if UPCAST:
                    k, v = k.to(tl.float32), v.to(tl.float32)

                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
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
                product = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
                weighted = weighted * rescale[:, None] + product
                highest = new_highest

        # A split without keys that this row sees: its sum is 0, its highest -inf.
        weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        result = weighted / weight_sum[:, None]
        if num_splits == 1:
            tl.store(output + row_place, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            part = (tl.zeros([], tl.int64) + item) * NUM_KV_HEADS + kv_head
            part = part * tile_rows + row
            target = partial + part[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result, mask=row_mask)
            tl.store(partial_lse + part, highest + tl.log(weight_sum), mask=is_row)


@jit_for_any("first_seq", "num_seqs", "first_token", "split_tiles", "tile_rows")
def _merge_splits_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [num_items, num_kv_heads, tile_rows, head_dim] float32
    partial_lse,  # [num_items, num_kv_heads, tile_rows] float32
    query_start_loc,  # [all sequences + 1]
    seq_lens,  # [all sequences]
    first_item,  # [num_seqs + 1]
    token_seq,  # [tokens of this launch], a sequence of it; num_seqs: padding
    first_seq,
    num_seqs,
    first_token,
    split_tiles,
    tile_rows,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    own_seq = tl.load(token_seq + tl.program_id(0))
    if own_seq >= num_seqs:
        return
    seq = (first_seq + own_seq).to(tl.int64)
    num_splits = tl.cdiv(tl.load(seq_lens + seq).to(tl.int32), split_tiles * BLOCK_N)
    if num_splits == 1:
        return
    token = first_token + tl.program_id(0)
    query_index = token - tl.load(query_start_loc + seq).to(tl.int32)
    head = tl.program_id(1)
    tile_row = query_index % TILE_TOKENS * NUM_SHARED + head % NUM_SHARED
    item = tl.load(first_item + own_seq) + query_index // TILE_TOKENS * num_splits

    dim = tl.arange(0, BLOCK_D)
    highest = tl.full([], float("-inf"), tl.float32)
    weight_sum = tl.zeros([], tl.float32)
    weighted = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        is_split = split < num_splits
        row = (item + split).to(tl.int64) * NUM_KV_HEADS + head // NUM_SHARED
        row = row * tile_rows + tile_row
        lse = tl.load(partial_lse + row, mask=is_split, other=float("-inf"))
        mask = is_split[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(partial + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        # Without a window every row sees keys of split 0.
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shift = new_highest
        if WINDOW:
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(lse - shift)
        rescale = tl.exp(highest - shift)
        weight_sum = weight_sum * rescale + tl.sum(weights, 0)
        weighted = weighted * rescale + tl.sum(part * weights[:, None], 0)
        highest = new_highest
    result = weighted / weight_sum
    target = output + (token.to(tl.int64) * NUM_KV_HEADS * NUM_SHARED + head) * HEAD_DIM + dim
    tl.store(target, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


@jit_for_any("first_seq", "num_seqs", "first_token", "num_tokens", "tile_tokens", "split_len")
def _plan_items_kernel(
    first_item,  # [num_seqs + 1], written
    item_seq,  # [num_items], written up to the last item
    token_seq,  # [num_tokens], written
    query_start_loc,  # [all sequences + 1]
    seq_lens,  # [all sequences]
    first_seq,
    num_seqs,
    first_token,
    num_tokens,
    tile_tokens,
    split_len,
    WIDTH: tl.constexpr,
):
    """Plan one sequence, or the padding after the last one. Each program adds up the sequences
    before it."""
    planned_seq = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    starts, lens = query_start_loc + first_seq, seq_lens + first_seq
    item = tl.zeros([], tl.int32)
    for start in range(0, planned_seq, WIDTH):
        seq = start + lane
        is_before = seq < planned_seq
        query_len = tl.load(starts + seq + 1, mask=is_before, other=0)
        query_len -= tl.load(starts + seq, mask=is_before, other=0)
        seq_len = tl.load(lens + seq, mask=is_before, other=0)
        num_items = tl.cdiv(query_len, tile_tokens) * tl.cdiv(seq_len, split_len)
        item += tl.sum(num_items.to(tl.int32), 0)
    tl.store(first_item + planned_seq, item)
    token = tl.load(starts + planned_seq).to(tl.int32) - first_token
    last_token = num_tokens
    if planned_seq < num_seqs:
        last_token = tl.load(starts + planned_seq + 1).to(tl.int32) - first_token
        num_splits = tl.cdiv(tl.load(lens + planned_seq).to(tl.int32), split_len)
        last_item = item + tl.cdiv(last_token - token, tile_tokens) * num_splits
        for start in range(item, last_item, WIDTH):
            tl.store(item_seq + start + lane, planned_seq, mask=start + lane < last_item)
    for start in range(token, last_token, WIDTH):
        tl.store(token_seq + start + lane, planned_seq, mask=start + lane < last_token)


# -- what the kernels are compiled for

_TYPES = {
    "slot_mapping": "*i64",
    "query_start_loc": "*i64",
    "seq_lens": "*i64",
    "partial": "*fp32",
    "partial_lse": "*fp32",
    "scale": "fp32",
}
_TYPES |= dict.fromkeys(("block_tables", "first_item", "item_seq", "token_seq"), "*i32")
_OF_THE_MODEL = ("output", "query", "key", "value", "key_cache", "value_cache")


def make_launch(
    kernel: Any, constants: dict[str, Any], dtype: torch.dtype, num_warps: int = 4
) -> Launch:
    types = dict.fromkeys(_OF_THE_MODEL, "*" + TRITON_TYPES[dtype]) | _TYPES
    names = [name for name in kernel.arg_names if name not in constants]
    arguments = {name: types.get(name, "i32") for name in names}
    return Launch(kernel, arguments, constants, num_warps)


@cache
def write_kv_launch(shape: AttentionShape, key_stride: int, value_stride: int) -> Launch:
    """Strides are from token to token."""
    block_stride, slot_stride, head_stride = shape.cache_strides
    constants = {
        "KEY_STRIDE": key_stride,
        "VALUE_STRIDE": value_stride,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "WIDTH": next_power_of_2(shape.num_kv_heads * shape.head_dim),
    }
    return make_launch(_write_kv_kernel, constants, shape.dtype)


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
        "PRECISION": shape.float32_precision,
        "UPCAST": shape.is_interpreted,
        "LOOPS": is_short,
    }
    return make_launch(_attention_kernel, constants, shape.dtype, num_warps=num_warps)


@cache
def merge_launch(shape: AttentionShape, is_short: bool) -> Launch:
    names = ("NUM_KV_HEADS", "NUM_SHARED", "HEAD_DIM", "TILE_TOKENS", "BLOCK_N", "BLOCK_D")
    attention = attention_launch(shape, is_short).constants
    constants = {name: attention[name] for name in (*names, "WINDOW")}
    constants["BLOCK_SPLITS"] = SPLITS_AT_ONCE
    return make_launch(_merge_splits_kernel, constants, shape.dtype, num_warps=2)


@cache
def plan_launch() -> Launch:
    return make_launch(_plan_items_kernel, {"WIDTH": PLANNED_AT_ONCE}, torch.float32)


# -- a step


class SequenceRange(NamedTuple):
    """Sequences of a batch that one launch attends to, with the host's bounds of their lengths."""

    first_seq: int
    num_seqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    # Query and sequence length of each, or None if known only on the device.
    lens: Sequence[tuple[int, int]] | None = None

    def max_items(self, tile_tokens: int, split_len: int) -> int:
        """Upper bound of the number of work items; their number, if the lengths are known."""
        if self.lens is not None:
            return sum(_cdiv(q, tile_tokens) * _cdiv(n, split_len) for q, n in self.lens)
        num_tiles = min(
            (self.num_tokens + self.num_seqs * (tile_tokens - 1)) // tile_tokens,
            self.num_seqs * _cdiv(self.max_query_len, tile_tokens),
        )
        return num_tiles * _cdiv(self.max_seq_len, split_len)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def choose_split_len(num_keys: int, max_seq_len: int) -> int:
    """Keys per split of long queries, whose tiles walk `num_keys` keys in total. No split is larger
    than a multiprocessor's share of that, and the splits of the longest sequence are equal; none is
    shorter than `SPLIT_KEYS`."""
    share = max(SPLIT_KEYS, _cdiv(num_keys, NUM_MULTIPROCESSORS))
    num_splits = _cdiv(max_seq_len, share)
    return max(SPLIT_KEYS, _cdiv(max_seq_len, num_splits))


class WorkItems:
    """One launch over some of a batch's sequences, planned once for all layers."""

    def __init__(
        self, rows: SequenceRange, shape: AttentionShape, metadata: AttentionMetadata
    ) -> None:
        self.rows = rows
        self.metadata = metadata
        is_short = rows.max_query_len * shape.num_shared <= SHORT_ROWS
        self.launch = attention_launch(shape, is_short)
        tile_tokens = self.launch.constants["TILE_TOKENS"]
        tile_keys = self.launch.constants["BLOCK_N"]
        split_len = SPLIT_KEYS
        if rows.max_query_len > tile_tokens:
            num_keys = rows.max_items(tile_tokens, split_len=1) * shape.num_kv_heads
            split_len = choose_split_len(num_keys, rows.max_seq_len)
        self.split_tiles = _cdiv(split_len, tile_keys)
        split_len = self.split_tiles * tile_keys
        self.num_items = rows.max_items(tile_tokens, split_len)
        self.num_programs = self.num_items * shape.num_kv_heads
        if is_short:
            in_waves = _cdiv(NUM_PROGRAMS, shape.num_kv_heads) * shape.num_kv_heads
            self.num_programs = min(self.num_programs, in_waves)

        starts = metadata.query_start_loc
        self.first_item = starts.new_empty(rows.num_seqs + 1, dtype=torch.int32)
        self.item_seq = self.first_item.new_empty(self.num_items)  # arbitrary after the last item
        self.token_seq = self.first_item.new_empty(rows.num_tokens)  # num_seqs: padding
        plan_launch()(
            (rows.num_seqs + 1,),
            self.first_item,
            self.item_seq,
            self.token_seq,
            starts,
            metadata.seq_lens,
            rows.first_seq,
            rows.num_seqs,
            rows.first_token,
            rows.num_tokens,
            tile_tokens,
            split_len,
        )
        self.merge: Launch | None = None  # every sequence is one split
        self.tile_rows = 0
        num_partial = 0
        if rows.max_seq_len > split_len:
            self.merge = merge_launch(shape, is_short)
            self.tile_rows = min(tile_tokens, rows.max_query_len) * shape.num_shared
            num_partial = self.num_items
        scratch = (num_partial, shape.num_kv_heads, self.tile_rows)
        self.partial_lse = self.first_item.new_empty(scratch, dtype=torch.float32)
        self.partial = self.partial_lse.new_empty(*scratch, shape.head_dim)

    def attend(
        self,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim], written
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
    ) -> None:
        rows = self.rows
        metadata = self.metadata
        self.launch(
            (self.num_programs,),
            output,
            self.partial,
            self.partial_lse,
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.first_item,
            self.item_seq,
            metadata.block_tables.stride(0),
            rows.first_seq,
            rows.num_seqs,
            self.split_tiles,
            self.tile_rows,
            scale,
        )
        if self.merge is not None:
            self.merge(
                (rows.num_tokens, query.shape[1]),
                output,
                self.partial,
                self.partial_lse,
                metadata.query_start_loc,
                metadata.seq_lens,
                self.first_item,
                self.token_seq,
                rows.first_seq,
                rows.num_seqs,
                rows.first_token,
                self.split_tiles,
                self.tile_rows,
            )


class TritonPlan:
    """A step for the kernels above: all metadata, and the work items of all layers."""

    def __init__(self, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        self.shape = shape
        self.slot_mapping = metadata.slot_mapping
        self.output: torch.Tensor | None = None
        self.items = [
            WorkItems(rows, shape, metadata)
            for rows in self.launches(metadata)
            if rows.num_seqs and rows.max_query_len
        ]

    def launches(self, metadata: AttentionMetadata) -> list[SequenceRange]:
        """Return one launch for all sequences."""
        every = SequenceRange(
            first_seq=0,
            num_seqs=len(metadata.seq_lens),
            first_token=0,
            num_tokens=len(metadata.slot_mapping),
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )
        return [every]

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # the same
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
        value_cache: torch.Tensor,  # the same
    ) -> None:
        """Write keys and values to their slots. Raises `ValueError` if the two caches have
        different memory layouts."""
        check_caches(key_cache, value_cache)
        key = with_heads_end_to_end(key)
        value = with_heads_end_to_end(value)
        launch = write_kv_launch(self.shape, key.stride(0), value.stride(0))
        if len(key):
            launch((len(key),), key, value, key_cache, value_cache, self.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim], copied if it is a part of more
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,  # the same
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], overwritten by the next layer's
        check_caches(key_cache, value_cache)
        if self.output is None:  # zeros once per step: no kernel writes padding rows
            self.output = query.new_zeros(query.shape)
        query = query.contiguous()
        for items in self.items:
            items.attend(self.output, query, key_cache, value_cache, scale)
        return self.output


class TritonAttentionBackend:
    """An `AttentionBackend` of the kernels above, for float16, bfloat16 and float32.

    Products of float32 are computed without tensor cores ("ieee"), or from three products of tensor
    cores ("tf32x3"), almost as exactly. Raises `RuntimeError` if Triton is missing, or if there is
    neither a GPU nor the interpreter, and `ValueError` for another precision.
    """

    plan_type = TritonPlan

    def __init__(self, float32_precision: str = "ieee") -> None:
        if float32_precision not in FLOAT32_PRECISIONS:
            allowed = " or ".join(map(repr, FLOAT32_PRECISIONS))
            raise ValueError(f"float32_precision must be {allowed}, got {float32_precision!r}")
        self.float32_precision = float32_precision
        if not HAS_TRITON:
            raise RuntimeError(
                "cannot use the Triton attention backend: the package triton is not installed; "
                "run `pip install triton`, or choose attention_backend='torch'"
            )
        self.is_interpreted = not isinstance(_write_kv_kernel, triton.runtime.JITFunction)
        if not torch.cuda.is_available() and not self.is_interpreted:
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

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, key_cache: torch.Tensor
    ) -> TritonPlan:
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        block_stride, slot_stride, head_stride, _ = key_cache.stride()
        self.check(key_cache.dtype, head_dim)
        shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            cache_strides=(block_stride, slot_stride, head_stride),
            dtype=key_cache.dtype,
            float32_precision=self.float32_precision,
            is_interpreted=self.is_interpreted,
            architecture=architecture_of(key_cache.device),
            window=metadata.window or 0,
        )
        return self.plan_type(metadata, shape)


def with_heads_end_to_end(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if a token's heads are not contiguous. A slice of a fused
    projection is not copied: only its tokens are apart."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    strides = key_cache.stride(), value_cache.stride()
    if strides[0] != strides[1] or strides[0][3] != 1:
        raise ValueError(
            "key_cache and value_cache must have the same strides, with contiguous channels per "
            f"head, got {strides[0]} and {strides[1]}"
        )
