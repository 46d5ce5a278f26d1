"""One contract, two caches, against a naive model that stores whole prefixes (`cache_world.py`): in
any order, and in every order. Examples are in `lookups.txt`, refused calls in
`test_cache_refusals.py`."""

from __future__ import annotations

import random
from array import array
from functools import partial
from pathlib import Path

import pytest

from bounded_loops import as_long_as
from cache_checks import cached_prefixes
from cache_words import Rig
from cache_world import CacheLog, Tenant, World
from kv_slots import BLOCK_SIZES, PREFIX_CACHES, Chaos, check_long_run
from prefix_cache import CacheStats, MatchCursor, normalise_extra_keys
from radix_cache import RadixCache
from step_log import Case, cases_of

SALT = (("salt", "x"),)


class CacheChaos(Chaos):
    """Requests start, publish, fork and end in any order, on a pool that is too small."""

    def __init__(self, world, pick) -> None:
        super().__init__(world, pick)
        self.waiting: list[Tenant] = []

    def any_tenant(self) -> Tenant:
        """One of the requests, or a new one that holds nothing."""
        tenants = [Tenant(self.tokens(0, 9), self.keys()), *self.world.tenants]
        return tenants[self.pick(0, len(tenants) - 1)]

    def keys(self) -> tuple:
        return [(), SALT][self.pick(0, 1)]

    def new(self) -> Tenant:
        """A request that waits, or a new one."""
        if self.waiting and self.pick(0, 1):
            return self.waiting.pop(self.pick(0, len(self.waiting) - 1))
        return Tenant(self.tokens(0, 9), self.keys(), MatchCursor() if self.pick(0, 1) else None)

    def start(self) -> None:
        tenant = self.new()
        if self.world.start(tenant, [None, 0, 1, 2][self.pick(0, 3)], split=self.pick(0, 3)):
            self.world.publish(tenant, self.pick(0, 3))
        else:
            self.waiting.append(tenant)

    def look_up(self) -> None:
        tenant = self.new()
        self.world.match(tenant.tokens, tenant.keys, tenant.cursor)
        self.waiting.append(tenant)

    def look_up_less(self) -> None:
        tenant = self.any_tenant()
        num_tokens = self.pick(0, len(tenant.tokens))
        self.world.match(tenant.tokens[:num_tokens], tenant.keys, tenant.cursor)

    def publish(self) -> None:
        self.world.publish(self.any_tenant(), self.pick(1, 4), with_cursor=self.pick(0, 1) == 1)

    def grow(self) -> None:
        for tenant in self.world.tenants[-2:]:
            self.world.grow(tenant, self.tokens(0, 4))

    def fork(self) -> None:
        self.world.fork(self.any_tenant())

    def drop(self) -> None:
        tenant = self.any_tenant()
        if tenant in self.world.tenants:
            self.world.drop(tenant, max(0, self.pick(-4, 3)), split=self.pick(0, 3))

    def withdraw_all(self) -> None:
        if self.pick(0, 3) == 0:
            self.world.withdraw_all()

    def evict(self) -> None:
        self.world.fails = self.pick(0, 3) == 0
        self.world.evict(self.pick(-1, 5))

    def cache_computed(self) -> None:
        self.world.cache_computed(self.tokens(0, 9), self.keys())

    def reset(self) -> None:
        self.world.reset()


OPERATIONS = ["start", "drop"] * 3 + ["publish", "grow", "look_up"] * 2
OPERATIONS += ["fork", "look_up_less", "withdraw_all", "evict", "cache_computed", "reset"]


@pytest.mark.net
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_agrees_with_the_naive_model(make_cache, seed):
    for block_size in BLOCK_SIZES:
        check_long_run(partial(World, make_cache), CacheChaos, OPERATIONS, seed, block_size)


LIFE = (  # of a request: what it does, one step after the other
    World.start,
    lambda world, tenant: world.publish(tenant, 9),
    World.drop,
)


@pytest.mark.net
@pytest.mark.parametrize("share", [0.7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_interleaving_of_three_requests_on_five_blocks(make_cache, share):
    """Each starts, publishes and ends, in every order, or in a `share` of the transitions out of
    each state. A request that does not fit tries again after another event. Every intermediate
    state is checked."""
    rng = random.Random(1)
    prompts = [[0, 0, 1, 1, 3, 3], [0, 0, 1, 1, 2, 2], [0, 0, 2, 2]]  # blocks P Q S, P Q R, P R
    num_ends = 0
    num_refused = 0
    pending = [[]]
    for _ in as_long_as(lambda: pending, max_rounds=200_000):
        order = pending.pop()
        taken = []
        world = World(make_cache, 5, 2)
        tenants = [Tenant(prompt[:], (), MatchCursor()) for prompt in prompts]
        tenants[2].cursor = None
        done = [0, 0, 0]
        refused = set()
        while choices := [i for i in range(3) if done[i] < 3 and i not in refused]:
            if len(taken) < len(order):
                chosen = order[len(taken)]
            else:  # a state not seen before: take its first way out now, the others later
                world.check()
                chosen = choices[0]
                pending += [[*taken, other] for other in choices[1:] if rng.random() < share]
            taken.append(chosen)
            if LIFE[done[chosen]](world, tenants[chosen]) is False:
                refused.add(chosen)
                num_refused += len(taken) >= len(order)
            else:
                done[chosen] += 1
                refused.clear()
        assert done == [3, 3, 3], "a request is refused forever"
        num_ends += 1
        world.drain()
    assert num_ends > (500 if share == 1 else 200) and num_refused > 10


@pytest.mark.net
@cases_of(Path(__file__).with_name("lookups.txt"))
def test_lookups(case: Case) -> None:
    """What each cache finds and evicts, step by step: both, unless the case names one."""
    options = dict(case.options)
    names = [options.pop("cache")] if "cache" in options else list(PREFIX_CACHES)
    for name in names:
        for block_size in (1, 3, 16):
            print(f"{name} cache, blocks of {block_size} tokens")
            CacheLog(PREFIX_CACHES[name], block_size, **options).perform(case)


ALL_KEYS = [
    None,
    SALT,
    (("lora", "x"),),
    (("lora", 1),),
    (("lora", "1"),),
    (("salt", ""),),
    (("lora", "x"), ("salt", "x")),
    (("a", "x"), ("b", "y")),
    (("a", "xbstr:y"),),  # spells the same letters as the one above
    (("ab", "x"),),
    (("a", "bx"),),
]


def test_extra_keys_separate_everything(make_cache):
    """Trap 12: tenants, adapters, and an adapter and a salt of one name never share KV."""
    rig = Rig(make_cache, 2 * len(ALL_KEYS), 4)
    held = [rig.warm("AB", keys) for keys in ALL_KEYS]
    assert len({block_id for blocks in held for block_id in blocks}) == 2 * len(ALL_KEYS)
    assert [rig.hits("AB", keys) for keys in ALL_KEYS] == held
    shown = {prefix.extra_keys for prefix in cached_prefixes(rig.cache)}
    assert shown == {normalise_extra_keys(keys) for keys in ALL_KEYS} and len(shown) == 11
    assert rig.hits("AB", (("salt", "unknown"),)) == []
    assert normalise_extra_keys(None) == () != normalise_extra_keys([("lora", 7)])
    normal = (("lora", "int:7"), ("salt", "str:x"))
    assert normalise_extra_keys([("salt", "x"), ("lora", 7)]) == normal


def test_any_sequence_of_tokens_is_copied_and_compared_alike(make_cache):
    """Trap 9: a slice of a tuple is a tuple, and one of a buffer looks into the buffer, which the
    next request writes over."""
    rig = Rig(make_cache, 5, 2)
    row = array("q", rig.spell("ABC"))
    rig.cache.insert(memoryview(row), rig.pool.allocate(3))
    row[:] = array("q", rig.spell("XYZ"))
    for kind in (list, tuple, lambda tokens: memoryview(array("q", tokens))):
        assert len(rig.cache.match_prefix(kind(rig.spell("ABX"))).blocks) == 2
        assert len(rig.cache.match_prefix(kind(rig.spell("XYZ"))).blocks) == 0
    rig.check()


def test_an_index_reports_its_block_names_and_nodes(make_cache):
    rig = Rig(make_cache, 12, 4)
    held = rig.hold("ABCD")
    rig.hits("AB")
    contents = {content.block.block_id: content for content in rig.cache.cached_contents()}
    begin = [contents[block.block_id].begins_node for block in held]
    names = {contents[block.block_id].block_hash for block in held}
    if isinstance(rig.cache, RadixCache):
        assert begin == [True, False, True, False]
        assert names == {contents[held[0].block_id].block_hash} and not any(names)
    else:
        assert not any(begin) and len(names) == 4 and all(names)


def test_hit_rate_is_tokens_hit_over_tokens_looked_up(make_cache):
    """Each hit is counted once, on admission: a lookup alone counts nothing."""
    cache = Rig(make_cache, 3, 4).cache
    cache.cache_computed_blocks([1] * 8)
    assert cache.stats == CacheStats() and cache.stats.hit_rate == 0.0
    cache.stats.record(1, 1)
    cache.stats.record(39, 19)
    assert cache.stats == CacheStats(2, 40, 20) and cache.stats.hit_rate == 0.5


def test_a_reader_sees_whether_anything_has_changed(make_cache):
    rig = Rig(make_cache, 12, 4)
    held = []
    seen = []
    for change in (
        lambda: rig.warm("ABCD"),
        lambda: rig.warm("ABX"),
        lambda: rig.cache.match_prefix(rig.spell("AB")),
        lambda: held.extend(rig.hold("AB")),
        lambda: rig.cache.release(held),
        lambda: rig.cache.evict(1),
        rig.cache.clear,
    ):
        change()
        contents = list(rig.cache.cached_contents())
        num_changes = rig.cache.num_changes
        assert list(rig.cache.cached_contents()) == contents and (num_changes, contents) not in seen
        assert num_changes == rig.cache.num_changes not in [number for number, _ in seen]
        seen.append((num_changes, contents))
