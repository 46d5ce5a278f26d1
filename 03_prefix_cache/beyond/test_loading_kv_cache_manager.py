"""The manager that loads: worked examples, and random orders of calls.

A load's blocks hold junk until it ends, so a read before that fails immediately. The behaviour of a
manager without loads is tested in `test_cached_kv_cache_manager.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from block_pool import BlockPool
from kv_chaos import OPERATIONS, Chaos
from kv_connector import ConnectorChain, KVConnector
from kv_loads import MAX_OVERTAKES, Load
from kv_memory import ComputedBlocks, NotReady
from kv_orders import BLOCK_SIZES, check_any_order, check_long_run
from kv_served_world import Engine
from kv_slots import Runner, content, make_request
from kv_world import World
from loading_kv_cache_manager import LoadingKVCacheManager
from prefix_cache import KeyedRequest
from prefix_cache_local import PrefixCacheLocal
from request import Request, RequestStatus, SamplingParams
from scheduler import MAX_SKIPPED, Scheduler


class FakeConnector(KVConnector):
    """Has the first `num_offered` blocks of whatever it is asked for. Loads end when the test says
    so; until then their blocks are full of junk, written at any moment."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block_size = runner.block_size
        self.num_offered: dict[str, int] = {}
        self.loads: dict[str, tuple[Request, int, list[int]]] = {}  # start, block ids
        self.results: dict[str, int] = {}
        self.at_query: dict[str, int] = {}  # computed tokens at the latest query
        self.at_answer: dict[str, int] = {}  # and at the final answer
        self.calls: list[tuple] = []
        self.on_wait: Callable[[], None] = lambda: None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        request_id = request.request_id
        assert num_computed_tokens % self.block_size == 0
        assert request_id not in self.loads, "asked while loading"
        assert num_computed_tokens < self.at_answer.get(request_id, 10**9), "asked for nothing"
        num_full = (request.num_tokens - 1) // self.block_size
        num_offered = min(self.num_offered.get(request_id, 0), num_full)
        num_tokens = max(num_offered * self.block_size - num_computed_tokens, 0)
        if num_tokens == 0:
            self.at_answer[request_id] = num_computed_tokens
        self.at_query[request_id] = num_computed_tokens
        return num_tokens, True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        assert len(block_ids) * self.block_size == num_external_tokens
        start = self.at_answer[request.request_id] = self.at_query[request.request_id]
        self.loads[request.request_id] = (request, start, list(block_ids))
        self.calls.append(("load", request.request_id, num_external_tokens))
        self.scribble()

    def scribble(self) -> None:
        for request_id in self.loads.keys() - self.results.keys():
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
        if request_id not in self.results:
            return None
        del self.loads[request_id]
        return self.results.pop(request_id)

    def cancel_load(self, request_id):
        if self.loads.pop(request_id, None) is not None:
            self.calls.append(("cancel", request_id))
        self.results.pop(request_id, None)

    def request_finished(self, request, block_ids):
        num_tokens = len(block_ids) * self.block_size
        assert block_ids, "nothing to save"
        expected = content(request.all_token_ids[:num_tokens], request)
        assert self.runner.read(block_ids, num_tokens) == expected, "not final"
        self.calls.append(("finished", request.request_id, list(block_ids)))

    def wait_for_load(self, timeout_s):
        assert 0 < timeout_s < 1
        self.calls.append(("wait",))
        self.on_wait()

    def close(self):
        pass


class LoadingWorld(World):
    """And a connector."""

    def make_manager(self) -> LoadingKVCacheManager:
        self.connector = FakeConnector(self.runner)
        return LoadingKVCacheManager(self.pool, self.block_size, self.cache, self.connector)

    def offer(self, request_id: str, tokens: Sequence[int], num_blocks: int) -> Request:
        """A new request, of which the connector has the first blocks."""
        self.connector.num_offered[request_id] = num_blocks
        return self.submit(request_id, tokens)

    def load(self, request_id: str, tokens: Sequence[int], num_blocks: int) -> Request:
        """A new request, whose load begins, or has to wait for others."""
        request = self.offer(request_id, tokens, num_blocks)
        assert self.get_computed_blocks(request) is NotReady.LOADING
        return request

    def loading_ids(self) -> set[str]:
        return self.connector.loads.keys() - self.connector.results.keys()

    def held_outside(self, for_good: bool = False) -> set[int]:
        """Blocks of loads. Those that arrived for requests that still wait can be reclaimed."""
        return {
            block.block_id
            for request_id, load in self.manager.loads._loads.items()
            for block in load.prefix + load.blocks
            if not for_good or request_id in self.loading_ids()
        }

    def get_computed_blocks(self, request: Request) -> ComputedBlocks | NotReady:
        request_id = request.request_id
        was_loading = request_id in self.connector.loads
        num_held = sum(len(q.prefix + q.blocks) for q in self.manager.loads._loads.values())
        num_held *= bool(self.loading_ids())  # if all loads have arrived, waiting requests give way
        computed = super().get_computed_blocks(request)
        if self.checks and computed is NotReady.LOADING:
            num_full = (request.num_tokens - 1) // self.block_size
            num_wanted = min(self.connector.num_offered[request_id], num_full)
            is_too_much = num_held and 2 * (num_held + num_wanted) > self.pool.num_usable_blocks
            assert was_loading or bool(is_too_much) == (request_id not in self.connector.loads)
        return computed

    def check_answer(self, request: Request, computed: ComputedBlocks | NotReady) -> None:
        if computed is not NotReady.LOADING:
            assert request.request_id not in self.connector.loads
            super().check_answer(request, computed)

    def _leave(self, request: Request) -> None:
        request_id = request.request_id
        num_published = self.written.get(request_id, 0) // self.block_size
        expected = list(self.manager.get_block_ids(request_id))[:num_published]
        num_calls = len(self.connector.calls)
        super()._leave(request)
        finish_calls = [call for call in self.connector.calls[num_calls:] if call[0] == "finished"]
        assert finish_calls == ([("finished", request_id, expected)] if expected else [])
        assert request_id not in self.connector.loads
        self.connector.at_answer.pop(request_id, None)

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.connector.scribble()
        super().forward(batch)

    def check(self) -> None:
        self.connector.scribble()
        super().check()
        loading_ids = {r for r, load in self.manager.loads._loads.items() if not load.has_arrived}
        assert self.connector.loads.keys() == loading_ids


@pytest.fixture
def world_of() -> type[World]:
    """The type that `make_world` makes."""
    return LoadingWorld


def test_blocks_of_a_load_are_freed_deepest_first(make_world):
    """Trap 11: of one that did not come, of one that came in part."""
    world = make_world(6, 2)
    for leave, num_kept in ((world.free, 0), (lambda _: world.connector.finish("b", 1), 1)):
        world.load("b", [2] * 7, 3)
        leave("b")
        if num_kept:
            assert world.get_computed_blocks(world.waiting["b"]).num_tokens == 2
        free = [block.block_id for block in world.pool.free_order()]
        assert free == [4, 5, 6, 3, 2, *([1] if not num_kept else [])]
        world.pool.reclaim([world.pool.blocks[b] for b in free])  # in order for the second time
        world.pool.free([world.pool.blocks[b] for b in sorted(free)])


def test_a_request_that_is_seated_while_it_loads_gives_the_load_up(make_cache):
    """A load's blocks go back to the pool, so nothing may be written to them any more."""
    world = LoadingWorld(make_cache, 20, 2)
    request = world.load("a", [1, 2, 3, 4, 5], 2)
    assert world.manager.allocate_slots(request, 5)
    assert world.connector.calls[-1] == ("cancel", "a") and not world.connector.loads
    world.manager.check_invariants([request])
    world.manager.free(request)
    assert world.pool.num_free_blocks == 20


@pytest.mark.parametrize("num_reserved", [0, 11])
def test_a_load_waits_for_the_steps_that_could_still_write_to_its_blocks(make_cache, num_reserved):
    """And no load means no wait."""
    connector, pool = FakeConnector(Runner(2)), BlockPool(9)
    calls, cache = connector.calls, make_cache(pool, 2)
    manager = LoadingKVCacheManager(pool, 2, cache, connector, lambda: calls.append(("steps",)))
    assert manager.allocate_slots(make_request("x", [9]), 1, num_reserved_tokens=num_reserved)
    connector.num_offered["a"] = 3
    found = manager.get_computed_blocks(make_request("a", [1] * 9))
    assert (found is NotReady.LOADING) == (num_reserved == 0)
    assert calls == ([("steps",), ("load", "a", 6)] if num_reserved == 0 else [])
    if num_reserved:  # there was no memory; now there is
        manager.free(make_request("x", [9]))
        assert manager.get_computed_blocks(make_request("a", [1] * 9)) is NotReady.LOADING


def test_blocks_of_a_request_that_failed_are_withdrawn_and_not_offered(make_cache):
    """But for those with which a request has sampled a token before."""
    connector, pool = FakeConnector(Runner(2)), BlockPool(9)
    calls = connector.calls
    connector.invalidate = lambda request, *blocks: calls.append(("withdrawn", *blocks))
    connector.request_finished = lambda request, ids: calls.append(("finished", len(ids)))
    manager = LoadingKVCacheManager(pool, 2, make_cache(pool, 2), connector)
    good, bad = make_request("good", [1] * 3), make_request("bad", [1] * 5)
    for request in (good, bad):
        computed = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 5, computed=computed)
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, request.num_tokens)
        if request is good:
            request.append_output_token(7)
        else:
            request.status = RequestStatus.FINISHED_ERROR
        manager.free(request)
    assert calls == [("finished", 1), ("withdrawn", 1, 2)]


def test_an_offer_that_was_not_taken_up_is_forgotten_with_the_request(make_cache):
    """No room for the load, or not yet: the chain had chosen who would load."""
    runner = Runner(2)
    chain = ConnectorChain([FakeConnector(runner)])
    pool = BlockPool(9)
    manager = LoadingKVCacheManager(pool, 2, make_cache(pool, 2), chain)
    requests = [make_request(request_id, [ord(request_id)] * 9) for request_id in "abc"]
    for request in requests:
        chain.connectors[0].num_offered[request.request_id] = 3
    assert manager.allocate_slots(make_request("x", [9]), 1, num_reserved_tokens=11)
    assert manager.get_computed_blocks(requests[0]).num_tokens == 0, "two blocks are left"
    manager.free(make_request("x", [9]))
    assert manager.get_computed_blocks(requests[1]) is NotReady.LOADING
    assert manager.get_computed_blocks(requests[2]) is NotReady.LOADING, "not yet"
    assert set(chain.connectors[0].loads) == {"b"}
    for request in requests:
        manager.free(request)
    assert not chain._chosen and not chain.connectors[0].loads
    assert pool.num_free_blocks == 8


@pytest.mark.parametrize("num_arrived", [2, 3])
def test_the_victims_blocks_count_in_addition_to_reclaimable_loads(make_world, num_arrived):
    """Trap 60. 8 blocks: v runs with 2 and a load has 3. The new request needs all 8. A load in
    flight keeps its blocks; a load that has arrived counts as free. v is only considered, not
    touched."""
    world = make_world(8, 2)
    victim = world.serve("v", [8, 8, 8, 8])
    world.load("a", [1, 2, 3, 4, 5, 6, 7], 3)
    new_request, nothing = world.submit("y", [9] * 16), ComputedBlocks()
    assert not world.manager.can_allocate(new_request, 16, nothing, 0, victim)
    assert world.manager.can_allocate(new_request, 10, nothing, 0, victim)
    assert not world.manager.can_allocate(new_request, 10, nothing, 1, victim)
    world.connector.finish("a", num_arrived)
    assert world.manager.can_allocate(new_request, 16, nothing, 0, victim)
    assert not world.manager.can_allocate(new_request, 16, nothing, 1, victim)
    assert len(world.manager.get_block_ids("v")) == 2
    world.check()
    world.free("v")
    assert world.admit("y")


def test_the_watermark_reclaims_no_loads_of_waiting_requests(make_world):
    """A watermark is no need: a load that has arrived gives way to a request, not to that."""
    world = make_world(8, 2)
    world.load("a", [1, 2, 3, 4, 5, 6, 7], 3)
    world.connector.finish("a", 3)
    assert world.get_computed_blocks(world.waiting["a"]).num_tokens == 6
    new_request = world.submit("y", [9] * 10)
    assert world.manager.can_allocate(new_request, 10, ComputedBlocks())
    assert not world.manager.can_allocate(new_request, 10, ComputedBlocks(), 1)
    assert world.admit("y")
    assert world.cache.num_evictable_blocks == 0, "still held for a"


def test_a_refused_load_is_overtaken_so_often_and_then_its_request_computes(make_world):
    """Loads of requests before it in the queue do not count. The bound holds for every refused
    request."""
    world = make_world(12, 2)

    def query(request_id: str, num_blocks: int) -> ComputedBlocks | NotReady:
        if request_id not in world.waiting:
            world.offer(
                request_id, [len(world.connector.calls), *[7] * (2 * num_blocks)], num_blocks
            )
        return world.get_computed_blocks(world.waiting[request_id])

    assert query("before", 3) is query("early", 4) is query("big", 6) is NotReady.LOADING
    assert set(world.connector.loads) == {"before"}
    answers: list[ComputedBlocks | NotReady] = []
    for index in range(MAX_OVERTAKES + 1):  # one of them is always in flight
        assert query(f"small {index}", 2) is NotReady.LOADING
        last = "before" if index == 0 else f"small {index - 1}"
        world.connector.finish(last, 1)
        world.get_computed_blocks(world.waiting[last])
        world.free(last)
        if index == 5:
            world.free("early")
        answers.append(query("big", 6))
    assert all(answer is NotReady.LOADING for answer in answers[: MAX_OVERTAKES - 1])
    assert all(isinstance(answer, ComputedBlocks) for answer in answers[MAX_OVERTAKES - 1 :])
    assert world.admit("big")
    world.step()
    assert [call for call in world.connector.calls if call[:2] == ("load", "big")] == []
    world.check()
    world.drain()
    assert not world.manager.loads._overtakes


def test_a_load_that_arrived_for_a_later_request_does_not_block_earlier_ones(make_world):
    """However many requests are before it: no request whose load could end the wait would be
    asked."""
    world = make_world(8, 2)
    for request_id in "ba":
        world.offer(request_id, [ord(request_id)] * 9, 4)
    assert world.get_computed_blocks(world.waiting["a"]) is NotReady.LOADING
    assert world.get_computed_blocks(world.waiting["b"]) is NotReady.LOADING
    assert set(world.connector.loads) == {"a"}, "4 + 4 of 8"
    world.connector.finish("a", 4)
    assert world.get_computed_blocks(world.waiting["b"]) is NotReady.LOADING
    assert set(world.connector.loads) == {"b"}
    assert world.get_computed_blocks(world.waiting["a"]).num_tokens == 8, (
        "there is still room for both"
    )


@pytest.mark.parametrize("first, second", [("long", "other"), ("other", "long")])
def test_the_cached_prefix_that_a_load_keeps_counts_in_its_share(make_world, first, second):
    world = make_world(8, 2)
    world.warm("x", [1, 2, 3, 4, 5])
    world.submit("long", [1, 2, 3, 4, 5, 6, 7])  # two blocks cached, one to load
    world.submit("other", [7] * 5)  # two to load
    world.connector.num_offered |= {"long": 3, "other": 2}
    assert world.get_computed_blocks(world.waiting[first]) is NotReady.LOADING
    assert world.get_computed_blocks(world.waiting[second]) is NotReady.LOADING
    assert set(world.connector.loads) == {first}, "3 + 2 of 8"


@pytest.mark.parametrize("invalidated", ["prefix", "arrived"])
def test_a_load_is_dropped_if_its_prefix_or_its_blocks_are_invalidated(make_world, invalidated):
    world = make_world(20, 2)
    world.warm("x", [1, 2, 3, 4, 5])
    world.load("a", [1, 2, 3, 4, 5, 6, 7], 3)
    load, loads = world.manager.loads._loads["a"], world.manager.loads
    if invalidated == "arrived":
        world.connector.finish("a", 1)
        assert not loads.is_in_flight("a")
    first = (load.prefix if invalidated == "prefix" else load.blocks)[0]
    loads.invalidate(world.pool.blocks[0])
    assert "a" in loads, "another block"
    loads.invalidate(first)
    assert "a" not in loads and world.manager.num_blocks_in_use == 0
    world.manager.check_invariants()


class LoadingChaos(Chaos):
    def submit(self) -> None:
        known = set(self.world.waiting)
        super().submit()
        for request_id in self.world.waiting.keys() - known:
            self.world.connector.num_offered[request_id] = max(0, self.pick(-4, 4))

    def end_load(self) -> None:
        connector = self.world.connector
        request_id = self.choose(self.world.loading_ids())
        if request_id is not None:
            connector.finish(request_id, self.pick(0, len(connector.loads[request_id][2])))


LOADING_OPERATIONS = [*OPERATIONS, "end_load", "end_load"]


@pytest.mark.sample(seed=2)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_run(make_world, seed, block_size):
    check_long_run(make_world, LoadingChaos, LOADING_OPERATIONS, seed, block_size)


def test_any_order_of_calls(make_world):
    check_any_order(make_world, LoadingChaos, LOADING_OPERATIONS)


class LoadingEngine(Engine):
    """Loads end when the engine waits for them, and now and then of themselves."""

    def make_manager(self) -> LoadingKVCacheManager:
        self.connector = FakeConnector(self.runner)
        self.connector.on_wait = self.end_a_load
        return LoadingKVCacheManager(self.pool, self.block_size, self.cache, self.connector)

    def end_a_load(self) -> None:
        loading_ids = sorted(self.connector.loads.keys() - self.connector.results.keys())
        if loading_ids:
            request_id = self.rng.choice(loading_ids)
            num_blocks = len(self.connector.loads[request_id][2])
            self.connector.finish(request_id, self.rng.randint(0, num_blocks))

    def submit(self) -> list[str]:
        submitted = super().submit()
        for request_id in submitted:
            self.connector.num_offered[request_id] = max(0, self.rng.randint(-5, 5))
        return submitted

    def offer(self, request_id: str, tokens: list[int], num_blocks: int, priority: int = 0) -> None:
        self.connector.num_offered[request_id] = num_blocks
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        self.scheduler.add_request(KeyedRequest(request_id, tokens, params, priority=priority))

    def step(self) -> None:
        super().step()
        for request in self.scheduler.waiting:
            is_loading = request.request_id in self.connector.loads
            assert not is_loading or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if not self.scheduler.running and self.scheduler.requests:
            self.manager.wait_for_loads()

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.connector.scribble()
        super().forward(batch)


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_arrives_is_served_and_nothing_is_left(make_cache, seed):
    """No deadlock: some request that waits for a block, a load or memory makes progress."""
    rng = random.Random(seed)
    engine = LoadingEngine(make_cache, rng)
    for _ in range(rng.randint(6, 12)):
        engine.submit()
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
            if rng.random() < 0.3:
                engine.end_a_load()
    engine.serve_all()
    assert not engine.connector.loads and engine.num_admitted > 0


class Calm(random.Random):
    """The first of each choice, and no accident happens."""

    def choice(self, seq):
        return seq[0]

    def random(self):
        return 0.99


def test_more_refused_loads_than_a_step_asks_do_not_hide_the_one_that_blocks_them(make_cache):
    """More requests than a scheduler skips in a step are before a request whose load has arrived.
    They are refused as long as it keeps the load, and it is not asked before them."""
    engine = LoadingEngine(make_cache, Calm())
    engine.scheduler = Scheduler(4, 40, policy="priority", kv_memory=engine.manager)
    engine.offer("last", [1, 2, 3, 4, 5], 4, priority=1)
    engine.step()
    assert engine.manager.num_blocks_in_use == 4, "half of the memory"
    for index in range(MAX_SKIPPED + 2):
        engine.offer(f"r{index}", [index, 7, 8], 2)
    engine.connector.finish("last", 4)
    for _ in range(3 * MAX_SKIPPED):
        engine.step()
        for request_id in engine.connector.loads.keys() - engine.connector.results.keys():
            engine.connector.finish(request_id, 1)
    assert not engine.scheduler.has_unfinished_requests(), "they wait for each other"


def test_a_large_load_is_not_starved_by_a_stream_of_small_ones(make_cache):
    """The scheduler's bound on starvation holds with loads: a bounded number of requests overtake
    it."""
    engine = LoadingEngine(make_cache, Calm())
    engine.scheduler = Scheduler(4, 40, kv_memory=engine.manager, max_overtakes=5)
    engine.connector.on_wait = lambda: None
    engine.offer("small 0", [0, 9, 9], 2)
    engine.step()
    engine.offer("big", [1000, 9, 9, 9, 9], 4)
    num_served = 0
    while "big" in engine.scheduler.requests and num_served < 3 * MAX_OVERTAKES:
        num_served += 1
        engine.offer(f"small {num_served}", [num_served, 9, 9], 2)
        engine.step()
        engine.connector.finish(f"small {num_served - 1}", 2)
        engine.step()
    assert num_served <= MAX_OVERTAKES + 1


@pytest.mark.parametrize("damage", ["loading", "holder", "share"])
def test_check_invariants_notices_damage(make_cache, damage):
    world = LoadingWorld(make_cache, 12, 2)
    world.serve("b", [1, 2, 3, 4, 6, 7, 8])
    world.offer("c", [9] * 5, 1)
    world.get_computed_blocks(world.waiting["c"])
    world.check()
    loads = world.manager.loads._loads
    if damage == "loading":
        loads["b"] = loads.pop("c")
    elif damage == "share":
        loads["d"] = Load(world.waiting["c"], [], world.pool.allocate(6))
    else:
        loads["c"].blocks[0].ref_cnt += 1
    with pytest.raises(AssertionError):
        world.manager.check_invariants(world.running.values())


def test_a_connector_that_fails_at_the_end_of_a_request_costs_nothing_but_its_help(caplog):
    pool, connector = BlockPool(9), FakeConnector(Runner(4))
    connector.request_finished = lambda *_: 1 / 0
    manager = LoadingKVCacheManager(pool, 4, PrefixCacheLocal(pool=pool, block_size=4), connector)
    request = Request.from_tokens("a", list(range(9)))
    assert manager.allocate_slots(request, 9, computed=ComputedBlocks())
    manager.cache_blocks(request, 9)
    manager.free(request)
    assert manager.num_blocks_in_use == 0 and "ZeroDivisionError" in caplog.text
    manager.check_invariants()


def test_loads_of_earlier_requests_delay_no_request(make_world):
    """However many were asked about before it, it loads when they have loaded."""
    world = make_world(4, 2)
    names = [f"r{index}" for index in range(MAX_OVERTAKES + 3)]
    for index, name in enumerate(names):
        world.offer(name, [index, *[9] * 8], 4)
    for index, name in enumerate(names):
        for other in names[index:]:
            assert world.get_computed_blocks(world.waiting[other]) is NotReady.LOADING
        assert set(world.connector.loads) == {name}
        world.connector.finish(name, 0)
        world.get_computed_blocks(world.waiting[name])
        world.free(name)


def test_for_a_request_that_runs_nothing_is_loaded_and_no_load_is_waited_for(make_cache):
    world = LoadingWorld(make_cache, 20, 2)
    request = world.offer("a", [1, 2, 3, 4, 5], 2)
    assert world.manager.allocate_slots(request, 5)
    with pytest.raises(ValueError, match="'a' already has a block table"):
        world.manager.get_computed_blocks(request)
    world.manager.wait_for_loads()
    assert not world.connector.calls
