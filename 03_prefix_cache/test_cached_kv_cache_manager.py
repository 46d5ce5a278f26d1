"""The manager with a cache: random orders of calls, and what they do not reach.

`kv_world.py` compares whatever it says with what tables and cached prefixes imply. A manager that
loads as well is tested in `beyond/`, and with a scheduler in `test_caching_fcfs_scheduler.py`.
"""

from __future__ import annotations

import pytest

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_chaos import OPERATIONS, Chaos
from kv_memory import ComputedBlocks, NotReady
from kv_orders import BLOCK_SIZES, check_long_run
from kv_slots import make_request
from kv_world import World
from request import RequestStatus


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_a_long_random_run(make_world, seed, block_size):
    check_long_run(make_world, Chaos, OPERATIONS, seed, block_size)


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


class NoLongSlices(list):
    """A block table that may be added to and looked at, but not gone through."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        assert not isinstance(key, slice) or len(found) <= 1, "a slice of the table"
        return found

    def __iter__(self):
        raise AssertionError("the whole table")


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_decode_step_costs_the_cache_nothing_until_a_block_is_full(
    make_cache, monkeypatch, block_size
):
    pool = BlockPool(400)
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
    for _ in range(300):
        request.append_output_token(1)
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_blocks(request, request.num_computed_tokens)
    assert inserted == [1] * (305 // block_size - 5 // block_size)


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
