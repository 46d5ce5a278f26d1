"""Tables, copy on write and refusals, checked by what a reader of the KV memory finds there."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from block_pool import BlockPool
from kv_cache_manager import ComputedBlocks, KVCacheManager
from request import Request


def make(num_usable_blocks: int, block_size: int) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_usable_blocks + 1), block_size)


def make_request(request_id: str, num_computed_tokens: int = 0) -> Request:
    request = Request.from_tokens(request_id, [0], max_new_tokens=1)
    request.num_computed_tokens = num_computed_tokens
    return request


def snapshot(manager: KVCacheManager) -> tuple:
    return (
        {request_id: list(table.block_ids) for request_id, table in manager._tables.items()},
        [block.ref_cnt for block in manager.pool.blocks],
        [block.block_id for block in manager.pool.free_order()],
        copy.deepcopy(manager._copies),
    )


# -- worked examples


def test_positions_become_slots():
    manager = make(8, block_size=4)
    request = make_request("a")
    manager.pool.reclaim(
        [manager.pool.blocks[i] for i in (7, 2, 5)]
    )  # put them last, in this order
    manager.pool.allocate(5)
    manager.pool.free([manager.pool.blocks[i] for i in (7, 2, 5)])
    assert manager.allocate_slots(request, 11)
    assert list(manager.get_block_ids("a")) == [7, 2, 5]
    assert manager.slot_mapping("a", 0, 12) == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]
    assert manager.slot_mapping("a", 6, 7) == [10]
    assert manager.slot_mapping("a", 3, 3) == []
    for start, stop in ((0, 13), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="its table reaches \\[0, 12\\)"):
            manager.slot_mapping("a", start, stop)
    with pytest.raises(ValueError, match="'nobody'"):
        manager.slot_mapping("nobody", 0, 1)


def test_decode_slots_of_the_reading_material():
    """Lengths 7, 3, 5 with tables [0,1], [2], [3,4] of 16: the fed tokens stand at positions 6, 2
    and 4, so their slots are 6, 34 and 52 (the reading material prints 7). Its blocks begin at 0
    and ours at 1, hence the shift by one block."""
    manager = make(5, block_size=16)
    requests = [make_request("abc"[i]) for i in range(3)]
    for request, reserved in zip(requests, (32, 16, 32), strict=True):
        assert manager.allocate_slots(request, reserved)
    tables = [list(manager.get_block_ids(request.request_id)) for request in requests]
    assert tables == [[1, 2], [3], [4, 5]]
    slots = [
        manager.slot_mapping(request.request_id, length - 1, length)[0] - 16
        for request, length in zip(requests, (7, 3, 5), strict=True)
    ]
    assert slots == [6, 34, 52]


def test_a_new_block_is_taken_when_a_position_crosses_into_it():
    """Trap 27: the token sampled after position 7 is known while both blocks are full; only when it
    is fed, at position 8, is there something to write and a block to take."""
    manager = make(8, block_size=4)
    request = make_request("a")
    num_blocks = []
    assert manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    for _ in range(7):
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        num_blocks.append(len(manager.get_block_ids("a")))
    #   position      6  7  8  9 10 11 12
    assert num_blocks == [2, 2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 33, 256])
def test_the_table_covers_exactly_what_was_asked(block_size):
    for num_tokens in (1, block_size - 1, block_size, block_size + 1, 3 * block_size, 700):
        manager = make(701, block_size)
        for new, lookahead in ((num_tokens, 0), (1, num_tokens - 1)):
            if new + lookahead < 1 or lookahead < 0:
                continue
            request = make_request("a")
            assert manager.allocate_slots(request, new, lookahead)
            assert len(manager.get_block_ids("a")) == -(-num_tokens // block_size)
            assert manager.allocate_slots(request, new, lookahead)  # asking again takes nothing
            assert len(manager.get_block_ids("a")) == -(-num_tokens // block_size)
            manager.free(request)


def test_usage_and_whether_a_request_could_ever_fit():
    manager = make(4, block_size=4)
    assert manager.usage == 0
    assert manager.fits_when_empty(16) and not manager.fits_when_empty(17)
    manager.allocate_slots(make_request("a"), 9)
    assert manager.usage == 0.75
    assert manager.fits_when_empty(16), "it does not depend on who is in"


def test_nothing_is_cached_in_this_chapter():
    manager = make(4, block_size=4)
    found = manager.get_computed_blocks(make_request("a"))
    assert found.blocks == [] and found.num_tokens == 0


# -- refusals and errors


def test_a_refusal_changes_nothing():
    manager = make(4, block_size=4)
    request, other = make_request("a"), make_request("b")
    assert manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    before = snapshot(manager)
    assert not manager.allocate_slots(other, 5)
    assert not manager.allocate_slots(request, 7, 1)
    assert not manager.allocate_slots(request, 1, 7)
    assert snapshot(manager) == before
    assert manager.allocate_slots(request, 3, 4)


def test_the_copy_of_a_shared_block_counts_in_a_refusal():
    manager = make(3, block_size=4)
    parent, child = make_request("p"), make_request("c", 6)
    assert manager.allocate_slots(parent, 6)
    parent.num_computed_tokens = 6
    manager.fork(parent, child)
    before = snapshot(manager)
    assert not manager.allocate_slots(child, 3), "one block to go on, one for the copy, one is free"
    assert snapshot(manager) == before
    assert manager.allocate_slots(child, 2), "only the copy"
    assert manager.take_block_copies() == [("c", 1, 2, 3)]


def test_bad_arguments_are_errors_that_change_nothing():
    manager = make(4, block_size=4)
    parent, child = make_request("p"), make_request("c", 3)
    assert manager.allocate_slots(parent, 8)
    parent.num_computed_tokens = 2
    before = snapshot(manager)
    calls = {
        "num_new_tokens is -1": lambda: manager.allocate_slots(parent, -1),
        "num_lookahead_tokens is -2": lambda: manager.allocate_slots(parent, 1, -2),
        "'p' has computed 2": lambda: manager.fork(parent, child),
        "'c' has computed 0": lambda: manager.fork(child, make_request("d", 1)),
        "'p' has a block table already": lambda: manager.fork(parent, parent),
        "request 'p' has a block table": lambda: manager.allocate_slots(
            parent, 1, computed=ComputedBlocks(manager.pool.blocks[1:2], 4)
        ),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match):
            call()
        assert snapshot(manager) == before
    with pytest.raises(ValueError, match="block_size is 0"):
        KVCacheManager(BlockPool(4), 0)


# -- release


def test_blocks_are_freed_deepest_first_and_only_once():
    """Traps 10 and 11."""
    manager = make(4, block_size=4)
    request = make_request("a")
    assert manager.allocate_slots(request, 12)
    manager.free(request)
    manager.free(request)
    manager.free(make_request("never seen"))
    assert [block.block_id for block in manager.pool.free_order()] == [4, 3, 2, 1]
    assert list(manager.get_block_ids("a")) == []


def test_blocks_found_in_a_cache_are_held_by_reference_and_never_written():
    """What chapter 3 relies on: a holder of its own in the pool stands in for the cache."""
    manager = make(4, block_size=4)
    cached = manager.pool.allocate(2)
    found = ComputedBlocks(cached, 8)
    refused, request = make_request("r"), make_request("a")
    before = snapshot(manager)
    assert not manager.allocate_slots(refused, 9, computed=found)
    assert snapshot(manager) == before
    assert manager.allocate_slots(request, 3, computed=found)
    assert list(manager.get_block_ids("a")) == [1, 2, 3]
    assert [block.ref_cnt for block in cached] == [2, 2]
    # All of its 8 tokens are cached; the last is computed again, into a copy, for block 2 is held.
    again = make_request("b")
    assert manager.allocate_slots(again, 1, computed=ComputedBlocks(cached, 7))
    assert list(manager.get_block_ids("b")) == [1, 4]
    assert manager.take_block_copies() == [("b", 1, 2, 4)]
    manager.free(request), manager.free(again)
    assert [block.ref_cnt for block in cached] == [1, 1]
    assert manager.pool.num_free_blocks == 2


# -- fork


def test_reserved_blocks_are_not_shared():
    manager = make(8, block_size=4)
    parent, child = make_request("p"), make_request("c", 5)
    assert manager.allocate_slots(parent, 6, num_lookahead_tokens=14)
    parent.num_computed_tokens = 6
    manager.fork(parent, child)
    assert list(manager.get_block_ids("p")) == [1, 2, 3, 4, 5]
    assert list(manager.get_block_ids("c")) == [1, 2]
    untouched, nothing = make_request("d", 0), snapshot(manager)
    manager.fork(parent, untouched)
    assert snapshot(manager) == nothing, "nothing computed, nothing shared"


def test_the_last_holder_of_a_shared_block_writes_it_in_place():
    manager = make(8, block_size=4)
    parent, child = make_request("p"), make_request("c", 6)
    manager.allocate_slots(parent, 6)
    parent.num_computed_tokens = 6
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 1)
    assert manager.allocate_slots(parent, 1)
    assert manager.take_block_copies() == [("c", 1, 2, 3)], "one of two copies, not both"
    assert manager.take_block_copies() == [], "taken once"


def test_full_shared_blocks_are_not_copied():
    manager = make(8, block_size=4)
    parent, child = make_request("p"), make_request("c", 8)
    manager.allocate_slots(parent, 8)
    parent.num_computed_tokens = 8
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 1) and manager.allocate_slots(parent, 1)
    assert manager.take_block_copies() == []
    assert list(manager.get_block_ids("c"))[:2] == list(manager.get_block_ids("p"))[:2]


def test_a_copy_dies_with_its_request():
    manager = make(8, block_size=4)
    parent, child, later = make_request("p"), make_request("c", 2), make_request("l")
    manager.allocate_slots(parent, 2)
    parent.num_computed_tokens = 2
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 1)
    manager.free(child)
    manager.check_invariants()
    assert manager.allocate_slots(later, 32 - 4), "the copy's block among them"
    assert manager.take_block_copies() == []


# -- a memory with contents


class World:
    """A manager, and a memory in which each request finds, or does not find, what it wrote.

    A step is any number of calls of the manager, then `step`: copies are made, planned positions
    are written. Every write is unique, so a block given to two requests shows.
    """

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.manager = make(num_usable_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.contents: dict[str, list[int]] = {}  # what each request has written, by position
        self.memory: dict[int, int] = {}  # slot -> content
        self.num_writes = 0

    def tables(self) -> dict[str, list[int]]:
        return {r: list(self.manager.get_block_ids(r)) for r in self.requests}

    def allocate(self, request_id: str, num_new: int, num_lookahead: int = 0) -> bool:
        """Checked against a count of blocks made position by position, from the tables alone."""
        request = self.requests.get(request_id) or make_request(request_id)
        tables = self.tables()
        own = tables.get(request_id, [])
        start = request.num_computed_tokens
        wanted = range(start, start + num_new + num_lookahead)
        to_take = {
            index
            for index in {position // self.manager.block_size for position in wanted}
            if index >= len(own) or sum(own[index] in table for table in tables.values()) > 1
        }
        in_use = {block_id for table in tables.values() for block_id in table}
        num_free = self.manager.pool.num_usable_blocks - len(in_use)
        before = snapshot(self.manager)
        accepted = self.manager.allocate_slots(request, num_new, num_lookahead)
        assert accepted == (len(to_take) <= num_free)
        if not accepted:
            assert snapshot(self.manager) == before
            return False
        self.requests[request_id] = request
        self.contents.setdefault(request_id, [])
        request.num_computed_tokens += num_new  # planned counts as computed, as in chapter 1
        tables = self.tables()
        for position in wanted:
            block_id = tables[request_id][position // self.manager.block_size]
            assert sum(block_id in table for table in tables.values()) == 1, "writable by two"
        kept = [i for i in range(len(own)) if i not in to_take]
        assert [tables[request_id][i] for i in kept] == [own[i] for i in kept]
        return True

    def fork(self, parent_id: str, child_id: str, num_computed: int) -> None:
        child = make_request(child_id, num_computed)
        self.manager.fork(self.requests[parent_id], child)
        self.requests[child_id] = child
        self.contents[child_id] = self.contents[parent_id][:num_computed]

    def free(self, request_id: str) -> None:
        self.manager.free(self.requests.pop(request_id))
        del self.contents[request_id]

    def step(self) -> None:
        size = self.manager.block_size
        moved = {}
        for request_id, index, src, dst in self.manager.take_block_copies():
            assert self.manager.get_block_ids(request_id)[index] == dst
            for offset in range(size):
                assert dst * size + offset not in moved, "two copies into one block"
                moved[dst * size + offset] = self.memory.get(src * size + offset)
        self.memory.update(moved)
        for request_id, request in self.requests.items():
            written = self.contents[request_id]
            planned = (len(written), request.num_computed_tokens)
            for slot in self.manager.slot_mapping(request_id, *planned):
                self.num_writes += 1
                self.memory[slot] = self.num_writes
                written.append(self.num_writes)
        for request_id, written in self.contents.items():
            slots = self.manager.slot_mapping(request_id, 0, len(written))
            assert [self.memory[slot] for slot in slots] == written, (
                f"{request_id} reads others' KV"
            )

    def check(self) -> None:
        self.manager.check_invariants(self.requests.values())

    def key(self) -> tuple:
        """The state but for names: requests in order of their counters, blocks in the order in
        which tables name them."""
        counters = [
            (request.num_computed_tokens, len(self.contents[request_id]), request_id)
            for request_id, request in self.requests.items()
        ]
        names: dict[int, int] = {}
        tables = tuple(
            (
                *numbers,
                tuple(
                    names.setdefault(block_id, len(names))
                    for block_id in self.manager.get_block_ids(request_id)
                ),
            )
            for *numbers, request_id in sorted(counters)
        )
        copies = frozenset(
            (names.get(dst), names.get(pending.src_block_id))
            for dst, pending in self.manager._copies.items()
        )
        return tables, copies


@pytest.mark.parametrize("order", ["pcd", "cpd", "cdp", "dcp", "pdc", "dpc"])
@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 4, 5])
def test_fork_then_diverge_in_any_order(order, one_step, block_size):
    world = World(30, block_size)
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


def test_a_copy_of_a_copy_may_land_in_the_freed_source():
    world = World(3, 2)
    world.allocate("a", 1)
    world.step()
    world.fork("a", "b", 1)
    world.allocate("b", 1)
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
        world = World(20, 4)
        world.allocate("a", 6)
        world.step()
        world.fork("a", "b", 6)
        world.allocate("b", 1)  # block 2 is to be copied into b's
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
    world = World(20, 4)
    world.allocate("a", 2)
    world.step()
    world.fork("a", "b", 2)
    world.allocate("b", 1)
    world.fork("b", "c", 2)
    world.allocate("b", 1)  # c keeps b's first copy
    world.check()
    world.step()
    assert world.contents["c"] == world.contents["a"]


def test_a_freed_source_may_be_reused_before_the_copy_is_made():
    world = World(4, 2)
    world.allocate("a", 3)
    world.step()
    world.fork("a", "b", 3)
    world.allocate("b", 1)
    world.free("a")
    world.allocate("e", 4)  # takes the source's block in the same step
    world.check()
    world.step()


EXPLORED_STEPS = (1, 2)
EXPLORED_DEPTH = 5


def transitions(world: World) -> list[tuple]:
    """Everything that may happen next: three requests, each free to start, go on, fork, end."""
    result: list[tuple] = [("step",)]
    for request_id in "abc":
        known = world.requests.get(request_id)
        if known is None:
            result += [("allocate", request_id, n) for n in EXPLORED_STEPS]
            for parent_id, written in world.contents.items():
                result += [("fork", parent_id, request_id, n) for n in range(1, len(written) + 1)]
        else:
            result.append(("free", request_id))
            if known.num_computed_tokens < 6:
                result += [("allocate", request_id, n) for n in EXPLORED_STEPS]
                result.append(("allocate", request_id, 1, 2))
    return result


def test_every_interleaving_of_three_requests_over_five_blocks():
    """Breadth first over all states, but for names, that five calls lead to."""
    world = World(5, 2)
    seen, frontier = {world.key()}, [world]
    for _ in range(EXPLORED_DEPTH):
        reached = []
        for world in frontier:
            for name, *arguments in transitions(world):
                after = copy.deepcopy(world)
                getattr(after, name)(*arguments)
                after.check()
                if after.key() not in seen:
                    seen.add(after.key())
                    reached.append(after)
        frontier = reached
    print(f"{len(seen)} states")


class ManagerMachine(RuleBasedStateMachine):
    @rule(num_usable=st.integers(1, 12), block_size=st.integers(1, 5))
    def restart(self, num_usable, block_size):
        self.world = World(num_usable, block_size)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(9, 3)

    @rule(request_id=st.sampled_from("abcde"), new=st.integers(0, 9), lookahead=st.integers(0, 5))
    def allocate(self, request_id, new, lookahead):
        if new or lookahead or request_id in self.world.requests:
            self.world.allocate(request_id, new, lookahead)

    @rule(data=st.data(), child_id=st.sampled_from("abcde"))
    def fork(self, data, child_id):
        parents = [r for r, written in self.world.contents.items() if written and r != child_id]
        if parents and child_id not in self.world.requests:
            parent_id = data.draw(st.sampled_from(parents))
            num_shared = data.draw(st.integers(1, len(self.world.contents[parent_id])))
            self.world.fork(parent_id, child_id, num_shared)

    @rule(request_id=st.sampled_from("abcde"))
    def free(self, request_id):
        if request_id in self.world.requests:
            self.world.free(request_id)

    @rule()
    def step(self):
        self.world.step()

    @invariant()
    def consistent(self):
        self.world.check()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(30))
def test_a_long_random_run(seed):
    rng = random.Random(seed)
    world = World(rng.choice([3, 10, 40]), rng.choice([1, 2, 4, 7]))
    for _ in range(400):
        name, *arguments = rng.choice(transitions(world))
        getattr(world, name)(*arguments)
        world.check()
    for request_id in list(world.requests):
        world.free(request_id)
    assert world.manager.usage == 0, f"seed {seed}"


# -- the check itself


@pytest.mark.parametrize(
    "damage", ["ref_cnt", "foreign_table", "ids", "copy", "too_short", "empty"]
)
def test_check_invariants_notices_damage(damage):
    manager = make(8, block_size=4)
    a, b = make_request("a"), make_request("b", 2)
    manager.allocate_slots(a, 6)
    a.num_computed_tokens = 6
    manager.fork(a, b)
    manager.allocate_slots(b, 1)
    manager.check_invariants([a, b])
    table = manager._tables["b"]
    if damage == "ref_cnt":
        table.blocks[0].ref_cnt += 1
    elif damage == "foreign_table":
        stolen = manager._tables["a"].blocks[1]
        stolen.ref_cnt += 1
        table.append([stolen])
        table.family = "another"
    elif damage == "ids":
        table.block_ids[0] = 7
    elif damage == "copy":
        next(iter(manager._copies.values())).request_id = "a"
    elif damage == "too_short":
        b.num_computed_tokens = 5
    elif damage == "empty":
        manager.pool.free(table.blocks)
        table.blocks.clear(), table.block_ids.clear(), manager._copies.clear()
    with pytest.raises(AssertionError):
        manager.check_invariants([a, b])


def test_asking_for_no_slots_copies_nothing_and_is_never_refused() -> None:
    """A shared block is copied when it is about to be written, and nothing is written here."""
    manager = KVCacheManager(BlockPool(2), block_size=4)  # one usable block
    parent = make_request("parent")
    assert manager.allocate_slots(parent, 1)
    parent.num_computed_tokens = 1
    child = make_request("child", 1)
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 0)
    assert manager.get_block_ids("child") == manager.get_block_ids("parent")
    assert manager.take_block_copies() == []
    assert not manager.allocate_slots(child, 1), "a copy is needed and no block is free"
