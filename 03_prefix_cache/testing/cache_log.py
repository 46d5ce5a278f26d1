"""Performs a log of a prefix cache; `lookups.txt` says how to read one."""

from __future__ import annotations

from collections.abc import Iterable

from block_pool import Block
from cache_words import as_word
from cache_world import Tenant, World
from kv_slots import MakeCache
from prefix_cache import MatchCursor
from radix_cache import RadixCache
from radix_words import nodes_of
from step_log import StepLog


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
                return f"evict {number} {shown(self.left())}"
            case ["invalidate", prefix, *_]:
                block = self.block_of(prefix.strip(":"))
                if not self.cache.owns(block):
                    self.cache.invalidate(block)
                world.invalidate(block)
                return f"invalidate {prefix} {shown(sorted(self.left()))}"
            case ["cached", *_]:
                return f"cached {shown(sorted(map(self.spelt, world.heard)))}"
            case ["users", *_]:
                blocks = {self.spelt(block_id): block_id for block_id in world.heard}
                used = world.used()
                return f"users {shown(f'{p}:{used[blocks[p]]}' for p in sorted(blocks))}"
            case ["nodes", *_]:
                assert isinstance(self.cache, RadixCache)
                locks = nodes_of(self.cache)
                nodes = [f"{node}:{locks[node]}".removesuffix(":0") for node in sorted(locks)]
                return f"nodes {shown(nodes)}"
            case [prefix, "hits", _]:
                found = [block.block_id for block in world.match(self.tokens(prefix))]
                return f"{prefix} hits {shown(map(self.spelt, found[-1:]))}"
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
                if tenant not in world.tenants:
                    world.tenants.append(tenant)
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

    def spelt(self, block_id: int) -> str:
        return as_word(self.world.heard[block_id][1], self.world.block_size)

    def left(self) -> list[str]:
        return [as_word(tokens, self.world.block_size) for _, tokens in self.world.left]

    def block_of(self, prefix: str) -> Block:
        """The block that holds this prefix; the null block, if it is not cached."""
        path = self.world.model.path(self.tokens(prefix), ())
        return self.world.pool.blocks[self.world.model.block_of.get(path[-1], 0)]

    def publish(self, tenant: Tenant, num_blocks: int) -> str:
        first = tenant.num_published
        given = tenant.table[first : first + num_blocks]
        frees = set(self.world.publish(tenant, num_blocks))
        assert all(given[index - first].ref_cnt == 0 for index in frees)
        indices = range(first, tenant.num_published)
        letters = {i: self.spelt(tenant.table[i].block_id)[-1] for i in indices}
        freed = f", frees {''.join(letters[i] for i in sorted(frees))}" if frees else ""
        return ("".join(letters[i] for i in indices if i not in frees) or "-") + freed


def shown(words: Iterable[str]) -> str:
    return " ".join(words) or "-"
