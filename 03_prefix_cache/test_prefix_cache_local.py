"""The hash chain alone: the hashes, its pool, and its dictionaries.

The behaviour shared with the radix tree is in `test_prefix_cache.py`."""

from __future__ import annotations

import pytest

from prefix_cache_local import (
    BLOCK_SIZE,
    PrefixCacheLocal,
    compute_block_hash,
    compute_hash_chain,
)
from radix_cache import RadixCache

SALT = (("salt", "x"),)


def test_the_hash_of_a_block_is_the_same_in_every_process_and_on_every_machine():
    """A global pool finds blocks by their hash. A change of the hash must change these three
    lines. Trap 12: Python's `hash` is -2 for both -1 and -2, and constant for None, so prompts with
    the same hash are easy to find."""
    assert compute_block_hash(None, [-1]) != compute_block_hash(None, [-2])
    first = compute_block_hash(None, [1, 2, 3])
    assert first.hex() == "d922bf6006d95f0d2a8992108761e7e098cb98a2944c5fc5d21249537e4b45fa"
    assert (
        compute_block_hash(first, [-4, 2**40]).hex()
        == "909a064f873faf1693bd83cf2d7a385a7b64fd8b1f1f1eafb4a1e743a229bcc7"
    )
    assert (
        compute_block_hash(None, [1, 2, 3], [("salt", "x"), ("lora", 7)]).hex()
        == "3f3d13d8401e95b8e773cc257162ecaefd6916c5ff903e663ea6c68f41689e9a"
    )


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("keys", [None, SALT])
def test_a_chain_hashes_the_full_blocks_one_behind_the_other(block_size, keys):
    for num_tokens in range(12):
        tokens = [7, 1, 2, 7, 1, 0, 0, 0, 5, 5, 5][:num_tokens]
        expected = []
        parent_hash = None
        for start in range(0, len(tokens) - block_size + 1, block_size):
            block = tokens[start : start + block_size]
            parent_hash = compute_block_hash(parent_hash, block, None if start else keys)
            expected.append((parent_hash, tuple(block)))
        assert compute_hash_chain(tokens, block_size, keys) == expected
        cache = PrefixCacheLocal(20, block_size=block_size)
        cached = cache.cache_computed_blocks(tokens, keys)
        assert [(block.block_hash, block.token_ids) for block in cached] == expected


def test_it_works_without_an_engine_as_a_reader_would_type_it():
    cache = PrefixCacheLocal(max_cached_blocks=4)
    prompt = list(range(100))
    assert cache.block_size == BLOCK_SIZE == 16 and cache.match_prefix(prompt) == ([], 0)
    blocks = cache.cache_computed_blocks(prompt)
    assert len(blocks) == 4 == cache.num_cached_blocks
    cache.touch(blocks)
    cache.touch(blocks[:1])
    assert [block.num_users for block in blocks] == [2, 1, 1, 1]
    cache.release(blocks)
    assert [block.num_users for block in blocks] == [1, 0, 0, 0]
    assert cache.match_prefix(prompt) == (blocks, 64)
    assert len(RadixCache(num_pages=3).cache_computed_blocks(prompt)) == 3
    assert RadixCache().pool.num_usable_blocks == 1024 and RadixCache().block_size == 16
