"""The manager that loads: random orders of calls, and what they do not reach. A load's blocks hold
junk until it ends, so a read before that fails immediately."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from kv_connector import KVConnector
from kv_memory import ComputedBlocks, NotReady
from kv_slots import BLOCK_SIZES, Runner, check_long_run, content
from kv_world import OPERATIONS, KVChaos, World
from loading_kv_cache_manager import LoadingKVCacheManager
from request import Request


class FakeConnector(KVConnector):
    """Has the first `num_offered` blocks of whatever it is asked for. Loads end when the test says
    so; until then their blocks are full of junk, written at any moment."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block_size = runner.block_size
        self.num_offered: dict[str, int] = {}
        self.asked: dict[str, int] = {}  # computed tokens at the latest query of each request
        self.at_answer: dict[str, int] = {}  # and at the final answer
        self.loads: dict[str, tuple[Request, int, list[int]]] = {}  # start, block ids
        self.results: dict[str, int] = {}
        self.given_back: list[list[int]] = []  # of loads that ended since the last check
        self.calls: list[tuple] = []

    def num_wanted(self, request: Request) -> int:
        num_full = (request.num_tokens - 1) // self.block_size
        return min(self.num_offered.get(request.request_id, 0), num_full)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        request_id = request.request_id
        assert request_id not in self.loads, "asked while loading"
        assert num_computed_tokens < self.at_answer.get(request_id, 10**9), "asked for nothing"
        num_tokens = self.num_wanted(request) * self.block_size - num_computed_tokens
        if num_tokens <= 0:
            self.at_answer[request_id] = num_computed_tokens
        self.asked[request_id] = num_computed_tokens
        return max(num_tokens, 0), True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        assert len(block_ids) * self.block_size == num_external_tokens
        start = self.at_answer[request.request_id] = self.asked[request.request_id]
        self.loads[request.request_id] = (request, start, list(block_ids))
        self.calls.append(("load", request.request_id, num_external_tokens))
        self.given_back.clear()  # some of these blocks are taken again
        self.scribble()

    def in_flight(self) -> list[str]:
        return sorted(self.loads.keys() - self.results.keys())

    def scribble(self) -> None:
        for request_id in self.in_flight():
            for block_id in self.loads[request_id][2]:
                self.runner.memory |= dict.fromkeys(self.runner.slots(block_id), "junk")

    def finish(self, request_id: str, num_blocks: int) -> None:
        """The first `num_blocks` of the load have arrived, and no more will."""
        request, start, block_ids = self.loads[request_id]
        self.scribble()
        stop = start + num_blocks * self.block_size
        values = content(request.all_token_ids[:stop], request)[start:]
        slots = [slot for block_id in block_ids for slot in self.runner.slots(block_id)]
        self.runner.memory |= zip(slots, values, strict=False)
        self.results[request_id] = num_blocks * self.block_size

    def get_finished_load(self, request_id):
        assert request_id in self.loads, "no such load"
        num_tokens = self.results.pop(request_id, None)
        if num_tokens is not None:
            self.given_back.append(self.loads.pop(request_id)[2][num_tokens // self.block_size :])
        return num_tokens

    def cancel_load(self, request_id):
        self.asked.pop(request_id, None)
        self.results.pop(request_id, None)
        if request_id in self.loads:
            self.given_back.append(self.loads.pop(request_id)[2])

    def request_finished(self, request, block_ids):
        """An assertion that fails here would be caught, like any failure of a connector."""
        num_tokens = len(block_ids) * self.block_size
        expected = content(request.all_token_ids[:num_tokens], request)
        is_final = self.runner.read(block_ids, num_tokens) == expected
        kind = "finished" if block_ids and is_final else "offered too early"
        self.calls.append((kind, request.request_id, list(block_ids)))

    def refuse(self, request, num_blocks):
        self.calls.append(("refused", request.request_id, num_blocks))

    def wait_for_load(self, timeout_s):
        pass

    def close(self):
        pass


class LoadingWorld(World):
    """And a connector."""

    def make_manager(self) -> LoadingKVCacheManager:
        self.connector = FakeConnector(self.runner)
        steps = lambda: self.connector.calls.append(("steps",))  # noqa: E731
        return LoadingKVCacheManager(self.pool, self.block_size, self.cache, self.connector, steps)

    def query(
        self, request_id: str, tokens: Sequence[int], num_blocks: int
    ) -> ComputedBlocks | NotReady:
        """Look a request up, of which the connector has the first blocks."""
        self.connector.num_offered[request_id] = num_blocks
        if request_id not in self.waiting:
            self.submit(request_id, tokens)
        return self.get_computed_blocks(self.waiting[request_id])

    def held_outside(self, for_good: bool = False) -> set[int]:
        """Blocks of loads. Those that arrived for requests that still wait can be reclaimed."""
        loads = self.manager.loads
        in_flight = self.connector.in_flight()
        held = [loads[name] for name in loads if not for_good or name in in_flight]
        return {block.block_id for load in held for block in load.prefix + load.blocks}

    def get_computed_blocks(self, request: Request) -> ComputedBlocks | NotReady:
        request_id = request.request_id
        connector = self.connector
        num_calls = len(connector.calls)
        computed = super().get_computed_blocks(request)
        kinds = [call[0] for call in connector.calls[num_calls:]]
        assert kinds in ([], ["steps", "load"]), "a load waits for steps; nothing else does"
        assert (computed is NotReady.LOADING) == (request_id in connector.loads)
        return computed

    def check_answer(self, request: Request, computed: ComputedBlocks | NotReady) -> None:
        if computed is not NotReady.LOADING:
            assert request.request_id not in self.connector.loads
            super().check_answer(request, computed)

    def _leave(self, request: Request) -> None:
        request_id = request.request_id
        connector = self.connector
        num_published = self.written.get(request_id, 0) // self.block_size
        expected = list(self.manager.get_block_ids(request_id))[:num_published]
        num_calls = len(connector.calls)
        super()._leave(request)
        offered = [("finished", request_id, expected)] if expected else []
        assert connector.calls[num_calls:] == offered
        assert request_id not in connector.loads
        connector.at_answer.pop(request_id, None)

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.connector.scribble()
        super().forward(batch)

    def check(self) -> None:
        connector = self.connector
        loads = self.manager.loads
        connector.scribble()
        super().check()
        in_flight = {name for name, load in loads.items() if not load.has_arrived}
        assert connector.loads.keys() == in_flight
        known = self.waiting.keys() | self.running.keys()
        for container in (self.manager._num_local, connector.asked):
            assert container.keys() <= known, "kept for a request that is gone"
        order = [block.block_id for block in self.pool.free_order()]
        for block_ids in connector.given_back:  # trap 11: the deepest is taken first
            places = [order.index(block_id) for block_id in block_ids if block_id in order]
            assert places == sorted(places, reverse=True)
        connector.given_back.clear()


class LoadingChaos(KVChaos):
    def submit(self) -> None:
        known = set(self.world.waiting)
        super().submit()
        for request_id in self.world.waiting.keys() - known:
            self.world.connector.num_offered[request_id] = max(0, self.pick(-4, 4))

    def end_load(self) -> None:
        connector = self.world.connector
        request_id = self.choose(connector.in_flight())
        if request_id is not None:
            connector.finish(request_id, self.pick(0, len(connector.loads[request_id][2])))


@pytest.mark.net
@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_run(make_cache, seed, block_size):
    operations = [*OPERATIONS, "end_load", "end_load"]
    check_long_run(partial(LoadingWorld, make_cache), LoadingChaos, operations, seed, block_size)


# -- what a random run does not reach


def test_a_load_displaces_no_other_load_and_its_request_does_not_wait(make_cache):
    world = LoadingWorld(make_cache, 8, 2)
    assert world.query("early", [1] * 9, 4) is NotReady.LOADING
    world.connector.finish("early", 4)
    assert isinstance(world.query("big", [2] * 13, 6), ComputedBlocks)
    assert world.query("small", [3] * 5, 2) is NotReady.LOADING
    world.connector.finish("small", 2)
    assert world.get_computed_blocks(world.waiting["early"]).num_tokens == 8
    assert set(world.manager.loads) == {"early", "small"}
    assert world.admit("early"), "loads that have arrived give way to a table"
    world.step()
    world.drain()


def test_a_load_that_gets_no_blocks_holds_nothing(make_cache):
    world = LoadingWorld(make_cache, 4, 2)
    world.serve("x", [1] * 5)
    world.free("x")
    world.serve("y", [2] * 3)
    assert isinstance(world.query("z", [1] * 9, 4), ComputedBlocks)
    world.check()
    world.drain()


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_of_a_request_with_bad_kv_are_refused_and_not_offered(make_cache, fails, caplog):
    """A connector that fails costs nothing but its help. All loads are dropped."""
    world = LoadingWorld(make_cache, 20, 2)
    if fails:
        world.connector.request_finished = world.connector.refuse = lambda *_: 1 / 0
    world.serve("good", [1] * 3)
    bad = world.serve("bad", [1] * 5)
    for name in ("prefix", "blocks"):
        assert world.query(name, [1] * 7, 3) is NotReady.LOADING
    loads = world.manager.loads
    world.connector.finish("blocks", 1)
    assert world.manager._has_arrived(loads["blocks"])
    assert "prefix" in loads and "blocks" in loads
    bad.has_bad_kv = True
    for name in ("good", "bad"):
        world.manager.free(world.running.pop(name))
    assert not loads and world.manager.num_blocks_in_use == 0
    calls = [call for call in world.connector.calls if call[0] in ("finished", "refused")]
    assert [call[:2] for call in calls[:1]] == ([] if fails else [("finished", "good")])
    assert calls[1:] == ([] if fails else [("refused", "bad", 2)])
    assert ("ZeroDivision" in caplog.text) == fails
