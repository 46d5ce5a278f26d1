"""A prefix cache and a naive model that stores whole prefixes, called together.

`NaiveModel` knows no hashes and no tree. It keeps (extra keys, all tokens up to a block's end) ->
block, and answers every question by looking at all of them. `World` makes each call to the cache
and to the model, and compares everything they show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from block_pool import Block
from cache_checks import cached_prefixes
from cache_words import Rig, as_word, ids, nodes_of
from kv_slots import MakeCache
from prefix_cache import ExtraKeys, MatchCursor, NormalKeys, normalise_extra_keys
from radix_cache import RadixCache
from step_log import StepLog

Prefix = tuple[NormalKeys, tuple[int, ...]]  # every token up to a block's end


def extends(longer: Prefix, prefix: Prefix) -> bool:
    keys, tokens = prefix
    is_longer = len(longer[1]) > len(tokens)
    return longer[0] == keys and is_longer and longer[1][: len(tokens)] == tokens


class NaiveModel:
    """Whole prefixes -> blocks, and the time of their last use. Every answer by brute force."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_of: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.now = 0

    def path(self, tokens: Sequence[int], keys: ExtraKeys) -> list[Prefix]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(normalise_extra_keys(keys), tuple(tokens[:end])) for end in ends]

    def use(self, prefixes: Sequence[Prefix]) -> None:
        self.now += 1
        self.used_at |= dict.fromkeys(prefixes, self.now)

    def match(self, path: Sequence[Prefix]) -> list[int]:
        found = list(takewhile(self.block_of.__contains__, path))
        self.use(found)
        return [self.block_of[prefix] for prefix in found]

    def release(self, block_ids: Sequence[int]) -> None:
        self.use([prefix for prefix, block_id in self.block_of.items() if block_id in block_ids])

    def insert(
        self, path: Sequence[Prefix], start: int, block_ids: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Block ids: the path's, those now owned, the duplicates."""
        owned, duplicates = [], []
        for prefix, block_id in zip(path[start:], block_ids, strict=True):
            is_new = self.block_of.setdefault(prefix, block_id) == block_id
            (owned if is_new else duplicates).append(block_id)
        self.use(path)
        return [self.block_of[prefix] for prefix in path[start:]], owned, duplicates

    def evict(self, num_blocks: int, used: Container[int]) -> list[int]:
        victims: list[int] = []
        while len(victims) < num_blocks:
            leaves = [
                (self.used_at[prefix], prefix)
                for prefix, block_id in self.block_of.items()
                if block_id not in used and not any(extends(p, prefix) for p in self.block_of)
            ]
            if not leaves:
                break
            used_at, prefix = min(leaves)
            assert sum(other == used_at for other, _ in leaves) == 1, "no two are equally old"
            victims.append(self.block_of.pop(prefix))
        return victims


@dataclass(eq=False)
class Tenant:
    """A request: its tokens, its table, and how many blocks of that are published."""

    tokens: list[int] = field(default_factory=list)
    keys: ExtraKeys = ()
    cursor: MatchCursor | None = None
    table: list[Block] = field(default_factory=list)
    num_published: int = 0
    is_trusted: bool = True  # it publishes nothing after all blocks were withdrawn


class World(Rig):
    """Every call goes to the cache and to the model, and their answers are compared."""

    def __init__(self, make_cache: MakeCache, num_usable: int, block_size: int) -> None:
        super().__init__(make_cache, num_usable, block_size)
        self.cache.listener = self
        self.model = NaiveModel(block_size)
        self.heard: dict[int, Prefix] = {}  # what is cached, from the listener's calls alone
        self.left: list[Prefix] = []  # what left the cache in the last call, in order
        self.tenants: list[Tenant] = []
        self.fails = False  # the listener raises in the next call

    # the listener

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        assert block is self.pool.blocks[block.block_id] and block.block_id not in self.heard
        keys, before = (extra_keys, ()) if parent is None else self.heard[parent.block_id]
        assert keys == extra_keys
        self.heard[block.block_id] = (keys, before + token_ids)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        assert blocks, "told of nothing"
        assert all(block.ref_cnt == 1 for block in blocks)
        for block in blocks:
            self.left.append(self.heard.pop(block.block_id))
            children = [other for other in self.heard.values() if extends(other, self.left[-1])]
            assert block is self.pool.blocks[block.block_id] and not children, "a child stays"
        if self.fails:
            raise ConnectionError("a listener's")

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        assert blocks == self.pool.blocks[1:]
        self.heard.clear()

    # calls

    def used(self) -> Counter[int]:
        return Counter(block.block_id for tenant in self.tenants for block in tenant.table)

    def match(
        self, tokens: Sequence[int], keys: ExtraKeys = (), cursor: MatchCursor | None = None
    ) -> list[Block]:
        match = self.cache.match_prefix(tokens, keys or None, cursor)
        assert ids(match.blocks) == self.model.match(self.model.path(tokens, keys))
        assert match.num_cached_tokens == len(match.blocks) * self.block_size
        return [self.pool.blocks[block.block_id] for block in match.blocks]

    def release(self, blocks: Sequence[Block]) -> None:
        self.cache.release(blocks)
        self.model.release(ids(blocks))

    def evict(self, num_blocks: int) -> None:
        """Also if the listener raises. Those evicted first are also allocated first."""
        self.left = []
        with suppress(ConnectionError):
            assert self.cache.evict(num_blocks) == len(self.left)
        self.fails = False
        evicted = self.evicted(num_blocks, self.used())
        assert ids(self.pool.free_order())[self.pool.num_free_blocks - len(evicted) :] == evicted

    def evicted(self, num_blocks: int, used: Container[int]) -> list[int]:
        """The blocks that must have left."""
        block_of = self.model.block_of.copy()
        evicted = self.model.evict(num_blocks, used)
        assert [block_of[prefix] for prefix in self.left] == evicted
        return evicted

    def reset(self) -> None:
        is_idle = not self.used().keys() & self.model.block_of.values()
        assert self.cache.reset() is is_idle
        if is_idle:
            self.model.block_of.clear()

    def cache_computed(self, tokens: list[int], keys: ExtraKeys = ()) -> None:
        path = self.model.path(tokens, keys)
        num_free = self.pool.num_free_blocks
        self.left = []
        computed = ids(self.cache.cache_computed_blocks(tokens, keys))
        found = self.model.match(path)
        num_evicted = len(self.evicted(len(path) - len(found) - num_free, {*self.used(), *found}))
        assert len(computed) == min(len(path), len(found) + num_free + num_evicted)
        self.model.insert(path[: len(computed)], len(found), computed[len(found) :])
        self.model.release(computed)
        tokens[:] = [-1] * len(tokens)  # the caller's list is written over

    # a request's life

    def start(self, tenant: Tenant, num_kept: int | None = None, split: int = 0) -> bool:
        """Share the cached prefix, or its first `num_kept` blocks, in two calls; then allocate the
        other blocks. Returns False, and holds nothing, if they do not fit."""
        found = self.match(tenant.tokens, tenant.keys, tenant.cursor)[:num_kept]
        self.cache.touch(found[:split])
        self.cache.touch(found[split:])
        tenant.table = found
        tenant.num_published = len(found)
        self.tenants.append(tenant)
        if not self.grow(tenant):
            self.release(found)
            self.tenants.remove(tenant)
            return False
        return True

    def grow(self, tenant: Tenant, tokens: Sequence[int] = ()) -> bool:
        """Append tokens, and allocate blocks for all full ones if they fit."""
        tenant.tokens += tokens
        num_new = len(tenant.tokens) // self.block_size - len(tenant.table)
        num_missing = num_new - self.pool.num_free_blocks
        if num_missing > self.cache.num_evictable_blocks:
            return False
        self.evict(num_missing)
        tenant.table += (self.pool.allocate(num_new) if num_new > 0 else None) or []
        return True

    def publish(self, tenant: Tenant, num_blocks: int, with_cursor: bool = True) -> list[int]:
        """Returns the indices of the blocks that were cached already."""
        first = tenant.num_published
        upto = min(first + num_blocks * tenant.is_trusted, len(tenant.table))
        while first < upto and self.cache.owns(tenant.table[first]):
            first += 1  # a fork has published the block that both hold
        given = tenant.table[first:upto]
        cursor = tenant.cursor if with_cursor else None
        cached = self.cache.insert(tenant.tokens, given, tenant.keys, start=first, cursor=cursor)
        path = self.model.path(tenant.tokens, tenant.keys)[:upto]
        expected = self.model.insert(path, first, ids(given))
        assert ids(cached) == expected[0]
        tenant.table[first:upto] = [self.pool.blocks[block_id] for block_id in expected[0]]
        tenant.num_published = upto
        return [first + index for index in range(len(expected[2]))]

    def fork(self, tenant: Tenant) -> None:
        """A second request that holds the same published blocks, and one after them."""
        shared = tenant.table[: tenant.num_published + 1]
        tokens = tenant.tokens[: len(shared) * self.block_size]
        child = Tenant(tokens, tenant.keys, MatchCursor(), shared, tenant.num_published)
        child.is_trusted = tenant.is_trusted
        num_cached = sum(map(self.cache.owns, shared))
        self.cache.touch(shared[:num_cached])
        self.pool.touch(shared[num_cached:])
        self.tenants.append(child)

    def drop(self, tenant: Tenant, num_kept: int = 0, split: int = 0) -> None:
        """Give back all blocks but the first ones, those that are cached in two calls."""
        num_cached = sum(map(self.cache.owns, tenant.table))
        self.pool.free(tenant.table[max(num_kept, num_cached) :][::-1])
        cached = tenant.table[num_kept:num_cached]
        self.release(cached[split:])
        self.release(cached[:split])
        del tenant.table[num_kept:]
        tenant.num_published = min(tenant.num_published, num_kept)
        if not num_kept:  # it ends, and the next request in its row of tokens writes over it
            tenant.tokens[:] = [-1] * len(tenant.tokens)
            self.tenants.remove(tenant)

    def withdraw_all(self) -> None:
        self.cache.withdraw_all()
        self.model.block_of.clear()
        for tenant in self.tenants:
            tenant.num_published = 0
            tenant.is_trusted = not tenant.table
            tenant.cursor = None if tenant.cursor is None else MatchCursor()

    # what must hold

    def check(self) -> None:
        super().check()
        block_of = self.model.block_of
        used = self.used()
        references = used + Counter(block_of.values())
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == references[block.block_id], block
            assert self.cache.owns(block) == (block.block_id in self.heard), block
        shown = {p[:2]: (p.block.block_id, p.num_users) for p in cached_prefixes(self.cache)}
        assert shown == {prefix: (i, used[i]) for prefix, i in block_of.items()}
        assert self.heard == {block_id: prefix for prefix, block_id in block_of.items()}
        assert sorted(self.cache.cached_block_ids()) == sorted(self.heard)
        assert self.cache.num_cached_blocks == len(block_of)
        num_unused = sum(used[block_id] == 0 for block_id in block_of.values())
        assert self.cache.num_evictable_blocks == num_unused

    def drain(self) -> None:
        """Drop everything, and evict block by block, in the order that the cache shows."""
        for tenant in self.tenants[:]:
            self.drop(tenant)
        for shown in list(cached_prefixes(self.cache)):
            self.evict(1)
            assert self.left == [shown[:2]]
        self.check()
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks


# -- a log; `lookups.txt` says how to read one


class CacheLog(StepLog):
    """Performs the actions of a case in a `World`, which compares the cache with a naive model."""

    def __init__(self, make_cache: MakeCache, block_size: int, num_blocks: int = 40) -> None:
        self.world = World(make_cache, num_blocks, block_size)
        self.cache = self.world.cache
        self.tenants: dict[str, Tenant] = {}
        self.ended: dict[str, list[Block]] = {}  # what they held

    def act(self, action: str) -> str:
        self.world.left = []
        words = action.removesuffix(": refused").split()
        if action.endswith(": refused"):
            self.world.refused(None, self.perform_words, words)
            return action
        performed = self.perform_words(words)
        self.world.check()
        return performed

    def perform_words(self, words: list[str]) -> str:
        world = self.world
        tenant = self.tenants.setdefault(words[0], Tenant(cursor=MatchCursor()))
        match words:
            case ["cache", *prefixes]:
                for prefix in prefixes:
                    world.cache_computed(self.tokens(prefix))
            case ["evict", number, *_]:
                world.evict(int(number.strip(":")))
                return f"evict {number} {self.shown(p for _, p in world.left)}"
            case ["cached", *_]:
                return f"cached {self.shown(sorted(p for _, p in world.heard.values()))}"
            case ["users", *_]:
                used = world.used()
                users = {self.shown([p]): used[i] for i, (_, p) in world.heard.items()}
                return f"users {shown(f'{p}:{users[p]}' for p in sorted(users))}"
            case ["nodes", *_]:
                assert isinstance(self.cache, RadixCache)
                locks = nodes_of(self.cache)
                nodes = [f"{node}:{locks[node]}".removesuffix(":0") for node in sorted(locks)]
                return f"nodes {shown(nodes)}"
            case [prefix, "hits", _]:
                found = world.match(self.tokens(prefix))
                return f"{prefix} hits {self.shown(world.heard[b.block_id][1] for b in found[-1:])}"
            case [_, "uses", prefix, *longer]:
                tenant.tokens = self.tokens(prefix)
                if longer:
                    tokens = self.tokens(longer[-1])
                    tenant.table = world.match(tokens, (), tenant.cursor)[: len(prefix)]
                    self.cache.touch(tenant.table)
                    tenant.num_published = len(prefix)
                    world.tenants.append(tenant)
                else:
                    assert world.start(tenant)
                    world.publish(tenant, len(prefix))
            case [_, "computes", prefix]:
                tenant.tokens = self.tokens(prefix)
                world.tenants += [] if tenant in world.tenants else [tenant]
                assert world.grow(tenant)
            case [name, "publishes", *parts]:
                num_blocks = sum(len(part.strip(",")) for part in parts if part != "frees")
                return f"{name} publishes {self.publish(tenant, num_blocks)}"
            case [_, "drops", part]:
                world.drop(tenant, len(tenant.table) - len(part))
            case [name, "ends"]:
                if tenant not in world.tenants:  # once more
                    self.cache.release(self.ended[name])
                self.ended[name] = tenant.table[:]
                world.drop(tenant)
            case _:
                raise AssertionError(f"cannot read {' '.join(words)!r}")
        return " ".join(words)

    def tokens(self, prefix: str) -> list[int]:
        """The tokens of `AB`; those of `Ab` lack the last one."""
        tokens = self.world.spell(prefix.strip("-").upper())
        return tokens[:-1] if prefix[-1].islower() else tokens

    def shown(self, prefixes: Iterable[Sequence[int]]) -> str:
        return shown(as_word(tokens, self.world.block_size) for tokens in prefixes)

    def publish(self, tenant: Tenant, num_blocks: int) -> str:
        first = tenant.num_published
        frees = self.world.publish(tenant, num_blocks)
        ids_published = ids(tenant.table[first : tenant.num_published])
        letters = [self.shown([self.world.heard[block_id][1]])[-1] for block_id in ids_published]
        freed = "".join(letters[index - first] for index in frees)
        kept = "".join(letter for i, letter in enumerate(letters, first) if i not in frees)
        return (kept or "-") + (f", frees {freed}" if freed else "")


def shown(words: Iterable[str]) -> str:
    return " ".join(words) or "-"
