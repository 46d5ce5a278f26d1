"""Calls that are refused: each names what is wrong, and changes nothing."""

from __future__ import annotations

import pytest

from block_pool import BlockPool
from cache_words import Rig
from cached_kv_cache_manager import CachedKVCacheManager
from kv_slots import PREFIX_CACHES, make_request
from kv_world import World
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal, compute_block_hash
from radix_cache import RadixCache
from request import SamplingParams

TOUCHED_OR_RELEASED = [  # a call, its blocks, the words of the refusal; for both caches
    ("touch release invalidate", "x", "not cached"),
    ("touch release invalidate", "free", "not cached"),
    ("touch release invalidate", "null", "not cached"),
    ("touch release", "a b x", "not cached"),
    ("touch release", "x a", "not cached"),
    ("touch", "a a", "must be unique"),
    ("release", "a b b", "must be unique"),  # trap 10; they have two users
    ("release", "q", "no request uses it"),  # trap 10
    ("release", "a q", "no request uses it|in order of a path"),
]
INSERTED = [  # a prefix, the first new block's index, the new blocks, the words of the refusal
    ("XYZ", 0, "free", "the block is free"),
    ("XYZ", 0, "x free", "the block is free"),
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


class Refusing(Rig):
    """A request uses the blocks a and b of AB twice; q, of Q, is cached and unused; x and y are
    private."""

    def __init__(self, make_cache) -> None:
        super().__init__(make_cache, num_usable=12, block_size=3)
        a, b = self.hold("AB")
        self.cache.touch([a, b])
        (q,) = map(self.pool.blocks.__getitem__, self.warm("Q"))
        x, y = self.pool.allocate(2) or []
        self.pool.touch([x])
        free, null = next(iter(self.pool.free_order())), self.pool.blocks[0]
        self.blocks = {"a": a, "b": b, "q": q, "x": x, "y": y, "free": free, "null": null}

    def named(self, names: str) -> list:
        return [self.blocks[name] for name in names.split()]


@pytest.mark.parametrize(("calls", "blocks", "words"), TOUCHED_OR_RELEASED)
def test_blocks_that_cannot_be_touched_or_released(make_caches, calls, blocks, words):
    for make_cache in make_caches.values():
        rig = Refusing(make_cache)
        for call in calls.split():
            given = rig.named(blocks) if call != "invalidate" else rig.blocks[blocks]
            rig.refused(words, getattr(rig.cache, call), given)


@pytest.mark.parametrize(("prefix", "start", "blocks", "words"), INSERTED)
def test_blocks_that_cannot_be_inserted(make_caches, prefix, start, blocks, words):
    for make_cache in make_caches.values():
        rig = Refusing(make_cache)
        letters, *tags = prefix.split()
        tokens = rig.spell(letters.upper())[: -1 if letters[-1].islower() else None]
        keys = [(tag, "x") for tag in tags]
        rig.refused(words, rig.cache.insert, tokens, rig.named(blocks), keys, start=start)


KEYS = [
    [("salt",)],
    [("salt", "x", "y")],
    [["salt", "x"]],
    [(1, "x")],
    [("salt", True)],
    [("lora", "x"), ("salt", b"x")],
    [("salt", "x"), ("salt", "y")],
    ("lora",),
    ("lora", None),
]


@pytest.mark.parametrize("keys", KEYS)
def test_keys_that_are_refused_by_lookups_and_by_requests(keys):
    """A request refuses them when it is made: a step would end the other requests too."""
    rig = Refusing(PREFIX_CACHES["hash"])
    rig.refused("extra_keys must", rig.cache.match_prefix, rig.spell("A"), keys)
    rig.refused("extra_keys must", rig.cache.insert, rig.spell("X"), rig.named("x"), keys)
    with pytest.raises(ValueError, match=r"extra_keys must .*, got [\[(]"):
        KeyedRequest("a", [1], SamplingParams(), extra_keys=keys)


def manager_of(cache_block_size: int, cache_pool: BlockPool):
    cache = PREFIX_CACHES["hash"](cache_pool, cache_block_size)
    return CachedKVCacheManager(POOL, 2, cache)


POOL = BlockPool(5)
HASH = r"parent_hash must .*\(32 bytes\).* None .*, got "
CONSTRUCTED = [
    (lambda: PrefixCacheLocal(), "give max_cached_blocks or pool"),
    (lambda: PrefixCacheLocal(3, POOL), "give max_cached_blocks or pool"),
    (lambda: PrefixCacheLocal(0), "max_cached_blocks must be .*>= 1, got 0"),
    (lambda: PrefixCacheLocal(3, block_size=0), "block_size must be .*>= 1, got 0"),
    (lambda: RadixCache(0), "page_size must be .*>= 1, got 0"),
    (lambda: RadixCache(-1, POOL), "page_size must be .*>= 1, got -1"),
    (lambda: RadixCache(num_pages=0), "num_pages must be .*, got 0"),
    (lambda: RadixCache(4, POOL, 4), "give num_pages or pool"),
    (lambda: compute_block_hash(1, [2]), f"{HASH}1"),
    (lambda: compute_block_hash(b"x" * 31, [2]), f"{HASH}b'x"),
    (lambda: compute_block_hash(hash((0, 2)), [2]), HASH),
    (lambda: manager_of(2, BlockPool(5)), r"block_size must .*cache \(2\).*, got 2"),
    (lambda: manager_of(3, POOL), r"block_size must .*cache \(3\).*, got 2"),
]


@pytest.mark.parametrize(("make", "words"), CONSTRUCTED)
def test_arguments_that_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_calls_that_a_manager_refuses():
    world = World(PREFIX_CACHES["hash"], 8, 2)
    request, manager = world.serve("a", [1] * 5), world.manager
    before, computed = world.snapshot(), manager._get_computed_blocks(request)
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
