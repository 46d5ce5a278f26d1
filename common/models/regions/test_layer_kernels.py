"""Kernels against their PyTorch specification in float64: on a GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from common.models.regions.layer_kernels import (
    CHANNELS_AT_ONCE,
    add_rms_norm,
    add_rms_norm_in_torch,
    rotate_and_write,
    rotate_and_write_in_torch,
    silu_and_multiply,
    silu_and_multiply_in_torch,
)
from common.models.rotary import RopeParameters, rotary_table
from compiled_attention import HeadMajorKVCache
from paged_attention import PagedKVCache

pytestmark = pytest.mark.needs("triton")

# Tolerance of a result of size 1, or relative to its size where it is larger.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(device)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    error = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    assert not error.isnan().any() and (error <= TOLERANCE[dtype]).all(), error.max()


@DTYPES
@pytest.mark.parametrize("hidden_size", [1, 24, 64, 1000])
@pytest.mark.parametrize("keeps_weight", [False, True])  # in float32
def test_the_residual_is_added_and_normed(keeps_weight, hidden_size, dtype, device):
    torch.manual_seed(hidden_size)
    hidden, delta = (normal(5, hidden_size, dtype=dtype, device=device) for _ in range(2))
    weight = normal(hidden_size, dtype=torch.float32 if keeps_weight else dtype, device=device)
    total = hidden.double() + delta.double()
    normed = add_rms_norm(hidden, delta, weight, 1e-6)
    check(hidden, total, dtype)
    # The norm reads the stored, rounded values. (The interpreter rounds toward zero.)
    nothing = torch.zeros_like(total)
    check(normed, add_rms_norm_in_torch(hidden.double(), nothing, weight.double(), 1e-6), dtype)


def test_rows_of_zeros_are_normed_to_zeros(device):
    """Padding: eps keeps them from NaN."""
    zeros = torch.zeros(2, 24, device=device)
    weight = torch.ones(24, device=device)
    assert torch.equal(add_rms_norm(zeros.clone(), zeros, weight, 1e-6), zeros)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(torch.zeros(24, 2, device=device).T, zeros, weight, 1e-6)


@pytest.mark.sample
@DTYPES
@pytest.mark.parametrize("has_norm", [False, True, "in float32"])
@pytest.mark.parametrize("kind", [PagedKVCache, HeadMajorKVCache])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 1, 80), (16, 8, 8), (1, 1, 2)]
)
def test_heads_are_normed_and_turned_and_written(
    num_heads, num_kv_heads, head_dim, kind, has_norm, dtype, device
):
    """NaN in every slot that is not written stays; -1 is written nowhere."""
    torch.manual_seed(head_dim)
    block_size, num_tokens = 3, 7
    shape = 1, 6, block_size, num_kv_heads, head_dim
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    weight = None
    if has_norm:
        norm_dtype = torch.float32 if has_norm == "in float32" else dtype
        weight = normal(num_heads + num_kv_heads, head_dim, dtype=norm_dtype, device=device)
    table = rotary_table(RopeParameters(), head_dim, 300, dtype).to(device)
    positions = torch.tensor([0, 1, 299, 17, 4, 5, 6], device=device)
    slots = torch.tensor([0, 17, -1, 5, 9, -1, 2], device=device)
    cache = kind(*shape, dtype, device=device)
    key_cache, value_cache = (
        cache.key_cache[0].fill_(math.nan),
        cache.value_cache[0].fill_(math.nan),
    )
    expected = [torch.full(shape[1:], math.nan, dtype=torch.float64, device=device) for _ in "kv"]
    expected_query = rotate_and_write_in_torch(
        qkv.double(),
        None if weight is None else weight.double(),
        table.double(),
        positions,
        *expected,
        slots,
        1e-6,
    )
    query = rotate_and_write(qkv, weight, table, positions, key_cache, value_cache, slots, 1e-6)
    check(query, expected_query, dtype)
    for found, reference in zip((key_cache, value_cache), expected, strict=True):
        assert torch.equal(found.isnan(), reference.isnan())
        check(found.nan_to_num(), reference.nan_to_num(), dtype)
    written = slots[slots >= 0]
    values = value_cache[written // block_size, written % block_size]
    assert torch.equal(values, qkv[slots >= 0, num_heads + num_kv_heads :]), "not rounded again"


@DTYPES
@pytest.mark.parametrize("inner_size", [1, 24, CHANNELS_AT_ONCE, CHANNELS_AT_ONCE + 7])
def test_the_gate_is_multiplied(inner_size, dtype, device):
    torch.manual_seed(inner_size)
    gate_up = 3 * normal(4, 2 * inner_size, dtype=dtype, device=device)
    check(silu_and_multiply(gate_up), silu_and_multiply_in_torch(gate_up.double()), dtype)


def test_very_negative_gates_give_zero_and_not_nan(device):
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=device)
    assert silu_and_multiply(gate_up).tolist() == [[0.0, 3e4]]


def test_batches_without_tokens(device):
    empty = torch.zeros(0, 8, device=device)
    assert add_rms_norm(empty, empty, torch.ones(8, device=device), 1e-6).shape == (0, 8)
    assert silu_and_multiply(empty).shape == (0, 4)
    cache = PagedKVCache(1, 2, 2, 1, 4, device=device)
    caches = cache.key_cache[0], cache.value_cache[0]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    qkv, table = torch.zeros(0, 4, 4, device=device), torch.zeros(3, 4, device=device)
    assert rotate_and_write(qkv, None, table, none, *caches, none, 1e-6).shape == (0, 2, 4)
