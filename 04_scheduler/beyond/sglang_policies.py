"""SGLang's policies, and every policy of this book by its name.

    policy       serves first                        because
    fcfs         the earliest arrival                fair and predictable
    priority     the lowest `priority` number        the caller decided so
    lof          the longest output to come          long ones overlap with more others
    random       the lowest seeded random number     a baseline for the others
    lpm          the longest cached prefix           least to compute, before it is evicted
    lpm-first    the same, of the first 128          `lpm` stops at 128, see below
    dfs-weight   the most wanted cached prefix,      requests with one prefix are served together,
                 depth first                         and it is evicted once, afterwards

The first two are the chapter's own (`policies.py`). The last three look up the cache at every step.

With more than 128 requests waiting, `lpm` serves all in order of arrival, as in SGLang, which saves
the lookups. `lpm-first` and `dfs-weight` go on sorting the first 128. That computes less where a
long queue shares prefixes that compete for memory.

Two requests with the same uncomputed prefix should not be computed in one step: a step later, the
second would find it in the cache. The cache-aware policies move the second one to the end of this
step's order. It waits for a request that came earlier, so new requests cannot defer it again and
again.

SGLang sorts its list at every step, with `dfs-weight` the whole list, and its `lpm` above 128
leaves the order of the last sort. Source: SGLang, arXiv 2312.07104 (for a batch known in advance,
depth first is the best order, and longest prefix first is equivalent to it).

See 04_scheduler/beyond/PREFILL_FIRST.md#9-compared-with-the-post"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil

import policies
from kv_memory import UncachedKVCacheManager, extra_keys_of
from policies import SchedulePolicy, get_policy
from prefix_cache import normalise_extra_keys
from request import Request

FindCachedBlocks = Callable[[Request], Sequence[int]]
CachedBlocks = Mapping[str, Sequence[int]]  # request id -> ids of its cached blocks, head first


class LongestOutputFirst(SchedulePolicy):
    """Most tokens left to generate first. An estimate: most requests stop before `max_tokens`."""

    name = "lof"

    def key(self, request: Request) -> int:
        return request.num_output_tokens - request.max_tokens


class RandomPolicy(SchedulePolicy):
    """Each request has a random number that depends only on `seed` and its id."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def key(self, request: Request) -> float:
        return random.Random(f"{self.seed}/{request.request_id}").random()


class CacheAwarePolicy(SchedulePolicy):
    """Looks up the cached prefix of each waiting request, then calls `arrange`.

    `find_cached_blocks` returns the ids of the blocks that hold a request's longest cached prefix.
    It is called once per step for each of the first `max_requests_to_sort` waiting requests; with
    `sorts_all_or_none`, for none while more of them wait.

    A request with fewer than `min_cached` cached tokens is deferred for this step if a request
    before it computes at least `min_shared` tokens, in whole blocks, that it could use.
    """

    is_cache_aware = True
    min_cached = 32
    min_shared = 32

    def __init__(self, find_cached_blocks: FindCachedBlocks, block_size: int = 16) -> None:
        self.find_cached_blocks = find_cached_blocks
        self.block_size = block_size

    @abstractmethod
    def arrange(self, requests: Sequence[Request], cached: CachedBlocks) -> list[Request]:
        """Return the requests, given in order of arrival, in the order of service."""

    def order(self, requests: Sequence[Request]) -> list[Request]:
        cached = {request.request_id: self.find_cached_blocks(request) for request in requests}
        return self._put_off_duplicates(self.arrange(requests, cached), cached)

    def _put_off_duplicates(
        self, requests: Sequence[Request], cached: CachedBlocks
    ) -> list[Request]:
        """Move duplicates to the end. Requests that share enough uncomputed blocks have the same
        cached block before them and the same tokens in the first of them. These form a key, so
        requests need not be compared in pairs."""
        num_shared_blocks = ceil(self.min_shared / self.block_size)
        to_be_computed: set[tuple] = set()
        now: list[Request] = []
        later: list[Request] = []
        for request in requests:
            block_ids = cached[request.request_id]
            start = len(block_ids) * self.block_size
            end = start + num_shared_blocks * self.block_size
            before = block_ids[-1] if block_ids else normalise_extra_keys(extra_keys_of(request))
            key = (before, *request.all_token_ids[start:end])
            is_duplicate = (
                key in to_be_computed
                and start < self.min_cached
                # The block of the last token cannot be used: see chapter 3.
                and end < request.num_tokens
            )
            to_be_computed.add(key)
            (later if is_duplicate else now).append(request)
        return now + later


class LongestPrefixMatch(CacheAwarePolicy):
    """The longest cached prefix first: least to compute, and in use before it is evicted. If more
    than `max_requests_to_sort` requests wait, they are served in order of arrival, as in SGLang."""

    name = "lpm"
    sorts_all_or_none = True

    def arrange(self, requests: Sequence[Request], cached: CachedBlocks) -> list[Request]:
        return sorted(requests, key=lambda request: -len(cached[request.request_id]))


class LongestPrefixMatchOfFirst(LongestPrefixMatch):
    """`lpm` among the first `max_requests_to_sort` requests, however many wait after them."""

    name = "lpm-first"
    sorts_all_or_none = False


class DFSWeight(CacheAwarePolicy):
    """Walks the tree of cached prefixes depth first, the child with the most requests first.

    A block is a node of the tree, since it represents one prefix, and a request's blocks are its
    path. A node's weight is the number of requests whose path contains it:

        A 3 --+-- B 2 ----- C 1      paths: ABC, AB, A, D, D   (weights after the names)
        D 2                          order: ABC, AB, A, then both D

    Sorting the paths by their weights gives that walk. A path that extends another one compares as
    larger, and the larger is first.
    """

    name = "dfs-weight"

    def arrange(self, requests: Sequence[Request], cached: CachedBlocks) -> list[Request]:
        weights: Counter[int] = Counter()
        # The earlier its first request arrived, the higher a block's rank.
        ranks: dict[int, int] = {}
        for rank, request in enumerate(reversed(requests)):
            blocks = cached[request.request_id]
            weights.update(blocks)
            ranks.update(dict.fromkeys(blocks, rank))

        nodes = {block: (weight, ranks[block]) for block, weight in weights.items()}

        def way(request: Request) -> list[tuple[int, int]]:
            return [nodes[block] for block in cached[request.request_id]]

        return sorted(requests, key=way, reverse=True)  # equals stay in order of arrival


POLICIES: dict[str, type[SchedulePolicy]] = policies.POLICIES | {
    policy.name: policy
    for policy in (
        LongestOutputFirst,
        RandomPolicy,
        LongestPrefixMatch,
        LongestPrefixMatchOfFirst,
        DFSWeight,
    )
}


def policy_by_name(
    name: str, kv_memory: UncachedKVCacheManager | None = None, seed: int = 0
) -> SchedulePolicy:
    """The policy of this name. `kv_memory` is for cache-aware policies, which look up its cache;
    `seed` is for `"random"`. Raises `ValueError` for an unknown name."""
    kind = get_policy(name, POLICIES)
    if issubclass(kind, CacheAwarePolicy):
        assert kv_memory is not None, f"{name!r} needs a memory to look up"
        return kind(kv_memory.find_cached_blocks, kv_memory.block_size)
    return RandomPolicy(seed) if kind is RandomPolicy else kind()
