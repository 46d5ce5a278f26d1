"""The manager with a cache, checked by what a reader of the KV memory finds there.

Every slot of a made-up memory says which tokens it was computed from, all of them from the first
on, and under which extra keys. A request that reads anything but its own prefix fails at once:
wrong sharing, a stale block, use after free, a table entry that the runner was not told of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from fcfs_scheduler import FCFSScheduler
from kv_connector import ConnectorChain, KVConnector
from prefix_cache import normalise_extra_keys
from request import Request, SamplingParams
from scheduler_interface import ComputedBlocks

BLOCK_SIZES = (1, 2, 4)
PARAMS = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)


def make_request(request_id: str, tokens: Sequence[int], salt: str | None = None) -> Request:
    keys = (("salt", salt),) if salt else ()
    return Request(request_id, tokens, PARAMS, arrival_time=0.0, extra_keys=keys)


def content(tokens: Sequence[int], request: Request) -> list[object]:
    """What a reader of these positions must find."""
    keys = normalise_extra_keys(request.extra_keys)
    return [(tuple(tokens[: i + 1]), keys) for i in range(len(tokens))]


class Runner:
    """The model's side: KV memory by slot, and block tables kept by deltas alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[int, object] = {}
        self.tables: dict[str, list[int]] = {}

    def slots(self, block_id: int) -> range:
        return range(block_id * self.block_size, (block_id + 1) * self.block_size)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[object]:
        slots = [slot for block_id in block_ids for slot in self.slots(block_id)]
        assert len(slots) >= num_tokens, "the table is too short"
        return [self.memory.get(slot) for slot in slots[:num_tokens]]

    def copy_blocks(self, copies: Iterable[tuple[str, int, int, int]]) -> None:
        moved: dict[int, object] = {}
        for _, _, src, dst in copies:
            if src != dst:
                assert moved.keys().isdisjoint(self.slots(dst)), "two copies into one block"
                read = [self.memory.get(slot) for slot in self.slots(src)]
                moved |= zip(self.slots(dst), read, strict=True)
        self.memory |= moved
        for request_id, index, _, dst in copies:
            if request_id in self.tables:
                self.tables[request_id][index] = dst

    def forward(self, batch: Iterable[tuple[Request, int, int]], alive: Iterable[str]) -> None:
        """Writes positions `[start, stop)` of each request, then lets each read all up to `stop`.
        Requests that were aborted meanwhile write as well, and read nothing."""
        written: set[int] = set()
        for request, start, stop in batch:
            table = self.tables[request.request_id]
            slots = [slot for block_id in table for slot in self.slots(block_id)][start:stop]
            assert len(slots) == stop - start, "the runner's table is too short"
            assert written.isdisjoint(slots), "two requests write one slot"
            written.update(slots)
            values = content(request.all_token_ids[:stop], request)[start:]
            self.memory |= zip(slots, values, strict=True)
        for request, _, stop in batch:
            if request.request_id in alive:
                found = self.read(self.tables[request.request_id], stop)
                assert found == content(request.all_token_ids[:stop], request), request


class FakeConnector(KVConnector):
    """Has the first `num_offered` blocks of whatever it is asked for. Loads end when the test says
    so; until then their blocks are full of junk, written at any moment."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block_size = runner.block_size
        self.num_offered: dict[str, int] = {}
        self.loads: dict[str, tuple[Request, int, list[int]]] = {}  # start, block ids
        self.results: dict[str, int] = {}
        self.asked: dict[
            str, int
        ] = {}  # tokens computed when asked, and when that was the last word
        self.decided: dict[str, int] = {}
        self.calls: list[tuple] = []
        self.on_wait: Callable[[], None] = lambda: None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        request_id = request.request_id
        assert num_computed_tokens % self.block_size == 0
        assert request_id not in self.loads, "asked while loading"
        assert num_computed_tokens < self.decided.get(request_id, 10**9), "asked for nothing"
        num_full = (request.num_tokens - 1) // self.block_size
        num_offered = min(self.num_offered.get(request_id, 0), num_full)
        num_tokens = max(num_offered * self.block_size - num_computed_tokens, 0)
        if num_tokens == 0:
            self.decided[request_id] = num_computed_tokens
        self.asked[request_id] = num_computed_tokens
        return num_tokens, True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        assert len(block_ids) * self.block_size == num_external_tokens
        start = self.decided[request.request_id] = self.asked[request.request_id]
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


class World:
    """A manager with everything around it. A step is any number of plans, then `step`: deltas and
    copies go to the runner, planned positions are written, what is full is published.

    Whatever the manager says is compared with what tables and cached prefixes imply.
    """

    def __init__(self, make_cache, num_usable: int, block_size: int, checks: bool = True) -> None:
        self.pool = BlockPool(num_usable + 1)
        self.block_size = block_size
        self.runner = Runner(block_size)
        self.cache = make_cache(self.pool, block_size)
        self.connector = FakeConnector(self.runner)
        self.manager = CachedKVCacheManager(self.pool, block_size, self.cache, self.connector)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.written: dict[str, int] = {}  # positions whose KV is in memory
        self.plan: dict[str, tuple[int, int]] = {}
        self.stats = [0, 0, 0]
        self.somebody_left = False  # since the last step
        self.checks = checks

    # -- what the manager's answers are compared with

    def tables(self) -> dict[str, list[int]]:
        return {r: list(self.manager.get_block_ids(r)) for r in self.running}

    def prefixes(self) -> dict[tuple, int]:
        return {
            (prefix.extra_keys, prefix.token_ids): prefix.block.block_id
            for prefix in self.cache.cached_prefixes()
        }

    def longest(self, request: Request, stop: int) -> list[int]:
        """The cached blocks of the request's first `stop` tokens."""
        keys, prefixes, found = normalise_extra_keys(request.extra_keys), self.prefixes(), []
        for end in range(self.block_size, stop + 1, self.block_size):
            block_id = prefixes.get((keys, tuple(request.all_token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def computing(self, request: Request, num_cached: int) -> bool:
        """Does this step compute the block behind the cached ones, for somebody who has those?"""
        end = (num_cached + 1) * self.block_size
        keys = normalise_extra_keys(request.extra_keys)
        return end < request.num_tokens and any(
            normalise_extra_keys(other.extra_keys) == keys
            and other.all_token_ids[:end] == request.all_token_ids[:end]
            and self.plan[r][0] < end <= self.plan[r][1]
            and self.plan[r][0] // self.block_size == num_cached
            for r, other in self.running.items()
            if r in self.plan
        )

    def held(self) -> set[int]:
        held = {block_id for table in self.tables().values() for block_id in table}
        return held | self.held_by_loads()

    def held_by_loads(self, arrived: bool = True) -> set[int]:
        """With what has arrived for requests that still wait, or without."""
        return {
            block.block_id
            for request_id, load in self.manager._loads._loads.items()
            for block in load.prefix + load.blocks
            if arrived or request_id in self.connector.loads.keys() - self.connector.results.keys()
        }

    def fits(self, request: Request, num_tokens: int, computed: ComputedBlocks | None) -> bool:
        tables, cached = self.tables(), set(self.cache.cached_block_ids())
        found = [] if computed is None else [block.block_id for block in computed.blocks]
        own = list(self.manager.get_block_ids(request.request_id)) + found
        start = request.num_computed_tokens + len(found) * self.block_size
        indices = {position // self.block_size for position in range(start, start + num_tokens)}
        num_fresh = sum(
            i >= len(own)
            or own[i] in cached
            or sum(own[i] in table for table in tables.values()) > 1
            for i in indices
        )
        held = {block_id for table in tables.values() for block_id in table} | set(own)
        held |= self.held_by_loads(arrived=False)  # what has arrived gives way
        return num_fresh <= self.pool.num_usable_blocks - len(held)

    def snapshot(self, arrivals: bool = False) -> tuple:
        """Everything but the order of use. With `arrivals`, loads that end are left out."""
        always = (
            {r: list(table.block_ids) for r, table in self.manager._tables.items()},
            dict(self.manager._in_flight),
            {dst: (c.request_id, c.src_block_id) for dst, c in self.manager._copies.items()},
            list(self.manager._moved),
        )
        if arrivals:
            return always
        return (
            *always,
            [block.ref_cnt for block in self.pool.blocks],
            [block.block_id for block in self.pool.free_order()],
            self.prefixes(),
            (self.cache.num_evictable_blocks, self.manager.num_blocks_in_use),
        )

    # -- requests come, run and go

    def submit(self, request_id: str, tokens: Sequence[int], salt: str | None = None) -> Request:
        self.waiting[request_id] = make_request(request_id, tokens, salt)
        return self.waiting[request_id]

    def look_up(self, request: Request) -> ComputedBlocks:
        was_loading = request.request_id in self.connector.loads
        num_held = sum(len(q.prefix + q.blocks) for q in self.manager._loads._loads.values())
        computed = self.manager.get_computed_blocks(request)
        if not self.checks:
            return computed
        found = self.longest(request, request.num_tokens - 1)
        if request.request_id in self.connector.loads:
            assert computed.is_loading
        if computed.is_loading:
            assert not computed.is_ready
            num_full = (request.num_tokens - 1) // self.block_size
            num_wanted = min(self.connector.num_offered[request.request_id], num_full)
            is_too_much = num_held and 2 * (num_held + num_wanted) > self.pool.num_usable_blocks
            assert was_loading or bool(is_too_much) == (
                request.request_id not in self.connector.loads
            )
            return computed
        is_computed = self.computing(request, len(found))
        assert is_computed or computed.is_ready, "nobody computes it"
        assert not is_computed or not computed.is_ready or self.somebody_left, "computed twice"
        if computed.is_ready:
            assert [block.block_id for block in computed.blocks] == found
            assert computed.num_tokens == len(found) * self.block_size
        return computed

    def admit(self, request_id: str, num_new: int = 10**9, num_lookahead: int = 0) -> bool:
        request = self.waiting[request_id]
        computed = self.look_up(request)
        if not computed.is_ready:
            return False
        num_new = min(num_new, request.num_tokens - computed.num_tokens)
        if not self._allocate(request, num_new, num_lookahead, computed):
            return False
        self.running[request_id] = self.waiting.pop(request_id)
        request.num_computed_tokens = self.written[request_id] = computed.num_tokens
        if request.num_preemptions == 0:
            for i, more in enumerate((1, request.num_tokens, computed.num_tokens)):
                self.stats[i] += more
        self._put_in_plan(request, num_new)
        return True

    def advance(self, request_id: str, num_new: int = 10**9, num_lookahead: int = 0) -> bool:
        request = self.running[request_id]
        num_new = min(num_new, request.num_tokens - request.num_computed_tokens)
        if not self._allocate(request, num_new, num_lookahead, None):
            return False
        self._put_in_plan(request, num_new)
        return True

    def _allocate(self, request, num_new, num_lookahead, computed) -> bool:
        if not self.checks:
            return self.manager.allocate_slots(request, num_new, num_lookahead, computed)
        give_way = self.held_by_loads() != self.held_by_loads(arrived=False)
        before, prefixes = self.snapshot(give_way), self.prefixes()
        fits = self.fits(request, num_new + num_lookahead, computed)
        accepted = self.manager.allocate_slots(request, num_new, num_lookahead, computed)
        assert accepted == fits, "refused or granted against the count of blocks"
        if not accepted:
            assert self.snapshot(give_way) == before, "a refusal changed something"
            assert self.prefixes().items() >= prefixes.items(), "evicted, and for nothing"
        return accepted

    def _put_in_plan(self, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens += num_new
        self.plan[request.request_id] = (start, start + num_new)
        block_ids = self.manager.get_block_ids(request.request_id)
        for index in {position // self.block_size for position in range(start, start + num_new)}:
            assert self.pool.blocks[block_ids[index]].ref_cnt == 1, "writable by two"

    def fork(self, parent_id: str, child_id: str, num_shared: int, tokens: Sequence[int]) -> None:
        parent = self.running[parent_id]
        assert 0 < num_shared <= self.written[parent_id]
        child = make_request(child_id, parent.all_token_ids[:num_shared] + list(tokens))
        child.extra_keys = parent.extra_keys
        child.num_computed_tokens = num_shared
        self.manager.fork(parent, child)
        self.running[child_id], self.written[child_id] = child, num_shared

    def free(self, request_id: str) -> None:
        """Finished, or aborted at whatever moment."""
        request = self.running.pop(request_id, None) or self.waiting.pop(request_id)
        self._leave(request)

    def preempt(self, request_id: str) -> None:
        request = self.waiting[request_id] = self.running.pop(request_id)
        self._leave(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def _leave(self, request: Request) -> None:
        request_id = request.request_id
        num_published = self.written.pop(request_id, 0) // self.block_size
        expected = list(self.manager.get_block_ids(request_id))[:num_published]
        num_calls = len(self.connector.calls)
        self.manager.free(request)
        told = [call for call in self.connector.calls[num_calls:] if call[0] == "finished"]
        assert told == ([("finished", request_id, expected)] if expected else [])
        assert list(self.manager.get_block_ids(request_id)) == []
        assert request_id not in self.connector.loads
        self.connector.decided.pop(request_id, None)
        self.runner.tables.pop(request_id, None)
        self.somebody_left |= self.plan.pop(request_id, None) is not None

    # -- one step

    def step(
        self, sample: Callable[[Request], int] = lambda _: 0, abort: Sequence[str] = ()
    ) -> None:
        """Requests in `abort` end between plan and forward pass."""
        self._tell_runner()
        batch = [(self.running[r], *self.plan[r]) for r in self.plan]
        tables = dict(self.runner.tables)
        for request_id in abort:
            self.free(request_id)
        self.connector.scribble()
        self.runner.tables = tables
        self.runner.forward(batch, self.running)
        self.runner.tables = {r: table for r, table in tables.items() if r in self.running}
        for request, _, stop in batch:
            if request.request_id in self.running:
                self.written[request.request_id] = stop
                self.manager.cache_blocks(request)
                if stop == request.num_tokens:
                    request.append_output_token(sample(request))
        self.plan, self.somebody_left = {}, False
        assert not self.manager._in_flight, "published, or given up"
        if self.checks:
            self._check_published()

    def _tell_runner(self) -> None:
        copies = self.manager.take_block_copies()
        for request_id in self.plan:
            known = self.runner.tables.setdefault(request_id, [])
            known += self.manager.get_block_ids(request_id)[len(known) :]
        for request_id, _, src, dst in copies:
            assert src != dst or request_id in self.runner.tables, "a move of a new request"
        self.runner.copy_blocks(copies)
        for request_id, table in self.runner.tables.items():
            assert table == self.manager.get_block_ids(request_id)[: len(table)], "not told"
        for request_id, (start, stop) in self.plan.items():
            slots = self.manager.slot_mapping(request_id, start, stop)
            table = self.runner.tables[request_id]
            assert slots == [slot for b in table for slot in self.runner.slots(b)][start:stop]

    def _check_published(self) -> None:
        for request_id, request in self.running.items():
            num_tokens = self.written[request_id]
            block_ids = list(self.manager.get_block_ids(request_id))
            found = self.longest(request, num_tokens)
            assert found == block_ids[: num_tokens // self.block_size], "in memory twice, or never"
            if not self.manager._copies:
                expected = content(request.all_token_ids[:num_tokens], request)
                assert self.runner.read(block_ids, num_tokens) == expected, request

    def check(self) -> None:
        self.manager.check_invariants(self.running.values())
        self.connector.scribble()
        for prefix in self.cache.cached_prefixes():
            first = len(prefix.token_ids) - self.block_size
            for i, slot in enumerate(self.runner.slots(prefix.block.block_id), first + 1):
                expected = (prefix.token_ids[:i], prefix.extra_keys)
                assert self.runner.memory[slot] == expected, "wrong KV is cached"
        stats = self.cache.stats
        found = [stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit]
        assert found == self.stats
        assert self.manager.num_blocks_in_use == len(self.held())
        assert self.manager.usage == len(self.held()) / self.pool.num_usable_blocks
        under_way = {r for r, load in self.manager._loads._loads.items() if not load.has_arrived}
        assert self.connector.loads.keys() == under_way
        assert set(self.manager._states) <= self.running.keys() | self.waiting.keys()

    def drain(self) -> None:
        """Nothing is left behind."""
        for request_id in [*self.running, *self.waiting]:
            self.free(request_id)
        self.check()
        assert self.manager.usage == 0
        assert not self.manager._states and not self.manager._moved and not self.manager._copies
        assert self.manager.reset_prefix_cache()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks

    def run(self, request_id: str, num_steps: int = 1) -> None:
        """Admit, compute and decode one request alone."""
        assert self.admit(request_id)
        self.step()
        for _ in range(num_steps - 1):
            assert self.advance(request_id)
            self.step()
            self.check()


@pytest.fixture
def make_world(make_cache) -> Callable[..., World]:
    return lambda *arguments: World(make_cache, *arguments)


# -- worked examples


def test_the_second_request_computes_what_the_first_did_not(make_world):
    world = make_world(20, 4)
    world.submit("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.run("a")
    world.submit("b", [1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    world.run("b")
    assert world.written == {"a": 9, "b": 10}
    assert world.tables()["b"][:2] == world.tables()["a"][:2]
    assert world.cache.stats.hit_rate == 8 / 19
    world.drain()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_at_least_the_last_token_is_computed(make_world, block_size):
    """Trap 3: the prompt is an exact multiple of the block size, and all of it is cached."""
    world = make_world(20, block_size)
    for request_id in "ab":
        world.submit(request_id, [5] * (2 * block_size))
        world.run(request_id)
    assert world.stats[2] == block_size, "one of two blocks"
    world.drain()


def test_what_is_planned_is_not_cached_before_it_is_written(make_world):
    """Trap 15: aborted or preempted between plan and forward pass, a request publishes nothing."""
    world = make_world(20, 2)
    for leave in (world.free, world.preempt):
        world.submit("a", [1] * 7)
        assert world.admit("a")
        leave("a")
        world.check()
        assert world.cache.num_cached_blocks == 0
    world.run("a")
    assert world.cache.num_cached_blocks == 3
    world.advance("a")
    world.step(abort=["a"])
    world.check()
    assert world.cache.num_cached_blocks == 3, (
        "the eighth token filled a block and was not waited for"
    )
    world.drain()


def test_a_duplicate_is_given_back_and_the_runner_is_told(make_world):
    """Trap 2: two requests whose first chunks end inside a block compute the same block."""
    world = make_world(20, 4)
    for request_id in "ab":
        world.submit(request_id, [1, 2, 3, 4, 5])
        assert world.admit(request_id, 3)
    world.step()
    assert world.advance("a") and world.advance("b")
    world.step()
    own = world.runner.tables["b"][0]
    kept = world.tables()["a"][0]
    assert world.tables()["b"][0] == kept != own and world.pool.blocks[own].ref_cnt == 0
    assert world.manager.take_block_copies() == [("b", 0, kept, kept)]
    assert world.manager.take_block_copies() == [], "taken once"
    world.manager._moved.append(("b", 0, kept, kept))  # put back
    assert world.advance("b")
    world.step()
    world.check()
    world.drain()


def test_a_move_dies_with_its_request(make_world):
    world = make_world(20, 4)
    for request_id in "abc":
        world.submit(request_id, [1, 2, 3, 4, 5])
        assert world.admit(request_id, 3)
    world.step()
    assert all(world.advance(request_id) for request_id in "abc")
    world.step()
    world.free("b")
    assert [move[0] for move in world.manager.take_block_copies()] == ["c"]


def test_blocks_are_freed_deepest_first(make_world):
    """Trap 11: those of a table that is not published, of a load that did not come, of one that
    came in part."""
    world = make_world(6, 2)
    for leave, num_kept in ((world.free, 0), (lambda _: world.connector.finish("b", 1), 1)):
        world.submit("a", [1] * 6)
        assert world.admit("a")
        assert world.tables()["a"] == [1, 2, 3]
        world.free("a")
        assert [block.block_id for block in world.pool.free_order()] == [4, 5, 6, 3, 2, 1]
        world.submit("b", [2] * 7)
        world.connector.num_offered["b"] = 3
        assert world.look_up(world.waiting["b"]).is_loading
        leave("b")
        if num_kept:
            assert world.look_up(world.waiting["b"]).num_tokens == 2
        free = [block.block_id for block in world.pool.free_order()]
        assert free == [3, 2, 1, *([6, 5, 4] if not num_kept else [6, 5])]
        world.pool.reclaim([world.pool.blocks[b] for b in free])  # in order for the second time
        world.pool.free([world.pool.blocks[b] for b in sorted(free)])


def test_a_hit_survives_the_eviction_it_causes(make_world):
    """Trap 5: touched before anything is taken."""
    world = make_world(4, 4)
    world.submit("a", [1] * 16)
    world.run("a")
    world.free("a")
    world.submit("b", [1] * 8 + [2] * 8)
    world.run("b")
    assert world.stats[2] == 8
    world.check()
    world.drain()


def test_a_request_waits_one_step_for_the_block_that_another_computes(make_world):
    world = make_world(20, 2)
    world.submit("a", [1, 1, 2, 2, 3, 3])
    world.submit("b", [1, 1, 2, 2, 4])
    world.submit("c", [1, 1, 2, 2, 4], salt="s")
    world.submit("d", [1, 1])
    world.submit("e", [2, 2, 2, 2])
    assert world.admit("a")
    found = world.look_up(world.waiting["b"])
    assert not found.is_ready and not found.is_loading and found.blocks == []
    assert world.admit("c"), "another tenant"
    assert world.admit("d"), "its last token is computed anyway"
    assert world.admit("e"), "another prefix"
    world.step()
    found = world.look_up(world.waiting["b"])
    assert found.is_ready and found.num_tokens == 4
    world.drain()


@pytest.mark.parametrize("leave", ["free", "preempt"])
def test_nobody_waits_for_a_request_that_has_left(make_world, leave):
    world = make_world(20, 2)
    world.submit("a", [1, 1, 2, 2, 3])
    world.submit("b", [1, 1, 2, 2, 4])
    assert world.admit("a")
    assert not world.admit("b")
    getattr(world, leave)("a")
    assert world.admit("b")
    world.step()
    world.check()
    world.drain()


def test_the_block_that_a_decoding_request_fills_is_waited_for_too(make_world):
    world = make_world(20, 4)
    world.submit("a", [1] * 6)
    world.run("a")
    world.submit("b", [1] * 6 + [0, 0, 2])
    world.advance("a")  # position 6: the block is not full yet, and nobody waits
    assert world.look_up(world.waiting["b"]).is_ready
    world.step()
    world.advance("a")
    assert not world.look_up(world.waiting["b"]).is_ready
    world.step()
    assert world.look_up(world.waiting["b"]).num_tokens == 8


def test_the_order_of_extra_keys_does_not_matter(make_world):
    world = make_world(20, 2)
    keys = (("salt", "s"), ("lora", 7))
    for request_id, extra_keys in (("a", keys), ("b", keys[::-1])):
        world.submit(request_id, [1, 2, 3]).extra_keys = extra_keys
    assert world.admit("a")
    assert not world.look_up(world.waiting["b"]).is_ready
    world.step()
    assert world.look_up(world.waiting["b"]).num_tokens == 2


def test_a_block_with_draft_tokens_is_neither_published_nor_waited_for(make_world):
    """Trap 13: positions beyond the known tokens are written for tokens that may be rejected."""
    world = make_world(20, 4)
    request = world.submit("a", [1, 1, 1])
    assert world.manager.allocate_slots(request, 5, computed=ComputedBlocks())
    assert not world.manager._in_flight
    request.num_computed_tokens = 5
    world.manager.cache_blocks(request)
    assert world.cache.num_cached_blocks == 0
    request.num_computed_tokens = 3  # both are rejected, and another token is sampled
    request.append_output_token(1)
    assert world.manager.allocate_slots(request, 1)
    other = make_request("b", [1] * 5)
    assert not world.manager.get_computed_blocks(other).is_ready
    request.num_computed_tokens = 4
    world.manager.cache_blocks(request)
    assert world.cache.num_cached_blocks == 1
    assert world.manager.get_computed_blocks(other).num_tokens == 4


def test_statistics_count_a_request_once_when_it_is_admitted(make_world):
    world = make_world(6, 2)
    stats = world.cache.stats
    world.submit("a", [1] * 8)
    world.submit("b", [1] * 6 + [2] * 5)
    world.run("a")
    assert (stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit) == (1, 8, 0)
    world.advance("a")
    world.step()
    for _ in range(3):
        assert not world.admit("b"), "two blocks too many"
    assert stats.num_requests == 1, "refused attempts do not count"
    world.preempt("a")
    assert world.admit("a")
    world.step()
    assert stats.num_requests == 1, "neither does a second admission"
    world.free("a")
    assert world.admit("b")
    assert (stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit) == (2, 19, 6)
    world.step()
    world.check()
    world.drain()


def test_what_is_only_cached_is_as_good_as_free(make_world):
    world = make_world(8, 2)
    world.submit("a", [1] * 8)
    world.run("a")
    assert world.manager.num_blocks_in_use == 4 and world.manager.usage == 0.5
    world.free("a")
    assert world.manager.num_blocks_in_use == 0 and world.manager.usage == 0
    assert world.pool.num_free_blocks == 4
    world.submit("b", [2] * 16)
    world.run("b")
    assert world.manager.usage == 1


def test_the_cache_is_forgotten_only_while_nobody_uses_it(make_world):
    world = make_world(8, 2)
    world.submit("a", [1] * 5)
    world.run("a")
    assert not world.manager.reset_prefix_cache()
    assert world.cache.num_cached_blocks == 2
    world.free("a")
    assert world.manager.reset_prefix_cache()
    assert world.cache.num_cached_blocks == 0


def test_wrong_collaborators_and_wrong_calls_are_errors(make_cache, make_world):
    pool = BlockPool(5)
    for other in (make_cache(BlockPool(5), 2), make_cache(pool, 3)):
        with pytest.raises(ValueError, match="block_size is 2"):
            CachedKVCacheManager(pool, 2, other)
    world = make_world(8, 2)
    world.submit("a", [1] * 5)
    world.run("a")
    with pytest.raises(ValueError, match="'a' has a block table already"):
        world.manager.get_computed_blocks(world.running["a"])
    world.manager.cache_blocks(make_request("never seen", [1, 2, 3]))
    world.manager.free(make_request("never seen", [1, 2, 3]))
    world.check()


class NoLongSlices(list):
    """A block table that may be added to and looked at, but not gone through."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        assert not isinstance(key, slice) or len(found) <= 1, "a slice of the table"
        return found

    def __iter__(self):
        raise AssertionError("the whole table")


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_decode_step_costs_the_cache_nothing_until_a_block_is_full(
    make_cache, monkeypatch, block_size
):
    pool = BlockPool(1100)
    cache = make_cache(pool, block_size)
    manager = CachedKVCacheManager(pool, block_size, cache)
    request = make_request("a", [1] * 5)
    assert manager.allocate_slots(request, 5, computed=manager.get_computed_blocks(request))
    request.num_computed_tokens = 5
    manager.cache_blocks(request)
    table = manager._tables["a"]
    table.blocks = NoLongSlices(table.blocks)
    inserted: list[int] = []
    insert = cache.insert

    def count_insert(token_ids, blocks, extra_keys=None, *, start=0, path=None):
        inserted.append(len(blocks))
        assert path is not None and path.state is not None, "from the root again"
        assert token_ids is request.all_token_ids, "a copy of the prompt"
        return insert(token_ids, blocks, extra_keys, start=start, path=path)

    def check_nothing_touched(blocks):
        assert not blocks

    def never(*_):
        raise AssertionError("asked for nothing")

    monkeypatch.setattr(cache, "insert", count_insert)
    monkeypatch.setattr(cache, "touch", check_nothing_touched)
    for name in ("match_prefix", "release", "cached_prefixes", "cached_block_ids"):
        monkeypatch.setattr(cache, name, never)
    for _ in range(1000):
        request.append_output_token(1)
        assert manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_blocks(request)
    assert inserted == [1] * (1005 // block_size - 5 // block_size)


# -- forks


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_shared", [3, 4, 5, 6, 7, 8])
def test_samples_share_a_prompt_and_what_it_publishes(make_world, block_size, num_shared):
    """A child that computes again the last position of a published block writes a copy, and gives
    it back when it is full."""
    world = make_world(40, block_size)
    world.submit("p", [1, 2, 3, 4, 5, 6, 7, 8])
    world.run("p", num_steps=2)
    for child_id in "cd":
        world.fork("p", child_id, num_shared, [8] * max(1, 8 - num_shared))
        assert world.advance(child_id)
        world.check()
    assert world.advance("p")
    for number in range(6):
        world.step(lambda request: ord(request.request_id) % 2)
        world.check()
        assert all(world.advance(request_id) for request_id in "pcd"[number % 2 :])
    world.free("p")
    world.check()
    world.step()
    world.check()
    world.drain()


def test_a_refused_fork_gives_back_what_it_shared(make_world):
    world = make_world(4, 2)
    world.submit("p", [1] * 7)
    world.run("p")
    world.fork("p", "c", 6, [1])
    before = world.snapshot()
    assert not world.advance("c")
    assert world.snapshot() == before
    world.free("c")
    world.check()
    world.drain()


def test_a_fork_of_unpublished_blocks_is_an_error_that_changes_nothing(make_world):
    """Shared before they are published, they could become duplicates in one table only, and the
    cached blocks behind them would be used without them."""
    world = make_world(20, 2)
    world.submit("p", [1, 2, 3, 4, 5])
    parent = world.waiting["p"]
    assert world.admit("p")
    world._tell_runner()
    child = make_request("c", [1, 2, 3, 4, 6])
    child.num_computed_tokens = 4
    before = world.snapshot()
    with pytest.raises(ValueError, match="'p' has published 0"):
        world.manager.fork(parent, child)
    child.num_computed_tokens = 6
    with pytest.raises(ValueError, match="'p' has computed 5"):
        world.manager.fork(parent, child)
    assert world.snapshot() == before
    world.check()


def test_a_fork_ends_the_load_of_the_child(make_world):
    """Looked up while its parent was loading too, the child loads; then it can share instead."""
    world = make_world(20, 2)
    for request_id in "pc":
        world.submit(request_id, [1, 2, 3, 4, 5])
        world.connector.num_offered[request_id] = 2
        assert world.look_up(world.waiting[request_id]).is_loading
    world.connector.finish("p", 2)
    assert world.admit("p")
    world.step()
    del world.waiting["c"]
    world.fork("p", "c", 4, [5])
    assert world.advance("c")
    assert ("cancel", "c") in world.connector.calls
    world.check()
    world.step()
    world.check()
    world.drain()


# -- KV from outside


def test_what_is_loaded_is_cached_and_then_found(make_world):
    world = make_world(20, 2)
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 2
    request = world.waiting["a"]
    found = world.look_up(request)
    assert (found.is_ready, found.is_loading, found.blocks, found.num_tokens) == (
        False,
        True,
        [],
        0,
    )
    assert world.manager.num_blocks_in_use == 2 and world.cache.num_cached_blocks == 0
    world.check()
    assert not world.look_up(request).is_ready, "and is not started again"
    world.connector.finish("a", 2)
    assert world.admit("a")
    assert world.written["a"] == 4 and world.stats == [1, 7, 4]
    world.step()
    world.check()
    world.drain()


def test_a_load_that_ends_at_once_holds_up_nothing(make_world):
    world = make_world(20, 2)
    world.submit("a", [1, 2, 3, 4, 5])
    world.connector.num_offered["a"] = 2
    start = world.connector.update_state_after_alloc

    def load_now(request, block_ids, num_tokens):
        start(request, block_ids, num_tokens)
        world.connector.finish("a", 2)

    world.connector.update_state_after_alloc = load_now
    assert world.admit("a")
    assert world.written["a"] == 4
    world.step()
    world.drain()


@pytest.mark.parametrize("num_arrived", [0, 1, 2])
def test_what_does_not_arrive_is_computed(make_world, num_arrived):
    world = make_world(20, 2)
    world.submit("x", [1, 2])
    world.run("x")
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    world.connector.finish("a", num_arrived)
    assert world.admit("a")
    assert world.written["a"] == 2 + 2 * num_arrived
    assert [call for call in world.connector.calls if call[0] == "load"] == [("load", "a", 4)]
    world.step()
    world.check()
    world.drain()


def test_a_load_starts_behind_what_is_cached_and_keeps_it(make_world):
    """The local prefix is used by the load: making room for others does not evict it."""
    world = make_world(8, 2)
    world.submit("x", [1, 2, 3, 4, 5])
    world.run("x")
    world.free("x")
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    assert world.connector.calls[-1] == ("load", "a", 2)
    world.submit("y", [9] * 10)
    world.run("y")
    world.submit("z", [8])
    assert not world.admit("z"), "everything is in use"
    world.check()
    world.connector.finish("a", 1)
    assert world.look_up(world.waiting["a"]).num_tokens == 6
    world.check()
    world.drain()


@pytest.mark.parametrize("num_arrived", [None, 0, 1])
def test_an_aborted_load_gives_everything_back(make_world, num_arrived):
    world = make_world(8, 2)
    world.submit("x", [1, 2])
    world.run("x")
    world.free("x")
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    if num_arrived is not None:
        world.connector.finish("a", num_arrived)
    world.free("a")
    assert world.connector.calls[-1] == ("cancel", "a")
    assert world.cache.num_cached_blocks == 1
    world.check()
    world.drain()


def test_a_pool_without_room_for_a_load_computes(make_world):
    world = make_world(5, 2)
    world.submit("x", [9] * 5)
    world.run("x")
    world.submit("a", [1] * 8)
    world.connector.num_offered["a"] = 3
    before = world.snapshot()
    found = world.look_up(world.waiting["a"])
    assert found.is_ready and found.num_tokens == 0 and not world.connector.loads
    assert world.snapshot() == before
    world.free("x")
    assert world.admit("a")
    world.step()
    world.check()


def test_an_offer_that_was_not_taken_up_is_forgotten_with_the_request(make_cache):
    """No room for the load, or not yet: the chain had chosen who would load."""
    runner = Runner(2)
    chain = ConnectorChain([FakeConnector(runner)])
    pool = BlockPool(9)
    manager = CachedKVCacheManager(pool, 2, make_cache(pool, 2), chain)
    requests = [make_request(request_id, [ord(request_id)] * 9) for request_id in "abc"]
    for request in requests:
        chain.connectors[0].num_offered[request.request_id] = 3
    assert manager.allocate_slots(make_request("x", [9]), 1, num_lookahead_tokens=11)
    assert manager.get_computed_blocks(requests[0]).is_ready, "two blocks are left"
    manager.free(make_request("x", [9]))
    assert manager.get_computed_blocks(requests[1]).is_loading
    assert manager.get_computed_blocks(requests[2]).is_loading, "not yet"
    assert set(chain.connectors[0].loads) == {"b"}
    for request in requests:
        manager.free(request)
    assert not chain._chosen and not chain.connectors[0].loads
    assert pool.num_free_blocks == 8


def test_a_request_loads_again_only_for_what_the_cache_has_lost(make_world):
    world = make_world(6, 2)
    world.submit("x", [1, 2, 3, 4, 5])
    world.run("x")
    world.free("x")
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    request = world.waiting["a"]
    assert not world.look_up(request).is_ready
    world.connector.finish("a", 1)
    for _ in range(3):
        assert world.look_up(request).num_tokens == 6
    world.submit("y", [9] * 7)
    world.run("y")
    world.free("y")
    assert world.look_up(request).num_tokens == 4, "no fewer than when the connector was asked"
    world.cache.evict(4)  # y's three, and one
    assert world.look_up(request).is_loading, "fewer"
    assert world.connector.calls[-1] == ("load", "a", 4)
    world.connector.finish("a", 0)
    assert world.look_up(request).num_tokens == 2
    world.check()
    world.drain()


def test_what_has_arrived_stays_until_its_request_is_admitted(make_world):
    world = make_world(8, 2)
    world.submit("x", [1, 2])
    world.run("x")
    world.free("x")
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    world.connector.finish("a", 2)
    assert world.look_up(world.waiting["a"]).num_tokens == 6
    assert world.manager.num_blocks_in_use == 3 and world.cache.num_evictable_blocks == 0
    for number in range(3):
        world.submit(str(number), [8, number] * 5)  # all the rest of the memory
        world.run(str(number))
        world.free(str(number))
        world.check()
    assert world.admit("a") and world.written["a"] == 6
    world.step()
    world.check()
    assert world.manager.num_blocks_in_use == 4, "held by the table alone"
    world.drain()


@pytest.mark.parametrize("num_blocks, num_left", [(5, 3), (6, 2), (7, 1), (8, 0)])
def test_those_who_wait_give_way_to_those_who_run(make_world, num_blocks, num_left):
    """What has arrived unnoticed does too; what is under way does not."""
    world = make_world(8, 2)
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    world.submit("y", [9] * (2 * num_blocks))
    if num_blocks > 5:
        assert not world.admit("y")
    world.connector.finish("a", 3)
    assert world.admit("y")
    world.step()
    world.check()
    assert (num_blocks == 5) == ("a" in world.connector.loads), "polled only if memory is short"
    assert world.look_up(world.waiting["a"]).num_tokens == 2 * num_left
    assert [call[0] for call in world.connector.calls].count("load") == 1, "the rest is computed"
    world.check()
    world.drain()


@pytest.mark.parametrize("num_arrived", [2, 3])
def test_who_would_be_replaced_counts_beside_what_gives_way(make_world, num_arrived):
    """8 blocks: v runs with 2 and a load has 3. The newcomer wants all 8. A load that is under way
    keeps its blocks; what has arrived is as good as free, and v is asked about, not touched."""
    world = make_world(8, 2)
    world.submit("v", [8, 8, 8, 8])
    assert world.admit("v")
    world.step()
    world.submit("a", [1, 2, 3, 4, 5, 6, 7])
    world.connector.num_offered["a"] = 3
    assert not world.look_up(world.waiting["a"]).is_ready
    world.submit("y", [9] * 16)
    victim, newcomer = world.running["v"], world.waiting["y"]
    assert not world.manager.can_replace(victim, newcomer, 16)
    assert world.manager.can_replace(victim, newcomer, 10)
    assert not world.manager.can_replace(victim, newcomer, 10, num_blocks_kept_free=1)
    world.connector.finish("a", num_arrived)
    assert world.manager.can_replace(victim, newcomer, 16)
    assert not world.manager.can_replace(victim, newcomer, 16, num_blocks_kept_free=1)
    assert len(world.manager.get_block_ids("v")) == 2
    world.check()
    world.manager.free(victim)
    assert world.manager.allocate_slots(newcomer, 16)


def test_loads_take_no_more_than_their_share(make_world):
    """The first may take what it needs; the others only up to half of the memory, together."""
    world = make_world(12, 2)
    for request_id, num_blocks in (("a", 4), ("b", 3), ("c", 2), ("d", 1)):
        world.submit(request_id, [ord(request_id)] * (2 * num_blocks + 1))
        world.connector.num_offered[request_id] = num_blocks
    assert all(world.look_up(world.waiting[r]).is_loading for r in "abcd")
    assert set(world.connector.loads) == {"a", "c"}, "4 + 2 of 12, then no more"
    world.connector.finish("a", 4)
    assert world.look_up(world.waiting["a"]).is_ready
    assert world.look_up(world.waiting["b"]).is_loading, "still held for a"
    assert world.admit("a")
    assert world.look_up(world.waiting["b"]).is_loading
    assert set(world.connector.loads) == {"b", "c"}
    world.check()
    world.drain()
    world = make_world(4, 2)
    world.submit("a", [1] * 9)
    world.connector.num_offered["a"] = 4
    assert world.look_up(world.waiting["a"]).is_loading
    assert set(world.connector.loads) == {"a"}, "alone it may have everything"


@pytest.mark.parametrize("first, second", [("long", "other"), ("other", "long")])
def test_the_cached_prefix_that_a_load_keeps_counts_in_its_share(make_world, first, second):
    world = make_world(8, 2)
    world.submit("x", [1, 2, 3, 4, 5])
    world.run("x")
    world.free("x")
    world.submit("long", [1, 2, 3, 4, 5, 6, 7])  # two blocks cached, one to load
    world.submit("other", [7] * 5)  # two to load
    world.connector.num_offered |= {"long": 3, "other": 2}
    assert world.look_up(world.waiting[first]).is_loading
    assert world.look_up(world.waiting[second]).is_loading
    assert set(world.connector.loads) == {first}, "3 + 2 of 8"
    world.check()
    world.drain()


def test_two_loads_of_one_prefix_leave_it_in_memory_once(make_world):
    world = make_world(20, 2)
    for request_id in "ab":
        world.submit(request_id, [1, 2, 3, 4, 5])
        world.connector.num_offered[request_id] = 2
        assert not world.look_up(world.waiting[request_id]).is_ready
    assert world.manager.num_blocks_in_use == 4
    world.connector.finish("b", 1)
    world.connector.finish("a", 2)
    assert world.admit("b")
    assert world.admit("a")
    world.step()
    world.check()
    assert world.written == {"a": 5, "b": 5} and world.cache.num_cached_blocks == 2
    world.drain()


def test_a_load_does_not_take_a_block_that_is_still_to_be_copied(make_world):
    """The fork's copy is made in the next step, a load may write at once."""
    world = make_world(3, 2)
    world.submit("p", [1, 2, 3, 4])
    world.run("p")
    world.fork("p", "c", 3, [4])
    assert world.advance("c")  # its copy of the second block takes the last free one
    world.free("p")
    world.submit("a", [7, 8, 9])
    world.connector.num_offered["a"] = 1
    world.look_up(world.waiting["a"])
    world.step()
    world.check()


def test_waiting_is_left_to_the_connector_and_only_while_it_loads(make_world, make_cache):
    world = make_world(20, 2)
    world.manager.wait_for_loads()
    assert world.connector.calls == []
    world.submit("a", [1, 2, 3, 4, 5])
    world.connector.num_offered["a"] = 2
    world.look_up(world.waiting["a"])
    world.manager.wait_for_loads()
    assert world.connector.calls[-1] == ("wait",)
    world.connector.finish("a", 2)
    world.look_up(world.waiting["a"])
    world.manager.wait_for_loads()
    assert [call for call in world.connector.calls if call[0] == "wait"] == [("wait",)]


# -- whatever happens


class Chaos:
    """Any order of anything, drawn by `pick(low, high)` and `choose(items)`."""

    def __init__(self, world: World, pick: Callable[[int, int], int]) -> None:
        self.world, self.pick = world, pick
        self.ids = map(str, count())

    def choose(self, items: Iterable) -> object | None:
        items = sorted(items)
        return items[self.pick(0, len(items) - 1)] if items else None

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.pick(0, 1) for _ in range(self.pick(low, high))]

    def submit(self) -> None:
        world, size = self.world, self.world.block_size
        if len(world.waiting) + len(world.running) < 5:
            known = self.choose([*world.waiting, *world.running])
            head: list[int] = []
            if known is not None:
                tokens = (world.waiting | world.running)[known].all_token_ids
                head = tokens[: self.pick(0, len(tokens))]
            salt = [None, None, None, "s"][self.pick(0, 3)]
            request_id = next(self.ids)
            world.submit(request_id, head + self.tokens(1, 2 * size + 1), salt)
            world.connector.num_offered[request_id] = max(0, self.pick(-4, 4))

    def admit(self) -> None:
        request_id = self.choose(self.world.waiting)
        if request_id is not None:
            num_new = 10**9 if self.pick(0, 1) else self.pick(1, 2 * self.world.block_size)
            self.world.admit(request_id, num_new, max(0, self.pick(-4, 3)))

    def advance(self) -> None:
        request_id = self.choose(self.world.running.keys() - self.world.plan.keys())
        if request_id is not None:
            self.world.advance(request_id, self.pick(1, 2 * self.world.block_size))

    def advance_all(self) -> None:
        for request_id in sorted(self.world.running.keys() - self.world.plan.keys()):
            self.world.advance(request_id)

    def leave(self) -> None:
        request_id = self.choose(self.world.running)
        if request_id is not None:
            leave = self.world.preempt if self.pick(0, 1) else self.world.free
            leave(request_id)

    def abort_waiting(self) -> None:
        request_id = self.choose(self.world.waiting)
        if request_id is not None and self.pick(0, 1):
            self.world.free(request_id)

    def fork(self) -> None:
        world = self.world
        parent_id = self.choose(r for r in world.running if world.written[r])
        if parent_id is not None and len(world.running) < 6:
            num_shared = self.pick(1, world.written[parent_id])
            child_id = next(self.ids)
            world.fork(parent_id, child_id, num_shared, self.tokens(1, 3))
            if not world.advance(child_id):
                world.free(child_id)

    def end_load(self) -> None:
        connector = self.world.connector
        request_id = self.choose(connector.loads.keys() - connector.results.keys())
        if request_id is not None:
            connector.finish(request_id, self.pick(0, len(connector.loads[request_id][2])))

    def step(self) -> None:
        world = self.world
        abort = [r for r in sorted(world.plan) if self.pick(0, 9) == 0]
        world.step(lambda _: self.pick(0, 1), abort)
        size = world.block_size
        for request_id in [r for r, q in world.running.items() if q.num_tokens > 7 * size + 2]:
            world.free(request_id)

    def reset(self) -> None:
        if self.pick(0, 4) == 0:
            is_idle = not any(self.world.written[r] for r in self.world.running)
            is_reset = self.world.manager.reset_prefix_cache()
            assert not is_reset or self.world.cache.num_cached_blocks == 0
            if is_idle and not self.world.running and not self.world.connector.loads:
                assert is_reset


OPERATIONS = [
    *(["submit"] * 3 + ["admit"] * 5 + ["advance", "advance_all", "step"] * 3),
    *["leave", "abort_waiting", "fork", "end_load", "end_load", "reset"],
]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_a_long_random_run(make_cache, seed, block_size):
    rng = random.Random(f"{seed} {block_size}")
    world = World(make_cache, rng.choice([4, 9, 20]), block_size)
    chaos = Chaos(world, rng.randint)
    for _ in range(250):
        getattr(chaos, rng.choice(OPERATIONS))()
        world.check()
    world.drain()


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self, make_cache) -> None:
        super().__init__()
        self.make_cache = make_cache

    @initialize(num_usable=st.integers(3, 12), block_size=st.sampled_from(BLOCK_SIZES))
    def start(self, num_usable, block_size):
        self.chaos = Chaos(World(self.make_cache, num_usable, block_size), None)

    @rule(operation=st.sampled_from(OPERATIONS), data=st.data())
    def operate(self, operation, data):
        self.chaos.pick = lambda low, high: data.draw(st.integers(low, high))
        getattr(self.chaos, operation)()

    @invariant()
    def consistent(self):
        self.chaos.world.check()

    def teardown(self):
        if hasattr(self, "chaos"):
            self.chaos.world.drain()


def test_any_order_of_calls(make_cache):
    run_state_machine_as_test(
        lambda: ManagerMachine(make_cache),
        settings=settings(
            max_examples=16,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )


# -- every interleaving

EXPLORED_PROMPTS = {"a": [0, 0, 1, 1, 0], "b": [0, 0, 1, 1, 0], "c": [0, 0, 1, 0]}
EXPLORED_DEPTH = 6


def transitions(world: World) -> list[tuple]:
    """Three requests over one beginning, two of them alike: each may be admitted, in whole or with
    a first chunk of three tokens; go on; leave at any moment; be preempted once."""
    found: list[tuple] = [("step",)] if world.plan else []
    for request_id, request in world.waiting.items():
        found.append(("admit", request_id))
        if not request.num_preemptions:
            found.append(("admit", request_id, 3))
    for request_id, request in world.running.items():
        found.append(("free", request_id))
        if not request.num_preemptions and request_id != "c":
            found.append(("preempt", request_id))
        if request_id not in world.plan and request.num_tokens < 8:
            found.append(("advance", request_id))
    return found


def explored_key(world: World) -> tuple:
    """The state but for the names of blocks."""
    names: dict[int, int] = {}
    requests = tuple(
        (
            request_id,
            request.num_computed_tokens,
            request.num_tokens,
            request.num_preemptions,
            world.plan.get(request_id),
            tuple(
                names.setdefault(block_id, len(names))
                for block_id in world.manager.get_block_ids(request_id)
            ),
        )
        for request_id, request in sorted((world.waiting | world.running).items())
    )
    prefixes = world.prefixes()
    by_id = {block_id: prefix for prefix, block_id in prefixes.items()}
    cached = frozenset((prefix, names.get(block_id)) for prefix, block_id in prefixes.items())
    return requests, cached, tuple(by_id[b] for b in use_order(world.cache) if b not in names)


def use_order(cache) -> list[int]:
    """Cached blocks, the least recently used first."""
    if hasattr(cache, "tree"):
        nodes = sorted(cache.tree.nodes(), key=lambda node: (node.last_access, -node.end))
        return [block.block_id for node in nodes for block in reversed(node.blocks)]
    return list(cache._evictable)


def replay(make_cache, calls: Sequence[tuple]) -> World:
    world = World(make_cache, 5, 2, checks=False)
    for request_id, tokens in EXPLORED_PROMPTS.items():
        world.submit(request_id, tokens)
    for name, *arguments in calls:
        getattr(world, name)(*arguments)
    return world


def test_every_interleaving_of_three_requests_over_five_blocks(make_cache):
    """Breadth first over all states, but for names, that so many calls lead to."""
    start = replay(make_cache, [])
    seen, frontier = {explored_key(start)}, [((), transitions(start))]
    for _ in range(EXPLORED_DEPTH):
        reached = []
        for calls, follow in frontier:
            for call in follow:
                world = replay(make_cache, calls)
                world.checks = True
                name, *arguments = call
                getattr(world, name)(*arguments)
                key = explored_key(world)
                if key not in seen:
                    world.check()
                    seen.add(key)
                    reached.append(((*calls, call), transitions(world)))
        frontier = reached
    print(f"{len(seen)} states")
    assert len(seen) > 500


# -- with a scheduler


class Engine:
    """`FCFSScheduler` and a runner that knows what the plans say and nothing else."""

    def __init__(self, make_cache, rng: random.Random) -> None:
        size = rng.choice(BLOCK_SIZES)
        pool = BlockPool(rng.choice([8, 12, 30]) + 1)
        self.rng, self.runner, self.cache = rng, Runner(size), make_cache(pool, size)
        self.connector = FakeConnector(self.runner)
        self.connector.on_wait = self.end_a_load
        self.manager = CachedKVCacheManager(pool, size, self.cache, self.connector)
        self.scheduler = FCFSScheduler(
            max_num_seqs=rng.choice([2, 4]),
            max_num_batched_tokens=rng.choice([14, 40]),
            kv_memory=self.manager,
        )
        self.num_admitted = 0

    def end_a_load(self) -> None:
        under_way = sorted(self.connector.loads.keys() - self.connector.results.keys())
        if under_way:
            request_id = self.rng.choice(under_way)
            num_blocks = len(self.connector.loads[request_id][2])
            self.connector.finish(request_id, self.rng.randint(0, num_blocks))

    def submit(self) -> None:
        """One request, or three samples of one prompt, or two that are alike."""
        name, kind = f"r{len(self.connector.num_offered)}", self.rng.choice("1123")
        head = self.rng.choice([[], [0] * 4, [0] * 5, [0, 1] * 3])
        tokens = head + [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 5))]
        num_offered = max(0, self.rng.randint(-5, 5))
        for i in range({"1": 1, "2": 2, "3": 3}[kind]):
            request_id = f"{name}.{i}"
            request = Request(
                request_id,
                tokens,
                SamplingParams(temperature=0, max_tokens=self.rng.randint(1, 4), ignore_eos=True),
                parent_id=f"{name}.0" if kind == "3" and i else None,
                extra_keys=(("salt", "s"),) if self.rng.random() < 0.2 else (),
            )
            if request.num_prompt_tokens + request.max_tokens - 1 <= self.capacity:
                if request.parent_id is not None:
                    parent = self.scheduler.requests.get(request.parent_id)
                    request.extra_keys = () if parent is None else parent.extra_keys
                self.connector.num_offered[request_id] = num_offered
                self.scheduler.add_request(request)

    @property
    def capacity(self) -> int:
        return self.manager.pool.num_usable_blocks * self.manager.block_size

    def step(self) -> None:
        plan = self.scheduler.schedule()
        tables, cached = self.runner.tables, plan.scheduled_cached_reqs
        for request_id in plan.finished_req_ids:
            del tables[request_id]
        for new in plan.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids)
            self.num_admitted += self.scheduler.requests[new.req_id].parent_id is None
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tables[request_id] += block_ids
        self.runner.copy_blocks([tuple(getattr(c, f) for f in COPY) for c in plan.block_copies])
        batch = [
            (
                q,
                q.num_computed_tokens - plan.num_scheduled_tokens[q.request_id],
                q.num_computed_tokens,
            )
            for q in plan.scheduled_requests
        ]
        self.connector.scribble()
        for request, _, _ in batch:
            if self.rng.random() < 0.03:
                self.scheduler.abort_request(request.request_id)
        self.runner.forward(batch, self.scheduler.requests)
        sampled = {
            q.request_id: [self.rng.randint(0, 1)] for q, _, stop in batch if stop == q.num_tokens
        }
        self.scheduler.update_from_output(plan, sampled)
        self.scheduler.check_invariants()
        self.manager.check_invariants(self.scheduler.running.values())


COPY = ("request_id", "block_index", "src_block_id", "dst_block_id")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_arrives_is_served_and_nothing_is_left(make_cache, seed):
    """No deadlock: of those who wait for a block, for a load, or for memory, somebody goes on."""
    rng = random.Random(seed)
    engine = Engine(make_cache, rng)
    for _ in range(rng.randint(6, 12)):
        engine.submit()
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
            if rng.random() < 0.3:
                engine.end_a_load()
    num_left = sum(q.num_prompt_tokens + q.max_tokens for q in engine.scheduler.requests.values())
    for _ in range(num_left + 20):
        if engine.scheduler.has_unfinished_requests():
            engine.step()
    assert not engine.scheduler.has_unfinished_requests(), "it hangs"
    assert engine.manager.usage == 0 and not engine.manager._states and not engine.connector.loads
    assert engine.manager.reset_prefix_cache()
    assert engine.manager.pool.num_free_blocks == engine.manager.pool.num_usable_blocks
    num_counted = engine.cache.stats.num_requests
    assert num_counted >= engine.num_admitted > 0, "each once, but for children that shared"


# -- the check itself


@pytest.mark.parametrize(
    "damage", ["own", "place", "path", "keys", "in_flight", "state", "loading", "holder", "cache"]
)
def test_check_invariants_notices_damage(make_world, damage):
    world = make_world(12, 2)
    world.submit("a", [1, 2, 3, 4, 5])
    world.run("a")
    world.submit("b", [1, 2, 3, 4, 6, 7, 8])
    world.run("b")
    world.submit("c", [9] * 5)
    world.connector.num_offered["c"] = 1
    world.look_up(world.waiting["c"])
    world.advance("a")
    world.check()
    manager, table = world.manager, world.manager._tables["b"]
    if damage == "own":
        manager._states["a"].num_published = 3
    elif damage == "place":
        table.blocks[0], table.blocks[1] = table.blocks[1], table.blocks[0]
        table.block_ids[:2] = table.block_ids[1::-1]
        manager._states["b"].num_published = 0
    elif damage == "path":
        world.running["a"].all_token_ids[1] = 7
    elif damage == "keys":
        world.running["a"].extra_keys = (("salt", "s"),)
    elif damage == "in_flight":
        manager._in_flight[next(iter(manager._in_flight))] = "b"
    elif damage == "state":
        del manager._states["b"]
    elif damage == "loading":
        manager._loads._loads["b"] = manager._loads._loads.pop("c")
    elif damage == "holder":
        manager._loads._loads["c"].blocks[0].ref_cnt += 1
    elif damage == "cache":
        monkey = world.cache.check_invariants

        def fail():
            monkey()
            raise AssertionError("contradicts itself")

        world.cache.check_invariants = fail
    with pytest.raises(AssertionError):
        manager.check_invariants(world.running.values())
