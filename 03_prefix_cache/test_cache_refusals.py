"""Calls of a manager that are refused: each names what is wrong, and changes nothing. And
arguments of the constructors."""

from __future__ import annotations

import pytest

from block_pool import BlockPool
from kv_slots import PREFIX_CACHES, make_request
from kv_world import World
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache

POOL = BlockPool(5)
CONSTRUCTED = [
    (lambda: PrefixCacheLocal(0), "num_blocks must be .*>= 2 .*, got 1"),
    (lambda: RadixCache(0), "block_size must be .*>= 1, got 0"),
]


def test_arguments_that_are_refused():
    for make, words in CONSTRUCTED:
        with pytest.raises(ValueError, match=words):
            make()


def test_calls_that_a_manager_refuses():
    world = World(PREFIX_CACHES["hash"], 8, 2)
    world.serve("a", [1] * 5)
    manager = world.manager
    before = world.snapshot()
    manager.cache_blocks(make_request("never seen", [1, 2, 3]), 3)
    manager.free(make_request("never seen", [1, 2, 3]))
    assert world.snapshot() == before
