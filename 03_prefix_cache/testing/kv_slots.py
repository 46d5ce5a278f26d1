"""A fake KV memory: every slot records all tokens, from the first on, that it was computed from,
and the extra keys. A request that reads anything except its own prefix fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from block_pool import BlockPool
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of, normalise_extra_keys
from prefix_cache_local import PrefixCacheLocal
from radix_cache import RadixCache
from request import Request, SamplingParams
from scheduler_interface import BlockTableUpdate

PARAMS = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)

MakeCache = Callable[[BlockPool, int], PrefixCache]


PREFIX_CACHES: dict[str, MakeCache] = {
    "hash": lambda pool, block_size: PrefixCacheLocal(pool=pool, block_size=block_size),
    "radix": lambda pool, block_size: RadixCache(pool=pool, page_size=block_size),
}


def make_request(request_id: str, tokens: Sequence[int], salt: str | None = None) -> KeyedRequest:
    keys = (("salt", salt), ("lora", 7))[:: 1 if len(tokens) % 2 else -1] if salt else ()
    return KeyedRequest(request_id, tokens, PARAMS, arrival_time=0.0, extra_keys=keys)


def content(tokens: Sequence[int], request: Request) -> list[object]:
    """The content that a reader of these positions must find."""
    keys = normalise_extra_keys(extra_keys_of(request))
    return [(tuple(tokens[: i + 1]), keys) for i in range(len(tokens))]


class Runner:
    """The model's side: KV memory by slot, and block tables built from deltas alone."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size, self.window = block_size, window
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

    def forward(self, batch: Sequence[tuple[Request, int, int]], alive: Collection[str]) -> None:
        """Write positions `[start, stop)` of each request, then let each read all that its tokens
        see, up to `stop`.
        Requests that were aborted in between also write, but do not read."""
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
        for prefix in cache.cached_prefixes():
            first = len(prefix.token_ids) - self.block_size
            for i, slot in enumerate(self.slots(prefix.block.block_id), first + 1):
                expected = (prefix.token_ids[:i], prefix.extra_keys)
                assert self.memory[slot] == expected, "wrong KV is cached"
