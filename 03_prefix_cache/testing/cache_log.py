"""Performs a log of a prefix cache; `lookups.txt` says how to read one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from block_pool import Block
from cache_words import Rig, as_word
from kv_slots import MakeCache
from prefix_cache import MatchCursor, NormalKeys
from radix_cache import RadixCache
from radix_words import nodes_of
from step_log import StepLog


@dataclass
class CacheUser:
    """A request: its blocks, how many of them are published, and the path that it remembers."""

    prefix: str = ""
    table: list[Block] = field(default_factory=list)
    num_published: int = 0
    cursor: MatchCursor = field(default_factory=MatchCursor)


class CacheLog(StepLog):
    """Performs the actions of a case on a cache, whose listener it is."""

    def __init__(self, make_cache: MakeCache, block_size: int, num_blocks: int = 40) -> None:
        self.rig = Rig(make_cache, num_blocks, block_size)
        self.cache, self.pool = self.rig.cache, self.rig.pool
        self.cache.listener = self
        self.holders: dict[str, CacheUser] = {}
        self.prefix_of: dict[int, str] = {}  # of each cached block, by its id
        self.left: list[str] = []  # in the last action

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        before = "" if parent is None else self.prefix_of[parent.block_id]
        self.prefix_of[block.block_id] = before + as_word(token_ids, self.rig.block_size)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        self.left += [self.prefix_of.pop(block.block_id) for block in blocks]

    blocks_invalidated = blocks_evicted

    def act(self, action: str) -> str:
        self.left = []
        words = action.removesuffix(": refused").split()
        if action.endswith(": refused"):
            self.rig.refused(None, self.perform_words, words)
            return action
        performed = self.perform_words(words)
        self.rig.check()
        return performed

    def perform_words(self, words: list[str]) -> str:
        holder = self.holders.setdefault(words[0], CacheUser())
        match words:
            case ["cache", *prefixes]:
                for prefix in prefixes:
                    tokens = self.tokens(prefix)
                    self.cache.cache_computed_blocks(tokens)
                    tokens[:] = [-1] * len(tokens)
            case ["evict", number, *_]:
                num_evicted = self.cache.evict(int(number.strip(":")))
                assert num_evicted == len(self.left)
                return f"evict {number} {shown(self.left)}"
            case ["invalidate", prefix, *_]:
                self.cache.invalidate(self.block_of(prefix.strip(":")))
                return f"invalidate {prefix} {shown(sorted(self.left))}"
            case ["cached", *_]:
                return f"cached {shown(sorted(self.rig.names()))}"
            case ["users", *_]:
                prefixes = sorted(self.prefix_of.values())
                users = [f"{p}:{self.cache.num_users(self.block_of(p))}" for p in prefixes]
                return f"users {shown(users)}"
            case ["nodes", *_]:
                assert isinstance(self.cache, RadixCache)
                locks = nodes_of(self.cache)
                nodes = [f"{node}:{locks[node]}".removesuffix(":0") for node in sorted(locks)]
                return f"nodes {shown(nodes)}"
            case [prefix, "hits", _]:
                return f"{prefix} hits {self.look_up(prefix, MatchCursor())}"
            case [name, prefix, "hits", _]:
                return f"{name} {prefix} hits {self.look_up(prefix, holder.cursor)}"
            case [_, "uses", prefix, *longer]:
                self.use(holder, prefix, longer[-1] if longer else prefix)
            case [_, "computes", prefix]:
                holder.prefix = prefix
                holder.table += self.pool.allocate(len(prefix) - len(holder.table)) or []
            case [name, "publishes", *parts]:
                num_blocks = sum(len(part.strip(",")) for part in parts if part != "frees")
                return f"{name} publishes {self.publish(holder, num_blocks)}"
            case [_, "drops", part]:
                self.drop(holder, len(part))
                del holder.table[-len(part) :]
            case [_, "ends"]:
                self.drop(holder, len(holder.table))
            case _:
                raise AssertionError(f"cannot read {' '.join(words)!r}")
        return " ".join(words)

    def tokens(self, prefix: str) -> list[int]:
        """The tokens of `AB`; those of `Ab` lack the last one."""
        tokens = self.rig.spell(prefix.strip("-").upper())
        return tokens[:-1] if prefix[-1].islower() else tokens

    def block_of(self, prefix: str) -> Block:
        """The block that holds this prefix; the null block, if it is not cached."""
        block_ids = {prefix: block_id for block_id, prefix in self.prefix_of.items()}
        return self.pool.blocks[block_ids.get(prefix, 0)]

    def look_up(self, prefix: str, cursor: MatchCursor) -> str:
        match = self.cache.match_prefix(self.tokens(prefix), None, cursor)
        assert match.num_cached_tokens == len(match.blocks) * self.rig.block_size
        found = [self.prefix_of[block.block_id] for block in match.blocks]
        assert found == [prefix[: n + 1].upper() for n in range(len(found))], found
        return shown(found[-1:])

    def use(self, holder: CacheUser, prefix: str, longer: str) -> None:
        match = self.cache.match_prefix(self.tokens(longer), None, holder.cursor)
        found = [self.pool.blocks[block.block_id] for block in match.blocks][: len(prefix)]
        self.cache.touch(found)
        num_new = len(prefix) - len(found)
        holder.prefix = prefix
        holder.table = found + ((self.pool.allocate(num_new) if num_new else None) or [])
        holder.num_published = len(found)
        if num_new:
            self.publish(holder, num_new)

    def publish(self, holder: CacheUser, num_blocks: int) -> str:
        start, stop = holder.num_published, holder.num_published + num_blocks
        given = holder.table[start:stop]
        tokens = self.rig.spell(holder.prefix)
        result = self.cache.insert(tokens, given, start=start, cursor=holder.cursor)
        tokens[:] = [-1] * len(tokens)
        holder.table[start:stop], holder.num_published = result.blocks, stop
        letters = [self.prefix_of[block.block_id][-1] for block in result.blocks]
        num_freed = len(result.duplicates)
        assert all(block.ref_cnt == 0 for block in result.duplicates)
        freed = f", frees {''.join(letters[:num_freed])}" if num_freed else ""
        return ("".join(letters[num_freed:]) or "-") + freed

    def drop(self, holder: CacheUser, num_blocks: int) -> None:
        """Release the last blocks; those that were invalidated are the request's own."""
        blocks = holder.table[-num_blocks:]
        cached = [block for block in blocks if self.cache.owns(block)]
        self.pool.free(blocks[len(cached) :][::-1])
        self.cache.release(cached)


def shown(words: Iterable[str]) -> str:
    return " ".join(words) or "-"
