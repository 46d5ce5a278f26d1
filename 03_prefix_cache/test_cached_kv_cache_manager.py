"""The manager with a cache: worked examples, and random orders of calls.

`kv_world.py` compares whatever it says with what tables and cached prefixes imply. A manager that
loads as well is tested in `beyond/`, and with a scheduler in `test_caching_fcfs_scheduler.py`.
"""

from __future__ import annotations

import pytest

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_chaos import OPERATIONS, Chaos
from kv_memory import ComputedBlocks, NotReady
from kv_orders import BLOCK_SIZES, check_any_order, check_long_run
from kv_slots import make_request
from kv_world import World
from request import RequestStatus
from scheduler_interface import BlockTableUpdate


def test_the_second_request_computes_what_the_first_did_not(make_world):
    world = make_world(20, 4)
    world.serve("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.serve("b", [1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    assert world.written == {"a": 9, "b": 10}
    assert world.tables()["b"][:2] == world.tables()["a"][:2]
    assert world.cache.stats.hit_rate == 8 / 19


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_at_least_the_last_token_is_computed(make_world, block_size):
    """Trap 3: the prompt is an exact multiple of the block size, and all of it is cached."""
    world = make_world(20, block_size)
    for request_id in "ab":
        world.serve(request_id, [5] * (2 * block_size))
    assert world.stats[2] == block_size, "one of two blocks"


def test_a_planned_block_is_not_cached_before_it_is_written(make_world):
    """Trap 15: aborted or preempted between plan and forward pass, a request publishes nothing."""
    world = make_world(20, 2)
    for leave in (world.free, world.preempt):
        world.submit("a", [1] * 7)
        assert world.admit("a")
        leave("a")
        world.check()
        assert world.cache.num_cached_blocks == 0
    world.run("a")
    assert world.cache.num_cached_blocks == 3
    world.advance("a")
    world.step(abort=["a"])
    world.check()
    assert world.cache.num_cached_blocks == 3, (
        "the eighth token filled a block and was not waited for"
    )


def test_a_duplicate_is_given_back_and_the_runner_is_told(make_world):
    """Trap 2: two requests whose first chunks end inside a block compute the same block."""
    world = make_world(20, 4)
    for request_id in "ab":
        world.submit(request_id, [1, 2, 3, 4, 5])
        assert world.admit(request_id, 3)
    world.step()
    assert world.advance("a") and world.advance("b")
    world.step()
    duplicate = world.runner.tables["b"][0]
    kept = world.tables()["a"][0]
    assert world.tables()["b"][0] == kept != duplicate and world.pool.blocks[duplicate].ref_cnt == 0
    assert world.manager.pop_table_updates() == [BlockTableUpdate("b", 0, kept)]
    assert world.manager.pop_table_updates() == [], "taken once"
    world.manager._moves.append(BlockTableUpdate("b", 0, kept))  # put back
    assert world.advance("b")
    world.step()


def test_blocks_are_freed_deepest_first(make_world):
    """Trap 11: those of a table that is not published."""
    world = make_world(6, 2)
    world.submit("a", [1] * 6)
    assert world.admit("a")
    assert world.tables()["a"] == [1, 2, 3]
    world.free("a")
    assert [block.block_id for block in world.pool.free_order()] == [4, 5, 6, 3, 2, 1]


def test_a_hit_survives_the_eviction_it_causes(make_world):
    """Trap 5: touched before anything is taken."""
    world = make_world(4, 4)
    world.warm("a", [1] * 16)
    world.serve("b", [1] * 8 + [2] * 8)
    assert world.stats[2] == 8


def test_a_request_waits_one_step_for_the_block_that_another_computes(make_world):
    world = make_world(20, 2)
    world.submit("a", [1, 1, 2, 2, 3, 3])
    world.submit("b", [1, 1, 2, 2, 4])
    world.submit("c", [1, 1, 2, 2, 4], salt="s")
    world.submit("d", [1, 1])
    world.submit("e", [2, 2, 2, 2])
    assert world.admit("a")
    assert world.get_computed_blocks(world.waiting["b"]) is NotReady.IN_FLIGHT
    assert world.manager.get_computed_blocks(world.waiting["b"], False) == ComputedBlocks()
    assert world.admit("c"), "another tenant"
    assert world.admit("d"), "its last token is computed anyway"
    assert world.admit("e"), "another prefix"
    world.step()
    assert world.get_computed_blocks(world.waiting["b"]).num_tokens == 4


def test_the_order_of_extra_keys_does_not_matter(make_world):
    world = make_world(20, 2)
    keys = (("salt", "s"), ("lora", 7))
    for request_id, extra_keys in (("a", keys), ("b", keys[::-1])):
        world.submit(request_id, [1, 2, 3]).extra_keys = extra_keys
    assert world.admit("a")
    assert world.get_computed_blocks(world.waiting["b"]) is NotReady.IN_FLIGHT
    world.step()
    assert world.get_computed_blocks(world.waiting["b"]).num_tokens == 2


def test_a_block_with_draft_tokens_is_neither_published_nor_waited_for(make_cache):
    """Trap 13: positions beyond the known tokens are written for tokens that may be rejected."""
    world = World(make_cache, 20, 4)
    request = world.submit("a", [1, 1, 1])
    assert world.manager.allocate_slots(request, 5, computed=ComputedBlocks())
    assert not world.manager._in_flight
    world.manager.cache_blocks(request, 5)
    assert world.cache.num_cached_blocks == 0
    request.num_computed_tokens = 3  # both are rejected, and another token is sampled
    request.append_output_token(1)
    assert world.manager.allocate_slots(request, 1)
    other = make_request("b", [1] * 5)
    assert world.manager.get_computed_blocks(other) is NotReady.IN_FLIGHT
    world.manager.cache_blocks(request, 4)
    assert world.cache.num_cached_blocks == 1
    assert world.manager.get_computed_blocks(other).num_tokens == 4


def test_statistics_count_a_request_once_when_it_is_admitted(make_world):
    world = make_world(6, 2)
    stats = world.cache.stats
    world.submit("a", [1] * 8)
    world.submit("b", [1] * 6 + [2] * 5)
    world.run("a")
    assert (stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit) == (1, 8, 0)
    world.advance("a")
    world.step()
    for _ in range(3):
        assert not world.admit("b"), "two blocks too many"
    assert stats.num_requests == 1, "refused attempts do not count"
    world.preempt("a")
    assert world.admit("a")
    world.step()
    assert stats.num_requests == 1, "neither does a second admission"
    world.free("a")
    assert world.admit("b")
    assert (stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit) == (2, 19, 6)
    world.step()


def test_wrong_collaborators_and_wrong_calls_are_errors(make_cache, make_world):
    pool = BlockPool(5)
    for other in (make_cache(BlockPool(5), 2), make_cache(pool, 3)):
        with pytest.raises(
            ValueError, match=rf"block_size must .*cache \({other.block_size}\).*, got 2"
        ):
            CachedKVCacheManager(pool, 2, other)
    world = make_world(8, 2)
    world.serve("a", [1] * 5)
    with pytest.raises(ValueError, match="'a' already has a block table"):
        world.manager.get_computed_blocks(world.running["a"])
    with pytest.raises(ValueError, match=r"num_new_tokens must be .*, got -1"):
        world.manager.allocate_slots(world.running["a"], -1)
    world.manager.cache_blocks(make_request("never seen", [1, 2, 3]), 3)
    world.manager.free(make_request("never seen", [1, 2, 3]))


class NoLongSlices(list):
    """A block table that may be added to and looked at, but not gone through."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        assert not isinstance(key, slice) or len(found) <= 1, "a slice of the table"
        return found

    def __iter__(self):
        raise AssertionError("the whole table")


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_decode_step_costs_the_cache_nothing_until_a_block_is_full(
    make_cache, monkeypatch, block_size
):
    pool = BlockPool(1100)
    cache = make_cache(pool, block_size)
    manager = CachedKVCacheManager(pool, block_size, cache)
    request = make_request("a", [1] * 5)
    assert manager.allocate_slots(request, 5, computed=manager.get_computed_blocks(request))
    request.num_computed_tokens = 5
    manager.cache_blocks(request, 5)
    table = manager._tables["a"]
    table.blocks = NoLongSlices(table.blocks)
    inserted: list[int] = []
    insert = cache.insert

    def count_insert(token_ids, blocks, extra_keys=None, *, start=0, cursor=None):
        inserted.append(len(blocks))
        assert cursor is not None and cursor.state is not None, "from the root again"
        assert token_ids is request.all_token_ids, "a copy of the prompt"
        return insert(token_ids, blocks, extra_keys, start=start, cursor=cursor)

    monkeypatch.setattr(cache, "insert", count_insert)
    for name in ("match_prefix", "touch", "release", "cached_prefixes", "cached_block_ids"):
        monkeypatch.setattr(cache, name, None)  # not to be called
    for _ in range(1000):
        request.append_output_token(1)
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_blocks(request, request.num_computed_tokens)
    assert inserted == [1] * (1005 // block_size - 5 // block_size)


def test_can_allocate_counts_the_blocks_of_a_victim_before_it_is_freed(make_world):
    """Trap 60. 8 blocks: v runs with 3, of which one is also used by w, who has 4 of its own."""
    world = make_world(8, 2)
    world.serve("v", [8] * 5)
    world.serve("w", [8, 8] + [7] * 8)
    assert world.tables() == {"v": [1, 2, 3], "w": [1, 4, 5, 6, 7]}
    world.submit("y", [9] * 6)
    victim, new_request, nothing = world.running["v"], world.waiting["y"], ComputedBlocks()
    before = world.snapshot()
    assert world.manager.can_allocate(new_request, 2, nothing)
    assert not world.manager.can_allocate(new_request, 3, nothing), "one block is free"
    assert not world.manager.can_allocate(new_request, 2, nothing, 1), "and would be kept"
    assert world.manager.can_allocate(new_request, 6, nothing, 0, victim), "two of v's three"
    assert not world.manager.can_allocate(new_request, 7, nothing, 0, victim)
    assert not world.manager.can_allocate(new_request, 6, nothing, 1, victim)
    assert world.snapshot() == before
    world.preempt("v")
    assert world.admit("y")
    world.step()


def test_matched_blocks_are_not_free_for_the_tokens_after_them(make_world):
    """Matched blocks can be evicted as long as no request uses them, but not once the new request
    does."""
    world = make_world(4, 2)
    world.warm("x", [1] * 5)
    new_request = world.submit("a", [1] * 8)
    found = world.get_computed_blocks(new_request)
    assert found.num_tokens == 4 and world.cache.num_evictable_blocks == 2
    assert world.manager.can_allocate(new_request, 4, found)
    assert not world.manager.can_allocate(new_request, 5, found)
    assert not world.manager.can_allocate(new_request, 4, found, 1)


def test_blocks_that_the_victim_and_the_new_request_share_are_counted_once(make_world):
    world = make_world(5, 2)
    world.serve("v", [1] * 9)
    new_request = world.submit("a", [1] * 4 + [2] * 6)
    found = world.get_computed_blocks(new_request)
    assert found.num_tokens == 4 and world.pool.num_free_blocks == 0
    victim = world.running["v"]
    assert world.manager.can_allocate(new_request, 6, found, 0, victim)
    assert not world.manager.can_allocate(new_request, 6, found, 1, victim)
    world.preempt("v")
    assert world.admit("a")
    world.step()


@pytest.mark.parametrize("first_has", ["left early", "sampled", "sampled, and lost its KV"])
def test_an_error_withdraws_blocks_with_which_no_request_has_sampled(make_cache, first_has):
    """Others that hold them run on and publish nothing more: no request waits for them."""
    world, has_sampled = World(make_cache, 20, 2, checks=False), first_has == "sampled"
    first = world.submit("first", [1] * 7)
    assert world.admit("first", 7 if has_sampled else 6)
    world.step()
    if first_has == "sampled, and lost its KV":
        first.append_output_token(1)
    world.free("first")
    for request_id, num_new in (("other", 1), ("later", 1), ("wrong", 3)):
        world.submit(request_id, [*[1] * 5, *request_id.encode()])
        assert world.admit(request_id, num_new)
        world.step()
    assert world.advance("other")
    world.running["wrong"].status = RequestStatus.FINISHED_ERROR
    world.free("wrong")
    assert world.cache.num_cached_blocks == (3 if has_sampled else 0)
    assert world.advance("later")
    probe = world.get_computed_blocks(world.submit("probe", [*[1] * 5, *b"later"]))
    assert (probe is NotReady.IN_FLIGHT) == has_sampled
    world.step()
    assert world.cache.num_cached_blocks == (9 if has_sampled else 0)
    world.manager.check_invariants(world.running.values())


def test_a_block_that_is_reallocated_is_no_longer_trusted(make_world):
    world = make_world(3, 2)
    world.warm("a", [1] * 6)
    world.serve("b", [2] * 6).status = RequestStatus.FINISHED_ERROR
    world.free("b")
    assert world.cache.num_cached_blocks == 0


@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_run(make_world, seed, block_size):
    check_long_run(make_world, Chaos, OPERATIONS, seed, block_size)


def test_any_order_of_calls(make_world):
    check_any_order(make_world, Chaos, OPERATIONS)


def fail() -> None:
    raise AssertionError


def swap_blocks(manager: CachedKVCacheManager) -> None:
    table = manager._tables["b"]
    table.blocks[:2], table.block_ids[:2] = table.blocks[1::-1], table.block_ids[1::-1]
    manager._states["b"].num_published = 0


DAMAGE = {
    "published": lambda manager, a: setattr(manager._states["a"], "num_published", 3),
    "place": lambda manager, a: swap_blocks(manager),
    "path": lambda manager, a: a.all_token_ids.__setitem__(1, 7),
    "keys": lambda manager, a: setattr(a, "extra_keys", (("salt", "s"),)),
    "in flight": lambda manager, a: manager._in_flight.update(
        dict.fromkeys(manager._in_flight, "b")
    ),
    "state": lambda manager, a: manager._states.pop("b"),
    "holder": lambda manager, a: manager.pool.touch(manager._tables["b"].blocks[-1:]),
    "cache": lambda manager, a: setattr(manager.cache, "check_invariants", fail),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_invariants_notices_damage(make_cache, name):
    world = World(make_cache, 12, 2)
    world.serve("a", [1, 2, 3, 4, 5])
    world.serve("b", [1, 2, 3, 4, 6, 7, 8])
    world.advance("a")
    world.check()
    DAMAGE[name](world.manager, world.running["a"])
    with pytest.raises(AssertionError):
        world.manager.check_invariants(world.running.values())
