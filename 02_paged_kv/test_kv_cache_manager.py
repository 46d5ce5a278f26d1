"""Tables and refusals, checked by what a reader of the KV memory finds there."""

from __future__ import annotations

import copy
from functools import partial

import pytest

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


# -- worked examples, and refusals


@pytest.mark.parametrize(
    ("block_size", "table", "start", "slots"),
    [
        (4, [7, 2, 5], 6, [10]),  # of the docstring
        (4, [7, 2, 5], 0, [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]),
        (4, [7, 2, 5], 3, []),
        # Lengths 7, 3 and 5: the fed tokens are at 6, 2 and 4 (the reading material prints 7).
        # Its blocks begin at 0 and ours at 1, hence the 16 more.
        (16, [1, 2], 7 - 1, [6 + 16]),
        (16, [3], 3 - 1, [34 + 16]),
        (16, [4, 5], 5 - 1, [52 + 16]),
    ],
)
def test_positions_become_slots(block_size, table, start, slots, monkeypatch):
    manager = make(8, block_size)
    monkeypatch.setattr(manager, "get_block_ids", {"a": table}.get)
    assert manager.slot_mapping("a", start, start + len(slots)) == slots


@pytest.mark.parametrize("asked", [("a", 0, 13), ("a", -1, 2), ("a", 3, 2), ("b", 0, 1)], ids=str)
def test_a_position_outside_of_its_table_is_refused(asked):
    """It grades answers to a task, whose words are free."""
    manager = make(4, block_size=4)
    manager.allocate_slots(make_request("a"), 11)
    with pytest.raises(ValueError):
        manager.slot_mapping(*asked)


REFUSALS = [  # of a table of three blocks of 4
    ("slots", ("a", 0, 13), r"\[0, 13\) of request 'a': .*\[0, 12\)"),
    ("allocate", (-1,), "num_new_tokens must be .*>= 0, got -1"),
    ("allocate", (0.5,), "num_new_tokens must be .*>= 0, got 0.5"),
    ("allocate", (1, -1), "num_reserved_tokens must be .*>= 0, got -1"),
    ("block_size", (0,), "block_size must be .*>= 1, got 0"),
    ("block_size", (True,), "block_size must be .*>= 1, got True"),
]


@pytest.mark.parametrize(("name", "arguments", "match"), REFUSALS, ids=str)
def test_what_is_refused_is_named_and_changes_nothing(name, arguments, match):
    manager, request = make(4, block_size=4), make_request("a")
    manager.allocate_slots(request, 11)
    before = snapshot(manager)
    calls = {
        "slots": manager.slot_mapping,
        "allocate": partial(manager.allocate_slots, request),
        "block_size": partial(KVCacheManager, manager.pool),
    }
    with pytest.raises(ValueError, match=match):
        calls[name](*arguments)
    assert snapshot(manager) == before


# -- a memory with contents


class World:
    """A manager, and a memory in which each request finds, or does not find, what it wrote. A step
    is any number of calls of the manager, then `step`: planned positions are written. Every write
    is unique, so a block given to two requests shows. Trap 27: a block is taken for a position that
    is written, not for a token that is known."""

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.manager = make(num_usable_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.contents: dict[str, list[int]] = {}  # what each request has written, by position
        self.memory: dict[int, int] = {}  # slot -> content
        self.num_writes = 0
        self.grown: set[str] = set()  # requests with blocks that the runner does not know

    def tables(self) -> dict[str, list[int]]:
        return {r: list(self.manager.get_block_ids(r)) for r in self.requests}

    def slots(self, request_id: str, start: int, stop: int) -> list[int]:
        """The manager's answer, compared with the picture at the head of the module."""
        slots = self.manager.slot_mapping(request_id, start, stop)
        (table,), size = self.manager.get_tables(request_id), self.manager.block_size
        assert table == self.manager.get_block_ids(request_id)
        assert [(slot // size, slot % size) for slot in slots] == [
            (table[position // size], position % size) for position in range(start, stop)
        ]
        return slots

    def allocate(self, request_id: str, num_new: int, num_reserved: int = 0) -> bool:
        """Checked against a count of blocks made position by position, from the tables alone."""
        request = self.requests.get(request_id) or make_request(request_id)
        tables = self.tables()
        old_table = tables.get(request_id, [])
        start = request.num_computed_tokens
        positions = range(start, start + num_new + num_reserved)
        to_take = {position // self.manager.block_size for position in positions}
        to_take -= set(range(len(old_table)))
        num_free = self.manager.pool.num_usable_blocks - sum(map(len, tables.values()))
        before = snapshot(self.manager)
        accepted = self.manager.allocate_slots(request, num_new, num_reserved)
        assert accepted == (len(to_take) <= num_free)
        if not accepted or not positions:
            assert snapshot(self.manager) == before
        if not accepted:
            return False
        self.requests[request_id] = request
        self.contents.setdefault(request_id, [])
        request.num_computed_tokens += num_new  # planned counts as computed, as in chapter 1
        tables = self.tables()
        for position in positions:
            block_id = tables[request_id][position // self.manager.block_size]
            assert sum(block_id in table for table in tables.values()) == 1, "writable by two"
        assert tables[request_id][: len(old_table)] == old_table
        assert len(tables[request_id]) == len(old_table) + len(to_take)
        self.grown |= {request_id} if to_take else set()
        return True

    def free(self, request_id: str) -> None:
        """Trap 11: the deepest block is freed first. Trap 10: only once."""
        request = self.requests.pop(request_id, None) or make_request(request_id)
        order = [block.block_id for block in self.manager.pool.free_order()]
        order += reversed(self.manager.get_block_ids(request_id))
        for _ in range(2):
            self.manager.free(request)
            assert [block.block_id for block in self.manager.pool.free_order()] == order
        self.contents.pop(request_id, None)
        self.grown.discard(request_id)

    def send(self) -> None:
        """New blocks are on their way to the runner."""
        self.manager.req_ids_with_new_blocks.clear()
        self.grown.clear()

    def clear(self) -> None:
        self.manager.clear()
        for known in (self.requests, self.contents, self.grown):
            known.clear()

    def step(self) -> None:
        for request_id, request in self.requests.items():
            written = self.contents[request_id]
            planned = (len(written), request.num_computed_tokens)
            for slot in self.slots(request_id, *planned):
                self.num_writes += 1
                self.memory[slot] = self.num_writes
                written.append(self.num_writes)
        for request_id, written in self.contents.items():
            slots = self.slots(request_id, 0, len(written))
            assert [self.memory[slot] for slot in slots] == written, (
                f"{request_id} reads others' KV"
            )

    def check(self) -> None:
        manager, usable = self.manager, self.manager.pool.num_usable_blocks
        manager.check_invariants(self.requests.values())
        assert manager.req_ids_with_new_blocks == self.grown
        num_held = sum(map(len, self.tables().values()))
        assert manager.num_blocks_in_use == num_held and manager.usage == num_held / usable
        assert manager.capacity == usable * manager.block_size

    def key(self) -> tuple:
        """The state but for names: requests in order of their counters, blocks in the order in
        which tables name them."""
        names: dict[int, int] = {}
        ordered = sorted(
            (request.num_computed_tokens, len(self.contents[request_id]), request_id)
            for request_id, request in self.requests.items()
        )
        return tuple(
            (*counters, *(names.setdefault(i, len(names)) for i in self.tables()[request_id]))
            for *counters, request_id in ordered
        )


EXPLORED_STEPS = (1, 2)
EXPLORED_DEPTH = 5


def transitions(world: World) -> list[tuple]:
    """Everything that may happen next: three requests, each free to start, go on, end."""
    result: list[tuple] = [("step",), ("send",), ("clear",)]
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


@pytest.mark.net
@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 2), (3, 3), (9, 1)])
def test_every_interleaving_of_three_requests(num_blocks, block_size):
    """Breadth first over all states, but for names, that five calls lead to."""
    world = World(num_blocks, block_size)
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
