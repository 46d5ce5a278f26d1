"""The small operations between a decoder layer's matrices, each one pass over its data.

A layer of `model.py` is four matrices, attention, and about twenty small operations between
them. On a GPU each of these is a launch, and a small model's decode step takes less time than
twenty launches. Three kernels replace them. They are tested against the plain operations of
`Regions`, in float64.

    add_rms_norm        adds to the residual and norms it: before attention, and before the MLP
    rotate_and_write    norms and rotates heads; writes keys and values to the cache
    silu_and_multiply   between the MLP's matrices

Everything between a load and a store is float32: a kernel rounds once where PyTorch rounds after
each operation. That changes low bits in bfloat16, as between any two implementations.

`kernel_regions.py` makes them available to the model.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from functools import cache

import torch

from kernel_launch import TRITON_TYPES, Launch
from paged_attention_triton import next_power_of_2
from triton_or_none import jit_for_any, tl

HEADS_AT_ONCE = 8  # in a program of `rotate_and_write`
CHANNELS_AT_ONCE = 1024  # in a program of `silu_and_multiply`
# Small tensors that came to the GPU in one copy with others.
UNALIGNED = ("positions", "slot_mapping")


# -- the residual is added and normed


@jit_for_any()
def _add_rms_norm_kernel(
    normed,  # [num_tokens, hidden_size], all contiguous
    hidden,
    delta,
    weight,  # [hidden_size]
    eps,
    HIDDEN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # HIDDEN_SIZE padded to a power of two
):
    channel = tl.arange(0, WIDTH)
    is_channel = channel < HIDDEN_SIZE
    place = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE + channel
    x = tl.load(hidden + place, mask=is_channel, other=0.0).to(tl.float32)
    x += tl.load(delta + place, mask=is_channel, other=0.0).to(tl.float32)
    x = x.to(hidden.dtype.element_ty)
    tl.store(hidden + place, x, mask=is_channel)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN_SIZE + eps)
    x *= scale * tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(normed + place, x.to(normed.dtype.element_ty), mask=is_channel)


@cache
def add_rms_norm_launch(hidden_size: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Launch:
    names = ("normed", "hidden", "delta")
    arguments = dict.fromkeys(names, "*" + TRITON_TYPES[dtype])
    arguments |= {"weight": "*" + TRITON_TYPES[weight_dtype], "eps": "fp32"}
    constants = {"HIDDEN_SIZE": hidden_size, "WIDTH": next_power_of_2(hidden_size)}
    return Launch(_add_rms_norm_kernel, arguments, constants, 4 if hidden_size <= 2048 else 8)


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add, and return the norm of the stored, rounded sum. `hidden` must be contiguous: it is
    written."""
    if not hidden.is_contiguous():
        raise ValueError(f"hidden must be contiguous, got strides {hidden.stride()}")
    normed = torch.empty_like(hidden)
    if len(hidden):
        launch = add_rms_norm_launch(hidden.shape[1], hidden.dtype, weight.dtype)
        launch((len(hidden),), normed, hidden, delta.contiguous(), weight, eps)
    return normed


# -- heads are normed and turned; keys and values go into the cache at once


@jit_for_any(unaligned=UNALIGNED)
def _rotate_and_write_kernel(
    query,  # [num_tokens, num_heads, head_dim], written
    qkv,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    norm_weight,  # [num_heads + num_kv_heads, head_dim]; any address if not HAS_NORM
    rotary_table,  # [num_positions, head_dim]
    positions,  # [num_tokens]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], written
    value_cache,
    slot_mapping,  # [num_tokens]
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of the caches, in elements
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM / 2 padded to a power of two
):
    HALF: tl.constexpr = HEAD_DIM // 2  # channel i is turned with channel i + HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    channel = tl.arange(0, WIDTH)
    is_channel = (channel < HALF)[None, :]
    is_query = head < NUM_HEADS
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    source = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    at = head[:, None] * HEAD_DIM + channel[None, :]
    mask = (is_turned | is_value)[:, None] & is_channel
    left = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + at + HALF, mask=mask, other=0.0).to(tl.float32)

    a, b = left, right
    if HAS_NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        mask = is_turned[:, None] & is_channel
        a = a * scale * tl.load(norm_weight + at, mask=mask, other=0.0).to(tl.float32)
        b = b * scale * tl.load(norm_weight + at + HALF, mask=mask, other=0.0).to(tl.float32)
    row = rotary_table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + channel[None, :]
    cos = tl.load(row, mask=is_channel, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, mask=is_channel, other=0.0).to(tl.float32)
    left = tl.where(is_value[:, None], left, a * cos - b * sin)
    right = tl.where(is_value[:, None], right, b * cos + a * sin)

    left, right = left.to(query.dtype.element_ty), right.to(query.dtype.element_ty)
    mask = is_query[:, None] & is_channel
    target = query + token * NUM_HEADS * HEAD_DIM + at
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * SLOT_STRIDE
    target = key_cache + place + (head - NUM_HEADS)[:, None] * HEAD_STRIDE + channel[None, :]
    mask = (is_turned & (head >= NUM_HEADS))[:, None] & is_channel
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)
    kv_head = head - NUM_HEADS - NUM_KV_HEADS
    target = value_cache + place + kv_head[:, None] * HEAD_STRIDE + channel[None, :]
    mask = is_value[:, None] & is_channel
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)


@cache
def rotate_and_write_launch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_strides: tuple[int, int, int],  # from block to block, slot to slot, head to head
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None,  # None: there is no norm
) -> Launch:
    names = ("query", "qkv", "rotary_table", "key_cache", "value_cache")
    arguments = dict.fromkeys(names, "*" + TRITON_TYPES[dtype])
    arguments |= {"norm_weight": "*" + TRITON_TYPES[norm_dtype or dtype]}
    arguments |= {"positions": "*i64", "slot_mapping": "*i64", "eps": "fp32"}
    block_stride, slot_stride, head_stride = cache_strides
    constants = {
        "HAS_NORM": norm_dtype is not None,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "HEADS_AT_ONCE": HEADS_AT_ONCE,
        "WIDTH": next_power_of_2(head_dim // 2),
    }
    return Launch(_rotate_and_write_kernel, arguments, constants, 2, unaligned=UNALIGNED)


def rotate_and_write(
    qkv: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The kernel for the function above. The caches can have either memory order."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    launch = rotate_and_write_launch(
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        key_cache.stride()[:3],
        qkv.dtype,
        None if norm_weight is None else norm_weight.dtype,
    )
    if len(qkv):
        launch(
            (len(qkv), -(-qkv.shape[1] // HEADS_AT_ONCE)),
            query,
            qkv.contiguous(),
            qkv if norm_weight is None else norm_weight,
            rotary_table,
            positions,
            key_cache,
            value_cache,
            slot_mapping,
            eps,
        )
    return query


# -- between the MLP's matrices


@jit_for_any()
def _silu_and_multiply_kernel(
    output,  # [num_tokens, intermediate_size], contiguous
    gate_up,  # [num_tokens, 2 * intermediate_size], contiguous
    INNER_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a program
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_channel = channel < INNER_SIZE
    source = gate_up + token * 2 * INNER_SIZE + channel
    gate = tl.load(source, mask=is_channel, other=0.0).to(tl.float32)
    up = tl.load(source + INNER_SIZE, mask=is_channel, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    target = output + token * INNER_SIZE + channel
    tl.store(target, result.to(output.dtype.element_ty), mask=is_channel)


@cache
def silu_and_multiply_launch(inner_size: int, dtype: torch.dtype) -> Launch:
    pointer = "*" + TRITON_TYPES[dtype]
    arguments = {"output": pointer, "gate_up": pointer}
    constants = {"INNER_SIZE": inner_size, "WIDTH": CHANNELS_AT_ONCE}
    return Launch(_silu_and_multiply_kernel, arguments, constants)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """The kernel for the function above."""
    num_tokens = gate_up.shape[0]
    inner_size = gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, inner_size)
    if num_tokens:
        grid = num_tokens, -(-inner_size // CHANNELS_AT_ONCE)
        silu_and_multiply_launch(inner_size, gate_up.dtype)(grid, output, gate_up.contiguous())
    return output
