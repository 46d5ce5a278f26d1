"""Fork and copy on write, checked by what a reader of the KV memory finds there."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from block_pool import BlockPool
from forking_kv_cache_manager import BlockCopy, ForkingKVCacheManager, copy_blocks
from paged_attention import PagedKVCache
from request import Request
from test_kv_cache_manager import (
    ManagerMachine,
    World,
    damage_table,
    explore,
    make_request,
    walk_at_random,
)
from test_kv_cache_manager import snapshot as snapshot_of_tables
from test_kv_cache_manager import transitions as transitions_without_forks
from test_paged_attention import run_paged_and_contiguous


def make(num_usable_blocks: int, block_size: int) -> ForkingKVCacheManager:
    return ForkingKVCacheManager(BlockPool(num_usable_blocks + 1), block_size)


def make_family(
    num_usable_blocks: int, num_tokens: int, num_shared: int, num_reserved: int = 0
) -> tuple[ForkingKVCacheManager, Request, Request]:
    """A parent "p" that has computed so many tokens, and a child "c" that shares the first ones, in
    blocks of 4."""
    manager = make(num_usable_blocks, block_size=4)
    parent, child = make_request("p"), make_request("c", num_shared)
    assert manager.allocate_slots(parent, num_tokens, num_reserved)
    parent.num_computed_tokens = num_tokens
    manager.fork(parent, child)
    return manager, parent, child


def snapshot(manager: ForkingKVCacheManager) -> tuple:
    return snapshot_of_tables(manager), dict(manager._copies), dict(manager._families)


# -- worked examples


def test_the_copy_of_a_shared_block_counts_in_a_refusal():
    manager, _, child = make_family(3, 6, 6)
    before = snapshot(manager)
    assert not manager.allocate_slots(child, 3), "one block to go on, one for the copy, one is free"
    assert snapshot(manager) == before
    assert manager.allocate_slots(child, 2), "only the copy"
    assert manager.take_block_copies() == [BlockCopy("c", 1, 2, 3)]


def test_bad_arguments_are_errors_that_change_nothing():
    manager = make(4, block_size=4)
    parent, child = make_request("p"), make_request("c", 3)
    assert manager.allocate_slots(parent, 8)
    parent.num_computed_tokens = 2
    before = snapshot(manager)
    calls = {
        "num_new_tokens is -1": lambda: manager.allocate_slots(parent, -1),
        "num_reserved_tokens is -2": lambda: manager.allocate_slots(parent, 1, -2),
        "'p' has computed 2": lambda: manager.fork(parent, child),
        "'c' has computed 0": lambda: manager.fork(child, make_request("d", 1)),
        "'p' has a block table already": lambda: manager.fork(parent, parent),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match):
            call()
        assert snapshot(manager) == before


def test_reserved_blocks_are_not_shared():
    manager, parent, _ = make_family(8, 6, 5, num_reserved=14)
    assert list(manager.get_block_ids("p")) == [1, 2, 3, 4, 5]
    assert list(manager.get_block_ids("c")) == [1, 2]
    untouched, nothing = make_request("d", 0), snapshot(manager)
    manager.fork(parent, untouched)
    assert snapshot(manager) == nothing, "nothing computed, nothing shared"


def test_the_last_holder_of_a_shared_block_writes_it_in_place():
    manager, parent, child = make_family(8, 6, 6)
    assert manager.allocate_slots(child, 1)
    assert manager.allocate_slots(parent, 1)
    assert manager.take_block_copies() == [BlockCopy("c", 1, 2, 3)], "one of two copies, not both"
    assert manager.take_block_copies() == [], "taken once"


def test_full_shared_blocks_are_not_copied():
    manager, parent, child = make_family(8, 8, 8)
    assert manager.allocate_slots(child, 1) and manager.allocate_slots(parent, 1)
    assert manager.take_block_copies() == []
    assert list(manager.get_block_ids("c"))[:2] == list(manager.get_block_ids("p"))[:2]


def test_a_copy_dies_with_its_request():
    manager, _, child = make_family(8, 2, 2)
    assert manager.allocate_slots(child, 1)
    manager.free(child)
    manager.check_invariants()
    assert manager.allocate_slots(make_request("l"), 32 - 4), "the copy's block among them"
    assert manager.take_block_copies() == []


def test_asking_for_no_slots_copies_nothing_and_is_never_refused() -> None:
    """A shared block is copied when it is about to be written, and nothing is written here."""
    manager, _, child = make_family(1, 1, 1)
    assert manager.allocate_slots(child, 0)
    assert manager.get_block_ids("c") == manager.get_block_ids("p")
    assert manager.take_block_copies() == []
    assert not manager.allocate_slots(child, 1), "a copy is needed and no block is free"


# -- copies


def test_block_copies_are_made_all_at_once():
    """Sources are read before destinations are written: 1 -> 2 and 2 -> 3 do not chain."""
    cache = PagedKVCache(2, 5, 2, 1, 3)
    tensors = [*cache.key_cache, *cache.value_cache]
    for i, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(30).view(5, 2, 1, 3) + 100 * i)
    before = [tensor.clone() for tensor in tensors]
    copy_blocks(cache, [])
    copy_blocks(cache, [BlockCopy("a", 0, 1, 2), BlockCopy("b", 0, 2, 3)])
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(new, old[[0, 1, 1, 2, 4]])


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_paged_equals_contiguous_while_requests_fork_and_diverge(block_size, seed):
    """Manager, copies, cache and attention against sequences that are plain tensors."""
    manager = make(599, block_size)

    def make_copies(cache: PagedKVCache) -> None:
        copy_blocks(cache, manager.take_block_copies())

    run_paged_and_contiguous(manager, seed, manager.fork, make_copies)


# -- a memory with contents


class ForkingWorld(World):
    """Copies are made before planned positions are written."""

    manager: ForkingKVCacheManager

    def make_manager(self, num_usable_blocks: int, block_size: int) -> ForkingKVCacheManager:
        return make(num_usable_blocks, block_size)

    def fork(self, parent_id: str, child_id: str, num_computed: int) -> None:
        child = make_request(child_id, num_computed)
        self.manager.fork(self.requests[parent_id], child)
        self.requests[child_id] = child
        self.contents[child_id] = self.contents[parent_id][:num_computed]

    def make_copies(self) -> None:
        size = self.manager.block_size
        moved = {}
        for copy in self.manager.take_block_copies():
            src, dst = copy.src_block_id, copy.dst_block_id
            assert self.manager.get_block_ids(copy.request_id)[copy.block_index] == dst
            for offset in range(size):
                assert dst * size + offset not in moved, "two copies into one block"
                moved[dst * size + offset] = self.memory.get(src * size + offset)
        self.memory.update(moved)

    def key_of_copies(self, names: dict[int, int]) -> frozenset:
        return frozenset(
            (names.get(dst), names.get(copy.src_block_id))
            for dst, copy in self.manager._copies.items()
        )


def test_without_a_fork_it_is_the_chapters_manager():
    """Call by call, the same answers and the same blocks."""
    rng = random.Random(0)
    plain, forking = World(9, 3), ForkingWorld(9, 3)
    for _ in range(400):
        name, *arguments = rng.choice(transitions_without_forks(plain))
        assert getattr(plain, name)(*arguments) == getattr(forking, name)(*arguments)
        assert snapshot_of_tables(plain.manager) == snapshot_of_tables(forking.manager)
        assert forking.manager.take_block_copies() == []


@pytest.mark.parametrize("order", ["pcd", "cpd", "cdp", "dcp", "pdc", "dpc"])
@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 4, 5])
def test_fork_then_diverge_in_any_order(order, one_step, block_size):
    world = ForkingWorld(30, block_size)
    world.allocate("p", 6)
    world.step()
    world.fork("p", "c", 6)
    world.fork("p", "d", 5)
    for _ in range(2 * block_size):
        for request_id in order:
            assert world.allocate(request_id, 1)
            if not one_step:
                world.step()
            world.check()
        world.step()
    values = {request_id: tuple(written) for request_id, written in world.contents.items()}
    assert len(set(values.values())) == 3
    for request_id in order:
        world.free(request_id)
        world.check()
    assert world.manager.usage == 0


def world_with_a_copy(num_usable_blocks: int, block_size: int, num_tokens: int) -> ForkingWorld:
    """`a` has written so many tokens, and its fork `b` is to go on in a copy of the last block."""
    world = ForkingWorld(num_usable_blocks, block_size)
    world.allocate("a", num_tokens)
    world.step()
    world.fork("a", "b", num_tokens)
    world.allocate("b", 1)
    return world


def test_a_copy_of_a_copy_may_land_in_the_freed_source():
    world = world_with_a_copy(3, 2, 1)
    world.fork("b", "c", 1)
    world.free("a")
    filler = world.manager.pool.allocate(1)  # leaves only a's block
    assert world.manager.allocate_slots(world.requests["c"], 1)
    world.manager.pool.free(filler)
    world.requests["c"].num_computed_tokens += 1
    world.check()
    world.step()


def test_forks_of_forks_within_one_step():
    """The child of a child copies a block that is itself still to be filled by a copy; then the
    child in the middle goes away, and its copy must not."""
    for middle_goes in (False, True):
        world = world_with_a_copy(20, 4, 6)  # block 2 is to be copied into b's
        world.fork("b", "c", 6)
        world.fork("b", "d", 5)
        world.allocate("c", 1)  # and b's, which is empty yet, into c's
        if middle_goes:
            world.free("b")  # d still holds b's block
        world.check()
        world.step()
        assert world.contents["c"][:6] == world.contents["a"]
        assert world.contents["d"] == world.contents["a"][:5]


def test_a_copy_passes_to_the_fork_when_its_request_copies_again():
    world = world_with_a_copy(20, 4, 2)
    world.fork("b", "c", 2)
    world.allocate("b", 1)  # c keeps b's first copy
    world.check()
    world.step()
    assert world.contents["c"] == world.contents["a"]


def test_a_freed_source_may_be_reused_before_the_copy_is_made():
    world = world_with_a_copy(4, 2, 3)
    world.free("a")
    world.allocate("e", 4)  # takes the source's block in the same step
    world.check()
    world.step()


def transitions(world: World) -> list[tuple]:
    """And every fork of whatever has been written."""
    result = transitions_without_forks(world)
    for request_id in "abc":
        if request_id not in world.requests:
            for parent_id, written in world.contents.items():
                result += [("fork", parent_id, request_id, n) for n in range(1, len(written) + 1)]
    return result


def test_every_interleaving_of_three_requests_over_five_blocks():
    explore(ForkingWorld(5, 2), transitions)


class ForkingMachine(ManagerMachine):
    world_of = ForkingWorld

    @rule(data=st.data(), child_id=st.sampled_from("abcde"))
    def fork(self, data, child_id):
        parents = [r for r, written in self.world.contents.items() if written and r != child_id]
        if parents and child_id not in self.world.requests:
            parent_id = data.draw(st.sampled_from(parents))
            num_shared = data.draw(st.integers(1, len(self.world.contents[parent_id])))
            self.world.fork(parent_id, child_id, num_shared)


TestForkingMachine = ForkingMachine.TestCase
TestForkingMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(30))
def test_a_long_random_run(seed):
    walk_at_random(ForkingWorld, transitions, seed)


# -- the check itself


@pytest.mark.parametrize(
    "damage", ["ref_cnt", "foreign_table", "no_family", "ids", "copy", "too_short", "empty", "left"]
)
def test_check_invariants_notices_damage(damage):
    manager = make(8, block_size=4)
    a, b = make_request("a"), make_request("b", 2)
    manager.allocate_slots(a, 6)
    a.num_computed_tokens = 6
    manager.fork(a, b)
    c = make_request("c", 6)
    manager.fork(a, c)
    manager.allocate_slots(b, 1)
    manager.check_invariants([a, b, c])
    damage_table(manager, damage)
    if damage == "foreign_table":
        manager._families["b"] = object()
    elif damage == "no_family":
        del manager._families["c"]
    elif damage == "copy":
        (wrong,) = manager._copies.values()
        manager._copies[wrong.dst_block_id] = BlockCopy("a", *astuple(wrong)[1:])
    elif damage == "too_short":
        b.num_computed_tokens = 5
    elif damage == "empty":
        manager._copies.clear()
    elif damage == "left":
        manager._families["gone"] = object()
    with pytest.raises(AssertionError):
        manager.check_invariants([a, b, c])
