"""How many blocks fit, by hand."""

from __future__ import annotations

import pytest

from kv_budget import BytesForKV, MemoryReading, remaining_bytes, share_of_free, size_kv_cache

GIB = 1 << 30


def test_half_of_free_cpu_memory_becomes_blocks() -> None:
    budget = size_kv_cache(1000, 16, 1000, 160, share_of_free(100_000))
    assert budget.num_blocks == 50
    assert "50 blocks" in budget.explanation
    assert "49" not in budget.explanation.split("taking")[0]


def test_never_more_than_the_requests_can_use() -> None:
    # 3 requests of 33 tokens: 3 blocks of 16 each, and the null block.
    assert size_kv_cache(1000, 16, 3, 33, share_of_free(10**9)).num_blocks == 3 * 3 + 1


def test_memory_for_less_than_one_request_is_refused_and_says_why() -> None:
    # 160 tokens need 10 blocks and the null block; 21,000 bytes give 10.
    with pytest.raises(ValueError, match="max_model_len=160") as error:
        size_kv_cache(1000, 16, 8, 160, share_of_free(21_000))
    assert "needs 10 KV blocks" in str(error.value) and "only 9 fit" in str(error.value)
    assert size_kv_cache(1000, 16, 8, 160, share_of_free(22_000)).num_blocks == 11


def test_what_remains_of_a_gpu() -> None:
    """80 GiB: 7 of others and 1 of the CUDA context before; 16 of weights, 2 of the warm-up's KV.
    The step takes 5 more, leaves 3 of them with PyTorch, and loads libraries of 1."""
    before = MemoryReading(80 * GIB, (80 - 8 - 18) * GIB, 18 * GIB, 18 * GIB)
    after = MemoryReading(80 * GIB, (80 - 9 - 21) * GIB, 21 * GIB, 23 * GIB)
    available = remaining_bytes(before, after, 2 * GIB, utilization=0.9)
    assert available.num_bytes == (72 - 16 - 5 - 9) * GIB
    for part in ("80.00 GiB x 90%", "16.00 weights", "5.00 activations", "9.00 not PyTorch's"):
        assert part in available.explanation
    assert remaining_bytes(before, after, 2 * GIB, utilization=1.0).num_bytes == 50 * GIB
    assert remaining_bytes(before, after, 2 * GIB, utilization=0.25) == BytesForKV(
        0, available.explanation.replace("90%", "25%")
    ), "never less than nothing"
