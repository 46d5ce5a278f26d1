"""Tables and refusals, checked by what a reader of the KV memory finds there."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from block_pool import BlockPool
from kv_cache_manager import KVCacheManager
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
    )


# -- worked examples


def test_positions_become_slots():
    manager = make(8, block_size=4)
    request = make_request("a")
    last = [manager.pool.blocks[i] for i in (7, 2, 5)]
    manager.pool.reclaim(last)
    manager.pool.allocate(5)
    manager.pool.free(last)
    assert manager.allocate_slots(request, 11)
    assert list(manager.get_block_ids("a")) == [7, 2, 5]
    assert manager.slot_mapping("a", 0, 12) == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]
    assert manager.slot_mapping("a", 6, 7) == [10]
    assert manager.slot_mapping("a", 3, 3) == []
    for name, start, stop in (("a", 0, 13), ("a", -1, 2), ("a", 3, 2), ("nobody", 0, 1)):
        with pytest.raises(ValueError):
            manager.slot_mapping(name, start, stop)


def test_a_position_outside_of_its_table_is_refused_with_a_sentence():
    """Not in the test above, which grades answers to a task: their words are free."""
    manager = make(8, block_size=4)
    manager.allocate_slots(make_request("a"), 11)
    with pytest.raises(ValueError, match=r"\[0, 13\) of request 'a': .*\[0, 12\)"):
        manager.slot_mapping("a", 0, 13)


def test_decode_slots_of_the_reading_material():
    """Lengths 7, 3, 5 with tables [0,1], [2], [3,4] of 16: the fed tokens are at positions 6, 2 and
    4, so their slots are 6, 34 and 52 (the reading material prints 7). Its blocks begin at 0 and
    ours at 1, hence the shift by one block."""
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
    num_blocks, num_grown = [], []
    assert manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    for _ in range(7):
        manager.req_ids_with_new_blocks.clear()
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        num_blocks.append(len(manager.get_block_ids("a")))
        num_grown.append(len(manager.req_ids_with_new_blocks))
    #   position      6  7  8  9 10 11 12
    assert num_blocks == [2, 2, 3, 3, 3, 3, 4]
    assert num_grown == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 33, 256])
def test_the_table_covers_exactly_what_was_asked(block_size):
    manager = make(701, block_size)
    for num_tokens in {1, block_size, block_size + 1, 2 * block_size - 1, 3 * block_size, 700}:
        for new, reserved in ((num_tokens, 0), (1, num_tokens - 1)):
            request = make_request("a")
            for _ in range(2):  # asking again takes nothing
                assert manager.allocate_slots(request, new, reserved)
                assert len(manager.get_block_ids("a")) == -(-num_tokens // block_size)
            manager.free(request)
    assert all(manager.allocate_slots(make_request(name), 1) for name in "ab")
    assert manager.req_ids_with_new_blocks == {"a", "b"}


def test_usage_counts_blocks_that_requests_hold():
    manager = make(4, block_size=4)
    assert (manager.usage, manager.num_blocks_in_use, manager.capacity) == (0, 0, 16)
    request = make_request("a")
    manager.allocate_slots(request, 9)
    assert (manager.usage, manager.num_blocks_in_use) == (0.75, 3)
    assert manager.capacity == 16, "it does not depend on who is in"
    manager.free(request)
    assert (manager.usage, manager.num_blocks_in_use) == (0, 0)


def test_positions_that_were_reserved_are_not_taken_again():
    manager = make(8, block_size=4)
    request = make_request("a")
    assert manager.allocate_slots(request, 6, num_reserved_tokens=14)
    before = snapshot(manager)
    request.num_computed_tokens = 6
    for _ in range(14):
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    assert snapshot(manager) == before


# -- refusals and errors


def test_a_refusal_changes_nothing():
    manager = make(4, block_size=4)
    request, other = make_request("a"), make_request("b")
    assert manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    before = snapshot(manager)
    assert not manager.allocate_slots(other, 5)
    assert manager.req_ids_with_new_blocks == {"a"}
    manager.req_ids_with_new_blocks.clear()
    assert not manager.allocate_slots(request, 7, 1)
    assert not manager.allocate_slots(request, 1, 7)
    assert snapshot(manager) == before and not manager.req_ids_with_new_blocks
    assert manager.allocate_slots(request, 3, 4)


def test_bad_arguments_are_errors_that_change_nothing():
    manager = make(4, block_size=4)
    request = make_request("p")
    assert manager.allocate_slots(request, 8)
    before = snapshot(manager)
    for name, counts in (
        ("num_new_tokens must be .*>= 0, got -1", (-1,)),
        ("num_reserved_tokens must be .*>= 0, got -2", (1, -2)),
        ("num_new_tokens must be .*>= 0, got 1.5", (1.5,)),
    ):
        with pytest.raises(ValueError, match=name):
            manager.allocate_slots(request, *counts)
        assert snapshot(manager) == before
    for block_size in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"block_size must be .*>= 1, got {block_size}"):
            KVCacheManager(BlockPool(4), block_size)


def test_asking_for_no_slots_is_never_refused_and_makes_no_table():
    manager = make(1, block_size=4)
    request, other = make_request("a"), make_request("b")
    assert manager.allocate_slots(request, 4)
    before = snapshot(manager)
    assert manager.allocate_slots(other, 0) and manager.allocate_slots(request, 0)
    assert snapshot(manager) == before


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


# -- a memory with contents


class World:
    """A manager, and a memory in which each request finds, or does not find, what it wrote.

    A step is any number of calls of the manager, then `step`: planned positions are written. Every
    write is unique, so a block given to two requests shows.
    """

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.manager = make(num_usable_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.contents: dict[str, list[int]] = {}  # what each request has written, by position
        self.memory: dict[int, int] = {}  # slot -> content
        self.num_writes = 0

    def tables(self) -> dict[str, list[int]]:
        return {r: list(self.manager.get_block_ids(r)) for r in self.requests}

    def allocate(self, request_id: str, num_new: int, num_reserved: int = 0) -> bool:
        """Checked against a count of blocks made position by position, from the tables alone."""
        request = self.requests.get(request_id) or make_request(request_id)
        tables = self.tables()
        old_table = tables.get(request_id, [])
        start = request.num_computed_tokens
        positions = range(start, start + num_new + num_reserved)
        to_take = {
            index
            for index in {position // self.manager.block_size for position in positions}
            if index >= len(old_table)
        }
        in_use = {block_id for table in tables.values() for block_id in table}
        num_free = self.manager.pool.num_usable_blocks - len(in_use)
        before = snapshot(self.manager)
        accepted = self.manager.allocate_slots(request, num_new, num_reserved)
        assert accepted == (len(to_take) <= num_free)
        if not accepted:
            assert snapshot(self.manager) == before
            return False
        self.requests[request_id] = request
        self.contents.setdefault(request_id, [])
        request.num_computed_tokens += num_new  # planned counts as computed, as in chapter 1
        tables = self.tables()
        for position in positions:
            block_id = tables[request_id][position // self.manager.block_size]
            assert sum(block_id in table for table in tables.values()) == 1, "writable by two"
        kept = [i for i in range(len(old_table)) if i not in to_take]
        assert [tables[request_id][i] for i in kept] == [old_table[i] for i in kept]
        return True

    def free(self, request_id: str) -> None:
        self.manager.free(self.requests.pop(request_id))
        del self.contents[request_id]

    def step(self) -> None:
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
        return tuple(
            (
                *numbers,
                tuple(
                    names.setdefault(block_id, len(names))
                    for block_id in self.manager.get_block_ids(request_id)
                ),
            )
            for *numbers, request_id in sorted(counters)
        )


EXPLORED_STEPS = (1, 2)
EXPLORED_DEPTH = 5


def transitions(world: World) -> list[tuple]:
    """Everything that may happen next: three requests, each free to start, go on, end."""
    result: list[tuple] = [("step",)]
    for request_id in "abc":
        known = world.requests.get(request_id)
        if known is None:
            result += [("allocate", request_id, n) for n in EXPLORED_STEPS]
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

    @rule(request_id=st.sampled_from("abcde"), new=st.integers(0, 9), reserved=st.integers(0, 5))
    def allocate(self, request_id, new, reserved):
        if new or reserved or request_id in self.world.requests:
            self.world.allocate(request_id, new, reserved)

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
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    "damage", ["ref_cnt", "foreign_table", "ids", "too_short", "empty", "pool"]
)
def test_check_invariants_notices_damage(damage):
    manager = make(8, block_size=4)
    a, b = make_request("a"), make_request("b")
    manager.allocate_slots(a, 6)
    manager.allocate_slots(b, 3)
    a.num_computed_tokens, b.num_computed_tokens = 6, 3
    manager.check_invariants([a, b])
    table = manager._tables["b"]
    if damage == "ref_cnt":
        table.blocks[0].ref_cnt += 1
    elif damage == "foreign_table":
        stolen = manager._tables["a"].blocks[1]
        stolen.ref_cnt += 1
        table.append([stolen])
    elif damage == "ids":
        table.block_ids[0] = 7
    elif damage == "too_short":
        b.num_computed_tokens = 5
    elif damage == "empty":
        manager.pool.free(table.blocks)
        table.blocks.clear(), table.block_ids.clear()
    elif damage == "pool":
        manager.pool._free.popitem()
    with pytest.raises(AssertionError):
        manager.check_invariants([a, b])
