"""The manager with a cache: random orders of calls (`kv_world.py`), and what they do not reach."""

from __future__ import annotations

from functools import partial

import pytest

from cache_checks import check_memory
from kv_memory import ComputedBlocks, NotReady, SharingRunnerState
from kv_slots import BLOCK_SIZES, check_long_run, make_request
from kv_world import OPERATIONS, KVChaos, World
from request import SamplingParams
from scheduler_interface import BlockTableUpdate, NewRequestData, SchedulerOutput


@pytest.mark.net
@pytest.mark.sample
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_a_long_random_run(make_cache, seed, block_size):
    check_long_run(partial(World, make_cache), KVChaos, OPERATIONS, seed, block_size)


def test_a_block_with_draft_tokens_is_neither_published_nor_waited_for(make_cache):
    """Trap 13: positions beyond the known tokens are written for tokens that may be rejected."""
    world = World(make_cache, 20, 4)
    request = world.submit("a", [1, 1, 1])
    manager = world.manager
    assert manager.allocate_slots(request, 5, computed=ComputedBlocks())
    assert not manager._in_flight
    manager.cache_blocks(request, 5)
    assert world.cache.num_cached_blocks == 0
    request.num_computed_tokens = 3  # both are rejected, and another token is sampled
    request.append_output_token(1)
    assert manager.allocate_slots(request, 1)
    other = make_request("b", [1] * 5)
    assert manager.get_computed_blocks(other) is NotReady.IN_FLIGHT
    manager.cache_blocks(request, 4)
    assert manager.get_computed_blocks(other).num_tokens == 4


def test_kv_that_is_not_trusted_empties_the_cache(make_cache):
    """Others that hold blocks run on and publish nothing more: no request waits for them."""
    world = World(make_cache, 20, 2, checks=False)
    for request_id in ("other", "later", "wrong"):
        world.submit(request_id, [*[1] * 5, *request_id.encode()])
        assert world.admit(request_id, 4)
        world.step()
    assert world.advance("other")
    world.running["wrong"].has_bad_kv = True
    world.free("wrong")
    assert world.cache.num_cached_blocks == 0
    assert world.advance("later")
    probe = world.get_computed_blocks(world.submit("probe", [*[1] * 5, *b"later"]))
    assert probe is not NotReady.IN_FLIGHT
    world.step()
    assert world.cache.num_cached_blocks == 0
    check_memory(world.manager, world.running.values())
    assert world.admit("probe", 4)
    world.step()
    assert world.cache.num_cached_blocks == 2


def test_a_table_update_replaces_one_entry_of_one_group():
    state = SharingRunnerState(4, 8, num_groups=2)
    new = NewRequestData("a", [1] * 5, SamplingParams(), block_ids=([2, 3], [12, 13]))
    moves = [BlockTableUpdate("a", 1, 6, group=1)]
    state.apply(SchedulerOutput(scheduled_new_reqs=[new], block_moves=moves))
    assert [state.block_ids("a", group=group) for group in (0, 1)] == [[2, 3], [12, 6]]
