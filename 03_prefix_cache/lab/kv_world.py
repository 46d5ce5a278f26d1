"""A manager with a cache, and everything around it, checked by what a reader of the memory finds.

Every slot of a made-up memory says which tokens it was computed from, all of them from the first
on, and under which extra keys. A request that reads anything but its own prefix fails at once:
wrong sharing, a stale block, use after free, a table entry that the runner was not told of.

For the tests of `CachedKVCacheManager`, of what derives from it, and of a scheduler over it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from caching_fcfs_scheduler import CachingFCFSScheduler
from kv_memory import ComputedBlocks, NotReady
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of, normalise_extra_keys
from request import Request, SamplingParams
from scheduler_interface import NO_FINITE_LOGITS, BlockMove, StepOutput

PARAMS = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)

MakeCache = Callable[[BlockPool, int], PrefixCache]


def make_request(request_id: str, tokens: Sequence[int], salt: str | None = None) -> KeyedRequest:
    keys = (("salt", salt),) if salt else ()
    return KeyedRequest(request_id, tokens, PARAMS, arrival_time=0.0, extra_keys=keys)


def content(tokens: Sequence[int], request: Request) -> list[object]:
    """What a reader of these positions must find."""
    keys = normalise_extra_keys(extra_keys_of(request))
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

    def move_blocks(self, moves: Iterable[BlockMove]) -> None:
        for move in moves:
            self.tables[move.req_id][move.block_index] = move.block_id

    def forward(self, batch: Sequence[tuple[Request, int, int]], alive: Collection[str]) -> None:
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

    def check_cached(self, cache: PrefixCache) -> None:
        for prefix in cache.cached_prefixes():
            first = len(prefix.token_ids) - self.block_size
            for i, slot in enumerate(self.slots(prefix.block.block_id), first + 1):
                expected = (prefix.token_ids[:i], prefix.extra_keys)
                assert self.memory[slot] == expected, "wrong KV is cached"


class World:
    """A manager with everything around it. A step is any number of plans, then `step`: deltas and
    moves go to the runner, planned positions are written, what is full is published.

    Whatever the manager says is compared with what tables and cached prefixes imply.
    """

    def __init__(
        self, make_cache: MakeCache, num_usable: int, block_size: int, checks: bool = True
    ) -> None:
        self.pool = BlockPool(num_usable + 1)
        self.block_size = block_size
        self.runner = Runner(block_size)
        self.cache = make_cache(self.pool, block_size)
        self.manager = self.make_manager()
        self.waiting: dict[str, KeyedRequest] = {}
        self.running: dict[str, KeyedRequest] = {}
        self.written: dict[str, int] = {}  # positions whose KV is in memory
        self.plan: dict[str, tuple[int, int]] = {}
        self.stats = [0, 0, 0]
        self.somebody_left = False  # since the last step
        self.checks = checks

    # -- for worlds in which KV comes from outside

    def make_manager(self) -> CachedKVCacheManager:
        return CachedKVCacheManager(self.pool, self.block_size, self.cache)

    def held_outside(self, for_good: bool = False) -> set[int]:
        """Blocks that something but a table holds. `for_good`: that do not give way to a table."""
        return set()

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
        keys, prefixes, found = normalise_extra_keys(extra_keys_of(request)), self.prefixes(), []
        for end in range(self.block_size, stop + 1, self.block_size):
            block_id = prefixes.get((keys, tuple(request.all_token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def computing(self, request: Request, num_cached: int) -> bool:
        """Does this step compute the block behind the cached ones, for somebody who has those?"""
        end = (num_cached + 1) * self.block_size
        keys = normalise_extra_keys(extra_keys_of(request))
        return end < request.num_tokens and any(
            normalise_extra_keys(extra_keys_of(other)) == keys
            and other.all_token_ids[:end] == request.all_token_ids[:end]
            and self.plan[r][0] < end <= self.plan[r][1]
            and self.plan[r][0] // self.block_size == num_cached
            for r, other in self.running.items()
            if r in self.plan
        )

    def held(self, for_good: bool = False, without: str | None = None) -> set[int]:
        tables = {r: table for r, table in self.tables().items() if r != without}
        held = {block_id for table in tables.values() for block_id in table}
        return held | self.held_outside(for_good)

    def num_missing(
        self, request: Request, num_tokens: int, computed: ComputedBlocks | None
    ) -> int:
        """Blocks that the request's table lacks for these tokens."""
        num_found = 0 if computed is None else len(computed.blocks)
        end = request.num_computed_tokens + num_found * self.block_size + num_tokens
        num_own = len(self.manager.get_block_ids(request.request_id)) + num_found
        return max(-(-end // self.block_size) - num_own, 0)

    def fits(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks | None,
        num_kept_free: int = 0,
        without: str | None = None,
    ) -> bool:
        found = set() if computed is None else {block.block_id for block in computed.blocks}
        num_missing = self.num_missing(request, num_tokens, computed)
        left = self.pool.num_usable_blocks - num_missing
        if left < len(self.held(False, without) | found):
            return left - num_kept_free >= len(self.held(True, without) | found)
        return left - num_kept_free >= len(self.held(False, without) | found)

    def gives_way(self) -> bool:
        return self.held_outside() != self.held_outside(for_good=True)

    def snapshot(self, arrivals: bool = False) -> tuple:
        """Everything but the order of use. With `arrivals`, loads that end are left out."""
        always = (
            {r: list(table.block_ids) for r, table in self.manager._tables.items()},
            dict(self.manager._in_flight),
            list(self.manager._moves),
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

    def look_up(self, request: Request) -> ComputedBlocks | NotReady:
        computed = self.manager.get_computed_blocks(request)
        if self.checks:
            self.check_answer(request, computed)
        return computed

    def check_answer(self, request: Request, computed: ComputedBlocks | NotReady) -> None:
        found = self.longest(request, request.num_tokens - 1)
        is_computed = self.computing(request, len(found))
        if isinstance(computed, NotReady):
            assert computed is NotReady.COMPUTED_NOW and is_computed, "nobody computes it"
        else:
            assert not is_computed or self.somebody_left, "computed twice"
            assert [block.block_id for block in computed.blocks] == found
            assert computed.num_tokens == len(found) * self.block_size

    def admit(self, request_id: str, num_new: int = 10**9, num_reserved: int = 0) -> bool:
        request = self.waiting[request_id]
        computed = self.look_up(request)
        if isinstance(computed, NotReady):
            return False
        num_new = min(num_new, request.num_tokens - computed.num_tokens)
        if not self._allocate(request, num_new, num_reserved, computed):
            return False
        self.running[request_id] = self.waiting.pop(request_id)
        request.num_computed_tokens = self.written[request_id] = computed.num_tokens
        if request.num_preemptions == 0:
            for i, more in enumerate((1, request.num_tokens, computed.num_tokens)):
                self.stats[i] += more
        self._put_in_plan(request, num_new)
        return True

    def ask(
        self, request_id: str, num_tokens: int, num_kept_free: int = 0, gone: str | None = None
    ) -> bool:
        """Would a waiting request fit, if `gone` were gone? Then it goes, and the request does."""
        request = self.waiting[request_id]
        computed = self.look_up(request)
        if isinstance(computed, NotReady):
            return False
        victim = None if gone is None else self.running[gone]
        gives_way = self.gives_way()
        before = self.snapshot(gives_way)
        fits = self.fits(request, num_tokens, computed, num_kept_free, gone)
        answer = self.manager.can_allocate(request, num_tokens, computed, num_kept_free, victim)
        assert answer == fits, "promised or denied against the count of blocks"
        assert self.snapshot(gives_way) == before, "a question changed something"
        if answer:
            if gone is not None:
                self.preempt(gone)
            assert self.manager.allocate_slots(request, num_tokens, 0, computed), "promised"
            assert self.pool.num_free_blocks + self.cache.num_evictable_blocks >= num_kept_free
            self.written[request_id] = computed.num_tokens
            self._leave(request)
        return answer

    def advance(self, request_id: str, num_new: int = 10**9, num_reserved: int = 0) -> bool:
        request = self.running[request_id]
        num_new = min(num_new, request.num_tokens - request.num_computed_tokens)
        if not self._allocate(request, num_new, num_reserved, None):
            return False
        self._put_in_plan(request, num_new)
        return True

    def _allocate(
        self, request: Request, num_new: int, num_reserved: int, computed: ComputedBlocks | None
    ) -> bool:
        if not self.checks:
            return self.manager.allocate_slots(request, num_new, num_reserved, computed)
        gives_way = self.gives_way()
        before, prefixes = self.snapshot(gives_way), self.prefixes()
        fits = self.fits(request, num_new + num_reserved, computed)
        accepted = self.manager.allocate_slots(request, num_new, num_reserved, computed)
        assert accepted == fits, "refused or granted against the count of blocks"
        if not accepted:
            assert self.snapshot(gives_way) == before, "a refusal changed something"
            assert self.prefixes().items() >= prefixes.items(), "evicted, and for nothing"
        return accepted

    def _put_in_plan(self, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens += num_new
        self.plan[request.request_id] = (start, start + num_new)
        block_ids = self.manager.get_block_ids(request.request_id)
        for index in {position // self.block_size for position in range(start, start + num_new)}:
            assert self.pool.blocks[block_ids[index]].ref_cnt == 1, "writable by two"

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
        self.written.pop(request_id, None)
        self.manager.free(request)
        assert list(self.manager.get_block_ids(request_id)) == []
        self.runner.tables.pop(request_id, None)
        self.somebody_left |= self.plan.pop(request_id, None) is not None

    # -- one step

    def step(
        self, sample: Callable[[Request], int] = lambda _: 0, abort: Sequence[str] = ()
    ) -> None:
        """Requests in `abort` end between plan and forward pass."""
        self.tell_runner()
        batch = [(self.running[r], *self.plan[r]) for r in self.plan]
        tables = dict(self.runner.tables)
        for request_id in abort:
            self.free(request_id)
        self.runner.tables = tables
        self.forward(batch)
        self.runner.tables = {r: table for r, table in tables.items() if r in self.running}
        for request, _, stop in batch:
            if request.request_id in self.running:
                self.written[request.request_id] = stop
                self.manager.cache_blocks(request, stop)
                if stop == request.num_tokens:
                    request.append_output_token(sample(request))
        self.plan, self.somebody_left = {}, False
        assert not self.manager._in_flight, "published, or given up"
        if self.checks:
            self._check_published()

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.runner.forward(batch, self.running)

    def tell_runner(self) -> None:
        moves = self.manager.take_block_moves()
        for request_id in self.plan:
            known = self.runner.tables.setdefault(request_id, [])
            known += self.manager.get_block_ids(request_id)[len(known) :]
        assert all(move.req_id in self.runner.tables for move in moves), "a move of a new request"
        self.runner.move_blocks(moves)
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
            expected = content(request.all_token_ids[:num_tokens], request)
            assert self.runner.read(block_ids, num_tokens) == expected, request

    def check(self) -> None:
        self.manager.check_invariants(self.running.values())
        self.runner.check_cached(self.cache)
        stats = self.cache.stats
        found = [stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit]
        assert found == self.stats
        assert self.manager.num_blocks_in_use == len(self.held())
        assert self.manager.usage == len(self.held()) / self.pool.num_usable_blocks
        assert set(self.manager._states) <= self.running.keys() | self.waiting.keys()

    def drain(self) -> None:
        """Nothing is left behind."""
        for request_id in [*self.running, *self.waiting]:
            self.free(request_id)
        self.check()
        assert self.manager.usage == 0
        assert not self.manager._states and not self.manager._moves
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


OPERATIONS = [
    *(["submit"] * 3 + ["admit"] * 5 + ["advance", "advance_all", "step"] * 3),
    *["leave", "abort_waiting", "ask", "reset"],
]


class Chaos:
    """Any order of anything, drawn by `pick(low, high)` and `choose(items)`."""

    def __init__(self, world: World, pick: Callable[[int, int], int]) -> None:
        self.world, self.pick = world, pick
        self.ids = map(str, count())

    def choose(self, items: Iterable[str]) -> str | None:
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
            world.submit(next(self.ids), head + self.tokens(1, 2 * size + 1), salt)

    def admit(self) -> None:
        request_id = self.choose(self.world.waiting)
        if request_id is not None:
            num_new = 10**9 if self.pick(0, 1) else self.pick(1, 2 * self.world.block_size)
            self.world.admit(request_id, num_new, max(0, self.pick(-4, 3)))

    def ask(self) -> None:
        """Only about requests that were preempted: the cache counts each first admission."""
        world = self.world
        request_id = self.choose(r for r, q in world.waiting.items() if q.num_preemptions)
        if request_id is not None:
            gone = self.choose(world.running) if self.pick(0, 1) else None
            num_tokens = self.pick(1, 4 * world.block_size)
            world.ask(request_id, num_tokens, max(0, self.pick(-2, 2)), gone)

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

    def step(self) -> None:
        world = self.world
        abort = [r for r in sorted(world.plan) if self.pick(0, 9) == 0]
        world.step(lambda _: self.pick(0, 1), abort)
        size = world.block_size
        for request_id in [r for r, q in world.running.items() if q.num_tokens > 7 * size + 2]:
            world.free(request_id)

    def reset(self) -> None:
        if self.pick(0, 4) == 0:
            is_reset = self.world.manager.reset_prefix_cache()
            assert not is_reset or self.world.cache.num_cached_blocks == 0
            if not self.world.held():
                assert is_reset


class Engine:
    """`CachingFCFSScheduler` and a runner that knows what the plans say and nothing else."""

    def __init__(self, make_cache: MakeCache, rng: random.Random) -> None:
        self.rng, self.block_size = rng, rng.choice([1, 2, 4])
        self.pool = BlockPool(rng.choice([8, 12, 30]) + 1)
        self.runner = Runner(self.block_size)
        self.cache = make_cache(self.pool, self.block_size)
        self.manager = self.make_manager()
        self.scheduler = CachingFCFSScheduler(
            self.manager,
            max_num_seqs=rng.choice([2, 4]),
            max_num_batched_tokens=rng.choice([14, 40]),
        )
        self.num_submitted = self.num_admitted = self.num_errors = 0

    def make_manager(self) -> CachedKVCacheManager:
        return CachedKVCacheManager(self.pool, self.block_size, self.cache)

    def submit(self) -> list[str]:
        """One request, or two or three of one prompt. Their ids."""
        num_alike = self.rng.choice([1, 1, 2, 3])
        head = self.rng.choice([[], [0] * 4, [0] * 5, [0, 1] * 3])
        tokens = head + [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 5))]
        submitted: list[str] = []
        for _ in range(num_alike):
            params = SamplingParams(
                temperature=0, max_tokens=self.rng.randint(1, 4), ignore_eos=True
            )
            keys = (("salt", "s"),) if self.rng.random() < 0.2 else ()
            request = KeyedRequest(f"r{self.num_submitted}", tokens, params, extra_keys=keys)
            if request.num_prompt_tokens + request.max_tokens - 1 <= self.manager.capacity:
                self.num_submitted += 1
                self.scheduler.add_request(request)
                submitted.append(request.request_id)
        return submitted

    def step(self) -> None:
        plan = self.scheduler.schedule()
        tables, cached = self.runner.tables, plan.scheduled_cached_reqs
        for request_id in plan.finished_req_ids:
            del tables[request_id]
        for new in plan.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids)
            self.num_admitted += 1
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tables[request_id] += block_ids
        self.runner.move_blocks(plan.block_moves)
        rows = zip(
            plan.scheduled_requests,
            plan.start_positions,
            plan.num_scheduled_tokens.values(),
            strict=True,
        )
        batch = [(request, start, start + num_tokens) for request, start, num_tokens in rows]
        for request, _, _ in batch:
            if self.rng.random() < 0.03:
                self.scheduler.abort_request(request.request_id)
        self.forward(batch)
        self.scheduler.update_from_output(plan, self._sample(batch))
        self.scheduler.check_invariants()
        self.manager.check_invariants(self.scheduler.running.values())
        self.runner.check_cached(self.cache)

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.runner.forward(batch, self.scheduler.requests)

    def _sample(self, batch: Sequence[tuple[Request, int, int]]) -> StepOutput:
        """Now and then what a request wrote is of no use."""
        output = StepOutput()
        for request, start, stop in batch:
            if self.rng.random() < 0.05:
                output.errors[request.request_id] = NO_FINITE_LOGITS
                self.num_errors += request.request_id in self.scheduler.requests
                table = self.runner.tables[request.request_id]
                slots = [slot for block_id in table for slot in self.runner.slots(block_id)]
                self.runner.memory |= dict.fromkeys(slots[start:stop], "NaN")
            elif stop == request.num_tokens:
                output.token_ids[request.request_id] = [self.rng.randint(0, 1)]
        return output

    def serve_all(self) -> None:
        """No deadlock: of those who wait for a block, or for memory, somebody goes on."""
        requests = self.scheduler.requests.values()
        num_left = sum(request.num_prompt_tokens + request.max_tokens for request in requests)
        for _ in range(num_left + 20):
            if self.scheduler.has_unfinished_requests():
                self.step()
        assert not self.scheduler.has_unfinished_requests(), "it hangs"
        assert self.manager.usage == 0 and not self.manager._states
        assert self.manager.reset_prefix_cache()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.cache.stats.num_requests == self.num_admitted, "each once"
