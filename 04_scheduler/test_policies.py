"""Each policy against its definition; the two that look at the cache with the real caches.

The definitions are written down again here without any cleverness: cached prefixes as tuples of
tokens, the walk as a recursion over groups of requests, duplicates by comparing all pairs."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from block_pool import BlockPool
from cache_checks import cached_prefixes
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import KeyedRequest, extra_keys_of
from kv_slots import PREFIX_CACHES
from policies import SchedulePolicy
from policy_queue import PolicyQueue
from prefix_cache import PrefixCache, normalise_extra_keys
from request import Request, SamplingParams
from sglang_policies import DFSWeight, LongestOutputFirst, LongestPrefixMatch, RandomPolicy

PARAMS = SamplingParams(temperature=0, ignore_eos=True)


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def make(request_id: str, tokens: Sequence[int] = (1,), salt: str | None = None) -> KeyedRequest:
    keys = (("salt", salt),) if salt else ()
    return KeyedRequest(request_id, tokens, PARAMS, arrival_time=0.0, extra_keys=keys)


# policies with a key


def test_the_longest_output_is_the_remaining_one():
    requests = [
        Request.from_tokens(name, [1], max_new_tokens=n) for name, n in zip("abc", (5, 9, 7))
    ]
    for token in (1, 2, 3):
        requests[1].append_output_token(token)  # nine less three
    assert ids(LongestOutputFirst().order(requests)) == ["c", "b", "a"]
    requests[2].max_tokens = 4  # the scheduler lowers it where the model ends sooner
    assert ids(LongestOutputFirst().order(requests)) == ["b", "a", "c"]


def test_draws_do_not_change_between_processes():
    """Python's own `hash` of a string would."""
    assert RandomPolicy(0).key(make("a")) == random.Random("0/a").random() == 0.9327985644569078
    assert RandomPolicy(3).key(make("b")) == random.Random("3/b").random()


def test_the_policy_that_the_docstring_suggests_runs_as_typed():
    (suggested,) = re.findall(r"^    class .*?(?=^\S)", policies.__doc__ or "", re.M | re.S)
    names = vars(policies).copy()
    exec(textwrap.dedent(suggested), names)
    queue = PolicyQueue(names["ShortestPromptFirst"]())
    for name, length in zip("abcd", (5, 2, 9, 2)):
        queue.add_request(make(name, [1] * length))
    assert ids(queue) == ["b", "d", "a", "c"]


def test_a_policy_without_key_and_order_says_so():
    class Nothing(SchedulePolicy):
        name = "nothing"

    with pytest.raises(NotImplementedError, match="Nothing must define key"):
        PolicyQueue(Nothing()).add_request(make("a"))


# policies that look at the cache, against brute force


@dataclass
class World:
    """A cache that has seen some prompts and forgotten others, and requests that wait."""

    cache: PrefixCache
    manager: CachedKVCacheManager
    waiting: list[Request]

    def num_cached(self) -> dict[str, int]:
        """Tokens of the longest cached prefix, short of the last token, by looking for each."""
        known = {(prefix.extra_keys, prefix.token_ids) for prefix in cached_prefixes(self.cache)}
        size = self.cache.block_size
        result = {}
        for request in self.waiting:
            keys = keys_of(request)
            tokens = tuple(request.all_token_ids)
            hits = [n for n in range(size, len(tokens), size) if (keys, tokens[:n]) in known]
            result[request.request_id] = max(hits, default=0)
        return result


def keys_of(request: Request) -> tuple:
    return normalise_extra_keys(extra_keys_of(request))


def make_world(cache: str, seed: int) -> World:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16, 40))
    pool = BlockPool(rng.choice((8, 30, 200)))
    world_cache = PREFIX_CACHES[cache](pool, block_size)
    unit = max(1, rng.choice((block_size // 2, block_size, 16)))  # texts end in blocks and at ends
    texts: list[list[int]] = [[]]
    for _ in range(8):  # a family tree: each text goes on from an earlier one
        more = [rng.randrange(3) for _ in range(unit)] * rng.randrange(1, 4)
        texts.append(rng.choice(texts) + more)

    def request(name: str) -> KeyedRequest:
        text = rng.choice(texts)
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text) + 1)]
        prompt = [*text, *([rng.randrange(3)] * rng.choice((0, 1, unit)))] or [0]
        return make(name, prompt, rng.choice((None, None, None, "x")))

    for _ in range(rng.randrange(6)):
        seen = request("")
        world_cache.cache_computed_blocks(seen.prompt_token_ids, seen.extra_keys)
    waiting = [request(f"r{i}") for i in range(rng.randrange(14))]
    return World(world_cache, CachedKVCacheManager(pool, block_size, world_cache), waiting)


def by_longest_prefix(world: World) -> list[Request]:
    num_cached = world.num_cached()
    return sorted(world.waiting, key=lambda request: -num_cached[request.request_id])


def by_depth(world: World) -> list[Request]:
    num_cached = world.num_cached()
    size = world.cache.block_size

    def depth_first(requests: list[Request], depth: int) -> list[Request]:
        below: dict[tuple, list[Request]] = {}  # in order of arrival, as dicts are
        for request in requests:
            if num_cached[request.request_id] > depth:
                child = (keys_of(request), *request.all_token_ids[: depth + size])
                below.setdefault(child, []).append(request)
        result: list[Request] = []
        for group in sorted(below.values(), key=len, reverse=True):
            result += depth_first(group, depth + size)
        return result + [r for r in requests if num_cached[r.request_id] == depth]

    return depth_first(world.waiting, 0)


def duplicates(
    world: World, ordered: list[Request], min_cached: int = 32, min_shared: int = 32
) -> set[str]:
    """Requests that wait a step for one that came before them."""
    num_cached = world.num_cached()
    size = world.cache.block_size

    def num_shared(request: Request, earlier: Request) -> int:
        """Uncached tokens, in whole blocks, that `request` could use of what `earlier` computes."""
        if keys_of(request) != keys_of(earlier):
            return 0
        num_equal = 0
        for one, other in zip(request.all_token_ids[:-1], earlier.all_token_ids):
            if one != other:
                break
            num_equal += 1
        return num_equal // size * size - num_cached[request.request_id]

    return {
        request.request_id
        for index, request in enumerate(ordered)
        if num_cached[request.request_id] < min_cached
        and any(num_shared(request, earlier) >= min_shared for earlier in ordered[:index])
    }


DEFINITIONS = {LongestPrefixMatch: by_longest_prefix, DFSWeight: by_depth}
SIZES = {"min_cached": st.sampled_from((0, 1, 8, 32, 1000))}
SIZES["min_shared"] = st.sampled_from((1, 5, 16, 32))


@pytest.mark.net
@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize("cache", PREFIX_CACHES)
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.just({}) | st.fixed_dictionaries(SIZES))
def test_the_order_is_the_one_of_the_definition(kind, cache, seed, sizes):
    world = make_world(cache, seed)
    policy = kind(world.manager.find_cached_blocks, world.cache.block_size)
    vars(policy).update(sizes)
    ordered = DEFINITIONS[kind](world)
    put_off = duplicates(world, ordered, **sizes)
    expected = sorted(ids(ordered), key=lambda request_id: request_id in put_off)
    for _ in range(2):  # to look changes nothing that a second look would see
        assert ids(policy.order(world.waiting)) == expected
    world.cache.check_invariants()


def test_the_worked_example_of_the_walk():
    paths = {"r0": "D", "r1": "A", "r2": "ABC", "r3": "D", "r4": "AB"}
    requests = [make(name) for name in paths]
    looked_up: list[str] = []

    def find(request: Request) -> list[int]:
        looked_up.append(request.request_id)
        return [ord(block) for block in paths[request.request_id]]

    assert ids(DFSWeight(find).order(requests)) == ["r2", "r4", "r1", "r0", "r3"]
    assert looked_up == [*paths], "once each"
    assert ids(LongestPrefixMatch(find).order(requests)) == ["r2", "r4", "r0", "r1", "r3"]
