"""How many blocks fit, by hand."""

from __future__ import annotations

import pytest
import torch

from common.kv_sizing import size_kv_cache

CPU = torch.device("cpu")


def test_half_of_free_cpu_memory_becomes_blocks() -> None:
    budget = size_kv_cache(1000, 16, 1000, 160, CPU, free_bytes=100_000)
    assert budget.num_blocks == 50
    assert "50 blocks" in budget.explanation
    assert "49" not in budget.explanation.split("taking")[0]


def test_never_more_than_the_requests_can_use() -> None:
    # 3 requests of 33 tokens: 3 blocks of 16 each, and the null block.
    assert size_kv_cache(1000, 16, 3, 33, CPU, free_bytes=10**9).num_blocks == 3 * 3 + 1


def test_memory_for_less_than_one_request_is_refused_and_says_why() -> None:
    # 160 tokens need 10 blocks and the null block; 21,000 bytes give 10.
    with pytest.raises(ValueError, match="max_model_len is 160") as error:
        size_kv_cache(1000, 16, 8, 160, CPU, free_bytes=21_000)
    assert "needs 10 KV blocks" in str(error.value)
    assert size_kv_cache(1000, 16, 8, 160, CPU, free_bytes=22_000).num_blocks == 11


def test_real_free_memory_is_asked_for_when_not_given() -> None:
    assert size_kv_cache(1000, 16, 2, 160, CPU).num_blocks == 2 * 10 + 1
