"""Each policy against its definition; the two that look at the cache with the real caches.

The definitions are written down again here without any cleverness: cached prefixes as tuples of
tokens, the walk as a recursion over groups of requests, duplicates by comparing all pairs.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from block_pool import BlockPool
from cached_kv_cache_manager import CachedKVCacheManager
from kv_memory import KeyedRequest, extra_keys_of
from kv_slots import PREFIX_CACHES
from policies import PriorityPolicy, SchedulePolicy
from policy_queue import PolicyQueue
from prefix_cache import PrefixCache, normalise_extra_keys
from prefix_cache_local import PrefixCacheLocal
from request import Request, SamplingParams
from sglang_policies import (
    CacheAwarePolicy,
    DFSWeight,
    LongestOutputFirst,
    LongestPrefixMatch,
    RandomPolicy,
)
from test_prefix_cache import CountingList

CACHE_AWARE = (LongestPrefixMatch, DFSWeight)
PARAMS = SamplingParams(temperature=0, ignore_eos=True)


def ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def make(request_id: str, tokens: Sequence[int] = (1,), salt: str | None = None) -> KeyedRequest:
    keys = (("salt", salt),) if salt else ()
    return KeyedRequest(request_id, tokens, PARAMS, arrival_time=0.0, extra_keys=keys)


# policies with a key


def test_a_lower_priority_number_is_served_first_and_then_who_came_first():
    requests = [
        Request.from_tokens(name, [1], priority=priority, arrival_time=time)
        for name, priority, time in [("a", 1, 0), ("b", 0, 9), ("c", -1, 7), ("d", 0, 8)]
    ]
    assert ids(PriorityPolicy().order(requests)) == ["c", "d", "b", "a"]
    assert not PriorityPolicy.preempted_first


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
    """No other module defines it, so a reader can type it, too."""
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

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    def known(self) -> set[tuple]:
        return {(prefix.extra_keys, prefix.token_ids) for prefix in self.cache.cached_prefixes()}

    def num_cached(self) -> dict[str, int]:
        """Tokens of the longest cached prefix, short of the last token, by looking for each."""
        known, size = self.known(), self.block_size
        result = {}
        for request in self.waiting:
            keys = normalise_extra_keys(extra_keys_of(request))
            tokens = tuple(request.all_token_ids)
            hits = [n for n in range(size, len(tokens), size) if (keys, tokens[:n]) in known]
            result[request.request_id] = max(hits, default=0)
        return result


def make_world(cache: str, seed: int, num_waiting: int = 14) -> World:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16, 40))
    pool = BlockPool(rng.choice((8, 30, 200)))
    world_cache = PREFIX_CACHES[cache](pool, block_size)
    unit = max(1, rng.choice((block_size // 2, block_size, 16)))  # texts end in blocks and at ends
    texts: list[list[int]] = [[]]
    for _ in range(8):  # a family tree: each text goes on from an earlier one
        more = [rng.randrange(3) for _ in range(unit)] * rng.randrange(1, 4)
        texts.append(rng.choice(texts) + more)

    def prompt() -> list[int]:
        text = rng.choice(texts)
        if rng.random() < 0.3:
            text = text[: rng.randrange(len(text) + 1)]
        return [*text, *([rng.randrange(3)] * rng.choice((0, 1, unit)))] or [0]

    def salt() -> str | None:
        return rng.choice((None, None, None, "x"))

    for _ in range(rng.randrange(6)):
        keys = make("", [1], salt()).extra_keys
        world_cache.cache_computed_blocks(prompt(), keys)
    waiting = [make(f"r{i}", prompt(), salt()) for i in range(rng.randrange(num_waiting))]
    return World(world_cache, CachedKVCacheManager(pool, block_size, world_cache), waiting)


def by_definition_lpm(world: World) -> list[Request]:
    num_cached = world.num_cached()
    numbered = list(enumerate(world.waiting))
    numbered.sort(key=lambda pair: (-num_cached[pair[1].request_id], pair[0]))
    return [request for _, request in numbered]


def by_definition_dfs(world: World) -> list[Request]:
    num_cached, size = world.num_cached(), world.block_size

    def depth_first(requests: list[Request], depth: int) -> list[Request]:
        below: dict[tuple, list[Request]] = {}  # in order of arrival, as dicts are
        for request in requests:
            if num_cached[request.request_id] > depth:
                keys = normalise_extra_keys(extra_keys_of(request))
                child = (keys, *request.all_token_ids[: depth + size])
                below.setdefault(child, []).append(request)
        result: list[Request] = []
        for group in sorted(below.values(), key=len, reverse=True):
            result += depth_first(group, depth + size)
        return result + [r for r in requests if num_cached[r.request_id] == depth]

    return depth_first(world.waiting, 0)


def duplicates_by_definition(
    world: World, ordered: list[Request], min_cached: int, min_shared: int
) -> set[str]:
    num_cached, size = world.num_cached(), world.block_size

    def num_shared(request: Request, earlier: Request) -> int:
        """Uncached tokens, in whole blocks, that `request` could use of what `earlier` computes."""
        if normalise_extra_keys(extra_keys_of(request)) != normalise_extra_keys(
            extra_keys_of(earlier)
        ):
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


def order_by_definition(
    kind: type[CacheAwarePolicy], world: World, min_cached: int, min_shared: int
) -> list[str]:
    ordered = DEFINITIONS[kind](world)
    put_off = duplicates_by_definition(world, ordered, min_cached, min_shared)
    return sorted(ids(ordered), key=lambda request_id: request_id in put_off)


DEFINITIONS = {LongestPrefixMatch: by_definition_lpm, DFSWeight: by_definition_dfs}


@pytest.mark.net
@pytest.mark.parametrize("kind", CACHE_AWARE)
@pytest.mark.parametrize("cache", PREFIX_CACHES)
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    min_cached=st.sampled_from((0, 1, 8, 32, 1000)),
    min_shared=st.sampled_from((1, 5, 16, 32)),
)
def test_the_order_is_the_one_of_the_definition(kind, cache, seed, min_cached, min_shared):
    world = make_world(cache, seed)
    find = world.manager.find_cached_blocks
    policy = kind(find, world.block_size, min_cached=min_cached, min_shared=min_shared)
    expected = order_by_definition(kind, world, min_cached, min_shared)
    for _ in range(2):  # to look changes nothing that a second look would see
        assert ids(policy.order(world.waiting)) == expected
    world.cache.check_invariants()


def test_the_random_worlds_cover_each_case():
    """Else the test above would prove little: hits, ends inside the tree, parted ways, duplicates,
    and orders in which the two policies differ."""
    seen = {"hit": 0, "put off": 0, "policies differ": 0, "not by arrival": 0, "two ways": 0}
    for seed in range(150):
        world = make_world("hash", seed)
        lpm, dfs = by_definition_lpm(world), by_definition_dfs(world)
        seen["hit"] += any(world.num_cached().values())
        seen["put off"] += bool(duplicates_by_definition(world, lpm, 32, 16))
        seen["policies differ"] += lpm != dfs
        seen["not by arrival"] += lpm != world.waiting
        seen["two ways"] += len(set(world.num_cached().values())) > 2
        # A request is deferred only for an earlier one, so new requests cannot defer it forever.
        put_off = duplicates_by_definition(world, world.waiting, 32, 8)
        assert duplicates_by_definition(world, lpm, 32, 8) == put_off
        assert duplicates_by_definition(world, dfs, 32, 8) == put_off
    assert all(count > 15 for count in seen.values()), seen


def test_the_worked_example_of_the_walk():
    paths = {"r0": "D", "r1": "A", "r2": "ABC", "r3": "D", "r4": "AB"}
    requests = [make(name) for name in paths]

    def find(request: Request) -> list[int]:
        return [ord(block) for block in paths[request.request_id]]

    assert ids(DFSWeight(find).order(requests)) == ["r2", "r4", "r1", "r0", "r3"]
    assert ids(LongestPrefixMatch(find).order(requests)) == ["r2", "r4", "r0", "r1", "r3"]


# duplicates


@pytest.mark.parametrize(
    ("num_cached", "num_shared", "is_put_off"),
    [
        (0, 0, False),
        (0, 31, False),
        (0, 32, True),
        (0, 47, True),
        (16, 100, True),
        (32, 100, False),
    ],
)
def test_a_request_that_shares_32_tokens_is_put_off_unless_32_are_cached(
    num_cached, num_shared, is_put_off
):
    cache, shared = PrefixCacheLocal(100, block_size=16), list(range(num_shared))
    cache.cache_computed_blocks(shared[:num_cached])
    requests = [
        make("a", [*shared, *[107] * 20]),
        make("b", [*shared, *[108] * 20]),
        make("c", shared[:num_cached] or [109]),
    ]
    manager = CachedKVCacheManager(cache.pool, 16, cache)
    order = ids(LongestPrefixMatch(manager.find_cached_blocks, 16).order(requests))
    assert order == (["a", "c", "b"] if is_put_off else ["a", "b", "c"])


# errors and cost


@pytest.mark.parametrize(
    ("field", "lowest"),
    [("block_size", 1), ("max_requests_to_sort", 0), ("min_cached", 0), ("min_shared", 1)],
)
def test_sizes_that_are_too_small_are_errors(field, lowest):
    with pytest.raises(ValueError, match=f"{field} must be >= {lowest}, got {lowest - 1}"):
        DFSWeight(list, **{field: lowest - 1})
    DFSWeight(list, **{field: lowest})


def test_each_request_is_looked_up_once():
    lookups: list[str] = []
    policy = DFSWeight(lambda request: lookups.append(request.request_id) or [])
    policy.order([make(str(i), [1, 2] * 40) for i in range(50)])
    assert lookups == [str(i) for i in range(50)]


def test_duplicates_are_found_without_comparing_pairs():
    """Each request's tokens are read once, 32 of them, however long it is and however many wait."""
    for num_waiting, length in ((10, 100), (100, 100), (10, 5000)):
        requests = [make(str(i), [i % 3] * length) for i in range(num_waiting)]
        for request in requests:
            request.all_token_ids = CountingList(request.all_token_ids)
        CountingList.num_read = 0
        order = LongestPrefixMatch(lambda request: []).order(requests)
        assert CountingList.num_read == 32 * num_waiting
        assert ids(order[:3]) == ["0", "1", "2"]
