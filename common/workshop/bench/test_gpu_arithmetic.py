"""Bytes and operations, by a pencil."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.linear import linear_layers
from common.workshop.bench.gpu_arithmetic import (
    Ceilings,
    Cost,
    Heads,
    add_rms_norm_cost,
    attention_cost,
    decode_cost,
    kv_bytes_per_token,
    matching_cost,
    merge_cost,
    num_matrix_weights,
    rejection_cost,
    rotate_and_write_cost,
    silu_and_multiply_cost,
    write_kv_cost,
)
from common.workshop.bench.gpu_inputs import TINY_MODEL
from common.workshop.bench.random_weights import QWEN3_0_6B, random_model

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


def test_operations_of_attention_are_those_of_its_two_products() -> None:
    """Counted by PyTorch, which multiplies what is masked too: so without a mask."""
    from torch.utils.flop_counter import FlopCounterMode

    query, keys = torch.zeros(4, 1, 16), torch.zeros(4, 9, 16)
    with FlopCounterMode(display=False) as counter:
        (query @ keys.mT) @ keys
    cost = attention_cost(Heads(4, 2, 16, 2), [(1, 9)], 4)
    assert cost.num_flops == counter.get_total_flops()


def test_merging_reads_a_partial_result_of_each_head_and_split() -> None:
    """Splits of 3, 1 and 2: the second sequence has nothing to merge."""
    assert merge_cost(HEADS, [3, 1, 2]) == Cost(5 * 4 * (3 + 1) * 4 + 2 * 24)
    assert merge_cost(HEADS, [1, 1]) == Cost(0)


def test_small_kernels_read_and_write_once() -> None:
    assert write_kv_cost(HEADS, 5) == Cost(5 * (24 + 24 + 8))
    # hidden and delta in, hidden and normed out, a weight: rows of 6 numbers of 2 bytes
    assert add_rms_norm_cost(6, 2, 5) == Cost((5 + 5 + 5 + 5 + 1) * 12)
    # 8 heads of 6 bytes in and out, a row of the table of 6, position and slot; 6 heads' weights
    assert rotate_and_write_cost(HEADS, 5) == Cost(5 * (48 + 48 + 6 + 8 + 8) + 6 * 6)
    # gate and up in, one out
    assert silu_and_multiply_cost(10, 2, 5) == Cost(5 * 30 * 2)


def test_verification_reads_a_row_of_p_and_one_of_q_where_a_draft_is_rejected() -> None:
    """3 requests, 2 of which reject, 4 drafts, 7 rows; a vocabulary of 10 in float32."""
    rows = (3 + 2) * 10 * 4
    drafts = 4 * (8 + 4 + 4 + 8)  # id, p, q, number
    tokens = (4 + 3) * 8  # accepted or padding, and one more for each request
    per_request = 3 * (8 + 8 + 8)  # where its rows begin, its number, how many tokens
    assert rejection_cost(10, 4, 3, 2, 4) == Cost(rows + drafts + tokens + per_request)
    # 7 samples and 4 drafts in, 3 places; 7 tokens and 3 counts out
    assert matching_cost(3, 4) == Cost(8 * (7 + 4 + 3 + 7 + 3))


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_weights_of_a_step_are_the_models_own_matrices(is_tied: bool) -> None:
    config = replace(TINY_MODEL, tie_word_embeddings=is_tied)
    model = random_model(config).model
    assert num_matrix_weights(config) == sum(m.plain_weight().numel() for m in linear_layers(model))


def test_a_decode_step_of_qwen3_0_6b() -> None:
    """28 layers of 1024 x (16 + 8 + 8) heads of 128, 2048 x 1024, 1024 x 6144, 3072 x 1024; the
    head 151,936 x 1024. A token's KV: 28 x 2 x 8 x 128 x 2 bytes."""
    layer = 1024 * 4096 + 2048 * 1024 + 1024 * 6144 + 3072 * 1024
    weights = 28 * layer + 151_936 * 1024
    assert num_matrix_weights(QWEN3_0_6B) == weights == 595_984_384
    assert kv_bytes_per_token(QWEN3_0_6B, 2) == 114_688
    cost = decode_cost(QWEN3_0_6B, 2, [100, 50])
    assert cost.num_bytes == 2 * weights + 2 * 1024 * 2 + 150 * 114_688
    attention = 28 * 16 * 150 * (2 * 128 + 2 * 128)
    assert cost.num_flops == 2 * 2 * weights + attention


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    """2,000 GB/s are 2 MB in a microsecond, 500 TFLOP/s are 500 million operations."""
    ceilings = Ceilings(gb_per_s=2000, tflop_per_s=500)
    assert ceilings.floor_ms(Cost(4_000_000, 500_000_000)) == pytest.approx(0.002)
    assert ceilings.floor_ms(Cost(1_000_000, 1_500_000_000)) == pytest.approx(0.003)
    assert ceilings.is_bound_by_memory(Cost(4_000_000, 500_000_000))
    assert not ceilings.is_bound_by_memory(Cost(1_000_000, 1_500_000_000))
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
    described = ceilings.describe(Cost(4_000_000, 500_000_000))
    assert described["floor_ms"] == 0.002 and described["is_bound_by_memory"] is True
