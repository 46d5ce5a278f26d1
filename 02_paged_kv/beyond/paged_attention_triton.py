"""`paged_attention` and `write_kv` as Triton kernels: keys are read where they lie. Version 1.

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
reach the output, nor whole tiles that a layer's window (`window_attention.py`) hides.

`paged_attention.py` is what this is tested against: on a GPU, or anywhere in Triton's interpreter.
Nothing here waits for the device. Caches may lie in memory in any order in which a head's channels
are neighbours.

The grid is a rectangle, sequences x tiles of the longest query x KV heads. One sequence of 100,000
keys among short ones is walked by one program for each KV head, while the rest of the GPU waits:
`split_attention_triton.py` is version 2.

Sources: FlashAttention-2, arXiv 2307.08691; vLLM's unified Triton attention kernel has this shape.

See 02_paged_kv/README.md#a-kernel-for-a-gpu"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kernel_launch import TRITON_TYPES, AttentionShape, DecodeTuning, Launch
from paged_attention import AttentionMetadata
from triton_or_none import HAS_TRITON, jit, jit_for_any, tl, triton

MAX_HEAD_DIM = 256
FLOAT32_PRECISIONS = ("ieee", "tf32x3")
SHORT_ROWS = 16  # query tokens x heads that share a KV head; more is a long query
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
    num_rows, num_keys, num_warps = TILES[kind, length][size]
    if is_short:
        num_keys = shape.tuning.tile_keys or num_keys
        num_warps = shape.tuning.num_warps or num_warps
    return num_rows, num_keys, num_warps


def tile_constants(shape: AttentionShape, is_short: bool) -> tuple[dict[str, Any], int, int]:
    """Return what both versions of the attention kernel are compiled for: constants, warps,
    stages."""
    num_rows, num_keys, num_warps = choose_tile(shape, is_short)
    num_shared = shape.num_shared
    tile_tokens = max(1, num_rows // num_shared)
    block_stride, slot_stride, head_stride = shape.cache_strides
    constants = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "NUM_SHARED": num_shared,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "QUERY_STRIDE": shape.query_stride,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "TILE_TOKENS": tile_tokens,
        "BLOCK_M": max(16, next_power_of_2(tile_tokens * num_shared)),
        "BLOCK_N": num_keys,
        "BLOCK_D": max(16, next_power_of_2(shape.head_dim)),
        "WINDOW": shape.window,
        "PRECISION": shape.float32_precision,
        "UPCAST": shape.is_interpreted,
    }
    return constants, num_warps, shape.tuning.num_stages if is_short else 3


@cache
def attention_launch(shape: AttentionShape, is_short: bool) -> Launch:
    pointer = "*" + TRITON_TYPES[shape.dtype]
    arguments = dict.fromkeys(("output", "query", "key_cache", "value_cache"), pointer)
    arguments |= {"query_start_loc": "*i64", "seq_lens": "*i64", "block_tables": "*i32"}
    arguments |= {"table_stride": "i32", "scale": "fp32"}
    constants, num_warps, num_stages = tile_constants(shape, is_short)
    return Launch(
        kernel=_paged_attention_kernel,
        arguments=arguments,
        constants=constants,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@cache
def write_kv_launch(
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    key_stride: int,  # from token to token
    value_stride: int,
    cache_strides: tuple[int, int, int],
) -> Launch:
    pointer = "*" + TRITON_TYPES[dtype]
    arguments = dict.fromkeys(("key", "value", "key_cache", "value_cache"), pointer)
    block_stride, slot_stride, head_stride = cache_strides
    constants = {
        "KEY_STRIDE": key_stride,
        "VALUE_STRIDE": value_stride,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "WIDTH": next_power_of_2(num_kv_heads * head_dim),
    }
    return Launch(_write_kv_kernel, arguments | {"slot_mapping": "*i64"}, constants)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


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


@jit_for_any("table_stride")
def _paged_attention_kernel(
    output,  # [num_tokens, num_heads, head_dim], contiguous
    query,  # [num_tokens, num_heads, head_dim], heads lie end to end
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
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
):
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(2)
    # Positions have 32 bits, which saves registers; offsets in memory have 64.
    first_token = tl.load(query_start_loc + seq).to(tl.int32)
    query_len = tl.load(query_start_loc + seq + 1).to(tl.int32) - first_token
    tile_start = tl.program_id(1) * TILE_TOKENS
    if tile_start >= query_len:
        return
    history = tl.load(seq_lens + seq).to(tl.int32) - query_len

    row = tl.arange(0, BLOCK_M)
    query_index = tile_start + row // NUM_SHARED
    dim = tl.arange(0, BLOCK_D)
    is_row = (row < TILE_TOKENS * NUM_SHARED) & (query_index < query_len)
    head = kv_head * NUM_SHARED + row % NUM_SHARED
    row_mask = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_token + query_index).to(tl.int64)
    query_row = query + token * QUERY_STRIDE + head * HEAD_DIM
    q = tl.load(query_row[:, None] + dim[None, :], mask=row_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Without a window every row sees key 0, the padding rows too: none's highest score stays -inf.
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_keys = history + tl.minimum(tile_start + TILE_TOKENS, query_len)
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(history + tile_start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    table = block_tables + seq * table_stride
    for start in range(first_tile, num_keys, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_key = position < num_keys
        block_id = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = block_id * BLOCK_STRIDE + position % BLOCK_SIZE * SLOT_STRIDE
        offsets = (place + kv_head * HEAD_STRIDE)[:, None] + dim[None, :]
        key_mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(key_cache + offsets, mask=key_mask, other=0.0)
        v = tl.load(value_cache + offsets, mask=key_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & (position[None, :] <= (history + query_index)[:, None])
        if WINDOW:
            is_seen = is_seen & (position[None, :] > (history + query_index - WINDOW)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = new_highest
        if WINDOW:  # a row may have seen no key yet: -inf - -inf would be NaN
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(highest - shift)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        product = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        weighted = weighted * rescale[:, None] + product
        highest = new_highest

    result = weighted / weight_sum[:, None]
    output_row = output + (token * NUM_KV_HEADS * NUM_SHARED + head) * HEAD_DIM
    target = output_row[:, None] + dim[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=row_mask)


def write_kv_triton(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # the same
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
    value_cache: torch.Tensor,  # the same
    slot_mapping: torch.Tensor,  # [num_tokens] int64, -1: not written
) -> None:
    """Write keys and values to their slots. Raises `ValueError` if the two caches have different
    memory layouts."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    check_caches(key_cache, value_cache)
    key, value = with_heads_end_to_end(key), with_heads_end_to_end(value)
    launch = write_kv_launch(
        num_kv_heads,
        head_dim,
        block_size,
        key_cache.dtype,
        key.stride(0),
        value.stride(0),
        key_cache.stride()[:3],
    )
    if len(key):
        launch((len(key),), key, value, key_cache, value_cache, slot_mapping)


class TritonPlan:
    """A step for the kernels above: all metadata, and the launches."""

    def __init__(self, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        self.metadata = metadata
        self.shape = shape
        self.slot_mapping = metadata.slot_mapping
        self.output: torch.Tensor | None = None

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        write_kv_triton(key, value, key_cache, value_cache, self.slot_mapping)

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
        self.launch(self.output, query.contiguous(), key_cache, value_cache, scale)
        return self.output

    def launch(
        self,
        output: torch.Tensor,  # written
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
    ) -> None:
        metadata = self.metadata
        shape = self.shape
        num_seqs = len(metadata.seq_lens)
        longest = metadata.max_query_len
        launch = attention_launch(shape, longest * shape.num_shared <= SHORT_ROWS)
        if num_seqs and longest:
            num_tiles = -(-longest // launch.constants["TILE_TOKENS"])
            launch(
                (num_seqs, num_tiles, shape.num_kv_heads),
                output,
                query,
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_tables,
                metadata.block_tables.stride(0),
                scale,
            )


class TritonAttentionBackend:
    """An `AttentionBackend` of the kernels above, for float16, bfloat16 and float32.

    Products of float32 are computed without tensor cores ("ieee"), or from three products of tensor
    cores ("tf32x3"), almost as exactly. Raises `RuntimeError` if Triton is missing, or if there is
    neither a GPU nor the interpreter, and `ValueError` for another precision.
    """

    plan_type = TritonPlan
    tuning = DecodeTuning()

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
        self.check(key_cache.dtype, key_cache.shape[3])
        shape = AttentionShape.of(
            num_heads,
            key_cache,
            float32_precision=self.float32_precision,
            is_interpreted=self.is_interpreted,
            window=metadata.window or 0,
            tuning=self.tuning,
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
