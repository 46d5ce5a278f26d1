"""The hit that holds in every group, against brute force; and a memory in any order of calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from block_pool import BlockPool
from cache_checks import cached_prefixes, check_cache, check_memory
from grouped_kv_memory import GroupedKVMemory
from grouped_prefix_cache import GroupedPrefixCache
from kv_slots import Chaos, Runner
from prefix_cache_local import compute_hash_chain
from request import Request, SamplingParams

SIZE, STEP = 2, 4


def holds(windows: Sequence[int | None], length: int, is_there: Callable[[int, int], bool]) -> bool:
    """Whether every position that the token after `length` sees is in a block of its group."""
    return all(
        is_there(group, position // SIZE)
        for group, window in enumerate(windows)
        for position in range(length)
        if window is None or position > length - window
    )


@pytest.mark.net
@pytest.mark.parametrize("windows", [(None, 4), (3, None), (2, 5), (1, None), (3, 4, None), (9,)])
def test_the_longest_hit_is_that_of_brute_force(windows: tuple[int | None, ...]):
    """Every set of blocks that can be there, of all groups."""
    num_blocks = 4 if len(windows) < 3 else 3
    chain = compute_hash_chain(range(SIZE * num_blocks), SIZE)
    places = list(product(range(len(windows)), range(num_blocks)))
    lengths = set()
    for is_there in product([False, True], repeat=len(places)):
        there = dict(zip(places, is_there))
        cache = GroupedPrefixCache(BlockPool(1 + len(places)), SIZE, windows)
        for number, (group, index) in enumerate(places, 1):
            if there[group, index]:
                cache.publish(group, chain, index, cache.pool.blocks[number])
        valid = [n for n in range(num_blocks + 1) if holds(windows, n * SIZE, lambda *p: there[p])]
        assert cache.longest_hit(chain) == valid[-1], there
        found = cache.find(chain, valid[-1])
        ids = [[(b.block_id - 1) % num_blocks for b in blocks] for blocks in found]
        assert all(x == list(range(valid[-1] - len(x), valid[-1])) for x in ids)
        check_cache(cache)
        lengths.add(valid[-1])
    assert lengths == set(range(num_blocks + 1))


# -- in any order


class GroupedChaos(Chaos):
    """Requests over a memory, and a runner for each group, which reads what its tokens see. They
    share one memory: a block that another group has taken holds other tokens. What can be allocated
    is checked in `test_grouped_scheduling.py`. Trap 70: what is computed, but not published, is not
    given up. Trap 71: a hit without the last token's block is found as such, not cut shorter."""

    def __init__(self, windows: tuple[int | None, ...], rng: random.Random) -> None:
        super().__init__(self, rng.randint)
        self.windows = windows
        pool = BlockPool(rng.choice([9, 16, 40]))
        self.memory = GroupedKVMemory(pool, SIZE, windows, STEP, has_cache=True)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.plan: dict[str, int] = {}  # where its step starts
        self.runners = [Runner(SIZE, window) for window in windows]
        for runner in self.runners[1:]:
            runner.memory = self.runners[0].memory
        self.stats = [0, 0, 0]
        self.untrusted: set[str] = set()  # they ran when all blocks were withdrawn
        self.is_late = rng.random() < 0.5  # a step is published after the next one is planned

    def submit(self) -> None:
        known = self.choose([*self.waiting, *self.running])
        head = (self.waiting | self.running)[known].all_token_ids if known else []
        tokens = head[: self.pick(0, len(head))] + self.tokens(0, 7) or [0]
        params = SamplingParams(max_tokens=99, skip_reading_prefix_cache=self.pick(0, 9) == 0)
        if len(self.waiting) < 3:
            name = next(self.ids)
            self.waiting[name] = Request(name, tokens, params)

    def expected_hit(self, request: Request) -> int:
        known = {(k.group, k.token_ids) for k in cached_prefixes(self.memory.cache)}
        tokens = request.all_token_ids

        def is_there(group: int, index: int) -> bool:
            return (group, tuple(tokens[: (index + 1) * SIZE])) in known

        lengths = range(0, request.num_tokens, SIZE)
        return max(length for length in lengths if holds(self.windows, length, is_there))

    def admit(self) -> None:
        """Perhaps in place of another, or with a reservation."""
        name = self.choose(self.waiting)
        if name is None:
            return
        request = self.waiting[name]
        memory = self.memory
        computed = memory.get_computed_blocks(request)
        reads = not request.sampling_params.skip_reading_prefix_cache
        finds = reads and not request.num_preemptions
        assert computed.num_tokens == (self.expected_hit(request) if finds else 0)
        num_new = min(self.pick(1, STEP), request.num_tokens - computed.num_tokens)
        freeing = self.choose(self.running.keys() - self.plan.keys()) if self.pick(0, 1) else None
        fits = memory.can_allocate(request, num_new, computed, 0, self.running.get(freeing))
        if fits and freeing is not None:
            self.preempt(freeing)
        num_reserved = self.pick(0, 3) * bool(request.num_preemptions or not computed.num_tokens)
        if not memory.allocate_slots(request, num_new, num_reserved, computed):
            assert (num_reserved or not fits) and not any(memory.get_tables(name))
            return
        self.running[name] = self.waiting.pop(name)
        self.plan[name] = computed.num_tokens
        request.num_computed_tokens = computed.num_tokens + num_new
        if finds:
            counts = zip(self.stats, (1, request.num_tokens, computed.num_tokens))
            self.stats = [count + more for count, more in counts]

    def advance(self) -> None:
        for name in sorted(self.running.keys() - self.plan.keys()):
            request = self.running[name]
            start = request.num_computed_tokens
            num_new = min(self.pick(1, STEP), request.num_tokens - start)
            if self.memory.allocate_slots(request, num_new, 0):
                self.plan[name] = start
                request.num_computed_tokens += num_new
            else:
                reserved = self.memory._reserved_ends.get(name, 0)
                assert start + num_new > reserved, "another has what it reserved"
                self.preempt(name)

    def step(self) -> None:
        memory = self.memory
        moves = self.memory.pop_table_updates()
        requests = [(self.running[name], start) for name, start in self.plan.items()]
        batch = [(request, start, request.num_computed_tokens) for request, start in requests]
        for group, runner in enumerate(self.runners):
            own = [move for move in moves if move.group == group]
            runner.update(self.plan, lambda name, g=group: memory.get_tables(name)[g], own)
        for runner in self.runners:
            runner.forward(batch, self.running)
        for request, start, stop in batch:
            num_cached = memory.cache.num_cached_blocks
            memory.cache_blocks(request, start if self.is_late else stop)
            is_quiet = memory.cache.num_cached_blocks == num_cached
            may_not_share = self.untrusted | memory._reserved_ends.keys()
            assert is_quiet or request.request_id not in may_not_share, "it publishes"
            if stop == request.num_tokens:
                request.append_output_token(self.pick(0, 1))
        self.plan.clear()

    def leave(self) -> None:
        name = self.choose(self.running.keys() - self.plan.keys())
        if name is not None and self.pick(0, 2) == 0:
            self.preempt(name)
        elif name is not None:
            self.free(self.running.pop(name), self.pick(0, 5) == 0)

    def free(self, request: Request, is_error: bool = False) -> None:
        """Bad KV withdraws all blocks. Blocks are freed deepest first (Trap 11)."""
        name = request.request_id
        memory = self.memory
        pool = self.memory.pool
        known = list(memory.cache.cached_prefixes())
        request.has_bad_kv = is_error
        depths = {i: depth for table in memory.get_tables(name) for depth, i in enumerate(table)}
        freed = [i for i in depths if i and pool.blocks[i].ref_cnt == 1]
        if is_error:
            self.untrusted |= self.running.keys()
        memory.free(request)
        order = [depths[block.block_id] for block in pool.free_order() if block.block_id in freed]
        assert order == sorted(order, reverse=True)
        assert set(memory.cache.cached_prefixes()) == (set() if is_error else set(known))
        for runner in self.runners:
            runner.tables.pop(name, None)
        self.untrusted.discard(name)

    def preempt(self, name: str) -> None:
        request = self.waiting[name] = self.running.pop(name)
        self.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def reset(self) -> None:
        is_idle = not any(known.num_users for known in cached_prefixes(self.memory.cache))
        assert self.memory.reset_prefix_cache() == is_idle
        assert not is_idle or self.memory.cache.num_cached_blocks == 0


@pytest.mark.net
@pytest.mark.parametrize("windows", [(None, 4), (3, 6), (None, 3, 5), (1, None), (4,)])
def test_any_order_of_calls(windows):
    operations = ["submit", "admit", "step"] * 4 + ["advance"] * 5 + ["leave", "leave", "reset"]
    num_found = 0
    for seed in range(4):
        chaos = GroupedChaos(windows, rng := random.Random(seed))
        memory = chaos.memory
        stats = chaos.memory.cache.stats
        for _ in range(250):
            getattr(chaos, rng.choice(operations))()
            check_memory(memory, chaos.running.values())
            counts = [stats.num_requests, stats.num_tokens_looked_up, stats.num_tokens_hit]
            assert counts == chaos.stats
        for name in list(chaos.running):
            chaos.free(chaos.running.pop(name))
        assert memory.num_blocks_in_use == 0 and memory.reset_prefix_cache()
        num_found += chaos.stats[2]
    assert num_found > 0
