"""Loads of external KV for requests that still wait.

KV that a connector can fetch (from tiers, a global pool) is put into the cache before its request
is admitted. A load allocates blocks for it and pins the prefix that it extends:

    | cached: pinned | allocated from the pool: the connector writes here |
    0                ^ cached here                                        ^ found there

Blocks that arrived are cached, and pinned for the request until it is admitted, unless memory runs
short: then waiting requests give way to running ones, and recompute the blocks that they lose.

Invariants: a block that is being loaded is in no table and not in the cache; all loads together
hold at most half of the blocks, unless there is only one load; a load waits only for loads in
flight; a request whose load was refused, and that has since seen `MAX_OVERTAKES` loads begin for
later requests, stops waiting and computes; a request is looked up again only if the cache has lost
something since.

See 03_prefix_cache/beyond/README.md#loads"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from block_pool import Block
from kv_connector import KVConnector
from kv_memory import ComputedBlocks
from prefix_cache import PrefixCache, extra_keys_of
from request import Request

logger = logging.getLogger(__name__)

LOAD_WAIT_S = 0.005
MAX_SHARE_OF_LOADS = 0.5  # of the usable blocks, for requests that are not admitted yet
MAX_OVERTAKES = 32  # loads that begin before one that was refused earlier


@dataclass(slots=True)
class Load:
    request: Request
    prefix: list[Block]  # cached blocks that the load pins
    blocks: list[Block]  # destination of the loaded KV; cached and pinned too when it has arrived
    has_arrived: bool = False


class LoadListener:
    """Notified of every load. Everything between `acting_for` and its end is done for that request,
    possibly within a call for another request."""

    def acting_for(self, request_id: str) -> AbstractContextManager[None]:
        return nullcontext()

    def load_begun(self, load: Load) -> None:
        """Called when a load has its blocks, and its prefix is pinned."""

    def load_arrived(self, load: Load) -> None:
        """Called when `load.blocks` are cached."""

    def load_ended(self, request_id: str) -> None:
        """Called when nothing is held for the request any longer."""


@dataclass(slots=True)
class _Offer:
    """The connector's answer to the lookup of one request."""

    num_local_at_decision: int | None = None  # tokens cached when a load was last decided on
    num_external_tokens: int = 0  # tokens that the connector had after these


class KVLoads:
    """The loads of one `LoadingKVCacheManager`. `allocate_blocks` allocates blocks that can be
    written immediately, or returns None."""

    def __init__(
        self,
        connector: KVConnector,
        cache: PrefixCache,
        allocate_blocks: Callable[[int], list[Block] | None],
    ) -> None:
        self.connector = connector
        self.cache = cache
        self.listener = LoadListener()
        self._allocate_blocks = allocate_blocks
        self._loads: dict[str, Load] = {}
        self._offers: dict[str, _Offer] = {}
        self._overtakes: dict[str, int] = {}  # of refused requests, the first refused first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def is_in_flight(self, request_id: str) -> bool:
        load = self._loads.get(request_id)
        return load is not None and not self._has_arrived(load)

    def wants_load(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether the connector has more than the cache, which was not requested before."""
        offer = self._offers.setdefault(request.request_id, _Offer())
        num_local = offer.num_local_at_decision
        if num_local is not None and computed.num_tokens >= num_local:
            return False
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, computed.num_tokens)
        offer.num_external_tokens = num_tokens
        if num_tokens == 0:
            offer.num_local_at_decision = computed.num_tokens
        return num_tokens > 0

    def start(self, request: Request, computed: ComputedBlocks) -> bool:
        """Allocate blocks for the connector's KV, and start the load. Returns True if the request
        need not wait."""
        offer = self._offers[request.request_id]
        num_blocks = offer.num_external_tokens // self.cache.block_size
        held = sum(len(load.prefix) + len(load.blocks) for load in self._loads.values())
        num_wanted = len(computed.blocks) + num_blocks
        max_held = self.cache.pool.num_usable_blocks * MAX_SHARE_OF_LOADS
        if held and held + num_wanted > max_held:
            if not all([self._has_arrived(load) for load in self._loads.values()]):
                return self._refuse(request.request_id)  # not now: others are first
            self.give_way()  # loads of requests that wait for admission may come after this one
        self.cache.touch(computed.blocks)
        blocks = self._allocate_blocks(num_blocks)
        if blocks is None:  # its admission needs as many, so it will be looked up again
            self.cache.release(computed.blocks)
            return True
        offer.num_local_at_decision = computed.num_tokens
        self._overtake(request.request_id)
        load = self._loads[request.request_id] = Load(request, computed.blocks, blocks)
        block_ids = [block.block_id for block in blocks]
        self.connector.update_state_after_alloc(request, block_ids, offer.num_external_tokens)
        self.listener.load_begun(load)
        return self._has_arrived(load)

    def _refuse(self, request_id: str) -> bool:
        """Refuse a load for now, so that the request waits. Returns True if it was overtaken too
        often to wait any longer."""
        if self._overtakes.setdefault(request_id, 0) < MAX_OVERTAKES:
            return False
        self._offers[request_id].num_local_at_decision = 0  # it is never looked up again
        del self._overtakes[request_id]
        return True

    def _overtake(self, request_id: str) -> None:
        """Count a load that begins before those that were refused earlier."""
        for refused in self._overtakes:
            if refused == request_id:
                break
            self._overtakes[refused] += 1
        self._overtakes.pop(request_id, None)

    def _has_arrived(self, load: Load) -> bool:
        """Cache the blocks that arrived, pinned by the load. Returns False while it is in
        flight."""
        if load.has_arrived:
            return True
        num_tokens = self.connector.get_finished_load(load.request.request_id)
        if num_tokens is None:
            return False
        with self.listener.acting_for(load.request.request_id):
            self._cache_arrived(load, num_tokens // self.cache.block_size)
        self.listener.load_arrived(load)
        return True

    def _cache_arrived(self, load: Load, num_arrived: int) -> None:
        result = self.cache.insert(
            load.request.all_token_ids,
            load.blocks[:num_arrived],
            extra_keys_of(load.request),
            start=len(load.prefix),
        )
        self.cache.pool.free(load.blocks[num_arrived:][::-1])
        load.blocks = result.blocks
        load.has_arrived = True

    def drop(self, request_id: str) -> None:
        """Drop a request's load. Blocks that arrived stay cached; the rest is cancelled."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        with self.listener.acting_for(request_id):
            if load.has_arrived:
                self.cache.release(load.prefix + load.blocks)
            else:
                self.connector.cancel_load(request_id)
                self.cache.pool.free(load.blocks[::-1])
                self.cache.release(load.prefix)
        self.listener.load_ended(request_id)

    def invalidate(self, first: Block) -> None:
        """Drop loads that depend on this cached block, before it and all blocks that extend it
        leave the cache: blocks that arrived there, and loads in flight to positions after it."""
        for request_id, load in list(self._loads.items()):
            if first in load.prefix + load.blocks:
                self.drop(request_id)

    def remove_request(self, request_id: str) -> None:
        """Drop the load of a request that frees its memory. The connector discards the result of
        its lookup for this request."""
        self.drop(request_id)
        self._overtakes.pop(request_id, None)
        if self._offers.pop(request_id, None) is not None:
            self.connector.cancel_load(request_id)

    def give_way(self) -> None:
        """Unpin blocks that were loaded for waiting requests, because memory is short."""
        for request_id, load in list(self._loads.items()):
            if self._has_arrived(load):
                self.drop(request_id)

    def clear(self) -> None:
        """Reset after a call that was interrupted: no load is in flight, no lookup is
        remembered."""
        try:
            for request_id in {*self._loads, *self._offers}:
                self.connector.cancel_load(request_id)
            self.connector.clear()
        except Exception:  # it would be raised again by every later call
            logger.exception("the connector failed when it was to begin anew")
        for container in (self._loads, self._offers, self._overtakes):
            container.clear()

    def wait(self) -> None:
        """Wait until a load arrives, for a short time."""
        if any(not load.has_arrived for load in self._loads.values()):
            self.connector.wait_for_load(LOAD_WAIT_S)

    def held_blocks(self) -> Iterator[Block]:
        for load in self._loads.values():
            yield from load.prefix + load.blocks

    def request_ids(self) -> set[str]:
        return set(self._loads)

    def loads(self) -> Iterable[Load]:
        return self._loads.values()

    def check_invariants(self) -> None:
        max_held = self.cache.pool.num_usable_blocks * MAX_SHARE_OF_LOADS
        num_held = sum(1 for _ in self.held_blocks())
        assert len(self._loads) <= 1 or num_held <= max_held, "loads exceed MAX_SHARE_OF_LOADS"
