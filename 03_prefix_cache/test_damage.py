"""`check_invariants` of each class notices damage: a statement each."""

from __future__ import annotations

import pytest

from block_pool import Block
from kv_slots import PREFIX_CACHES
from kv_world import World
from prefix_cache_local import PrefixCacheLocal
from radix_words import TreeRig

HASH = """
cache._by_hash.pop(c.block_hash)
cache._by_hash[b.block_hash] = c
cache._by_block_id[b.block_id] = c
c.token_ids = (0, 0)
c.token_ids = ()
a.extra_keys = (("salt", "str:x"),)
c.parent = None
c.block = Block(c.block_id, 1)
cache._evictable[a.block_id] = a
cache._evictable.move_to_end(c.block_id)
"""
RADIX = """
cache._num_used += 1
ab.lock_ref += 1
cache._lock(cd); cache._lock(cd)
cd.last_access = 10**9; cd.parent.lock_ref = 0
cache._heap.pop()
cache._heap.append(cache._heap[0])
cache._heap.insert(0, (10**9, *cache._heap.pop(0)[1:]))
ab.blocks[0] = Block(ab.blocks[0].block_id, ab.lock_ref + 1)
cache.tree.node_of[99] = ab
cd.key.pop()
cd.end = 5
xyz.parent = ab
cache.tree.roots[(("salt", "str:x"),)] = ab
"""
MANAGER = """
manager._states["a"].num_published = 3
request.all_token_ids[1] = 7
request.extra_keys = (("salt", "str:x"),)
manager._in_flight.update(dict.fromkeys(manager._in_flight, "b"))
manager._states.pop("b")
manager.pool.touch(manager._tables["b"].blocks[-1:])
"""


def hash_cache() -> dict:
    """A used block `a`, and `b` and `c` after it, unused."""
    cache = PrefixCacheLocal(5, block_size=2)
    a, b, c = cache.cache_computed_blocks([1, 2, 3, 4, 5, 6])
    cache.touch([a])
    return {"check": cache.check_invariants, "cache": cache, "a": a, "b": b, "c": c}


def radix_cache() -> dict:
    rig = TreeRig()
    d, z = rig.warm("ABCD")[-1], rig.warm("XYZ")[-1]
    b = rig.hold("AB")[-1].block_id
    node_of = rig.cache.tree.node_of
    found = {"ab": node_of[b], "cd": node_of[d], "xyz": node_of[z]}
    return found | {"check": rig.cache.check_invariants, "cache": rig.cache}


def cached_manager() -> dict:
    world = World(PREFIX_CACHES["hash"], 12, 2)
    request = world.serve("a", [1, 2, 3, 4, 5])
    world.serve("b", [1, 2, 3, 4, 6, 7, 8])
    world.advance("a")
    manager, running = world.manager, world.running.values()
    check = lambda: manager.check_invariants(running)  # noqa: E731
    return {"check": check, "manager": manager, "request": request}


MAKERS = {hash_cache: HASH, radix_cache: RADIX, cached_manager: MANAGER}
CASES = [(make, line) for make, lines in MAKERS.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("make", "damage"), CASES)
def test_damage_is_noticed(make, damage):
    found = make()
    found["check"]()
    exec(damage, {"Block": Block} | found)
    with pytest.raises(AssertionError):
        found["check"]()
