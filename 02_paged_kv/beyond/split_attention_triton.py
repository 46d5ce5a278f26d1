"""Attention as work items of one size: a tile of queries times a split of keys. Version 2.

Version 1 (`paged_attention_triton.py`) launches a rectangle and walks all keys of a sequence in one
program. Neither fits a real batch: with one chunk of 512 tokens among 256 decodes almost all of the
rectangle is empty, and one sequence of 100,000 keys keeps one program busy long after the others
are done. Here a sequence is divided twice, its queries into tiles and its keys into splits of a
fixed number of keys, and the work items of all sequences are concatenated:

    sequence       A: 1 token, 700 keys   B: 1, 90   C: 9 tokens in tiles of 8, 300 keys
    tiles, splits  1 x 3                  1 x 1      2 x 2
    items          0      1      2        3          4       5       6       7
    first_item     0                      3          4                                  8
    keys           0-255  -511   -699     0-89       0-255   -299    0-255   -299

No item is larger than the others, however the lengths are distributed: the longest sequence has the
most items. The sequence of an item is looked up: `first_item` is a prefix sum over the sequences,
`item_seq` its inverse. Both are computed on the device, by one kernel per step for all layers, and
nothing waits for them: the grid needs only an upper bound, and programs after the last item end
immediately. If the bound may be far too high, in decodes whose lengths the host does not know,
there are as many programs as keep the GPU busy, and each loops over several items. A graph of a
step (`common/runner/graphs.py`) has to work for the longest possible sequences: without the loop,
256 of up to 40,960 tokens are 40,960 programs for each KV head and layer, nearly all without work.
Adjacent programs take the KV heads of one item, whose keys are adjacent in a block.

A split yields a *partial* result: attention to its own keys alone, and the log of the sum of
exp(score), in scratch memory. A second kernel merges the results of a row, each with the weight
exp(its log-sum-exp). A sequence of one split writes its output directly and is not merged.

Queries of one tile, decodes above all, have splits of a constant length, not of a share of the
GPU's free capacity. So the result of a decode does not depend on the other decodes. For longer
queries splits serve only to keep the GPU busy when there are few tiles, or one history is much
longer than the others, and are as long as that allows.

Keys that every row of a tile sees need no mask; only the tiles on the diagonal, at the end, have
one. Invariants: keys that a tile must not see are never loaded; scratch memory that no program has
written reaches no output; nothing here waits for the device.

Sources: FlashDecoding; FlashInfer plans such items on the host (arXiv 2501.01005); vLLM's unified
Triton kernel searches for an item's sequence in each program.

See 02_paged_kv/beyond/README.md#the-kernels-in-versions"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from kernel_launch import TRITON_TYPES, AttentionShape, Launch
from paged_attention import AttentionMetadata
from paged_attention_triton import (
    SHORT_ROWS,
    TritonAttentionBackend,
    TritonPlan,
    tile_constants,
)
from triton_or_none import jit_for_any, tl

NUM_MULTIPROCESSORS = 132  # that should have work; querying the device is not worth it
SPLITS_AT_ONCE = 16  # loaded by the merging kernel at a time
PLANNED_AT_ONCE = 1024  # sequences, items and tokens in one program of the planning kernel


@jit_for_any()
def _attend_item(
    item,
    kv_head,
    output,
    partial,
    partial_lse,
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_tables,
    first_item,
    item_seq,
    table_stride,
    first_seq,
    num_seqs,
    split_tiles,
    tile_rows,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute one split of the keys of one tile of queries, for one KV head."""
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    own_seq = tl.load(item_seq + item)
    seq = (first_seq + own_seq).to(tl.int64)
    first_token = tl.load(query_start_loc + seq).to(tl.int32)
    query_len = tl.load(query_start_loc + seq + 1).to(tl.int32) - first_token
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    history = seq_len - query_len
    num_splits = tl.cdiv(seq_len, split_tiles * BLOCK_N)
    own_item = item - tl.load(first_item + own_seq)
    tile_start = own_item // num_splits * TILE_TOKENS
    split = own_item % num_splits

    query_index = tile_start + row // NUM_SHARED
    is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
    head = kv_head * NUM_SHARED + row % NUM_SHARED
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_token + query_index).to(tl.int64)
    query_row = query + token * QUERY_STRIDE + head * HEAD_DIM
    q = tl.load(query_row[:, None] + dim[None, :], mask=row_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Keys [0, whole_stop) are whole tiles that all rows see; [whole_stop, num_keys) the diagonal.
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
        output_row = output + (token * NUM_KV_HEADS * NUM_SHARED + head) * HEAD_DIM
        target = output_row[:, None] + dim[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=row_mask)
    else:
        partial_row = ((tl.zeros([], tl.int64) + item) * NUM_KV_HEADS + kv_head) * tile_rows + row
        tl.store(partial + partial_row[:, None] * HEAD_DIM + dim[None, :], result, mask=row_mask)
        tl.store(partial_lse + partial_row, highest + tl.log(weight_sum), mask=is_row)


@jit_for_any("table_stride", "first_seq", "num_seqs", "split_tiles", "tile_rows")
def _split_attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [num_items, num_kv_heads, tile_rows, head_dim] float32
    partial_lse,  # [num_items, num_kv_heads, tile_rows] float32
    query,  # [num_tokens, num_heads, head_dim], heads lie end to end
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
    QUERY_STRIDE: tl.constexpr,  # from token to token
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
    HEADS_FASTEST: tl.constexpr,  # neighbouring programs take the KV heads of one item
    LOOPS: tl.constexpr,  # the grid is smaller than the number of items may be
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0) // NUM_KV_HEADS
    if HEADS_FASTEST:
        item = program // NUM_KV_HEADS
        kv_head = program % NUM_KV_HEADS
    else:
        item = program % num_programs
        kv_head = program // num_programs
    num_items = tl.load(first_item + num_seqs)
    if item >= num_items:
        return
    if LOOPS:
        for looped_item in range(item, num_items, num_programs):
            _attend_item(
                looped_item,
                kv_head,
                output,
                partial,
                partial_lse,
                query,
                key_cache,
                value_cache,
                query_start_loc,
                seq_lens,
                block_tables,
                first_item,
                item_seq,
                table_stride,
                first_seq,
                num_seqs,
                split_tiles,
                tile_rows,
                scale,
                NUM_KV_HEADS,
                NUM_SHARED,
                HEAD_DIM,
                BLOCK_SIZE,
                QUERY_STRIDE,
                BLOCK_STRIDE,
                SLOT_STRIDE,
                HEAD_STRIDE,
                TILE_TOKENS,
                BLOCK_M,
                BLOCK_N,
                BLOCK_D,
                WINDOW,
                PRECISION,
                UPCAST,
            )
    else:
        _attend_item(
            item,
            kv_head,
            output,
            partial,
            partial_lse,
            query,
            key_cache,
            value_cache,
            query_start_loc,
            seq_lens,
            block_tables,
            first_item,
            item_seq,
            table_stride,
            first_seq,
            num_seqs,
            split_tiles,
            tile_rows,
            scale,
            NUM_KV_HEADS,
            NUM_SHARED,
            HEAD_DIM,
            BLOCK_SIZE,
            QUERY_STRIDE,
            BLOCK_STRIDE,
            SLOT_STRIDE,
            HEAD_STRIDE,
            TILE_TOKENS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            PRECISION,
            UPCAST,
        )


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


_LENGTHS = {"query_start_loc": "*i64", "seq_lens": "*i64"}
_SCRATCH = {"partial": "*fp32", "partial_lse": "*fp32"}


def split_launch(shape: AttentionShape, is_short: bool, loops: bool = False) -> Launch:
    pointer = "*" + TRITON_TYPES[shape.dtype]
    arguments = dict.fromkeys(("output", "query", "key_cache", "value_cache"), pointer)
    arguments |= _SCRATCH | _LENGTHS
    arguments |= dict.fromkeys(("block_tables", "first_item", "item_seq"), "*i32")
    counts = ("table_stride", "first_seq", "num_seqs", "split_tiles", "tile_rows")
    arguments |= dict.fromkeys(counts, "i32") | {"scale": "fp32"}
    constants, num_warps, num_stages = tile_constants(shape, is_short)
    constants |= {"HEADS_FASTEST": shape.tuning.heads_fastest, "LOOPS": loops}
    return Launch(_split_attention_kernel, arguments, constants, num_warps, num_stages)


def merge_launch(shape: AttentionShape, is_short: bool) -> Launch:
    arguments = {"output": "*" + TRITON_TYPES[shape.dtype]} | _SCRATCH | _LENGTHS
    arguments |= dict.fromkeys(("first_item", "token_seq"), "*i32")
    counts = ("first_seq", "num_seqs", "first_token", "split_tiles", "tile_rows")
    arguments |= dict.fromkeys(counts, "i32")
    names = "NUM_KV_HEADS", "NUM_SHARED", "HEAD_DIM", "TILE_TOKENS", "BLOCK_N", "BLOCK_D", "WINDOW"
    tile, *_ = tile_constants(shape, is_short)
    constants = {name: tile[name] for name in names} | {"BLOCK_SPLITS": SPLITS_AT_ONCE}
    return Launch(_merge_splits_kernel, arguments, constants, num_warps=2)


@cache
def plan_launch() -> Launch:
    arguments = dict.fromkeys(("first_item", "item_seq", "token_seq"), "*i32") | _LENGTHS
    counts = "first_seq", "num_seqs", "first_token", "num_tokens", "tile_tokens", "split_len"
    arguments |= dict.fromkeys(counts, "i32")
    return Launch(_plan_items_kernel, arguments, {"WIDTH": PLANNED_AT_ONCE})


class SequenceRange(NamedTuple):
    """Sequences of a batch that one launch attends to, with the host's bounds of their lengths."""

    first_seq: int
    num_seqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    # Each [num_seqs], or None if known only on the device.
    query_lens: Sequence[int] | None = None
    seq_lens: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class WorkItems:
    """One launch over some of a batch's sequences, planned once for all layers."""

    rows: SequenceRange
    launch: Launch
    merge: Launch | None  # None: every sequence is one split
    split_tiles: int
    tile_rows: int
    num_items: int  # upper bound
    num_programs: int  # per KV head
    first_item: torch.Tensor  # [num_seqs + 1] int32
    item_seq: torch.Tensor  # [num_items] int32, arbitrary after the last item
    token_seq: torch.Tensor  # [num_tokens] int32, num_seqs: padding
    partial: torch.Tensor  # scratch of all layers
    partial_lse: torch.Tensor

    @classmethod
    def plan(
        cls, rows: SequenceRange, shape: AttentionShape, metadata: AttentionMetadata
    ) -> WorkItems:
        is_short = rows.max_query_len * shape.num_shared <= SHORT_ROWS
        launch = split_launch(shape, is_short)
        tile_tokens, tile_keys = launch.constants["TILE_TOKENS"], launch.constants["BLOCK_N"]
        num_tiles = bound_tiles(rows, tile_tokens)
        split_tiles = -(-shape.tuning.split_keys // tile_keys)
        if rows.max_query_len > tile_tokens:
            num_keys = bound_items(rows, num_tiles, tile_tokens, 1) * shape.num_kv_heads
            split_len = choose_split_len(num_keys, rows.max_seq_len, shape.tuning.split_keys)
            split_tiles = -(-split_len // tile_keys)
        split_len = split_tiles * tile_keys
        num_items = num_programs = bound_items(rows, num_tiles, tile_tokens, split_len)
        is_split = rows.max_seq_len > split_len
        if is_short and is_split and rows.seq_lens is None:  # there may be far fewer
            num_programs = min(num_items, -(-shape.tuning.num_programs // shape.num_kv_heads))
            launch = split_launch(shape, is_short, loops=num_programs < num_items)

        first_item, item_seq, token_seq = plan_items(
            rows, metadata, tile_tokens, split_len, num_items
        )
        tile_rows = min(tile_tokens, rows.max_query_len) * shape.num_shared if is_split else 0
        scratch = (num_items if is_split else 0, shape.num_kv_heads, tile_rows, shape.head_dim)
        partial = first_item.new_empty(scratch, dtype=torch.float32)
        return cls(
            rows,
            launch,
            merge_launch(shape, is_short) if is_split else None,
            split_tiles,
            tile_rows,
            num_items,
            num_programs,
            first_item,
            item_seq,
            token_seq,
            partial,
            partial.new_empty(scratch),
        )

    def attend(
        self,
        output: torch.Tensor,  # [num_tokens, num_heads, head_dim], written
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> None:
        rows = self.rows
        num_heads = query.shape[1]
        self.launch(
            (self.num_programs * key_cache.shape[2],),
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
                (rows.num_tokens, num_heads),
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


def bound_tiles(rows: SequenceRange, tile_tokens: int) -> int:
    """Upper bound of the number of tiles of queries."""
    if rows.query_lens is not None:
        return sum(-(-n // tile_tokens) for n in rows.query_lens)
    from_tokens = (rows.num_tokens + rows.num_seqs * (tile_tokens - 1)) // tile_tokens
    return min(from_tokens, rows.num_seqs * -(-rows.max_query_len // tile_tokens))


def bound_items(rows: SequenceRange, num_tiles: int, tile_tokens: int, split_len: int) -> int:
    if rows.query_lens is None or rows.seq_lens is None:
        return num_tiles * -(-rows.max_seq_len // split_len)
    lens = zip(rows.query_lens, rows.seq_lens, strict=True)
    return sum(-(-q // tile_tokens) * -(-n // split_len) for q, n in lens)


def choose_split_len(num_keys: int, max_seq_len: int, shortest: int) -> int:
    """Keys per split of long queries, whose tiles walk `num_keys` keys in total. No split is larger
    than a multiprocessor's share of that, and the splits of the longest sequence are equal; none is
    shorter than `shortest`, the least that is worth merging."""
    share = max(shortest, -(-num_keys // NUM_MULTIPROCESSORS))
    num_splits = -(-max_seq_len // share)
    return max(shortest, -(-max_seq_len // num_splits))


def plan_items(
    rows: SequenceRange,
    metadata: AttentionMetadata,
    tile_tokens: int,
    split_len: int,
    num_items: int,  # upper bound
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # first_item, item_seq, token_seq: as above
    starts = metadata.query_start_loc
    seq_lens = metadata.seq_lens
    first_item = starts.new_empty(rows.num_seqs + 1, dtype=torch.int32)
    item_seq = first_item.new_empty(num_items)
    token_seq = first_item.new_empty(rows.num_tokens)
    launch = plan_launch()
    launch(
        (rows.num_seqs + 1,),
        first_item,
        item_seq,
        token_seq,
        starts,
        seq_lens,
        rows.first_seq,
        rows.num_seqs,
        rows.first_token,
        rows.num_tokens,
        tile_tokens,
        split_len,
    )
    return first_item, item_seq, token_seq


class SplitPlan(TritonPlan):
    """The plan that all layers of a step share, work items included."""

    def __init__(self, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        super().__init__(metadata, shape)
        self.items = [
            WorkItems.plan(rows, shape, metadata)
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

    def launch(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
    ) -> None:
        for items in self.items:
            items.attend(output, query, key_cache, value_cache, self.metadata, scale)


class SplitTritonAttentionBackend(TritonAttentionBackend):
    """An `AttentionBackend` of the kernels above; writing and all checks are version 1's."""

    plan_type = SplitPlan
