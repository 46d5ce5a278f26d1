"""Calls that are refused: each names what is wrong, and changes nothing."""

from __future__ import annotations

import pytest

from block_pool import Block, BlockPool
from cache_words import Rig
from cached_kv_cache_manager import CachedKVCacheManager
from kv_slots import PREFIX_CACHES, make_request
from kv_world import World
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal, compute_block_hash
from radix_cache import RadixCache
from request import SamplingParams

TOUCHED_OR_RELEASED = [  # a call, its blocks, the words of the refusal; for both caches
    ("touch release", "x", "not cached"),
    ("touch release", "free", "not cached"),
    ("touch release", "null", "not cached"),
    ("touch release", "x a", "not cached"),
    ("touch", "a a", "must be unique"),
    ("release", "a b b", "must be unique"),  # trap 10; they have two users
    ("release", "q", "no request uses it"),  # trap 10
    ("release", "a q", "no request uses it|in order of a path"),
]
INSERTED = [  # a prefix, the first new block's index, the new blocks, the words of the refusal
    ("XYZ", 0, "free", "the block is free"),
    ("XYZ", 0, "null", "the block is free"),
    ("XYZ", 0, "a", "cached already"),
    ("XYZ", 0, "q", "cached already"),  # although unused
    ("AB", 0, "a b", "cached already"),  # even where they are
    ("XY", 0, "x x", "must be unique"),
    ("Xy", 0, "x y", "token_ids must have 6 ids, got 5"),
    ("Ab", 2, "", "token_ids must have 6 ids, got 5"),
    ("ABXY", 3, "x", "cannot insert after 3 blocks: block 2 is not cached"),
    ("AXCD", 2, "x y", "cannot insert after 2 blocks: block 1 is not cached"),
    ("BCD", 1, "x y", "cannot insert after 1 blocks: block 0 is not cached"),
    ("QR", 1, "x", "cannot insert after 1 blocks: block 0 is unused"),
    ("AC salt", 1, "x", "block 0 is not cached"),  # another tenant's is no parent
]


def make_rig(make_cache) -> tuple[Rig, dict[str, Block]]:
    """A request uses the blocks a and b of AB twice; q, of Q, is cached and unused; x and y are
    private."""
    rig = Rig(make_cache, num_usable=12, block_size=3)
    a, b = rig.hold("AB")
    rig.cache.touch([a, b])
    q = rig.pool.blocks[rig.warm("Q")[0]]
    x, y = rig.pool.allocate(2) or []
    free = next(iter(rig.pool.free_order()))
    null = rig.pool.blocks[0]
    return rig, {"a": a, "b": b, "q": q, "x": x, "y": y, "free": free, "null": null}


def test_blocks_that_cannot_be_touched_or_released(make_cache):
    rig, named = make_rig(make_cache)
    for calls, blocks, words in TOUCHED_OR_RELEASED:
        given = [named[name] for name in blocks.split()]
        for call in calls.split():
            arguments = [given]
            rig.refused(words, getattr(rig.cache, call), *arguments)


@pytest.mark.parametrize(("prefix", "start", "blocks", "words"), INSERTED)
def test_blocks_that_cannot_be_inserted(make_cache, prefix, start, blocks, words):
    rig, named = make_rig(make_cache)
    letters, *tags = prefix.split()
    tokens = rig.spell(letters.upper())[: -1 if letters[-1].islower() else None]
    given = [named[name] for name in blocks.split()]
    keys = [(tag, "x") for tag in tags]
    rig.refused(words, rig.cache.insert, tokens, given, keys, start=start)


@pytest.mark.parametrize(
    "keys",
    [
        [("salt",)],
        [("salt", "x", "y")],
        [(1, "x")],
        [("salt", True)],
        [("lora", "x"), ("salt", b"x")],
        [("salt", "x"), ("salt", "y")],
        ("lora", None),
    ],
)
def test_keys_that_are_refused_by_lookups_and_by_requests(keys):
    """A request refuses them when it is made: a step would end the other requests too."""
    rig, named = make_rig(PREFIX_CACHES["hash"])
    rig.refused("extra_keys must", rig.cache.match_prefix, rig.spell("A"), keys)
    rig.refused("extra_keys must", rig.cache.insert, rig.spell("X"), [named["x"]], keys)
    with pytest.raises(ValueError, match=r"extra_keys must .*, got [\[(]"):
        KeyedRequest("a", [1], SamplingParams(), extra_keys=keys)


POOL = BlockPool(5)
HASH = r"parent_hash must .*\(32 bytes\).* None .*, got "
CONSTRUCTED = [
    (lambda: PrefixCacheLocal(3, POOL), "give max_cached_blocks or pool"),
    (lambda: PrefixCacheLocal(0), "max_cached_blocks must be .*>= 1, got 0"),
    (lambda: RadixCache(0), "page_size must be .*>= 1, got 0"),
    (lambda: RadixCache(num_pages=0), "num_pages must be .*, got 0"),
    (lambda: RadixCache(4, POOL, 4), "give num_pages or pool"),
    (lambda: compute_block_hash(b"x" * 31, [2]), f"{HASH}b'x"),
    (lambda: compute_block_hash(hash((0, 2)), [2]), HASH),
    (lambda: CachedKVCacheManager(POOL, 2, PrefixCacheLocal(4, block_size=2)), "block_size must"),
    (lambda: CachedKVCacheManager(POOL, 2, RadixCache(3, POOL)), r"cache \(3\).*, got 2"),
]


def test_arguments_that_are_refused():
    for make, words in CONSTRUCTED:
        with pytest.raises(ValueError, match=words):
            make()


def test_calls_that_a_manager_refuses():
    world = World(PREFIX_CACHES["hash"], 8, 2)
    request = world.serve("a", [1] * 5)
    manager = world.manager
    before = world.snapshot()
    computed = manager._get_computed_blocks(request)
    for words, call in (
        ("'a' already has a block table", lambda: manager.get_computed_blocks(request)),
        ("'a' already has a bl", lambda: manager.allocate_slots(request, 1, 0, computed)),
        ("num_new_tokens must be .*, got -1", lambda: manager.allocate_slots(request, -1)),
        ("num_reserved_tokens must .*-1", lambda: manager.allocate_slots(request, 1, -1)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    manager.cache_blocks(make_request("never seen", [1, 2, 3]), 3)
    manager.free(make_request("never seen", [1, 2, 3]))
    assert world.snapshot() == before
