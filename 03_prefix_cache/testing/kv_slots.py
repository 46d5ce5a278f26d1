"""A fake KV memory: every slot records all tokens, from the first on, that it was computed from,
and the extra keys. A request that reads anything except its own prefix fails. And random orders of
calls of a world around it, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Any

from block_pool import BlockPool
from cache_checks import cached_prefixes
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of, normalise_extra_keys
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache
from request import Request, SamplingParams
from scheduler_interface import BlockTableUpdate

MakeCache = Callable[[BlockPool, int], PrefixCache]
BLOCK_SIZES = (1, 2, 4)
PREFIX_CACHES: dict[str, MakeCache] = {
    "hash": lambda pool, block_size: PrefixCacheLocal(pool=pool, block_size=block_size),
    "radix": lambda pool, block_size: RadixCache(pool=pool, page_size=block_size),
}


def make_request(request_id: str, tokens: Sequence[int], salt: str | None = None) -> KeyedRequest:
    keys = (("salt", salt), ("lora", 7))[:: 1 if len(tokens) % 2 else -1] if salt else ()
    params = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
    return KeyedRequest(request_id, tokens, params, arrival_time=0.0, extra_keys=keys)


def content(tokens: Sequence[int], request: Request) -> list[object]:
    """The content that a reader of these positions must find."""
    keys = normalise_extra_keys(extra_keys_of(request))
    return [(tuple(tokens[: i + 1]), keys) for i in range(len(tokens))]


class Runner:
    """The model's side: KV memory by slot, and block tables built from deltas alone."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.memory: dict[int, object] = {}
        self.tables: dict[str, list[int]] = {}

    def slots(self, block_id: int) -> range:
        return range(block_id * self.block_size, (block_id + 1) * self.block_size)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[object]:
        slots = [slot for block_id in block_ids for slot in self.slots(block_id)]
        assert len(slots) >= num_tokens, "the table is too short"
        return [self.memory.get(slot) for slot in slots[:num_tokens]]

    def move_blocks(self, moves: Iterable[BlockTableUpdate]) -> None:
        for move in moves:
            self.tables[move.req_id][move.block_index] = move.block_id

    def update(
        self,
        planned: Iterable[str],
        tables: Callable[[str], Sequence[int]],
        moves: Iterable[BlockTableUpdate],
    ) -> None:
        """A plan brings new table entries of its requests, and moves."""
        for name in planned:
            known = self.tables.setdefault(name, [])
            known += tables(name)[len(known) :]
        self.move_blocks(moves)
        for name, table in self.tables.items():
            assert table == list(tables(name))[: len(table)], "not told"

    def forward(self, batch: Sequence[tuple[Request, int, int]], alive: Collection[str]) -> None:
        """Write positions `[start, stop)` of each request, then let each read all that its tokens
        see. Requests that were aborted in between also write, but do not read."""
        written: set[int] = set()
        for request, start, stop in batch:
            table = self.tables[request.request_id]
            slots = [slot for block_id in table for slot in self.slots(block_id)][start:stop]
            assert len(slots) == stop - start, "the runner's table is too short"
            assert written.isdisjoint(slots), "two requests write one slot"
            written.update(slots)
            values = content(request.all_token_ids[:stop], request)[start:]
            self.memory |= zip(slots, values, strict=True)
        for request, start, stop in batch:
            first = 0 if self.window is None else max(0, start - self.window + 1)
            if request.request_id in alive:
                found = self.read(self.tables[request.request_id], stop)
                expected = content(request.all_token_ids[:stop], request)
                assert found[first:] == expected[first:], request

    def spoil(self, request_id: str, start: int, stop: int) -> None:
        slots = [slot for block_id in self.tables[request_id] for slot in self.slots(block_id)]
        self.memory |= dict.fromkeys(slots[start:stop], "NaN")

    def check_cached(self, cache: PrefixCache) -> None:
        for prefix in cached_prefixes(cache):
            first = len(prefix.token_ids) - self.block_size
            for i, slot in enumerate(self.slots(prefix.block.block_id), first + 1):
                expected = (prefix.token_ids[:i], prefix.extra_keys)
                assert self.memory[slot] == expected, "wrong KV is cached"


# -- in any order


class Chaos:
    """Any order of anything, drawn by `pick(low, high)` and `choose(items)`. An operation is a
    method."""

    def __init__(self, world: Any, pick: Callable[[int, int], int]) -> None:
        self.world = world
        self.pick = pick
        self.ids = map(str, count())

    def choose(self, items: Iterable[str]) -> str | None:
        items = sorted(items)
        return items[self.pick(0, len(items) - 1)] if items else None

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.pick(0, 1) for _ in range(self.pick(low, high))]


def check_long_run(
    make_world: Callable[[int, int], Any],
    kind: type[Chaos],
    operations: Sequence[str],
    seed: int,
    block_size: int,
) -> None:
    """`make_world(num_usable_blocks, block_size)`."""
    rng = random.Random(f"{seed} {block_size}")
    world = make_world(rng.choice([4, 9, 20]), block_size)
    chaos = kind(world, rng.randint)
    for _ in range(250):
        getattr(chaos, rng.choice(operations))()
        world.check()
    world.drain()
