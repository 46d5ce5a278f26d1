"""How many blocks fit, by hand."""

from __future__ import annotations

import pytest

from kv_budget import MemoryReading, remaining_bytes, share_of_free, size_kv_cache

GIB = 1 << 30


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "free", "num_blocks"),
    [
        (1000, 160, 100_000, 50),  # half of what is free
        (3, 33, 10**9, 3 * 3 + 1),  # no more than requests can use: 3 blocks of 16 each, and null
        (8, 160, 22_000, 11),  # one request, and the null block
    ],
)
def test_free_cpu_memory_becomes_blocks(max_num_seqs, max_model_len, free, num_blocks) -> None:
    available = share_of_free(free)
    assert size_kv_cache(1000, 16, max_num_seqs, max_model_len, available) == num_blocks


def test_memory_for_less_than_one_request_is_refused_and_says_why() -> None:
    # 160 tokens need 10 blocks and the null block; 21,000 bytes give 10.
    with pytest.raises(ValueError, match=r"max_model_len=160 needs 10 KV blocks.*only 9 fit"):
        size_kv_cache(1000, 16, 8, 160, share_of_free(21_000))


def test_what_remains_of_a_gpu() -> None:
    """80 GiB: 7 of others and 1 of the CUDA context before; 16 of weights, 2 of the warm-up's KV.
    The step takes 5 more, leaves 3 of them with PyTorch, and loads libraries of 1."""
    before = MemoryReading(80 * GIB, (80 - 8 - 18) * GIB, 18 * GIB, 18 * GIB)
    after = MemoryReading(80 * GIB, (80 - 9 - 21) * GIB, 21 * GIB, 23 * GIB)
    available = remaining_bytes(before, after, 2 * GIB, utilization=0.9)
    assert available.num_bytes == (72 - 16 - 5 - 9) * GIB
    assert "80.00 GiB x 90% - 16.00 weights - 5.00 activations - 9.00" in available.explanation
    little = remaining_bytes(before, after, 2 * GIB, utilization=0.25)
    assert little.num_bytes == 0, "never less than nothing"
