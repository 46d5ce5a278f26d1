"""The small operations between the matrices of a model, each one pass over its data.

For models with Triton attention. A layer of `model.py` is four matrices, attention, and about
twenty small operations between them. On a GPU each of these is a launch, and a small model's decode
step takes less time than twenty launches. Three kernels replace them. They are tested against the
plain operations of `Regions`, in float64.

    rms_norm            PyTorch's, which is one launch on a GPU
    rotate_and_write    norms and rotates heads; writes keys and values to the cache
    add_and_norm        adds to the residual and norms it: before attention, and before the MLP
    silu_and_multiply   the MLP's gate

The MLP's last matrix product includes the addition to the residual (`Linear.add_to`). With a bias,
or split over several GPUs, whose products are summed first, the addition is one launch more.

Everything between a load and a store is float32: a kernel rounds once where PyTorch rounds after
each operation. That changes low bits in bfloat16, as between any two implementations.

See common/models/regions/README.md#between-the-matrices"""

from __future__ import annotations

from functools import cache

import torch

from common.models.linear import Linear
from common.models.regions.regions import FusedRegions
from kernel_launch import TRITON_TYPES, AttentionShape, Launch
from paged_attention import AttentionPlan
from paged_attention_triton import next_power_of_2
from triton_or_none import jit_for_any, tl

HEADS_AT_ONCE = 8  # in a program of `_rotate_and_write_kernel`
CHANNELS_AT_ONCE = 1024  # in a program of `_silu_and_multiply_kernel`
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
    pointer = "*" + TRITON_TYPES[dtype]
    arguments = {
        "normed": pointer,
        "hidden": pointer,
        "delta": pointer,
        "weight": "*" + TRITON_TYPES[weight_dtype],
        "eps": "fp32",
    }
    constants = {"HIDDEN_SIZE": hidden_size, "WIDTH": next_power_of_2(hidden_size)}
    return Launch(_add_rms_norm_kernel, arguments, constants, 4 if hidden_size <= 2048 else 8)


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
    shape: AttentionShape,
    norm_dtype: torch.dtype | None,  # None: there is no norm
) -> Launch:
    names = ("query", "qkv", "rotary_table", "key_cache", "value_cache")
    arguments = dict.fromkeys(names, "*" + TRITON_TYPES[shape.dtype])
    arguments |= {"norm_weight": "*" + TRITON_TYPES[norm_dtype or shape.dtype]}
    arguments |= {"positions": "*i64", "slot_mapping": "*i64", "eps": "fp32"}
    block_stride, slot_stride, head_stride = shape.cache_strides
    constants = {
        "HAS_NORM": norm_dtype is not None,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_STRIDE": block_stride,
        "SLOT_STRIDE": slot_stride,
        "HEAD_STRIDE": head_stride,
        "HEADS_AT_ONCE": HEADS_AT_ONCE,
        "WIDTH": next_power_of_2(shape.head_dim // 2),
    }
    return Launch(_rotate_and_write_kernel, arguments, constants, 2, unaligned=UNALIGNED)


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


class KernelRegions(FusedRegions):
    """Versions of the methods of `Regions` that launch Triton kernels."""

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Norm, rotate and write to the cache directly: `plan.write_kv` is not called. The caches
        can have either memory order."""
        table, positions = rotary
        num_tokens, num_all_heads, head_dim = qkv.shape
        block_size, num_kv_heads = key_cache.shape[1:3]
        block_stride, slot_stride, head_stride, _ = key_cache.stride()
        shape = AttentionShape(
            num_heads=num_all_heads - 2 * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            cache_strides=(block_stride, slot_stride, head_stride),
            dtype=qkv.dtype,
        )
        query = qkv.new_empty(num_tokens, shape.num_heads, head_dim)
        has_norm = norm_weight is not None
        launch = rotate_and_write_launch(shape, norm_weight.dtype if has_norm else None)
        if num_tokens:
            launch(
                (num_tokens, -(-num_all_heads // HEADS_AT_ONCE)),
                query,
                qkv.contiguous(),
                norm_weight if has_norm else qkv,
                table,
                positions,
                key_cache,
                value_cache,
                plan.slot_mapping,
                eps,
            )
        return query

    def add_and_norm(
        self,
        matrix: Linear,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, and norm the stored, rounded sum. `hidden` must be contiguous: it is written."""
        if weight is None:
            return super().add_and_norm(matrix, hidden, x, weight, eps, post_weight)
        delta = matrix(x)
        if post_weight is not None:
            delta = self.rms_norm(delta, post_weight, eps)
        normed = torch.empty_like(hidden)
        num_tokens, hidden_size = hidden.shape
        if num_tokens:
            launch = add_rms_norm_launch(hidden_size, hidden.dtype, weight.dtype)
            launch((num_tokens,), normed, hidden, delta.contiguous(), weight, eps)
        return hidden, normed

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens = gate_up.shape[0]
        inner_size = gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, inner_size)
        if num_tokens:
            grid = num_tokens, -(-inner_size // CHANNELS_AT_ONCE)
            silu_and_multiply_launch(inner_size, gate_up.dtype)(grid, output, gate_up.contiguous())
        return output
