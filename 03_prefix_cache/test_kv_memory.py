"""Between a scheduler and a cache: keys of requests, no cache at all, tables that move."""

from __future__ import annotations

from block_pool import BlockPool
from kv_memory import ComputedBlocks, SharingRunnerState, UncachedKVCacheManager
from request import Request, SamplingParams
from scheduler_interface import BlockTableUpdate, CachedRequestData, NewRequestData, SchedulerOutput

PARAMS = SamplingParams(temperature=0, max_tokens=4)


# no cache


def test_without_a_cache_nothing_is_found_and_nothing_kept():
    manager = UncachedKVCacheManager(BlockPool(9), 2)
    request = Request("a", [1] * 5, PARAMS)
    for _ in range(2):
        computed = manager.get_computed_blocks(request)
        assert computed == ComputedBlocks([], 0) and list(manager.find_cached_blocks(request)) == []
        assert manager.allocate_slots(request, 5, 2, computed)
        assert len(manager.get_block_ids("a")) == 4
        manager.cache_blocks(request, 5)
        manager.check_invariants([request])
        manager.free(request)
        assert manager.pool.num_free_blocks == 8 and manager.pop_table_updates() == []
    assert manager.cache is None and manager.reset_prefix_cache()


def test_without_a_cache_a_request_that_goes_leaves_all_its_blocks():
    """Trap 60. 8 blocks: v has 3. Nothing changes by asking."""
    manager = UncachedKVCacheManager(BlockPool(9), 2)
    victim, new_request = Request("v", [1], PARAMS), Request("y", [2], PARAMS)
    assert manager.allocate_slots(victim, 5)
    for num_tokens, watermark, freeing, fits in (
        (10, 0, None, True),
        (11, 0, None, False),
        (10, 1, None, False),
        (16, 0, victim, True),
        (16, 1, victim, False),
        (17, 0, victim, False),
    ):
        found = manager.can_allocate(new_request, num_tokens, ComputedBlocks(), watermark, freeing)
        assert found == fits, (num_tokens, watermark)
    assert len(manager.get_block_ids("v")) == 3 and manager.pool.num_free_blocks == 5


# the runner's tables


def test_a_table_update_replaces_only_one_entry():
    """The update is in the plan that also grows the table, and affects no other request or
    group."""
    state = SharingRunnerState(4, 8, num_groups=2)
    tables = {"a": ([2, 3], [12, 13]), "b": ([4, 5], [14, 15])}
    new = [NewRequestData(name, [1] * 5, PARAMS, block_ids=ids) for name, ids in tables.items()]
    state.apply(SchedulerOutput(scheduled_new_reqs=new))
    changes = CachedRequestData(["a"], [[7]], [5], [1], [([9], [19])])
    moves = [BlockTableUpdate("a", 1, 6), BlockTableUpdate("b", 0, 2, group=1)]
    state.apply(SchedulerOutput(scheduled_cached_reqs=changes, block_moves=moves))
    found = {name: [state.block_ids(name, group=group) for group in (0, 1)] for name in tables}
    assert found == {"a": [[2, 6, 9], [12, 13, 19]], "b": [[4, 5], [2, 15]]}
