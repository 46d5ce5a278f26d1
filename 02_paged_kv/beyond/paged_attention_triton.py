"""`paged_attention` and `write_kv` as Triton kernels: keys are read where they lie.

Nothing is gathered to memory first. A program of the attention kernel takes one sequence, one KV
head and a tile of query rows, and walks along the keys in tiles of `BLOCK_N`; for each key it looks
up the block in the table and computes the address:

    row m of a tile     query token m // num_shared, query head m % num_shared of this KV head,
                        so the heads that share a KV head also share every key that is loaded
    key n of a tile     position p -> block table[p // block_size], offset p % block_size

Softmax is *online*: with the highest score so far m, the sum of exp(score - m) and the weighted sum
of values are kept in float32 and rescaled whenever m grows. So no row of scores is ever stored, and
one kernel serves any mix of one and many query tokens, any block size, any head_dim up to 256
(padded to a power of two). Keys beyond what a tile may see are never loaded, so garbage cannot
reach the output.

The signatures are those of `paged_attention.py`, which is what this is tested against: on a GPU,
or anywhere in Triton's interpreter. Nothing here waits for the device.

Sources: FlashAttention-2, arXiv 2307.08691; vLLM's unified Triton attention kernel has this shape.
"""

from __future__ import annotations

import torch

from paged_attention import AttentionMetadata
from triton_or_none import HAS_TRITON, jit, tl, triton

MAX_HEAD_DIM = 256


@jit
def _write_kv_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache,
    slot_mapping,  # [num_tokens]
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # NUM_KV_HEADS * HEAD_DIM padded to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    lane = tl.arange(0, WIDTH)
    head, dim = lane // HEAD_DIM, lane % HEAD_DIM
    is_written = lane < NUM_KV_HEADS * HEAD_DIM
    new_key = key + token * key_stride_token + head * key_stride_head + dim
    new_value = value + token * value_stride_token + head * value_stride_head + dim
    target = slot * NUM_KV_HEADS * HEAD_DIM + lane
    tl.store(key_cache + target, tl.load(new_key, mask=is_written), mask=is_written)
    tl.store(value_cache + target, tl.load(new_value, mask=is_written), mask=is_written)


@jit
def _paged_attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    query,  # [num_tokens, num_heads, head_dim], contiguous
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache,
    query_start_loc,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    block_tables,  # [num_seqs, max_blocks]
    table_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SHARED: tl.constexpr,  # query heads to a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # query tokens to a tile
    BLOCK_M: tl.constexpr,  # TILE_TOKENS * NUM_SHARED padded to a power of two
    BLOCK_N: tl.constexpr,  # keys to a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    UPCAST: tl.constexpr,  # multiply in float32: the interpreter cannot in bfloat16
):
    seq, kv_head = tl.program_id(0), tl.program_id(2)
    first_token = tl.load(query_start_loc + seq).to(tl.int64)
    query_len = tl.load(query_start_loc + seq + 1).to(tl.int64) - first_token
    tile_start = tl.program_id(1) * TILE_TOKENS
    if tile_start >= query_len:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int64)
    history = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = tile_start + row // NUM_SHARED
    dim = tl.arange(0, BLOCK_D)
    is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
    head = kv_head * NUM_SHARED + row % NUM_SHARED
    row_offset = ((first_token + query_index) * NUM_KV_HEADS * NUM_SHARED + head) * HEAD_DIM
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(query + row_offset[:, None] + dim[None, :], mask=row_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Every row sees key 0, the padding rows too, so no row's highest score stays at -inf.
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_keys = history + tl.minimum(tile_start + TILE_TOKENS, query_len)
    for start in range(0, num_keys, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_key = position < num_keys
        table = block_tables + seq.to(tl.int64) * table_stride
        block_id = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
        key_offset = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        key_mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        offsets = key_offset[:, None] + dim[None, :]
        k = tl.load(key_cache + offsets, mask=key_mask, other=0.0)
        v = tl.load(value_cache + offsets, mask=key_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = is_key[None, :] & (position[None, :] <= (history + query_index)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        weighted = weighted * rescale[:, None] + product
        highest = new_highest

    result = weighted / weight_sum[:, None]
    target = output + row_offset[:, None] + dim[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=row_mask)


class TritonAttentionBackend:
    """An `AttentionBackend` of the kernels above, for float16, bfloat16 and float32.

    Raises `RuntimeError` if Triton is missing, or if there is neither a GPU nor the interpreter.
    """

    def __init__(self) -> None:
        if not HAS_TRITON:
            raise RuntimeError(
                "the Triton attention backend needs the package triton, which is not installed: "
                "run `pip install triton`, or choose attention_backend='torch'"
            )
        self.is_interpreted = not isinstance(_write_kv_kernel, triton.runtime.JITFunction)
        if not torch.cuda.is_available() and not self.is_interpreted:
            raise RuntimeError(
                "the Triton attention backend needs a CUDA device, and there is none: choose "
                "attention_backend='torch', or, to try the kernels slowly on a CPU, set the "
                "environment variable TRITON_INTERPRET=1 before Python starts"
            )

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # the same
        key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
        value_cache: torch.Tensor,  # the same
        slot_mapping: torch.Tensor,  # [num_tokens] int64, -1: not written
    ) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        check_contiguous(key_cache, value_cache)
        if key.stride(2) != 1 or value.stride(2) != 1:
            key, value = key.contiguous(), value.contiguous()
        if num_tokens:
            _write_kv_kernel[(num_tokens,)](
                key,
                value,
                key_cache,
                value_cache,
                slot_mapping,
                *key.stride()[:2],
                *value.stride()[:2],
                NUM_KV_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                WIDTH=triton.next_power_of_2(num_kv_heads * head_dim),
            )

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
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        check_attention_inputs(query, key_cache, value_cache)
        query = query.contiguous()
        output = torch.zeros_like(query)
        num_shared = num_heads // num_kv_heads
        # A power of two: each value is a compilation of its own.
        longest = triton.next_power_of_2(metadata.max_query_len)
        tile_tokens = max(1, min(64 // num_shared, longest))
        num_seqs = len(metadata.seq_lens)
        if num_seqs and metadata.max_query_len:
            grid = (num_seqs, triton.cdiv(metadata.max_query_len, tile_tokens), num_kv_heads)
            _paged_attention_kernel[grid](
                output,
                query,
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                metadata.block_tables.stride(0),
                scale,
                NUM_KV_HEADS=num_kv_heads,
                NUM_SHARED=num_shared,
                HEAD_DIM=head_dim,
                BLOCK_SIZE=block_size,
                TILE_TOKENS=tile_tokens,
                BLOCK_M=max(16, triton.next_power_of_2(tile_tokens * num_shared)),
                BLOCK_N=32 if head_dim > 128 else 64,
                BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
                UPCAST=self.is_interpreted,
            )
        return output


def check_attention_inputs(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    check_contiguous(key_cache, value_cache)
    if query.dtype == torch.float64 or query.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"query is {query.dtype} with head_dim {query.shape[2]}: the Triton backend takes 16 "
            f"or 32 bits and head_dim <= {MAX_HEAD_DIM}; choose attention_backend='torch'"
        )


def check_contiguous(*caches: torch.Tensor) -> None:
    if not all(cache.is_contiguous() for cache in caches):
        raise ValueError("key_cache and value_cache must be contiguous")
