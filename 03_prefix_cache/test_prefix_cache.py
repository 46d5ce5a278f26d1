"""One contract, two caches: examples of every rule, and a naive model that stores whole prefixes.

`NaiveModel` knows no hashes and no tree. It keeps (extra keys, all tokens up to a block's end) ->
block, and answers every question by looking at all of them. `World` drives a cache, its pool and
the model with the same calls and compares everything they show; a state machine and an exhaustive
search drive `World`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from block_pool import Block, BlockPool
from bounded_loops import as_long_as
from cache_words import Rig, ids
from kv_orders import run_machine
from prefix_cache import (
    CacheStats,
    MatchCursor,
    PrefixCache,
    PrefixMatch,
    normalise_extra_keys,
)
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache

pytestmark = pytest.mark.sample  # both caches, and each block size with one of them
SALT = (("salt", "x"),)
LORA = (("lora", "x"),)


# -- the naive model

Prefix = tuple[tuple, tuple[int, ...]]  # (normalised extra keys, every token up to a block's end)


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

    def has_child(self, prefix: Prefix) -> bool:
        keys, tokens = prefix
        return any(
            other_keys == keys and len(others) > len(tokens) and others[: len(tokens)] == tokens
            for other_keys, others in self.entries
        )

    def evict(self, num_blocks: int) -> list[int]:
        victims = []
        while len(victims) < num_blocks:
            leaves = [
                (entry.used_at, prefix)
                for prefix, entry in self.entries.items()
                if entry.num_users == 0 and not self.has_child(prefix)
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


# -- the cache, its pool and the model, driven together


@dataclass(eq=False)
class Tenant:
    """A request: its live list of tokens, its table, and how much of that is published."""

    tokens: list[int]
    keys: tuple = ()
    cursor: MatchCursor | None = None
    table: list[Block] = field(default_factory=list)
    num_published: int = 0

    def num_full(self, block_size: int) -> int:
        """The number of its blocks that are full."""
        return min(len(self.tokens) // block_size, len(self.table))


class World:
    """Every call goes to the cache and to the model; what they return is compared at once."""

    def __init__(self, make_cache, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache: PrefixCache = make_cache(self.pool, block_size)
        self.cache.listener = self
        self.model = NaiveModel(num_blocks, block_size)
        self.kv: dict[int, Prefix] = {}  # what is written in each block
        self.heard: dict[int, Prefix] = {}  # what is cached, from the listener's calls alone
        self.last_evicted: list[int] = []

    # the listener

    def block_cached(self, block, parent, token_ids, extra_keys) -> None:
        assert len(token_ids) == self.block_size and block.block_id not in self.heard
        before = () if parent is None else self.heard[parent.block_id][1]
        assert parent is None or self.heard[parent.block_id][0] == extra_keys
        self.heard[block.block_id] = (extra_keys, before + token_ids)
        assert self.pool.blocks[block.block_id] is block and block.ref_cnt >= 2

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        assert blocks, "told of nothing"
        for block in blocks:
            assert self.pool.blocks[block.block_id] is block and block.ref_cnt == 1
        self.hear_of_leaving(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        self.hear_of_leaving(blocks)

    def hear_of_leaving(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            keys, tokens = self.heard.pop(block.block_id)
            for other_keys, others in self.heard.values():
                is_child = other_keys == keys and others[: len(tokens)] == tokens
                assert not is_child, "a parent goes before its child"
        self.last_evicted += ids(blocks)

    # what a request does

    def get_computed(self, tenant: Tenant) -> list[Block]:
        match = self.cache.match_prefix(tenant.tokens, tenant.keys or None, tenant.cursor)
        assert isinstance(match, PrefixMatch)
        assert ids(match.blocks) == self.model.match(tenant.tokens, tenant.keys)
        assert match.num_cached_tokens == len(match.blocks) * self.block_size
        return list(match.blocks)

    def admit(self, tenant: Tenant, split: int = 0, num_kept: int | None = None) -> bool:
        """Look up, keep what was found, or the first `num_kept` blocks of it, take the rest.
        `split`: touch the hit in two calls."""
        found = self.get_computed(tenant)[:num_kept]
        for part in (found[:split], found[split:]):
            self.cache.touch(part)
            self.model.touch(ids(part))
        num_new = -(-len(tenant.tokens) // self.block_size) - len(found)
        num_missing = num_new - self.pool.num_free_blocks
        if num_missing > self.cache.num_evictable_blocks:
            self.release_cached(found, split)
            return False
        self.evict(num_missing)
        tenant.table = [self.pool.blocks[block.block_id] for block in found]
        tenant.num_published = len(found)
        self.extend_table(tenant, num_new)
        self.compute(tenant)
        return True

    def extend_table(self, tenant: Tenant, num_new: int) -> None:
        if num_new > 0:
            new = self.pool.allocate(num_new)
            assert ids(new) == self.model.allocate(num_new)
            tenant.table += new

    def compute(self, tenant: Tenant) -> None:
        """Write the KV of every full block that is not published: never one that is cached."""
        num_full = tenant.num_full(self.block_size)
        written = self.model.prefixes(tenant.tokens, tenant.keys, num_full)
        for block, prefix in list(zip(tenant.table, written, strict=False))[tenant.num_published :]:
            if not self.cache.owns(block):
                self.kv[block.block_id] = prefix

    def publish(self, tenant: Tenant, upto: int, with_cursor: bool = True) -> None:
        first = tenant.num_published
        cursor = tenant.cursor if with_cursor else None
        while first < upto and self.cache.owns(tenant.table[first]):
            first += 1  # a fork of this request has published the block that both hold
        given = tenant.table[first:upto]
        result = self.cache.insert(tenant.tokens, given, tenant.keys, start=first, cursor=cursor)
        expected = self.model.insert(tenant.tokens, ids(given), tenant.keys, first)
        assert (ids(result.blocks), ids(result.owned), ids(result.duplicates)) == expected
        assert all(block is self.pool.blocks[block.block_id] for block in result.blocks)
        tenant.table[first:upto] = result.blocks
        tenant.num_published = upto

    def grow(self, tenant: Tenant, token: int) -> None:
        """One token more; the blocks that its table lacks are taken."""
        num_new = len(tenant.tokens) // self.block_size + 1 - len(tenant.table)
        num_missing = num_new - self.pool.num_free_blocks
        if num_missing > self.cache.num_evictable_blocks:
            return
        self.evict(num_missing)
        self.extend_table(tenant, num_new)
        tenant.tokens.append(token)
        self.compute(tenant)

    def fork(self, tenant: Tenant) -> Tenant:
        """Add a second request that holds the same blocks: the published ones and one after
        them."""
        num_shared = min(tenant.num_full(self.block_size), tenant.num_published + 1)
        tokens = tenant.tokens[: num_shared * self.block_size]
        child = Tenant(tokens, tenant.keys, MatchCursor() if tenant.cursor else None)
        child.table = tenant.table[:num_shared]
        child.num_published = min(tenant.num_published, num_shared)
        cached, private = self.split(child.table)
        self.cache.touch(cached)
        self.model.touch(ids(cached))
        self.pool.touch(private)
        for block in private:
            self.model.refs[block.block_id] += 1
        return child

    def split(self, table: list[Block]) -> tuple[list[Block], list[Block]]:
        num_cached = sum(self.cache.owns(block) for block in table)
        assert all(self.cache.owns(block) for block in table[:num_cached])
        return table[:num_cached], table[num_cached:]

    def give_up(self, tenant: Tenant, num_kept: int, split: int = 0) -> None:
        """All blocks but the first ones."""
        cached, private = self.split(tenant.table)
        num_own = max(num_kept - len(cached), 0)
        self.pool.free(private[num_own:][::-1])
        self.model.free(ids(private[num_own:])[::-1])
        self.release_cached(cached[num_kept:], split)
        del tenant.table[num_kept:]
        tenant.num_published = min(tenant.num_published, num_kept)

    def finish(self, tenant: Tenant, split: int = 0) -> None:
        """Give all blocks up. The next tenant of the token row writes over it."""
        self.give_up(tenant, 0, split)
        tenant.tokens[:] = [-1] * len(tenant.tokens)

    def release_cached(self, blocks: Sequence, split: int) -> None:
        """The tail, then the head."""
        for part in (blocks[split:], blocks[:split]):
            self.cache.release(part)
            self.model.release(ids(part))

    # what else may happen

    def evict(self, num_blocks: int) -> None:
        self.last_evicted = []
        num_evicted = self.cache.evict(num_blocks)
        assert self.last_evicted == self.model.evict(num_blocks)
        assert num_evicted == len(self.last_evicted)

    def invalidate(self, tenant: Tenant, index: int, tenants: Sequence[Tenant]) -> None:
        self.last_evicted = []
        self.cache.invalidate(tenant.table[index])
        (_, tokens) = self.model.prefixes(tenant.tokens, tenant.keys, index + 1)[index]
        keys = normalise_extra_keys(tenant.keys)
        removed = {
            entry.block_id: prefix
            for prefix, entry in self.model.entries.items()
            if prefix[0] == keys and prefix[1][: len(tokens)] == tokens
        }
        assert sorted(removed) == sorted(self.last_evicted)
        for prefix in removed.values():
            del self.model.entries[prefix]
        self.model.free(self.last_evicted)  # the order of branches is unspecified
        for other in tenants:
            cached, _ = self.split(other.table)
            other.num_published = min(other.num_published, len(cached))

    def reset(self) -> None:
        is_idle = self.model.num_evictable == len(self.model.entries)
        self.last_evicted = []
        assert self.cache.reset() is is_idle
        if is_idle:
            self.model.evict(len(self.model.entries))
            assert self.cache.num_cached_blocks == 0
            # The eviction order of a full reset is unspecified.
            order = ids(self.pool.free_order())
            assert sorted(order) == sorted(self.model.free_ids)
            self.model.free_ids = order

    def cache_computed(self, tenant: Tenant) -> None:
        num_full = len(tenant.tokens) // self.block_size
        self.last_evicted = []
        path = self.cache.cache_computed_blocks(tenant.tokens, tenant.keys)
        found = self.model.match(tenant.tokens, tenant.keys)
        self.model.touch(found)
        victims = self.model.evict(num_full - len(found) - len(self.model.free_ids))
        assert self.last_evicted == victims
        new = self.model.allocate(num_full - len(found))
        self.model.insert(tenant.tokens, new, tenant.keys, len(found))
        self.model.release(found + new)
        assert ids(path) == found + new
        written = self.model.prefixes(tenant.tokens, tenant.keys, len(found + new))
        self.kv.update(zip(new, written[len(found) :], strict=True))

    def evict_all_one_by_one(self) -> None:
        idle = [p.block.block_id for p in self.cache.cached_prefixes() if p.num_users == 0]
        for block_id in idle:
            self.evict(1)
            assert self.last_evicted[-1] == block_id, "they are shown in another order"
        assert self.model.num_evictable == 0
        self.check()

    # what must hold

    def check(self) -> None:
        self.cache.check_invariants()
        self.pool.check_invariants()
        assert ids(self.pool.free_order()) == self.model.free_ids
        assert [block.ref_cnt for block in self.pool.blocks] == self.model.refs
        shown = {
            (prefix.extra_keys, prefix.token_ids): (prefix.block.block_id, prefix.num_users)
            for prefix in self.cache.cached_prefixes()
        }
        entries = self.model.entries
        assert shown == {key: (entry.block_id, entry.num_users) for key, entry in entries.items()}
        assert self.heard == {entry.block_id: key for key, entry in entries.items()}
        assert all(self.kv[entry.block_id] == key for key, entry in entries.items())
        cached_ids = sorted(entry.block_id for entry in entries.values())
        assert sorted(self.cache.cached_block_ids()) == cached_ids
        assert [b.block_id for b in self.pool.blocks if self.cache.owns(b)] == cached_ids
        for entry in entries.values():
            assert self.cache.num_users(self.pool.blocks[entry.block_id]) == entry.num_users
        assert self.cache.num_cached_blocks == len(entries)
        assert self.cache.num_evictable_blocks == self.model.num_evictable


# -- examples, with 26 different blocks named A .. Z


@pytest.fixture(params=[1, 3, 4, 16])
def rig(request, make_cache) -> Iterator[Rig]:
    """12 usable blocks; whatever the test did, the cache is consistent at its end."""
    rig = Rig(make_cache, 12, request.param)
    yield rig
    rig.check()


# match: whole blocks of the longest prefix


def test_an_empty_cache_hits_nothing(rig):
    assert rig.hits("AB") == rig.hits("") == []
    assert rig.cache.num_cached_blocks == rig.cache.num_evictable_blocks == 0
    assert rig.cache.evict(3) == 0


def test_a_match_ends_at_the_first_block_that_is_not_cached(rig):
    a, b, c, d = rig.warm("ABCD")
    assert rig.hits("ABCD") == rig.hits("ABCDE") == [a, b, c, d]
    assert rig.hits("ABXD") == [a, b]  # D is cached, after C
    assert rig.hits("XBCD") == []
    assert rig.hits("A") == [a]


def test_a_match_finds_nothing_in_the_middle_of_a_prefix(rig):
    """`B C` does not hit `A B C`: the KV of B depends on the tokens before it."""
    rig.warm("ABC")
    assert rig.hits("BC") == rig.hits("C") == rig.hits("AC")[1:] == []


def test_equal_blocks_at_two_places_are_two_blocks(rig):
    blocks = rig.warm("AAAB")
    assert len(set(blocks)) == 4
    assert rig.hits("AAAAB") == blocks[:3]


def test_prefixes_branch(rig):
    a, b, c = rig.warm("ABC")
    assert rig.warm("ABD")[:2] == [a, b] and rig.warm("AE")[:1] == [a]
    assert rig.names() == {"A", "AB", "ABC", "ABD", "AE"}
    assert rig.hits("ABC") == [a, b, c]
    assert rig.cache.num_cached_blocks == 5


def test_only_whole_blocks_are_cached_and_matched(rig):
    """Traps 3, 8: a prompt that is a multiple of the block size is cached whole; the manager keeps
    its last token back. A tail that does not fill a block is never cached."""
    for num_extra in range(rig.block_size):
        rig.cache.cache_computed_blocks(rig.spell("AB", num_extra))
        assert rig.cache.num_cached_blocks == 2
        assert len(rig.hits("AB", num_extra=num_extra)) == 2
    short = rig.spell("AB")[:-1]
    assert len(rig.cache.match_prefix(short).blocks) == 1
    assert rig.cache.match_prefix(short).num_cached_tokens == rig.block_size
    assert rig.cache.match_prefix(rig.spell("A")[:-1]).blocks == []


def test_a_way_that_is_remembered_is_right_when_the_prompt_has_grown(rig):
    """A block that is not full must not be remembered, because it will get other tokens."""
    rig.warm("AB")
    *tokens, last = rig.spell("AB")
    cursor = MatchCursor()
    assert len(rig.cache.match_prefix(tokens, None, cursor).blocks) == 1
    assert cursor.state is not None
    assert len(rig.cache.match_prefix([*tokens, last], None, cursor).blocks) == 2


# keys


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
    rig.check()


def test_an_index_reports_its_block_names_and_splits(rig):
    splits: list[int] = []
    rig.cache.on_split(splits.append)
    held = [rig.cache.pool.blocks[block_id] for block_id in rig.warm("ABCD")]
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


@pytest.mark.parametrize(
    "keys",
    [
        [("salt",)],
        [("salt", "x", "y")],
        [["salt", "x"]],
        [(1, "x")],
        [("salt", True)],
        [("lora", "x"), ("salt", b"x")],
        [("salt", "x"), ("salt", "y")],
        ("lora",),
    ],
)
def test_a_bad_extra_key_is_an_error(make_cache, keys):
    rig = Rig(make_cache, 4, 4)
    rig.refused("extra_keys must", rig.cache.match_prefix, rig.spell("A"), keys)
    new = rig.pool.allocate(1)
    rig.refused("extra_keys must", rig.cache.insert, rig.spell("A"), new, keys)


def test_normal_extra_keys_carry_tag_and_type():
    assert normalise_extra_keys(None) == normalise_extra_keys(()) == normalise_extra_keys([]) == ()
    assert normalise_extra_keys([("salt", "x"), ("lora", 7)]) == (
        ("lora", "int:7"),
        ("salt", "str:x"),
    )
    assert normalise_extra_keys(("lora", 7)) == (("lora", "int:7"),)  # one, as the posts write it


# insert


def test_the_reference_to_a_duplicate_moves_to_the_block_that_is_cached(rig):
    """Trap 2: two equal prompts are computed in one step. The copy that is cached stays reachable,
    and the table of the second request names it, never the copy that is freed."""
    first, second = rig.pool.allocate(3), rig.pool.allocate(4)
    rig.cache.insert(rig.spell("ABC"), first)
    result = rig.cache.insert(rig.spell("ABCD"), second)
    assert result.blocks == [*first, second[3]]
    assert result.owned == second[3:] and result.duplicates == second[:3]
    assert [block.ref_cnt for block in second] == [0, 0, 0, 2]
    assert [rig.cache.num_users(block) for block in result.blocks] == [2, 2, 2, 1]
    rig.cache.release(first)
    assert rig.cache.evict(9) == 0  # the second request uses them still
    rig.cache.release(result.blocks)
    recycled = rig.pool.allocate(rig.pool.num_free_blocks)
    assert rig.hits("ABCD") == ids(result.blocks) and set(second[:3]) <= set(recycled)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("with_cursor", [False, True])
def test_chunk_by_chunk_is_the_same_as_all_at_once(rig, chunk, with_cursor):
    """Trap 15: what a chunked request has computed may be shared while it computes the rest."""
    tokens, new = rig.spell("ABCDE"), rig.pool.allocate(5)
    cursor = MatchCursor() if with_cursor else None
    for first in range(0, 5, chunk):
        part = new[first : first + chunk]
        known = tokens[: (first + len(part)) * rig.block_size]  # the rest is not sampled yet
        assert rig.cache.insert(known, part, start=first, cursor=cursor).owned == part
        assert rig.hits("ABCDE") == ids(new[: first + chunk])
    assert [block.ref_cnt for block in new] == [2] * 5
    rig.cache.release(new)
    assert rig.cache.num_evictable_blocks == 5


def test_the_cache_keeps_a_copy_of_the_tokens(rig):
    """Trap 9: the caller's list lives on, and the next request in its row writes over it."""
    row = rig.spell("AB")
    cursor = MatchCursor()
    rig.cache.match_prefix(row, None, cursor)
    blocks = rig.cache.insert(row, rig.pool.allocate(2), cursor=cursor).blocks
    rig.cache.release(blocks)
    row[:] = rig.spell("XY")
    assert rig.hits("AB") == ids(blocks) and rig.hits("XY") == []
    assert rig.names() == {"A", "AB"}
    rig.warm("ABC"), rig.warm("AD")
    assert rig.names() == {"A", "AB", "ABC", "AD"}


def test_a_path_may_be_older_than_the_cache_is(rig):
    """A waiting request is looked up again and again, while what it once hit is evicted."""
    cursor = MatchCursor()
    rig.warm("ABCD")
    for letters, num_evicted in (("ABCD", 0), ("AB", 2), ("A", 1), ("", 1)):
        rig.cache.evict(num_evicted)
        assert len(rig.cache.match_prefix(rig.spell("ABCDE"), None, cursor).blocks) == len(letters)
    others = rig.warm("AX")
    new = rig.pool.allocate(5)
    rig.refused("not cached", rig.cache.insert, rig.spell("ABCDE"), new[2:], start=2, cursor=cursor)
    result = rig.cache.insert(rig.spell("ABCDE"), new, cursor=cursor)
    assert ids(result.blocks) == others[:1] + ids(new[1:])


def test_a_path_does_not_answer_for_the_tokens(rig):
    """The same request may ask for less than it did: its last token is always computed."""
    cursor = MatchCursor()
    blocks = rig.warm("ABCD")
    for letters in ("ABCD", "AB", "ABC", ""):
        match = rig.cache.match_prefix(rig.spell(letters), None, cursor)
        assert ids(match.blocks) == blocks[: len(letters)]


@pytest.mark.parametrize("num_evicted", [0, 1])
def test_a_remembered_path_does_not_cover_blocks_that_others_insert_after_it(rig, num_evicted):
    """The path ended at C or at D, which has been evicted since; now X is in that place."""
    cursor = MatchCursor()
    rig.warm("ABCD"[: 3 + num_evicted])
    rig.cache.match_prefix(rig.spell("ABCD"), None, cursor)
    rig.cache.evict(num_evicted)
    rig.hold("ABCX")
    new = rig.pool.allocate(1)
    rig.refused("not cached", rig.cache.insert, rig.spell("ABCDE"), new, start=4, cursor=cursor)
    assert len(rig.cache.match_prefix(rig.spell("ABCDE"), None, cursor).blocks) == 3


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
    tokens = CountingList(range(2000))
    cursor = MatchCursor()
    new = rig.pool.allocate(500)
    rig.cache.insert(tokens, new[:400], cursor=cursor)
    for index in range(400, 500):
        CountingList.num_read = 0
        rig.cache.insert(tokens, new[index : index + 1], start=index, cursor=cursor)
        assert CountingList.num_read <= 4 * 4, index
    assert rig.cache.match_prefix(tokens).num_cached_tokens == 2000
    rig.check()


# evict


def test_eviction_gives_back_exactly_as_many_as_asked(rig):
    """Trap 14: it neither evicts 19 for 8 nor loops forever."""
    rig.warm("ABCDEF"), rig.warm("ABXYZ")
    for num_blocks, num_remaining in ((0, 9), (-3, 9), (1, 8), (2, 6), (4, 2), (9, 0), (1, 0)):
        num_free = rig.pool.num_free_blocks
        num_evicted = rig.cache.evict(num_blocks)
        assert rig.pool.num_free_blocks == num_free + num_evicted
        assert rig.cache.num_cached_blocks == rig.cache.num_evictable_blocks == num_remaining
        assert num_evicted == min(max(num_blocks, 0), num_evicted + num_remaining)


def test_children_are_evicted_before_their_parents(rig):
    """Trap 11: the tail goes before the head, so what is left can still be found. The ids of the
    blocks say nothing of that."""
    rig.pool.free((rig.pool.allocate(12) or [])[::-1])
    rig.warm("ABCD")
    for left in ("ABC", "AB", "A", ""):
        assert rig.cache.evict(1) == 1
        assert rig.names() == {left[:n] for n in range(1, len(left) + 1)}
        assert len(rig.hits("ABCD")) == len(left)


def test_the_least_recently_used_block_is_evicted_first(rig):
    rig.warm("A"), rig.warm("B"), rig.warm("C")
    rig.hits("A")  # a match is a use
    rig.cache.evict(1)
    assert rig.names() == {"A", "C"}
    rig.hold("C")
    rig.cache.evict(1)
    assert rig.names() == {"C"}


def test_a_release_is_a_use(rig):
    """Later than the match before it."""
    a = rig.hold("A")
    rig.warm("B"), rig.hits("B")
    rig.cache.release(a)
    rig.cache.evict(1)
    assert rig.names() == {"A"}


def test_only_the_matched_part_of_a_prefix_is_refreshed(rig):
    """Trap 6: a match that ends in the middle of a tree node keeps its half, and only that."""
    rig.warm("ABCD"), rig.warm("XY")
    rig.hits("AB")
    for left in ({"A", "AB", "ABC", "X", "XY"}, {"A", "AB", "X", "XY"}, {"A", "AB", "X"}):
        rig.cache.evict(1)
        assert rig.names() == left
    rig.cache.evict(1)
    assert rig.names() == {"A", "AB"}
    rig.cache.evict(1)
    assert rig.names() == {"A"}


def test_a_used_block_is_never_evicted(rig):
    """Trap 7: blocks before a used block are not evicted either, but unused blocks after it are."""
    rig.warm("ABCD")
    used = rig.hold("AB")
    assert rig.cache.num_evictable_blocks == 2
    assert rig.cache.evict(10) == 2 and rig.names() == {"A", "AB"}
    assert rig.cache.evict(1) == 0
    rig.cache.release(used)
    assert rig.cache.evict(10) == 2 and rig.names() == set()


def test_a_block_is_used_until_its_last_user_lets_go(rig):
    """Trap 58: shared, it counts once as used, and once as free to be evicted."""
    first, second, third = rig.hold("AB"), rig.hold("ABC"), rig.hold("A")
    assert [rig.cache.num_users(block) for block in second] == [3, 2, 1]
    rig.cache.release(first)
    assert rig.cache.evict(9) == 0
    rig.cache.release(second)
    assert rig.cache.evict(9) == 2 and rig.names() == {"A"}
    rig.cache.release(third)
    assert rig.cache.evict(9) == 1


# refused calls


def test_touch_of_a_block_that_is_not_cached_is_an_error(rig):
    a, b = rig.hold("AB")
    (private,) = rig.pool.allocate(1)
    (free,) = list(rig.pool.free_order())[:1]
    for blocks in ([private], [free], [a, b, private], [private, a], [rig.pool.blocks[0]]):
        rig.refused("not cached", rig.cache.touch, blocks)
        rig.refused("not cached", rig.cache.release, blocks)
    rig.cache.touch([]), rig.cache.release([])


def test_release_of_a_block_that_nobody_uses_is_an_error(rig):
    """Trap 10, in two calls: the second would free what the cache still keeps."""
    blocks = rig.hold("AB")
    rig.cache.release(blocks)
    rig.refused(None, rig.cache.release, blocks)
    rig.cache.touch(blocks[:1])
    rig.refused(None, rig.cache.release, blocks)
    rig.cache.release(blocks[:1])
    assert rig.hits("AB") == ids(blocks)


def test_a_block_named_twice_in_one_call_is_an_error(rig):
    """Trap 10, in one call."""
    a, b = rig.hold("AB")
    rig.cache.touch([a, b])  # two users: the count alone would allow it
    rig.refused("must be unique", rig.cache.release, [a, b, b])
    rig.refused("must be unique", rig.cache.touch, [a, a])
    (new,) = rig.pool.allocate(1)
    rig.pool.touch([new])
    rig.refused("must be unique", rig.cache.insert, rig.spell("XY"), [new, new])


def test_insert_refuses_blocks_that_are_free_or_cached(rig):
    cached = rig.hold("AB")
    new = rig.pool.allocate(2)
    free = next(iter(rig.pool.free_order()))
    for blocks in ([free], [new[0], free], [rig.pool.blocks[0]]):
        rig.refused("free", rig.cache.insert, rig.spell("XYZ"), blocks)
    for blocks in ([cached[0]], [new[0], cached[1]], [cached[1], new[0]]):
        rig.refused("cached already", rig.cache.insert, rig.spell("XYZ"), blocks)
    rig.refused("cached already", rig.cache.insert, rig.spell("AB"), cached)  # even where it is
    rig.cache.release(cached)
    rig.refused("cached already", rig.cache.insert, rig.spell("XY"), cached)  # although unused
    assert rig.cache.insert(rig.spell("XY"), new).owned == new


def test_insert_refuses_too_few_tokens(rig):
    rig.hold("AB")
    new = rig.pool.allocate(2)
    rig.refused("token_ids", rig.cache.insert, rig.spell("XY")[:-1], new)
    rig.refused("token_ids", rig.cache.insert, rig.spell("ABXY")[:-1], new, start=2)
    rig.refused("token_ids", rig.cache.insert, rig.spell("AB")[:-1], [], start=2)


def test_insert_refuses_a_start_after_blocks_that_are_not_cached_or_not_used(rig):
    """After an unused block, the new block would be used, and the one before it evicted."""
    held = rig.hold("AB")
    new = rig.pool.allocate(2)
    for letters, start in (("ABXY", 3), ("AXCD", 2), ("XYZ", 1), ("BCD", 1)):
        blocks = new[: len(letters) - start]
        rig.refused("not cached", rig.cache.insert, rig.spell(letters), blocks, start=start)
    rig.refused("not cached", rig.cache.insert, rig.spell("AC"), new[:1], SALT, start=1)
    rig.cache.release(held[1:])
    rig.refused("is unused", rig.cache.insert, rig.spell("ABC"), new[:1], start=2)


# the rest of the contract


def test_hit_rate_is_tokens_hit_over_tokens_looked_up(rig):
    """Each hit is counted once, on admission: a lookup alone counts nothing."""
    assert rig.cache.cache_hit_rate == 0.0
    rig.warm("AB"), rig.hits("AB")
    assert rig.cache.stats == CacheStats() and rig.cache.cache_hit_rate == 0.0
    rig.cache.stats.record(10, 0)
    rig.cache.stats.record(30, 20)
    assert rig.cache.stats == CacheStats(2, 40, 20)
    assert rig.cache.cache_hit_rate == 0.5
    one_token = CacheStats()
    one_token.record(1, 1)
    assert one_token.hit_rate == 1.0


def test_a_block_size_below_one_is_an_error(make_cache):
    for block_size in (0, -1):
        with pytest.raises(ValueError, match=f"^[a-z]+_size must be .*>= 1, got {block_size}"):
            make_cache(BlockPool(3), block_size)


def test_invalidated_blocks_leave_with_their_successors_and_stay_with_their_users(rig):
    """A B C and A B D, where a request uses A B D; and A E, which is unused."""
    _, _, c = rig.warm("ABC")
    a, b, d = rig.hold("ABD")
    rig.warm("AE")
    rig.cache.invalidate(b)
    assert rig.names() == {"A", "AE"}
    assert [block.ref_cnt for block in (a, b, rig.pool.blocks[c], d)] == [2, 1, 0, 1]
    rig.refused("not cached", rig.cache.invalidate, b)


def test_blocks_before_an_invalidated_block_can_be_evicted(rig):
    _, b = rig.warm("AB")
    rig.cache.invalidate(rig.pool.blocks[b])
    assert rig.cache.evict(9) == 1 and rig.names() == set()


def test_a_path_does_not_lead_to_an_invalidated_block(rig):
    cursor = MatchCursor()
    blocks = rig.hold("AB")
    assert ids(rig.cache.match_prefix(rig.spell("ABC"), None, cursor).blocks) == ids(blocks)
    rig.cache.invalidate(blocks[0])
    assert rig.cache.match_prefix(rig.spell("ABC"), None, cursor).blocks == []
    rig.pool.free(blocks[::-1])
    again = rig.hold("A")
    assert ids(rig.cache.match_prefix(rig.spell("ABC"), None, cursor).blocks) == ids(again)
    rig.cache.release(again)


def test_recycled_content_is_no_hit_for_another_prefix(rig):
    """Trap 1: A = P T ends and its blocks are recycled; B = Q T computes T after Q, into a block
    that once held T after P. C = P T may hit P's blocks, if any, but none of B's."""
    old = rig.warm("PT")
    rig.cache.evict(1)
    *_, q, t = rig.pool.allocate(11)
    assert t.block_id == old[1]
    rig.cache.insert(rig.spell("QT"), [q, t])
    assert rig.hits("PT") == old[:1]
    assert rig.hits("QT") == [q.block_id, old[1]]
    assert rig.hits("T") == []


# cache_computed_blocks: a cache on its own


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_cache_with_its_own_pool_holds_the_given_number_of_blocks(num_blocks):
    for cache in (PrefixCacheLocal(num_blocks), RadixCache(num_pages=num_blocks)):
        assert cache.pool.num_usable_blocks == num_blocks and cache.block_size == 16
        assert len(cache.cache_computed_blocks(list(range(100)))) == num_blocks
        assert cache.num_cached_blocks == num_blocks
        cache.check_invariants()


# -- random and exhaustive: the world against the model

KEYS = [(), SALT]
PROMPTS = st.lists(st.integers(0, 1), max_size=9)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, publish, fork, grow and end in any order, on a pool that is too small."""

    def __init__(self, make_cache) -> None:
        super().__init__()
        self.make_cache = make_cache

    @initialize(num_usable=st.integers(6, 10), block_size=st.integers(1, 3))
    def start(self, num_usable, block_size):
        self.world = World(self.make_cache, num_usable + 1, block_size)
        self.waiting: list[Tenant] = []
        self.running: list[Tenant] = []

    @rule(
        tokens=PROMPTS,
        keys=st.sampled_from(KEYS),
        with_cursor=st.booleans(),
        split=st.integers(0, 3),
        num_kept=st.none() | st.integers(0, 3),
        publish=st.booleans(),
    )
    def new_request(self, tokens, keys, with_cursor, split, num_kept, publish):
        tenant = Tenant(list(tokens), keys, MatchCursor() if with_cursor else None)
        if not self.world.admit(tenant, split, num_kept):
            self.waiting.append(tenant)
            return
        self.running.append(tenant)
        if publish:
            self.world.publish(tenant, tenant.num_full(self.world.block_size))

    @precondition(lambda self: self.waiting)
    @rule(split=st.integers(0, 3))
    def try_the_waiting_again(self, split):
        tenant = self.waiting.pop(0)
        (self.running if self.world.admit(tenant, split) else self.waiting).append(tenant)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_blocks=st.integers(1, 4), with_cursor=st.booleans())
    def publish(self, data, num_blocks, with_cursor):
        tenant = data.draw(st.sampled_from(self.running))
        num_full = tenant.num_full(self.world.block_size)
        self.world.publish(tenant, min(tenant.num_published + num_blocks, num_full), with_cursor)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data, tokens):
        tenant = data.draw(st.sampled_from(self.running))
        for token in tokens:
            self.world.grow(tenant, token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        self.running.append(self.world.fork(data.draw(st.sampled_from(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_kept=st.integers(0, 3))
    def give_up(self, data, num_kept):
        self.world.give_up(data.draw(st.sampled_from(self.running)), num_kept)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), split=st.integers(0, 3))
    def finish(self, data, split):
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.world.finish(self.running.pop(index), split)

    @precondition(lambda self: any(tenant.num_published for tenant in self.running))
    @rule(data=st.data())
    def invalidate(self, data):
        tenant = data.draw(st.sampled_from([t for t in self.running if t.num_published]))
        index = data.draw(st.integers(0, tenant.num_published - 1))
        self.world.invalidate(tenant, index, self.running)

    @rule(num_blocks=st.integers(-1, 5))
    def evict(self, num_blocks):
        self.world.evict(num_blocks)

    @rule(tokens=PROMPTS, keys=st.sampled_from(KEYS))
    def get_computed(self, tokens, keys):
        self.world.get_computed(Tenant(tokens, keys))

    @rule(tokens=PROMPTS, keys=st.sampled_from(KEYS))
    def cache_computed(self, tokens, keys):
        self.world.cache_computed(Tenant(tokens, keys))

    @rule()
    def reset(self):
        self.world.reset()

    @invariant()
    def all_is_as_the_model_says(self):
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            for tenant in self.running:
                self.world.finish(tenant)
            self.world.evict_all_one_by_one()
            assert self.world.pool.num_free_blocks == self.world.pool.num_usable_blocks


def test_any_order_of_calls_agrees_with_the_naive_model(make_cache):
    run_machine(lambda: CacheMachine(make_cache), max_examples=25, num_steps=25)


LIFE = (  # of a request: what it does, one step after the other
    lambda world, tenant: world.admit(tenant),
    lambda world, tenant: world.publish(tenant, tenant.num_full(2)),
    lambda world, tenant: world.finish(tenant),
)


@pytest.mark.parametrize("share", [0.7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_interleaving_of_three_requests_on_five_blocks(make_cache, share):
    """Each is admitted, publishes and ends, in every order, or in a `share` of the transitions out
    of each state. A request that does not fit tries again after another event. Every intermediate
    state is checked."""
    rng = random.Random(1)
    prompts = [[0, 0, 1, 1, 0], [0, 0, 1, 1, 2, 2], [0, 0, 2, 2]]  # blocks P Q, P Q R, P R
    num_ends, num_refused, num_checked, pending = 0, 0, 0, [[]]
    for _ in as_long_as(lambda: pending, max_rounds=200_000):
        order = pending.pop()
        world = World(make_cache, 6, 2)
        tenants = [Tenant(prompt[:], (), MatchCursor()) for prompt in prompts]
        tenants[2].cursor = None
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
            if LIFE[done[chosen]](world, tenants[chosen]) is False:
                refused.add(chosen)
                num_refused += len(taken) >= len(order)
            else:
                done[chosen] += 1
                refused.clear()
        assert done == [3, 3, 3], "somebody never finds room"
        num_ends += 1
        world.evict(9)
        world.check()
        assert world.pool.num_free_blocks == 5
    if share == 1:
        assert num_ends > 500 and num_refused > 20 and num_checked > 1000
    assert num_ends > 200 and num_refused > 10 and num_checked > 300
