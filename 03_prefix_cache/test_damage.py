"""`check_invariants` of each class notices damage: a statement each."""

from __future__ import annotations

import pytest

from block_pool import Block
from kv_slots import PREFIX_CACHES
from kv_world import World
from prefix_cache_local import PrefixCacheLocal
from radix_tree import TreeNode
from radix_words import TreeRig
from test_radix_tree import Grove

SALT = (("salt", "str:x"),)

HASH = """
cache._by_hash.pop(c.block_hash)
del cache._by_hash[b.block_hash], cache._by_block_id[b.block_id]
cache._by_hash[b.block_hash] = c
cache._by_block_id[b.block_id] = c
c.block_hash = b"x"
c.token_ids = (0, 0)
a.token_ids = (0, 0)
c.token_ids = ()
a.extra_keys = SALT
c.parent = a
c.parent = None
c.block.ref_cnt = 0; cache._evictable.pop(c.block_id)
c.block = Block(c.block_id, 1)
cache._evictable[a.block_id] = a
cache._evictable.pop(c.block_id)
cache._evictable.move_to_end(c.block_id)
cache.pool.touch([c.block]); cache._evictable.pop(c.block_id)
"""
RADIX = """
cache._num_used += 1
ab.lock_ref += 1
cache._lock(cd); cache._lock(cd)
xyz.last_access = 10**9
cache._heap.pop()
cache._heap.append(cache._heap[0])
cache._heap.insert(0, (10**9, *cache._heap.pop(0)[1:]))
cache._heap[0][2].is_queued = False
ab.blocks[0] = Block(ab.blocks[0].block_id, ab.lock_ref + 1)
cache.tree.node_of[99] = ab
"""
TREE = """
cd.key.pop()
tree.node_of.pop(4)
tree.node_of[99] = cd
tree.node_of[1] = cd
cd.end = 5
x.parent = tree.root(())
ab.children[(1, 2)] = ab.children.pop(tuple(cd.key[:2]))
tree.roots[SALT] = TreeNode(extra_keys=SALT)
x.children[()] = TreeNode(x, end=3)
"""
MANAGER = """
manager._states["a"].num_published = 3
swap(table.blocks); swap(table.block_ids); b.num_published = 0
request.all_token_ids[1] = 7
request.extra_keys = SALT
manager._in_flight.update(dict.fromkeys(manager._in_flight, "b"))
manager._states.pop("b")
manager.pool.touch(table.blocks[-1:])
manager.cache._by_block_id.popitem()
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
    rig.hits("XY")
    node_of = rig.cache.tree.node_of
    found = {"ab": node_of[b], "cd": node_of[d], "xyz": node_of[z]}
    return found | {"check": rig.cache.check_invariants, "cache": rig.cache}


def radix_tree() -> dict:
    grove = Grove("ABCD", "ABX")
    nodes = {"ab": grove.end_of("AB"), "cd": grove.end_of("ABCD"), "x": grove.end_of("ABX")}
    return nodes | {"check": grove.tree.check_invariants, "tree": grove.tree}


def cached_manager() -> dict:
    world = World(PREFIX_CACHES["hash"], 12, 2)
    request = world.serve("a", [1, 2, 3, 4, 5])
    world.serve("b", [1, 2, 3, 4, 6, 7, 8])
    world.advance("a")
    manager = world.manager
    return {
        "check": lambda: manager.check_invariants(world.running.values()),
        "manager": manager,
        "request": request,
        "table": manager._tables["b"],
        "b": manager._states["b"],
    }


def swap(items: list) -> None:
    items[:2] = items[1::-1]


NAMES = {"Block": Block, "SALT": SALT, "TreeNode": TreeNode, "swap": swap}
MAKERS = {hash_cache: HASH, radix_cache: RADIX, radix_tree: TREE, cached_manager: MANAGER}
CASES = [(make, line) for make, lines in MAKERS.items() for line in lines.strip().splitlines()]


@pytest.mark.parametrize(("make", "damage"), CASES)
def test_damage_is_noticed(make, damage):
    found = make()
    found["check"]()
    exec(damage, NAMES | found)
    with pytest.raises(AssertionError):
        found["check"]()
