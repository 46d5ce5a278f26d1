"""One contract, two caches, against a naive model that stores whole prefixes.

`NaiveModel` knows no hashes and no tree. It keeps (extra keys, all tokens up to a block's end) ->
block, and answers every question by looking at all of them. `World` makes the same calls to a
cache with its pool and to the model, and compares everything they show; a state machine and an
exhaustive search drive `World`. Examples are in `lookups.txt`, refused calls in
`test_cache_refusals.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from block_pool import Block, BlockPool
from bounded_loops import as_long_as
from cache_words import Rig, ids
from kv_chaos import Chaos
from kv_orders import BLOCK_SIZES, check_long_run
from prefix_cache import CacheStats, MatchCursor, PrefixMatch, normalise_extra_keys
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache

SALT = (("salt", "x"),)
LORA = (("lora", "x"),)


# -- the naive model

Prefix = tuple[tuple, tuple[int, ...]]  # (normalised extra keys, every token up to a block's end)


def extends(longer: Prefix, prefix: Prefix) -> bool:
    keys, tokens = prefix
    is_longer = len(longer[1]) > len(tokens)
    return longer[0] == keys and is_longer and longer[1][: len(tokens)] == tokens


@dataclass
class Entry:
    block_id: int
    num_users: int
    used_at: int


class NaiveModel:
    """Whole prefixes -> blocks, and the pool's free order. Every answer by brute force."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_ids = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.entries: dict[Prefix, Entry] = {}
        self.now = 0

    def prefixes(self, tokens: Sequence[int], keys: tuple, num_blocks: int) -> list[Prefix]:
        ends = range(self.block_size, num_blocks * self.block_size + 1, self.block_size)
        return [(normalise_extra_keys(keys), tuple(tokens[:end])) for end in ends]

    def by_id(self, block_id: int) -> Entry:
        (entry,) = (entry for entry in self.entries.values() if entry.block_id == block_id)
        return entry

    def use(self, entries: Sequence[Entry]) -> None:
        self.now += 1
        for entry in entries:
            entry.used_at = self.now

    def allocate(self, num_blocks: int) -> list[int]:
        taken, self.free_ids = self.free_ids[:num_blocks], self.free_ids[num_blocks:]
        for block_id in taken:
            self.refs[block_id] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free_ids.append(block_id)

    def match(self, tokens: Sequence[int], keys: tuple) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens, keys, len(tokens) // self.block_size):
            if prefix not in self.entries:
                break
            found.append(self.entries[prefix])
        self.use(found)
        return [entry.block_id for entry in found]

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.by_id(block_id).num_users += 1
            self.refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        entries = [self.by_id(block_id) for block_id in block_ids]
        self.use(entries)
        for entry in entries:
            entry.num_users -= 1
            self.refs[entry.block_id] -= 1

    def insert(
        self, tokens: Sequence[int], block_ids: Sequence[int], keys: tuple, start: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Block ids: the path's, those now owned, the duplicates."""
        path = self.prefixes(tokens, keys, start + len(block_ids))
        owned, duplicates = [], []
        for prefix, block_id in zip(path[start:], block_ids, strict=True):
            entry = self.entries.get(prefix)
            if entry is None:
                self.entries[prefix] = Entry(block_id, self.refs[block_id], 0)
                self.refs[block_id] += 1
                owned.append(block_id)
            else:
                entry.num_users += 1
                self.refs[entry.block_id] += 1
                self.free([block_id])
                duplicates.append(block_id)
        self.use([self.entries[prefix] for prefix in path])
        return [self.entries[prefix].block_id for prefix in path[start:]], owned, duplicates

    def evict(self, num_blocks: int) -> list[int]:
        victims = []
        while len(victims) < num_blocks:
            leaves = [
                (entry.used_at, prefix)
                for prefix, entry in self.entries.items()
                if entry.num_users == 0 and not any(extends(p, prefix) for p in self.entries)
            ]
            if not leaves:
                break
            used_at, prefix = min(leaves)
            assert sum(other == used_at for other, _ in leaves) == 1, "no two are equally old"
            victims.append(self.entries.pop(prefix).block_id)
        self.free(victims)
        return victims

    @property
    def num_evictable(self) -> int:
        return sum(entry.num_users == 0 for entry in self.entries.values())


# -- the cache, its pool and the model, called together


@dataclass(eq=False)
class Tenant:
    """A request: its tokens, its table, and how many blocks of that are published."""

    tokens: list[int]
    keys: tuple = ()
    cursor: MatchCursor | None = None
    table: list[Block] = field(default_factory=list)
    num_published: int = 0
    is_trusted: bool = True  # it publishes nothing after a block that was invalidated


class World:
    """Every call goes to the cache and to the model, and their answers are compared."""

    def __init__(self, make_cache, num_usable: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_usable + 1)
        self.cache = make_cache(self.pool, block_size)
        self.cache.listener = self
        self.model = NaiveModel(num_usable + 1, block_size)
        self.heard: dict[int, Prefix] = {}  # what is cached, from the listener's calls alone
        self.left: list[int] = []  # block ids that left the cache, in order
        self.holders: list[Tenant] = []
        self.fails = False  # the listener raises in the next call

    # the listener

    def block_cached(self, block, parent, token_ids, extra_keys) -> None:
        assert len(token_ids) == self.block_size and block.block_id not in self.heard
        before = () if parent is None else self.heard[parent.block_id][1]
        assert parent is None or self.heard[parent.block_id][0] == extra_keys
        self.heard[block.block_id] = (extra_keys, before + token_ids)
        assert self.pool.blocks[block.block_id] is block and block.ref_cnt >= 2

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        assert blocks, "told of nothing"
        assert all(block.ref_cnt == 1 for block in blocks)
        self.blocks_invalidated(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert self.pool.blocks[block.block_id] is block
            prefix = self.heard.pop(block.block_id)
            assert not any(extends(other, prefix) for other in self.heard.values()), "a child stays"
        self.left += ids(blocks)
        if self.fails:
            raise ConnectionError("a listener's")

    # calls

    def match(self, tokens: Sequence[int], keys: tuple, cursor: MatchCursor | None = None) -> list:
        match = self.cache.match_prefix(tokens, keys or None, cursor)
        assert isinstance(match, PrefixMatch)
        assert ids(match.blocks) == self.model.match(tokens, keys)
        assert match.num_cached_tokens == len(match.blocks) * self.block_size
        return [self.pool.blocks[block.block_id] for block in match.blocks]

    def touch(self, blocks: Sequence[Block]) -> None:
        self.cache.touch(blocks)
        self.model.touch(ids(blocks))

    def release(self, blocks: Sequence[Block]) -> None:
        self.cache.release(blocks)
        self.model.release(ids(blocks))

    def free(self, blocks: Sequence[Block]) -> None:
        self.pool.free(blocks)
        self.model.free(ids(blocks))

    def allocate(self, num_blocks: int) -> list[Block]:
        blocks = (self.pool.allocate(num_blocks) if num_blocks > 0 else None) or []
        assert ids(blocks) == self.model.allocate(max(num_blocks, 0))
        return blocks

    def evict(self, num_blocks: int) -> None:
        self.left = []
        with suppress(ConnectionError):
            assert self.cache.evict(num_blocks) == len(self.left)
        self.fails = False
        assert self.left == self.model.evict(num_blocks)

    def reset(self) -> None:
        is_idle = self.model.num_evictable == len(self.model.entries)
        assert self.cache.reset() is is_idle
        if is_idle:
            self.model.evict(len(self.model.entries))
            assert self.cache.num_cached_blocks == 0
            order = ids(self.pool.free_order())  # that of the reset blocks is unspecified
            assert sorted(order) == sorted(self.model.free_ids)
            self.model.free_ids = order

    def cache_computed(self, tokens: Sequence[int], keys: tuple) -> None:
        num_full = len(tokens) // self.block_size
        self.left = []
        path = self.cache.cache_computed_blocks(tokens, keys)
        found = self.model.match(tokens, keys)
        self.model.touch(found)
        assert self.left == self.model.evict(num_full - len(found) - len(self.model.free_ids))
        new = self.model.allocate(num_full - len(found))
        self.model.insert(tokens, new, keys, len(found))
        self.model.release(found + new)
        assert ids(path) == found + new

    # a request's life

    def start(self, holder: Tenant, num_kept: int | None = None, split: int = 0) -> bool:
        """Share the cached prefix, or its first `num_kept` blocks, in two calls; then allocate the
        other blocks. Returns False, and holds nothing, if they do not fit."""
        found = self.match(holder.tokens, holder.keys, holder.cursor)[:num_kept]
        self.touch(found[:split])
        self.touch(found[split:])
        num_new = len(holder.tokens) // self.block_size - len(found)
        num_missing = num_new - self.pool.num_free_blocks
        if num_missing > self.cache.num_evictable_blocks:
            self.release(found)
            return False
        holder.table, holder.num_published = found, len(found)
        self.holders.append(holder)
        self.grow(holder, [])
        return True

    def grow(self, holder: Tenant, tokens: Sequence[int]) -> None:
        """Append tokens, and allocate blocks for all full ones if they fit."""
        holder.tokens += tokens
        num_new = len(holder.tokens) // self.block_size - len(holder.table)
        num_missing = num_new - self.pool.num_free_blocks
        if num_missing <= self.cache.num_evictable_blocks:
            self.evict(num_missing)
            holder.table += self.allocate(num_new)

    def publish(self, holder: Tenant, num_blocks: int, with_cursor: bool = True) -> None:
        first = holder.num_published
        upto = min(first + num_blocks * holder.is_trusted, len(holder.table))
        while first < upto and self.cache.owns(holder.table[first]):
            first += 1  # a fork has published the block that both hold
        given = holder.table[first:upto]
        cursor = holder.cursor if with_cursor else None
        result = self.cache.insert(holder.tokens, given, holder.keys, start=first, cursor=cursor)
        expected = self.model.insert(holder.tokens, ids(given), holder.keys, first)
        assert (ids(result.blocks), ids(result.owned), ids(result.duplicates)) == expected
        assert all(block is self.pool.blocks[block.block_id] for block in result.blocks)
        holder.table[first:upto] = result.blocks
        holder.num_published = upto

    def fork(self, holder: Tenant) -> None:
        """A second request that holds the same published blocks, and one after them."""
        shared = holder.table[: holder.num_published + 1]
        tokens = holder.tokens[: len(shared) * self.block_size]
        child = Tenant(tokens, holder.keys, MatchCursor(), shared, holder.num_published)
        child.is_trusted = holder.is_trusted
        num_cached = sum(map(self.cache.owns, shared))
        self.touch(shared[:num_cached])
        self.pool.touch(shared[num_cached:])
        for block in shared[num_cached:]:
            self.model.refs[block.block_id] += 1
        self.holders.append(child)

    def drop(self, holder: Tenant, num_kept: int = 0, split: int = 0) -> None:
        """Give back all blocks but the first ones, those that are cached in two calls."""
        num_cached = sum(map(self.cache.owns, holder.table))
        self.free(holder.table[max(num_kept, num_cached) :][::-1])
        cached = holder.table[num_kept:num_cached]
        self.release(cached[split:])
        self.release(cached[:split])
        del holder.table[num_kept:]
        holder.num_published = min(holder.num_published, num_kept)
        if not num_kept:  # it ends, and the next request in its row of tokens writes over it
            holder.tokens[:] = [-1] * len(holder.tokens)
            self.holders.remove(holder)

    def invalidate(self, block: Block) -> None:
        self.left = []
        prefix = self.heard[block.block_id]
        with suppress(ConnectionError):
            self.cache.invalidate(block)
        self.fails = False
        entries = self.model.entries.items()
        removed = {e.block_id: p for p, e in entries if p == prefix or extends(p, prefix)}
        assert sorted(removed) == sorted(self.left)
        for gone in removed.values():
            del self.model.entries[gone]
        self.model.free(self.left)  # the order of branches is unspecified
        for holder in self.holders:
            if any(block.block_id in removed for block in holder.table):
                holder.num_published = sum(map(self.cache.owns, holder.table))
                holder.is_trusted = False

    # what must hold

    def check(self) -> None:
        self.cache.check_invariants()
        self.pool.check_invariants()
        assert ids(self.pool.free_order()) == self.model.free_ids
        assert [block.ref_cnt for block in self.pool.blocks] == self.model.refs
        entries = self.model.entries
        shown = {p[:2]: (p.block.block_id, p.num_users) for p in self.cache.cached_prefixes()}
        assert shown == {p: (entry.block_id, entry.num_users) for p, entry in entries.items()}
        assert self.heard == {entry.block_id: prefix for prefix, entry in entries.items()}
        assert sorted(self.cache.cached_block_ids()) == sorted(self.heard)
        assert [self.cache.owns(b) for b in self.pool.blocks] == [
            block.block_id in self.heard for block in self.pool.blocks
        ]
        for entry in entries.values():
            assert self.cache.num_users(entry) == entry.num_users
        assert self.cache.num_cached_blocks == len(entries)
        assert self.cache.num_evictable_blocks == self.model.num_evictable

    def drain(self) -> None:
        """Drop everything, and evict block by block, in the order that the cache shows."""
        for holder in self.holders[:]:
            self.drop(holder)
        order = [p.block.block_id for p in self.cache.cached_prefixes()]
        for block_id in order:
            self.evict(1)
            assert self.left == [block_id]
        self.check()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks


# -- random and exhaustive


class CacheChaos(Chaos):
    """Requests start, publish, fork and end in any order, on a pool that is too small."""

    world: World

    def __init__(self, world, pick) -> None:
        super().__init__(world, pick)
        self.waiting: list[Tenant] = []

    def keys(self) -> tuple:
        return [(), SALT][self.pick(0, 1)]

    def holder(self) -> Tenant:
        """One of the requests, or a new one that holds nothing."""
        holders = [Tenant(self.tokens(0, 9), self.keys()), *self.world.holders]
        return holders[self.pick(0, len(holders) - 1)]

    def new(self) -> Tenant:
        """A request that waits, or a new one."""
        if self.waiting and self.pick(0, 1):
            return self.waiting.pop(self.pick(0, len(self.waiting) - 1))
        return Tenant(self.tokens(0, 9), self.keys(), MatchCursor() if self.pick(0, 1) else None)

    def start(self) -> None:
        holder = self.new()
        if self.world.start(holder, [None, 0, 1, 2][self.pick(0, 3)], split=self.pick(0, 3)):
            self.world.publish(holder, self.pick(0, 3))
        else:
            self.waiting.append(holder)

    def look_up(self) -> None:
        holder = self.new()
        self.world.match(holder.tokens, holder.keys, holder.cursor)
        self.waiting.append(holder)

    def look_up_less(self) -> None:
        holder = self.holder()
        num_tokens = self.pick(0, len(holder.tokens))
        self.world.match(holder.tokens[:num_tokens], holder.keys, holder.cursor)

    def publish(self) -> None:
        self.world.publish(self.holder(), self.pick(1, 4), with_cursor=self.pick(0, 1) == 1)

    def grow(self) -> None:
        for holder in self.world.holders[-2:]:
            self.world.grow(holder, self.tokens(0, 4))

    def fork(self) -> None:
        self.world.fork(self.holder())

    def drop(self) -> None:
        self.world.drop(self.holder(), self.pick(1, 3), split=self.pick(0, 3))

    def finish(self) -> None:
        if self.world.holders:
            index = self.pick(0, len(self.world.holders) - 1)
            self.world.drop(self.world.holders[index], split=self.pick(0, 3))

    def invalidate(self) -> None:
        if self.world.heard:
            block_ids = sorted(self.world.heard)
            block_id = block_ids[self.pick(0, len(block_ids) - 1)]
            self.world.fails = self.pick(0, 3) == 0
            self.world.invalidate(self.world.pool.blocks[block_id])

    def evict(self) -> None:
        self.world.fails = self.pick(0, 3) == 0
        self.world.evict(self.pick(-1, 5))

    def cache_computed(self) -> None:
        self.world.cache_computed(self.tokens(0, 9), self.keys())

    def reset(self) -> None:
        self.world.reset()


OPERATIONS = ["start"] * 3 + ["publish", "grow", "finish", "look_up"] * 2
OPERATIONS += ["fork", "look_up_less", "drop", "invalidate", "evict", "cache_computed", "reset"]


@pytest.mark.net
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_agrees_with_the_naive_model(make_cache, seed):
    for block_size in BLOCK_SIZES:
        check_long_run(partial(World, make_cache), CacheChaos, OPERATIONS, seed, block_size)


LIFE = (  # of a request: what it does, one step after the other
    World.start,
    lambda world, holder: world.publish(holder, 9),
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
    num_ends, num_refused, num_checked, pending = 0, 0, 0, [[]]
    for _ in as_long_as(lambda: pending, max_rounds=200_000):
        order = pending.pop()
        world = World(make_cache, 5, 2)
        holders = [Tenant(prompt[:], (), MatchCursor()) for prompt in prompts]
        holders[2].cursor = None
        done, refused = [0, 0, 0], set()
        taken: list[int] = []
        while choices := [i for i in range(3) if done[i] < 3 and i not in refused]:
            if len(taken) < len(order):
                chosen = order[len(taken)]
            else:  # a state not seen before: take its first way out now, the others later
                world.check()
                num_checked += 1
                chosen = choices[0]
                pending += [[*taken, other] for other in choices[1:] if rng.random() < share]
            taken.append(chosen)
            if LIFE[done[chosen]](world, holders[chosen]) is False:
                refused.add(chosen)
                num_refused += len(taken) >= len(order)
            else:
                done[chosen] += 1
                refused.clear()
        assert done == [3, 3, 3], "a request is refused forever"
        num_ends += 1
        world.drain()
    assert num_ends > (500 if share == 1 else 200) and num_refused > 10 and num_checked > 300


# -- what a log does not show


ALL_KEYS = [
    None,
    SALT,
    LORA,
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
    shown = {prefix.extra_keys for prefix in rig.cache.cached_prefixes()}
    assert shown == {normalise_extra_keys(keys) for keys in ALL_KEYS} and len(shown) == 11
    assert rig.hits("AB", (("salt", "unknown"),)) == []


def test_normal_extra_keys_carry_tag_and_type():
    assert normalise_extra_keys(None) == normalise_extra_keys(()) == normalise_extra_keys([]) == ()
    pairs = (("lora", "int:7"), ("salt", "str:x"))
    assert normalise_extra_keys([("salt", "x"), ("lora", 7)]) == pairs
    assert normalise_extra_keys(("lora", 7)) == pairs[:1]  # one, as the posts write it


def test_an_index_reports_its_block_names_and_splits(make_cache):
    rig, splits = Rig(make_cache, 12, 4), []
    rig.cache.on_split(splits.append)
    held = rig.hold("ABCD")
    is_tree, has_hashes = rig.cache.begins_node(held[0]), bool(rig.cache.hash_of(held[0]))
    assert is_tree != has_hashes
    rig.hits("AB")
    assert splits == ([held[2].block_id] if is_tree else [])
    begin = [rig.cache.begins_node(block) for block in held]
    assert begin == ([True, False, True, False] if is_tree else [False] * 4)
    assert len({rig.cache.hash_of(block) for block in held}) == (4 if has_hashes else 1)
    rig.cache.on_split(None)
    rig.hits("ABC")
    assert len(splits) == is_tree


def test_hit_rate_is_tokens_hit_over_tokens_looked_up(make_cache):
    """Each hit is counted once, on admission: a lookup alone counts nothing."""
    cache = Rig(make_cache, 3, 4).cache
    cache.cache_computed_blocks([1] * 8)
    assert cache.stats == CacheStats() and cache.cache_hit_rate == 0.0
    cache.stats.record(1, 1)
    assert cache.cache_hit_rate == 1.0
    cache.stats.record(39, 19)
    assert cache.stats == CacheStats(2, 40, 20) and cache.cache_hit_rate == 0.5


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_cache_with_its_own_pool_holds_the_given_number_of_blocks(num_blocks):
    for cache in (PrefixCacheLocal(num_blocks), RadixCache(num_pages=num_blocks)):
        assert cache.pool.num_usable_blocks == num_blocks and cache.block_size == 16
        assert len(cache.cache_computed_blocks(list(range(100)))) == num_blocks
        assert cache.num_cached_blocks == num_blocks
        cache.check_invariants()


class CountingList(list):
    """Counts the tokens that are read out of it."""

    num_read = 0

    def __getitem__(self, index):
        got = super().__getitem__(index)
        CountingList.num_read += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self):
        CountingList.num_read += len(self)
        return super().__iter__()


def test_with_a_path_an_insertion_costs_only_the_new_blocks(make_cache):
    """Not the prompt: a request of 2,000 tokens does not read them all again in every step."""
    rig = Rig(make_cache, 600, 4)
    tokens, cursor, new = CountingList(range(2000)), MatchCursor(), rig.pool.allocate(500)
    rig.cache.insert(tokens, new[:400], cursor=cursor)
    for index in range(400, 500):
        CountingList.num_read = 0
        rig.cache.insert(tokens, new[index : index + 1], start=index, cursor=cursor)
        assert CountingList.num_read <= 4 * 4, index
    assert rig.cache.match_prefix(tokens).num_cached_tokens == 2000
