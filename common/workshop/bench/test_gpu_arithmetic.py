"""Bytes and operations, by a pencil."""

from __future__ import annotations

import pytest
import torch

from common.workshop.bench.gpu_arithmetic import (
    Ceilings,
    Cost,
    Heads,
    attention_cost,
    decode_cost,
    moved,
)
from common.workshop.bench.random_weights import QWEN3_0_6B

# 4 query heads and 2 KV heads of 3 numbers of 2 bytes: a query has 24 bytes, a key and value 24.
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=3, itemsize=2)


def test_attention_reads_every_key_once_and_multiplies_what_a_query_sees() -> None:
    """A decode over 7 keys; 3 tokens that see 3, 4 and 5 keys. Blocks of 4."""
    assert HEADS.query_bytes == 24 and HEADS.kv_bytes == 24
    cost = attention_cost(HEADS, [(1, 7), (3, 5)], block_size=4)
    keys, queries, table_entries = 12 * 24, 2 * 4 * 24, (2 + 2) * 4
    assert cost.num_bytes == keys + queries + table_entries
    pairs = 7 + (3 + 4 + 5)
    assert cost.num_flops == pairs * 4 * (2 * 3 + 2 * 3)  # heads x (score + weighted value)


def test_a_small_kernel_moves_its_tensors_once() -> None:
    assert moved(torch.zeros(3, 4), torch.zeros(5, dtype=torch.int64)) == Cost(3 * 4 * 4 + 5 * 8)


def test_a_decode_step_of_qwen3_0_6b() -> None:
    """28 layers of 1024 x (16 + 8 + 8) heads of 128, 2048 x 1024, 1024 x 6144, 3072 x 1024; the
    head 151,936 x 1024. A token's KV: 28 x 2 x 8 x 128 x 2 bytes."""
    layer = 1024 * 4096 + 2048 * 1024 + 1024 * 6144 + 3072 * 1024
    weights = 28 * layer + 151_936 * 1024
    assert weights == 595_984_384
    cost = decode_cost(QWEN3_0_6B, weights, 2, [100, 50])
    assert cost.num_bytes == 2 * weights + 2 * 1024 * 2 + 150 * 114_688
    attention = 28 * 16 * 150 * (2 * 128 + 2 * 128)
    assert cost.num_flops == 2 * 2 * weights + attention


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    """2,000 GB/s are 2 MB in a microsecond, 500 TFLOP/s are 500 million operations."""
    ceilings = Ceilings(gb_per_s=2000, tflop_per_s=500)
    reads, multiplies = Cost(4_000_000, 500_000_000), Cost(1_000_000, 1_500_000_000)
    assert ceilings.describe(reads)["floor_ms"] == pytest.approx(0.002)
    assert ceilings.describe(multiplies)["floor_ms"] == pytest.approx(0.003)
    assert ceilings.describe(reads)["is_bound_by_memory"] is True
    assert ceilings.describe(multiplies)["is_bound_by_memory"] is False
