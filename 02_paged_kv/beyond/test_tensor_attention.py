"""Attention without a host, against the oracle of `test_paged_attention.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attention import AttentionMetadata, write_kv
from tensor_attention import TensorAttentionBackend
from test_paged_attention import BLOCK_SIZES, TOLERANCE, Case, make_case

DECODES = [(1, 1), (1, 17), (1, 40), (1, 3), (1, 35), (1, 33), (1, 16)]


def without_numbers(metadata: AttentionMetadata) -> AttentionMetadata:
    """The metadata with unusable numbers on the host."""
    return replace(metadata, max_query_len="unknown", max_seq_len="unknown")  # pyright: ignore


def attend(case: Case) -> torch.Tensor:
    case = replace(case, metadata=without_numbers(case.metadata))
    return case.attend(case.plan(TensorAttentionBackend()))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decodes_through_shuffled_tables(block_size, dtype):
    """Trap 35: unused slots are NaN, and tables have spare entries."""
    case = make_case(DECODES, block_size, dtype, num_padding_tokens=2, seed=block_size)
    case.check(attend(case))


@pytest.mark.parametrize("num_kv_heads, num_shared", [(1, 1), (1, 8), (4, 1), (2, 3), (3, 2)])
def test_grouped_query_heads(num_kv_heads, num_shared):
    """With a window."""
    case = make_case(DECODES, 4, num_kv_heads=num_kv_heads, num_shared=num_shared, head_dim=5)
    case.metadata.window = 6
    case.check(attend(case))


def test_sequences_without_query_tokens_are_padding():
    """In between too: whose a token is, is looked up."""
    case = make_case([(1, 9), (0, 5), (1, 21), (0, 3), (0, 8)], 4, num_padding_tokens=3)
    case.check(attend(case))


def test_keys_and_values_are_written_like_chapter_2_does():
    generator = torch.Generator().manual_seed(0)
    shape = (7, 4, 2, 5)
    before = [torch.randn(shape, generator=generator) for _ in range(2)]
    new = [torch.randn(6, 2, 5, generator=generator) for _ in range(2)]
    slots = torch.tensor([27, -1, 4, 13, -1, 9])
    caches, expected = ([x.clone() for x in before] for _ in range(2))
    write_kv(*new, *expected, slots)
    empty = torch.zeros(0, dtype=torch.int64)
    metadata = AttentionMetadata(empty, empty, empty, slots, 1, 1)
    TensorAttentionBackend().plan(metadata, 2, caches[0]).write_kv(*new, *caches)
    for cache, right in zip(caches, expected, strict=True):
        assert torch.equal(cache[1:], right[1:])  # no request owns the null block
