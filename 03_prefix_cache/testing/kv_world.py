"""A manager with a cache and its surroundings, checked by what a reader of the memory finds.

Wrong sharing, a stale block, use after free, a table entry that was not sent to the runner: in each
case a reader finds tokens other than its own (`kv_slots.py`). The manager's answers are compared
with those that its tables and its cache's prefixes imply. `KVChaos` calls a world in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from block_pool import BlockPool
from cache_checks import cached_prefixes, check_memory
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import ComputedBlocks, NotReady
from kv_slots import Chaos, MakeCache, Runner, make_request
from prefix_cache import KeyedRequest, extra_keys_of, normalise_extra_keys
from request import Request


class World:
    """A manager and its surroundings, with the right answer to every call. A step is any number of
    plans, then `step`: the runner gets the deltas and updates, scheduled positions are written,
    full blocks are published."""

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
        self.planned_request_left = False  # since the last step
        self.checks = checks

    # -- for worlds in which KV comes from outside

    def make_manager(self) -> CachedKVCacheManager:
        return CachedKVCacheManager(self.pool, self.block_size, self.cache)

    def held_outside(self, for_good: bool = False) -> set[int]:
        """Blocks that are held by something other than a table. `for_good`: only those that do not
        give way to a table."""
        return set()

    # -- expected answers of the manager

    def prefixes(self) -> dict[tuple, int]:
        return {prefix[:2]: prefix.block.block_id for prefix in cached_prefixes(self.cache)}

    def longest(self, request: Request, stop: int) -> list[int]:
        """The cached blocks of the request's first `stop` tokens."""
        keys = normalise_extra_keys(extra_keys_of(request))
        prefixes = self.prefixes()
        found = []
        for end in range(self.block_size, stop + 1, self.block_size):
            block_id = prefixes.get((keys, tuple(request.all_token_ids[:end])))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def computing(self, request: Request, num_cached: int) -> bool:
        """Whether this step computes the block after the cached ones, for a request that has
        these."""
        end = (num_cached + 1) * self.block_size
        keys = normalise_extra_keys(extra_keys_of(request))
        return end < request.num_tokens and any(
            normalise_extra_keys(extra_keys_of(self.running[name])) == keys
            and self.running[name].all_token_ids[:end] == request.all_token_ids[:end]
            and start < end <= stop
            and start // self.block_size == num_cached
            for name, (start, stop) in self.plan.items()
        )

    def held(self, for_good: bool = False, without: str | None = None) -> set[int]:
        tables = (self.manager.get_block_ids(name) for name in self.running if name != without)
        return {block_id for table in tables for block_id in table} | self.held_outside(for_good)

    def fits(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks | None,
        num_watermark_blocks: int = 0,
        without: str | None = None,
    ) -> bool:
        found = set() if computed is None else {block.block_id for block in computed.blocks}
        end = request.num_computed_tokens + len(found) * self.block_size + num_tokens
        num_present = len(self.manager.get_block_ids(request.request_id)) + len(found)
        left = self.pool.num_usable_blocks - max(-(-end // self.block_size) - num_present, 0)
        is_short = left < len(self.held(False, without) | found)
        return left - num_watermark_blocks >= len(self.held(is_short, without) | found)

    def snapshot(self) -> object:
        """The whole state except the order of use, unless what waits can give way to a table."""
        if self.held_outside() != self.held_outside(for_good=True):
            return None
        tables = {name: list(table.block_ids) for name, table in self.manager._tables.items()}
        refs = [(block.block_id, block.ref_cnt) for block in self.pool.free_order()]
        refs += [(block.block_id, block.ref_cnt) for block in self.pool.blocks]
        notes = dict(self.manager._in_flight), list(self.manager._moves)
        return tables, refs, notes, self.prefixes()

    # -- requests come, run and go

    def submit(self, request_id: str, tokens: Sequence[int], salt: str | None = None) -> Request:
        self.waiting[request_id] = make_request(request_id, tokens, salt)
        return self.waiting[request_id]

    def get_computed_blocks(self, request: Request) -> ComputedBlocks | NotReady:
        computed = self.manager.get_computed_blocks(request)
        if self.checks:
            self.check_answer(request, computed)
        return computed

    def check_answer(self, request: Request, computed: ComputedBlocks | NotReady) -> None:
        found = self.longest(request, request.num_tokens - 1)
        is_computed = self.computing(request, len(found))
        if isinstance(computed, NotReady):
            assert computed is NotReady.IN_FLIGHT and is_computed, "no request computes it"
            computed = self.manager.get_computed_blocks(request, wait_for_others=False)
            assert isinstance(computed, ComputedBlocks)
        else:
            assert not is_computed or self.planned_request_left, "computed twice"
        assert [block.block_id for block in computed.blocks] == found
        assert computed.num_tokens == len(found) * self.block_size

    def admit(
        self,
        request_id: str,
        num_new: int = 10**9,
        num_reserved: int = 0,
        num_watermark_blocks: int = 0,
        freeing: str | None = None,
    ) -> bool:
        """Admit a request if it fits, perhaps in place of the request `freeing`. The question comes
        first, except while blocks are held outside of tables, which may give way to it."""
        request = self.waiting[request_id]
        computed = self.get_computed_blocks(request)
        if isinstance(computed, NotReady):
            return False
        num_new = min(num_new, request.num_tokens - computed.num_tokens)
        if request.num_preemptions or not self.held_outside():
            before = self.snapshot()
            victim = None if freeing is None else self.running.get(freeing)
            fits = self.fits(request, num_new, computed, num_watermark_blocks, freeing)
            asked = request, num_new, computed, num_watermark_blocks, victim
            answer = self.manager.can_allocate(*asked)
            assert answer == fits, "promised or denied against the count of blocks"
            assert before in (None, self.snapshot()), "a question changed something"
            if answer and freeing is not None:
                self.preempt(freeing)
        if not self._allocate(request, num_new, num_reserved, computed):
            return False
        self.running[request_id] = self.waiting.pop(request_id)
        request.num_computed_tokens = self.written[request_id] = computed.num_tokens
        if request.num_preemptions == 0:  # the cache counts each admission once
            counts = zip(self.stats, (1, request.num_tokens, computed.num_tokens))
            self.stats = [count + more for count, more in counts]
        self._put_in_plan(request, num_new)
        return True

    def advance(self, request_id: str, num_new: int = 10**9) -> bool:
        request = self.running[request_id]
        num_new = min(num_new, request.num_tokens - request.num_computed_tokens)
        if not self._allocate(request, num_new, 0, None):
            return False
        self._put_in_plan(request, num_new)
        return True

    def _allocate(
        self, request: Request, num_new: int, num_reserved: int, computed: ComputedBlocks | None
    ) -> bool:
        before = self.snapshot()
        fits = self.fits(request, num_new + num_reserved, computed)
        accepted = self.manager.allocate_slots(request, num_new, num_reserved, computed)
        assert accepted == fits, "refused or granted against the count of blocks"
        assert accepted or before in (None, self.snapshot()), "a refusal changed something"
        return accepted

    def _put_in_plan(self, request: Request, num_new: int) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens += num_new
        self.plan[request.request_id] = (start, start + num_new)
        block_ids = self.manager.get_block_ids(request.request_id)
        for index in {position // self.block_size for position in range(start, start + num_new)}:
            assert self.pool.blocks[block_ids[index]].ref_cnt == 1, "writable by two"

    def free(self, request_id: str) -> None:
        """Free a request that finished, or was aborted at any time."""
        self._leave(self.running.pop(request_id, None) or self.waiting.pop(request_id))

    def preempt(self, request_id: str) -> None:
        request = self.waiting[request_id] = self.running.pop(request_id)
        self._leave(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def _leave(self, request: Request) -> None:
        request_id = request.request_id
        self.written.pop(request_id, None)
        table = [self.pool.blocks[b] for b in self.manager.get_block_ids(request_id)]
        own = [block.block_id for block in table if block.ref_cnt == 1]
        self.manager.free(request)
        freed = [b.block_id for b in self.pool.free_order() if b.block_id in own]
        assert freed == own[::-1], "not the deepest first"  # trap 11
        assert list(self.manager.get_block_ids(request_id)) == []
        self.runner.tables.pop(request_id, None)
        self.planned_request_left |= self.plan.pop(request_id, None) is not None

    # -- one step

    def step(
        self, sample: Callable[[Request], int] = lambda _: 0, abort: Sequence[str] = ()
    ) -> None:
        """Run a step. Requests in `abort` are aborted between plan and forward pass."""
        moves = self.manager.pop_table_updates()
        self.runner.update(self.plan, self.manager.get_block_ids, moves)
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
        self.plan = {}
        self.planned_request_left = False
        assert not self.manager._in_flight, "published, or given up"
        for request_id, request in self.running.items() if self.checks else ():
            found = self.longest(request, self.written[request_id])
            published = self.manager.get_block_ids(request_id)[: len(found)]
            assert found == list(published), "in memory twice"
            assert len(found) == self.written[request_id] // self.block_size, "never published"

    def forward(self, batch: Sequence[tuple[Request, int, int]]) -> None:
        self.runner.forward(batch, self.running)

    def check(self) -> None:
        check_memory(self.manager, self.running.values())
        self.runner.check_cached(self.cache)
        stats = self.cache.stats
        found = [stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit]
        assert found == self.stats
        assert self.manager.num_blocks_in_use == len(self.held())
        assert set(self.manager._states) <= self.running.keys() | self.waiting.keys()

    def drain(self) -> None:
        """Free everything, and check that nothing is left."""
        for request_id in [*self.running, *self.waiting]:
            self.free(request_id)
        self.check()
        assert self.manager.usage == 0
        assert not self.manager._states and not self.manager._moves
        assert self.manager.reset_prefix_cache()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks

    def serve(self, request_id: str, tokens: Sequence[int]) -> Request:
        """Add a request, and compute its prompt, alone; it keeps running."""
        request = self.submit(request_id, tokens)
        assert self.admit(request_id)
        self.step()
        return request


# -- in any order

OPERATIONS = [
    *(["submit", "advance", "advance_all", "step"] * 3 + ["admit"] * 7),
    *["leave", "abort_waiting", "reset"],
]


class KVChaos(Chaos):
    def submit(self) -> None:
        world = self.world
        size = self.world.block_size
        if len(world.waiting) + len(world.running) < 5:
            known = self.choose([*world.waiting, *world.running])
            head: list[int] = []
            if known is not None:
                tokens = (world.waiting | world.running)[known].all_token_ids
                head = tokens[: self.pick(0, len(tokens))]
            salt = [None, "s"][self.pick(0, 1)]
            world.submit(next(self.ids), head + self.tokens(1, 2 * size + 1), salt)

    def admit(self) -> None:
        world = self.world
        request_id = self.choose(self.world.waiting)
        if request_id is not None:
            num_new = 10**9 if self.pick(0, 1) else self.pick(1, 5 * world.block_size)
            freeing = self.choose(world.running) if self.pick(0, 2) == 0 else None
            num_reserved, num_watermark_blocks = max(0, self.pick(-4, 3)), max(0, self.pick(-2, 2))
            world.admit(request_id, num_new, num_reserved, num_watermark_blocks, freeing)

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
        for request_id in [r for r, q in world.running.items() if q.num_tokens > 30]:
            world.free(request_id)

    def reset(self) -> None:
        if self.pick(0, 4) == 0:
            is_reset = self.world.manager.reset_prefix_cache()
            assert is_reset or self.world.held()
            assert not is_reset or self.world.cache.num_cached_blocks == 0
