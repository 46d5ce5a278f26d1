"""The cost of the caches themselves, without a model. `plot_prefix_cache.py --record` runs this
module; alone it does nothing.

Every repeat is kept. Compared calls run in turn, each round starting with another. Times are
processor time of one thread, which other programs disturb less than wall time. Python's cycle
collector is off during timing, as in `timeit`: with a million cached blocks one collection takes
longer than everything here.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from block_pool import BlockPool
from kv_slots import PREFIX_CACHES
from prefix_cache import MatchCursor, PrefixCache

try:
    import xxhash  # pyright: ignore[reportMissingImports]
except ImportError:
    xxhash = None

VOCAB_SIZE = 32768
BLOCK_SIZE = 16
PROMPT_LEN = 4096  # tokens
PROMPT_BLOCKS = PROMPT_LEN // BLOCK_SIZE
NUM_PROMPTS = (4, 40, 400, 4000)  # 1,024 to 1,024,000 cached blocks
DEPTHS = (1, 4, 16, 64, 256)  # nodes on the way to the end of a 4,096-token prompt
CACHES = ("hash", "radix")
OPERATIONS = ("match", "touch + release", "match + insert", "evict")


def make_cache(name: str, num_blocks: int, block_size: int = BLOCK_SIZE) -> PrefixCache:
    return PREFIX_CACHES[name](BlockPool(num_blocks + 1), block_size)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cpu_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return microseconds of processor time of one call, and its result."""
    start = time.process_time_ns()
    result = call()
    return (time.process_time_ns() - start) / 1e3, result


def in_turn(names: Sequence, round_number: int) -> list:
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


# -- cost of an operation against the size of the cache


def random_prompt(source: np.random.Generator) -> list[int]:
    return source.integers(VOCAB_SIZE, size=PROMPT_LEN).tolist()


class FilledCache:
    """A cache full of prompts that no request uses, and blocks for one more prompt.

    `_prompts` holds them in the order of their last use, as arrays: every call of the cache gets
    new token id objects, as from a tokenizer. Comparing an object with itself would be cheaper.
    """

    def __init__(self, name: str, num_prompts: int) -> None:
        self.cache = make_cache(name, (num_prompts + 1) * PROMPT_BLOCKS)
        self.num_blocks = num_prompts * PROMPT_BLOCKS
        self._source = np.random.default_rng(num_prompts)
        self._random = random.Random(num_prompts)
        self._prompts: deque[np.ndarray] = deque()
        tokens = list(range(VOCAB_SIZE))  # one object a token, else a million blocks take 10 GB
        for _ in range(num_prompts):
            prompt = random_prompt(self._source)
            self._prompts.append(np.array(prompt, dtype=np.int32))
            self.cache.cache_computed_blocks([tokens[t] for t in prompt])

    def time_round(self) -> dict[str, float]:
        """Return microseconds of each operation on a whole prompt: a cached one is matched, used
        and released, a new one is missed and inserted. The cache is as full afterwards."""
        cache, times = self.cache, {}
        index = self._random.randrange(len(self._prompts))
        self._prompts.append(self._prompts[index])
        del self._prompts[index]
        known, new = self._prompts[-1].tolist(), random_prompt(self._source)

        times["match"], match = cpu_us(lambda: cache.match_prefix(known))
        assert len(match.blocks) == PROMPT_BLOCKS, "a cached prompt was not found"
        times["touch + release"], _ = cpu_us(
            lambda: (cache.touch(match.blocks), cache.release(match.blocks))
        )
        blocks, cursor = cache.pool.allocate(PROMPT_BLOCKS), MatchCursor()
        assert blocks is not None, "the pool is too small"
        times["match + insert"], (missed, inserted) = cpu_us(
            lambda: (
                cache.match_prefix(new, cursor=cursor),
                cache.insert(new, blocks, cursor=cursor),
            )
        )
        assert not missed.blocks, "a new prompt was found"
        cache.release(inserted.blocks)
        self._prompts.append(np.array(new, dtype=np.int32))
        times["evict"], _ = cpu_us(lambda: cache.evict(PROMPT_BLOCKS))
        self._prompts.popleft()
        assert cache.num_cached_blocks == self.num_blocks, "a round must leave the cache as full"
        return times


def measure_sizes(num_prompts: Sequence[int], repeats: int) -> dict:
    """Return `{cache: {cached blocks: {operation: [microseconds for a prompt]}}}`."""
    filled = {(name, num): FilledCache(name, num) for num in num_prompts for name in CACHES}
    times = {
        name: {str(num * PROMPT_BLOCKS): {op: [] for op in OPERATIONS} for num in num_prompts}
        for name in CACHES
    }
    with no_collection():
        for round_number in range(-1, repeats):  # the first warms up
            for name, num in in_turn(list(filled), round_number):
                for operation, us in filled[name, num].time_round().items():
                    if round_number >= 0:
                        times[name][str(num * PROMPT_BLOCKS)][operation].append(us)
    return times


# -- cost of a match against the number of nodes on its way


def split_path(name: str, num_nodes: int) -> tuple[PrefixCache, list[int]]:
    """Build a cache with one prompt, whose path other prompts leave at `num_nodes - 1` places."""
    source = np.random.default_rng(num_nodes)
    cache = make_cache(name, 2 * PROMPT_BLOCKS)
    prompt = random_prompt(source)
    cache.cache_computed_blocks(prompt)
    for i in range(1, num_nodes):
        left_at = i * PROMPT_LEN // num_nodes
        cache.cache_computed_blocks(prompt[:left_at] + random_prompt(source)[:BLOCK_SIZE])
    return cache, list(prompt)


def measure_depths(depths: Sequence[int], repeats: int) -> dict:
    """Return `{cache: {nodes: [microseconds to match a prompt]}}`."""
    split = {(name, depth): split_path(name, depth) for depth in depths for name in CACHES}
    times = {name: {str(depth): [] for depth in depths} for name in CACHES}
    with no_collection():
        for round_number in range(-1, repeats):
            for name, depth in in_turn(list(split), round_number):
                cache, prompt = split[name, depth]
                prompt = np.array(prompt).tolist()
                us, match = cpu_us(lambda: cache.match_prefix(prompt))  # noqa: B023
                assert len(match.blocks) == PROMPT_BLOCKS
                if round_number >= 0:
                    times[name][str(depth)].append(us)
    return times


# -- a whole prompt, matched and allocated, compared with a design that keeps less


class DictOfHashes:
    """The published design of nano-vllm's block manager, written from its description: a dictionary
    from chained hashes to block ids, tokens compared at each hit, and blocks that stay findable
    until they are reallocated. No extra keys, listener, refusals or checks."""

    def __init__(self, num_blocks: int, hash_bytes: Callable[[bytes], int]) -> None:
        self.hash_bytes = hash_bytes
        self.block_ids: dict[int, int] = {}
        self.tokens: list[list[int]] = [[] for _ in range(num_blocks)]
        self.hashes: list[int] = [-1] * num_blocks
        self.ref_cnts = [0] * num_blocks
        self.free = deque(range(num_blocks))

    def take(self, token_ids: list[int]) -> list[int]:
        """Return a block for each full block of tokens, cached or fresh."""
        table, parent = [], b""
        for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            tokens = token_ids[start : start + BLOCK_SIZE]
            key = self.hash_bytes(parent + np.array(tokens).tobytes())
            parent = key.to_bytes(8, "little")
            block_id = self.block_ids.get(key, -1)
            if block_id == -1 or self.tokens[block_id] != tokens:
                block_id = self._take_free(key, tokens)
            self.ref_cnts[block_id] += 1
            table.append(block_id)
        return table

    def _take_free(self, key: int, tokens: list[int]) -> int:
        block_id = self.free.popleft()
        old = self.hashes[block_id]
        if self.block_ids.get(old) == block_id:
            del self.block_ids[old]
        self.hashes[block_id], self.tokens[block_id] = key, tokens
        self.block_ids[key] = block_id
        return block_id

    def give_back(self, table: list[int]) -> None:
        for block_id in reversed(table):
            self.ref_cnts[block_id] -= 1
            if self.ref_cnts[block_id] == 0:
                self.free.append(block_id)


def blake2b_64(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


class PromptTimer:
    """Admission of a prompt: look up its cached blocks, then cache the rest. Then its end."""

    def __init__(self, name: str, num_prompts: int) -> None:
        self.cache = make_cache(name, num_prompts * PROMPT_BLOCKS)

    def take(self, prompt: list[int]) -> list:
        cache, cursor = self.cache, MatchCursor()
        found = cache.match_prefix(prompt, cursor=cursor).blocks
        cache.touch(found)
        num_new = PROMPT_BLOCKS - len(found)
        if num_new == 0:
            return found
        cache.evict(num_new - cache.pool.num_free_blocks)
        blocks = cache.pool.allocate(num_new)
        assert blocks is not None, "the pool is too small"
        return found + cache.insert(prompt, blocks, start=len(found), cursor=cursor).blocks

    def give_back(self, taken: list) -> None:
        self.cache.release(taken)


def measure_prompts(num_prompts: int, repeats: int) -> dict:
    """Return `{design: {"new" | "known": [microseconds for a prompt]}}`; every cache is full, so a
    new prompt also evicts an old one. A known prompt is in use by another request."""
    designs: dict[str, PromptTimer | DictOfHashes] = {
        name: PromptTimer(name, num_prompts) for name in CACHES
    }
    num_blocks = num_prompts * PROMPT_BLOCKS
    designs["dict, blake2b"] = DictOfHashes(num_blocks, blake2b_64)
    if xxhash is not None:
        designs["dict, xxhash"] = DictOfHashes(num_blocks, xxhash.xxh64_intdigest)
    source = np.random.default_rng(0)
    for _ in range(num_prompts):
        prompt = random_prompt(source)
        for design in designs.values():
            design.give_back(design.take(prompt))
    times = {name: {"new": [], "known": []} for name in designs}
    with no_collection():
        for round_number in range(-1, repeats):
            prompt = random_prompt(source)
            for name in in_turn(list(designs), round_number):
                take = designs[name].take
                new, taken = cpu_us(lambda: take(np.array(prompt).tolist()))  # noqa: B023
                known, again = cpu_us(lambda: take(np.array(prompt).tolist()))  # noqa: B023
                designs[name].give_back(again)
                designs[name].give_back(taken)
                if round_number >= 0:
                    times[name]["new"].append(new)
                    times[name]["known"].append(known)
    return times


def measure_operations(repeats: int, *, tiny: bool = False) -> dict:
    """Measure everything of `--record ops` except the workload."""
    num_prompts = NUM_PROMPTS[:2] if tiny else NUM_PROMPTS
    return {
        "config": {
            "repeats": repeats,
            "prompt_len": PROMPT_LEN,
            "block_size": BLOCK_SIZE,
            "clock": "processor time",
            "xxhash": None if xxhash is None else xxhash.VERSION,
        },
        "sizes": measure_sizes(num_prompts, repeats),
        "depths": measure_depths(DEPTHS, repeats),
        "prompts": measure_prompts(num_prompts[1], repeats),
    }
