"""Tables and refusals, checked by what a reader of the KV memory finds there."""

from __future__ import annotations

import copy

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


def test_a_refusal_names_the_positions():
    """Ours does."""
    manager = make(4, block_size=4)
    manager.allocate_slots(make_request("a"), 11)
    with pytest.raises(ValueError, match=r"\[0, 13\) of request 'a': .*\[0, 12\)"):
        manager.slot_mapping("a", 0, 13)


# -- against tables in lists


class Pair:
    """A manager, and the same promises in lists. Trap 27: a block is taken for a position that is
    written, not for a token that is known. Traps 10 and 11: a table is freed once, its deepest
    block first."""

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self.manager = make(num_usable_blocks, block_size)
        self.requests = {name: make_request(name) for name in "abc"}
        self.tables: dict[str, list[int]] = {}
        self.free_ids = list(range(1, num_usable_blocks + 1))
        self.grown: set[str] = set()  # requests with blocks that the runner does not know

    def allocate(self, name: str, num_new: int, num_reserved: int = 0) -> None:
        request = self.requests[name]
        size = self.manager.block_size
        end = request.num_computed_tokens + num_new + num_reserved
        table = self.tables.get(name, [])
        missing = [position for position in range(0, end, size) if position // size >= len(table)]
        fits = len(missing) <= len(self.free_ids)
        assert self.manager.allocate_slots(request, num_new, num_reserved) == fits
        if fits:
            request.num_computed_tokens += num_new
        if fits and missing:
            self.tables[name] = table + [self.free_ids.pop(0) for _ in missing]
            self.grown.add(name)

    def free(self, name: str) -> None:
        for _ in range(2):
            self.manager.free(self.requests[name])
        self.free_ids += self.tables.pop(name, [])[::-1]
        self.requests[name] = make_request(name)
        self.grown.discard(name)

    def send(self) -> None:
        """New blocks are on their way to the runner."""
        self.manager.req_ids_with_new_blocks.clear()
        self.grown.clear()

    def clear(self) -> None:
        self.manager.clear()
        assert self.manager.usage == 0 and not self.manager.req_ids_with_new_blocks
        self.__init__(self.manager.pool.num_usable_blocks, self.manager.block_size)

    def check(self) -> None:
        manager = self.manager
        size = self.manager.block_size
        manager.check_invariants(self.requests.values())
        assert [block.block_id for block in manager.pool.free_order()] == self.free_ids
        assert manager.req_ids_with_new_blocks == self.grown
        num_held = sum(map(len, self.tables.values()))
        num_usable = manager.pool.num_usable_blocks
        assert (manager.num_blocks_in_use, manager.usage) == (num_held, num_held / num_usable)
        assert manager.capacity == num_usable * size
        for name in self.requests:
            table = self.tables.get(name, [])
            assert list(manager.get_block_ids(name)) == table == list(manager.get_tables(name)[0])
            slots = manager.slot_mapping(name, 0, len(table) * size)
            assert slots == [i * size + offset for i in table for offset in range(size)]

    def key(self) -> tuple:
        """The state but for the names of requests and blocks."""
        return tuple(
            sorted(
                (request.num_computed_tokens, len(self.tables.get(name, ())), name in self.grown)
                for name, request in self.requests.items()
            )
        )


OPERATIONS: list[tuple] = [("send",), ("clear",), *(("free", name) for name in "abc")]
OPERATIONS += [("allocate", name, *n) for name in "abc" for n in ((1,), (2,), (1, 2))]


@pytest.mark.net
@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 2), (3, 3), (7, 1)])
def test_every_interleaving_of_three_requests(num_blocks, block_size):
    """Breadth first over all states that five calls lead to."""
    seen = set()
    frontier = [Pair(num_blocks, block_size)]
    for _ in range(5):
        reached = []
        for pair in frontier:
            for name, *arguments in OPERATIONS:
                after = copy.deepcopy(pair)
                getattr(after, name)(*arguments)
                after.check()
                if after.key() not in seen:
                    seen.add(after.key())
                    reached.append(after)
        frontier = reached
