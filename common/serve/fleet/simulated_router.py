"""A router in front of many engines on a clock that nobody has to wait for: who finds what where.

SIMULATED. The caches are chapter 3's, block by block, and what they tell a router are the engine's
own KV events. The rest is a cost model:

    engine    one prompt after the other, first come, first served, `PREFILL_RATE` tokens a second;
              what its cache has when a prompt's turn comes is not computed again
    cache     as in `replay_trace.py`: one id of the trace is one block, cached once it is computed
    answers   `DECODE_SECONDS` a token; they hold up no prompt and take no room in the cache
    routers   one, or some in turn; of no cost. Each knows at once whom itself it sent where, which
              of their first tokens came, which answers ended, and each event of every engine.
              Nobody dies, leaves, or asks an engine past them.
    arrivals  those of the trace, in its order, faster: in all, `load` times the tokens that the
              fleet could compute if it found nothing. Those of one moment (some traces tell the
              time in steps of 3 s) are spread evenly until the next.

A policy with an index sends a request where `overlap - load_weight * waiting` is highest: tokens
of the prompt that the index says the engine has, and tokens it was sent and has not computed, as
the router knows them. With a weight of 1 that is where the first token should come first, as
Mooncake's conductor (arXiv 2407.00079) has it. Of equals: the one with fewer tokens waiting, then
the one of which the index knows fewer blocks.

    tree     what the router sent there, and, beyond a bound, what was not sent again for longest
    exact    what the engine says: `BlockStored`, `BlockRemoved`. It knows of evictions, and does
             not know what is being computed
    both     what the engine says, and of what the router sent there all that is not computed yet
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product, takewhile

from common.serve.kv_events import CacheChanges
from common.serve.kv_wire import Event
from prefix_workloads import TraceRequest
from replay_trace import make_cache

PREFILL_RATE = 20_000  # tokens a second
DECODE_SECONDS = 0.02  # a token
INDEXES = ("turns", "two", "tree", "exact", "both")
COMPUTED, ENDED, ARRIVES = range(3)  # what happens; of one moment, in this order


@dataclass(frozen=True, slots=True)
class Policy:
    """`index`: "turns" (round robin) and "two" (of two at random, the one with fewer unfinished
    requests) look at no prompt. `tree_size`: a tree's bound, in sizes of an engine's cache."""

    index: str
    load_weight: float = 0.0
    tree_size: float = 1.0

    def __post_init__(self) -> None:
        if self.index not in INDEXES:
            raise ValueError(f"index is {self.index!r}: it must be one of {INDEXES}")


@dataclass(slots=True)
class Served:
    """Of one request: by whom, the prompt's tokens that the router thought were there and that
    were, and the seconds until its first token."""

    engine: int
    expected: int
    hit: int = 0
    first_token: float = 0.0


class Tree:
    """Of one engine: ids in the order of their last use, the deepest of a prompt before its front.
    So nothing leaves before what is behind it."""

    def __init__(self, max_blocks: int) -> None:
        self.held: OrderedDict[int, None] = OrderedDict()
        self.max_blocks = max_blocks

    def has(self, hash_id: int) -> bool:
        return hash_id in self.held

    def sent(self, hash_ids: Sequence[int]) -> None:
        for hash_id in reversed(hash_ids):
            self.held[hash_id] = None
            self.held.move_to_end(hash_id)
        while len(self.held) > self.max_blocks:
            self.held.popitem(last=False)

    def computed(self, hash_ids: Sequence[int]) -> None:
        """It was told when they were sent."""


class Exact:
    """Of one engine: ids by their blocks' hashes, from its events. If `is_ahead`, also those that
    it was sent and has not computed yet."""

    def __init__(self, is_ahead: bool) -> None:
        self.held: set[int] = set()
        self._id_of: dict[int, int] = {}
        self._is_ahead, self._under_way = is_ahead, Counter[int]()

    def has(self, hash_id: int) -> bool:
        return hash_id in self.held or self._under_way[hash_id] > 0

    def told(self, event: Event) -> None:
        if event["type"] == "BlockStored":
            self._id_of |= zip(event["block_hashes"], event["token_ids"], strict=True)
            self.held.update(event["token_ids"])
        elif event["type"] == "BlockRemoved":
            self.held.difference_update(self._id_of.pop(name) for name in event["block_hashes"])
        else:
            self.held.clear()
            self._id_of.clear()

    def sent(self, hash_ids: Sequence[int]) -> None:
        if self._is_ahead:
            self._under_way.update(hash_ids)

    def computed(self, hash_ids: Sequence[int]) -> None:
        if self._is_ahead:
            self._under_way.subtract(hash_ids)


class Router:
    def __init__(self, policy: Policy, num_engines: int, capacity: int, seed: int = 0) -> None:
        self.policy, self._random, self._turn = policy, random.Random(seed), -1
        self.waiting = [0] * num_engines  # tokens
        self.unfinished = [0] * num_engines  # requests
        self.known = [self._new_index(capacity) for _ in range(num_engines)]

    def _new_index(self, capacity: int) -> Tree | Exact:
        if self.policy.index in ("exact", "both"):
            return Exact(self.policy.index == "both")
        size = self.policy.tree_size if self.policy.index == "tree" else 0
        return Tree(int(size * capacity))

    def overlaps(self, request: TraceRequest) -> list[int]:
        """Tokens of its prompt that each engine has, as far as is known."""
        return [
            request.num_tokens_in(len([*takewhile(known.has, request.hash_ids)]))
            for known in self.known
        ]

    def send(self, request: TraceRequest) -> Served:
        overlaps = self.overlaps(request)
        place = self._choose(overlaps)
        self.known[place].sent(request.hash_ids)
        self.waiting[place] += request.input_length - overlaps[place]
        self.unfinished[place] += 1
        return Served(place, overlaps[place])

    def computed(self, request: TraceRequest, one: Served) -> None:
        self.known[one.engine].computed(request.hash_ids)
        self.waiting[one.engine] -= request.input_length - one.expected

    def _choose(self, overlaps: Sequence[int]) -> int:
        engines = range(len(self.known))
        if self.policy.index == "turns":
            self._turn += 1
            return self._turn % len(engines)
        if self.policy.index == "two":
            two = self._random.sample(engines, min(2, len(engines)))
            return min(two, key=self.unfinished.__getitem__)

        def worth(place: int) -> tuple[float, int, int]:
            waiting = self.waiting[place]
            value = overlaps[place] - self.policy.load_weight * waiting
            return value, -waiting, -len(self.known[place].held)

        return max(engines, key=worth)


class SimulatedEngine:
    """`listeners`: one of each router that hears its events."""

    def __init__(self, capacity: int, listeners: Sequence[Exact]) -> None:
        self.cache, self._listeners = make_cache("radix", capacity), listeners
        self.queue: deque[int] = deque()  # the first is being computed
        self._changes = CacheChanges(self.cache)
        if listeners:
            self._changes.put_in()

    def begin(self, request: TraceRequest) -> int:
        """Tokens that the cache has."""
        found = self.cache.match_prefix(request.hash_ids).num_cached_tokens
        return request.num_tokens_in(found)

    def computed(self, request: TraceRequest) -> None:
        self.cache.cache_computed_blocks(request.hash_ids)
        if self._listeners:
            for event, index in product(chain(*self._changes.take()), self._listeners):
                index.told(event)


def arrival_times(trace: Sequence[TraceRequest], num_engines: int, load: float) -> list[float]:
    """Seconds. The last moment lasts as long as one does on average."""
    moments = [(at, len(list(group))) for at, group in groupby(r.timestamp_ms for r in trace)]
    span = moments[-1][0] - moments[0][0] or 1
    end = moments[-1][0] + span / len(moments)
    num_tokens = sum(request.input_length for request in trace)
    scale = num_tokens / (load * num_engines * PREFILL_RATE) / (end - moments[0][0])
    nexts = [*(at for at, _ in moments[1:]), end]
    return [
        (at - moments[0][0] + (until - at) * i / count) * scale
        for (at, count), until in zip(moments, nexts, strict=True)
        for i in range(count)
    ]


def simulate(
    trace: Sequence[TraceRequest],
    policy: Policy,
    num_engines: int,
    capacity: int,
    load: float = 1.0,
    num_routers: int = 1,
    seed: int = 0,
) -> list[Served]:
    """What became of each request. `capacity`: blocks of the trace in each engine's cache."""
    routers = [Router(policy, num_engines, capacity, seed + i) for i in range(num_routers)]
    engines = [
        SimulatedEngine(capacity, [index for index in indexes if isinstance(index, Exact)])
        for indexes in zip(*(router.known for router in routers), strict=True)
    ]
    arrivals = arrival_times(trace, num_engines, load)
    served: list[Served] = []
    happens = [(at, ARRIVES, number) for number, at in enumerate(arrivals)]  # a heap: it is sorted

    while happens:
        now, what, number = heapq.heappop(happens)
        request, router = trace[number], routers[number % num_routers]
        if what == ARRIVES:
            served.append(router.send(request))
        one = served[number]
        engine = engines[one.engine]
        if what == ENDED:
            router.unfinished[one.engine] -= 1
            continue
        if what == COMPUTED:
            engine.queue.popleft()
            engine.computed(request)
            router.computed(request, one)
            one.first_token = now - arrivals[number]
            heapq.heappush(happens, (now + request.output_length * DECODE_SECONDS, ENDED, number))
        else:
            engine.queue.append(number)
        if engine.queue and (what == COMPUTED or len(engine.queue) == 1):
            number = engine.queue[0]  # its turn begins
            hit = served[number].hit = engine.begin(trace[number])
            num_computed = max(trace[number].input_length - hit, 1)  # the last token always
            heapq.heappush(happens, (now + num_computed / PREFILL_RATE, COMPUTED, number))
    return served
