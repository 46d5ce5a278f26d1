"""`mixed_attention` as one Triton kernel for any mix of query lengths.

Chapter 2's kernel launches a rectangle, sequences x tiles of the longest query. With 256 decodes
and one chunk of 512 almost all of it is empty. Here the tiles of the batch lie end to end:

    sequence          A: 1 token | B: 1 | C: 6 tokens, in tiles of 4       |
    query_start_loc   0            1      2                                8
    first tile        0            1      2            3                   4   (start + 3 s) // 4
    program           0            1      2: tokens 0-3   3: tokens 4-5

Sequence s starts at tile (query_start_loc[s] + s * (TILE_TOKENS - 1)) // TILE_TOKENS, which leaves
room for the last, partial tile of each one before it. The grid follows from the number of tokens
alone; each program finds its sequence by binary search, and at most one tile for each sequence is
left without work. Four query tiles against a history of 100,000 keys would keep four of a GPU's
multiprocessors busy, so a third axis splits the keys (FlashDecoding): each program writes the
softmax over its own part and its log-sum-exp, and a small kernel merges them.

Keys that every row of a tile sees need no mask; only the tiles on the diagonal, at the end, have
one. Query heads that share a KV head share the keys that are loaded, as in chapter 2.

Invariants: keys beyond what a tile may see are never loaded; scratch that no program has written
reaches no output; nothing here waits for the device.

Sources: FlashAttention-2, arXiv 2307.08691; FlashDecoding; vLLM's unified Triton kernel also has a
flat grid with a search, and a variant that splits the keys.
"""

from __future__ import annotations

import torch

from paged_attention import AttentionMetadata
from paged_attention_triton import TritonAttentionBackend, check_attention_inputs
from triton_or_none import jit, tl, triton

TILE_ROWS = 64  # query tokens x heads that share a KV head
TILE_KEYS = 64  # half of it for large heads
NUM_MULTIPROCESSORS = 132  # that should have work: asking the device is not worth it
MIN_KEYS_PER_SPLIT = 256  # below, merging costs more than it gains
MAX_SPLITS = 32


@jit
def _mixed_attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [num_splits, num_tokens, num_heads, head_dim] float32; not with one split
    partial_lse,  # [num_splits, num_tokens, num_heads] float32; not with one split
    query,  # [num_tokens, num_heads, head_dim], contiguous
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache,
    query_start_loc,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    block_tables,  # [num_seqs, max_blocks]
    table_stride,
    num_seqs,
    num_tokens,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,  # query heads to a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # query tokens to a tile
    BLOCK_M: tl.constexpr,  # TILE_TOKENS * NUM_SHARED padded to a power of two
    BLOCK_N: tl.constexpr,  # keys to a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32: the interpreter cannot in bfloat16
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The last sequence that starts at this tile or before it.
    seq = 0
    highest_seq = num_seqs - 1
    while seq < highest_seq:
        middle = (seq + highest_seq + 1) // 2
        start_loc = tl.load(query_start_loc + middle).to(tl.int32)
        if (start_loc + middle * (TILE_TOKENS - 1)) // TILE_TOKENS <= tile:
            seq = middle
        else:
            highest_seq = middle - 1
    first_token = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = tl.load(query_start_loc + seq + 1).to(tl.int64) - first_token
    first_tile = (first_token + seq * (TILE_TOKENS - 1)) // TILE_TOKENS
    tile_start = (tile - first_tile) * TILE_TOKENS
    if tile_start >= query_len:
        return
    history = tl.load(seq_lens + seq).to(tl.int64) - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = tile_start + row // NUM_SHARED
    dim = tl.arange(0, BLOCK_D)
    is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
    head = kv_head * NUM_SHARED + row % NUM_SHARED
    row_id = (first_token + query_index) * NUM_KV_HEADS * NUM_SHARED + head
    offsets = row_id[:, None] * HEAD_DIM + dim[None, :]
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + offsets, mask=row_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Keys [0, whole_stop) are whole tiles that all rows see; [whole_stop, num_keys) the diagonal.
    num_keys = history + tl.minimum(tile_start + TILE_TOKENS, query_len)
    whole_stop = (history + tile_start + 1) // BLOCK_N * BLOCK_N
    split_start = 0 * num_keys
    split_stop = num_keys
    if IS_SPLIT:
        split_len = tl.cdiv(tl.cdiv(num_keys, BLOCK_N), tl.num_programs(2)) * BLOCK_N
        split_start = split * split_len
        split_stop = tl.minimum(split_start + split_len, num_keys)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_row = seq.to(tl.int64) * table_stride  # pyright: ignore[reportAttributeAccessIssue]
    table = block_tables + first_row
    # Two loops, of which only the second has masks.
    for is_diagonal in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        first, stop = split_start, tl.minimum(whole_stop, split_stop)
        if is_diagonal:
            first, stop = tl.maximum(whole_stop, split_start), split_stop
        for start in range(first, stop, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            key_mask = (dim < HEAD_DIM)[None, :]
            if is_diagonal:
                is_key = position < num_keys
                key_mask = key_mask & is_key[:, None]
                block_id = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0)
            else:
                block_id = tl.load(table + position // BLOCK_SIZE)
            slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            key_offset = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
            key_offsets = key_offset[:, None] + dim[None, :]
            k = tl.load(key_cache + key_offsets, mask=key_mask, other=0.0)
            v = tl.load(value_cache + key_offsets, mask=key_mask, other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if is_diagonal:
                is_seen = position[None, :] <= (history + query_index)[:, None]
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

    if IS_SPLIT:
        # A split without keys, or without any that this row sees: its sum is 0, its highest -inf.
        weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        result = weighted / weight_sum[:, None]
        split_row = split.to(tl.int64) * num_tokens * NUM_KV_HEADS * NUM_SHARED
        tl.store(partial + split_row * HEAD_DIM + offsets, result, mask=row_mask)
        tl.store(partial_lse + split_row + row_id, highest + tl.log(weight_sum), mask=is_row)
    else:
        result = weighted / weight_sum[:, None]
        tl.store(output + offsets, result.to(output.dtype.element_ty), mask=row_mask)


@jit
def _merge_splits_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    partial,  # [num_splits, num_tokens, num_heads, head_dim] float32
    partial_lse,  # [num_splits, num_tokens, num_heads] float32
    query_start_loc,  # [num_seqs + 1]
    num_seqs,
    num_tokens,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # num_splits padded to a power of two
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_start_loc + num_seqs):  # padding: nobody has written its scratch
        return
    row = token * NUM_HEADS + tl.program_id(1)
    split, dim = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    split_row = row + split.to(tl.int64) * num_tokens * NUM_HEADS
    lse = tl.load(partial_lse + split_row, mask=split < num_splits, other=float("-inf"))
    weights = tl.exp(lse - tl.max(lse, 0))  # some split has seen a key
    mask = (split < num_splits)[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(partial + split_row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(part * weights[:, None], 0) / total  # pyright: ignore[reportOperatorIssue]
    target = output + row * HEAD_DIM + dim
    tl.store(target, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


class MixedTritonAttentionBackend(TritonAttentionBackend):
    """An `AttentionBackend` of the kernels above; `write_kv` and all checks are chapter 2's."""

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: torch.Tensor,  # the same
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Raises `ValueError` for float64, which the kernels would round, and for a head_dim above
        256."""
        check_attention_inputs(query, key_cache, value_cache)
        num_tokens, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        query = query.contiguous()
        output = torch.zeros_like(query)
        num_seqs = len(metadata.seq_lens)
        if not num_seqs or not metadata.max_query_len:
            return output
        num_shared = num_heads // num_kv_heads
        # A power of two: each value is a compilation of its own.
        longest = triton.next_power_of_2(metadata.max_query_len)
        tile_tokens = max(1, min(TILE_ROWS // num_shared, longest))
        num_tiles = (num_tokens + num_seqs * (tile_tokens - 1)) // tile_tokens
        num_splits = choose_num_splits(num_tiles * num_kv_heads, metadata.max_seq_len)
        partial = partial_lse = None
        if num_splits > 1:
            partial = query.new_empty(num_splits, *query.shape, dtype=torch.float32)
            partial_lse = partial.new_empty(num_splits, num_tokens, num_heads)
        block_dim = max(16, triton.next_power_of_2(head_dim))
        _mixed_attention_kernel[(num_tiles, num_kv_heads, num_splits)](
            output,
            partial,
            partial_lse,
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.block_tables.stride(0),
            num_seqs,
            num_tokens,
            scale,
            NUM_KV_HEADS=num_kv_heads,
            NUM_SHARED=num_shared,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_TOKENS=tile_tokens,
            BLOCK_M=max(16, triton.next_power_of_2(tile_tokens * num_shared)),
            BLOCK_N=max(16, TILE_KEYS // 2) if head_dim > 128 else TILE_KEYS,
            BLOCK_D=block_dim,
            IS_SPLIT=num_splits > 1,
            UPCAST=self.is_interpreted,
        )
        if num_splits > 1:
            _merge_splits_kernel[(num_tokens, num_heads)](
                output,
                partial,
                partial_lse,
                metadata.query_start_loc,
                num_seqs,
                num_tokens,
                num_splits,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                BLOCK_SPLITS=triton.next_power_of_2(num_splits),
                BLOCK_D=block_dim,
            )
        return output


def choose_num_splits(num_programs: int, max_seq_len: int) -> int:
    """As many as give each multiprocessor a program, unless the parts become too short."""
    wanted = -(-NUM_MULTIPROCESSORS // num_programs)
    return max(1, min(wanted, max_seq_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS))
