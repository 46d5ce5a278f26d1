"""KV that comes from outside for requests that still wait.

What a connector can fetch (tiers, a global pool) goes into the cache too, before its request is
admitted. A load takes blocks for it and holds the prefix that it continues:

    | cached: held, so that it stays | taken from the pool: the connector writes here |
    0                                ^ cached here                                    ^ found there

What has arrived is cached, and kept for the request until it is admitted, unless memory runs
short: then those who wait give way to those who run, and what they lose they compute.

Invariants: a block that is being loaded is in no table and not in the cache; all loads together
hold at most half of the blocks, or there is but one; a load waits only for loads that are under
way; who was refused a load and has seen `MAX_OVERTAKES` begin for others who came to it later waits
no more, and computes; a request is asked about again only if the cache has lost something since.
"""

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
    prefix: list[Block]  # cached, and used by the load so that they stay
    blocks: list[Block]  # where the loaded KV goes; cached and used too when it has arrived
    has_arrived: bool = False


class LoadListener:
    """Told of every load. What is done between `acting_for` and its end is done for that request,
    in the middle, it may be, of a call for another one."""

    def acting_for(self, request_id: str) -> AbstractContextManager[None]:
        return nullcontext()

    def load_begun(self, load: Load) -> None:
        """Its blocks are taken, and its prefix is held."""

    def load_arrived(self, load: Load) -> None:
        """`load.blocks` are cached."""

    def load_ended(self, request_id: str) -> None:
        """Nothing is held for it any more."""


@dataclass(slots=True)
class _Offer:
    """What the connector said of one request when it was asked."""

    num_local_when_asked: int | None = None  # tokens cached when a load was last decided on
    num_external_tokens: int = 0  # what the connector then had behind them


class KVLoads:
    """The loads of one `LoadingKVCacheManager`. `take_blocks` gives blocks that may be written at
    once, or None."""

    def __init__(
        self,
        connector: KVConnector,
        cache: PrefixCache,
        take_blocks: Callable[[int], list[Block] | None],
    ) -> None:
        self.connector = connector
        self.cache = cache
        self.listener = LoadListener()
        self._take_blocks = take_blocks
        self._loads: dict[str, Load] = {}
        self._offers: dict[str, _Offer] = {}
        self._overtakes: dict[str, int] = {}  # of the refused ones, the first of them in front

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def is_under_way(self, request_id: str) -> bool:
        load = self._loads.get(request_id)
        return load is not None and not self._has_arrived(load)

    def wants_load(self, request: Request, computed: ComputedBlocks) -> bool:
        """Is there more than the cache has, that was not asked for before?"""
        offer = self._offers.setdefault(request.request_id, _Offer())
        asked = offer.num_local_when_asked
        if asked is not None and computed.num_tokens >= asked:
            return False
        num_tokens, _ = self.connector.get_num_new_matched_tokens(request, computed.num_tokens)
        offer.num_external_tokens = num_tokens
        if num_tokens == 0:
            offer.num_local_when_asked = computed.num_tokens
        return num_tokens > 0

    def start(self, request: Request, computed: ComputedBlocks) -> bool:
        """Take blocks for what the connector has. True: there is nothing to wait for."""
        offer = self._offers[request.request_id]
        num_blocks = offer.num_external_tokens // self.cache.block_size
        held = sum(len(load.prefix) + len(load.blocks) for load in self._loads.values())
        num_wanted = len(computed.blocks) + num_blocks
        most = self.cache.pool.num_usable_blocks * MAX_SHARE_OF_LOADS
        if held and held + num_wanted > most:
            if not all([self._has_arrived(load) for load in self._loads.values()]):
                return self._refuse(request.request_id)  # not now: others are ahead
            self.give_way()  # whoever waits for an admission may stand behind this request
        offer.num_local_when_asked = computed.num_tokens
        self.cache.touch(computed.blocks)
        blocks = self._take_blocks(num_blocks)
        if blocks is None:
            self.cache.release(computed.blocks)
            return True
        self._overtake(request.request_id)
        load = self._loads[request.request_id] = Load(request, computed.blocks, blocks)
        block_ids = [block.block_id for block in blocks]
        self.connector.update_state_after_alloc(request, block_ids, offer.num_external_tokens)
        self.listener.load_begun(load)
        return self._has_arrived(load)

    def _refuse(self, request_id: str) -> bool:
        """It waits for its turn. True: not any more, others have had theirs too often."""
        if self._overtakes.setdefault(request_id, 0) < MAX_OVERTAKES:
            return False
        self._offers[request_id].num_local_when_asked = 0  # it is never asked about again
        del self._overtakes[request_id]
        return True

    def _overtake(self, request_id: str) -> None:
        """A load begins, before those who were refused earlier."""
        for refused in self._overtakes:
            if refused == request_id:
                break
            self._overtakes[refused] += 1
        self._overtakes.pop(request_id, None)

    def _has_arrived(self, load: Load) -> bool:
        """Cache what has arrived, as used by the load. False: it is still under way."""
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
        load.blocks, load.has_arrived = result.blocks, True

    def drop(self, request_id: str) -> None:
        """What has arrived stays cached; what is under way never comes."""
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

    def withdraw(self, first: Block) -> None:
        """This cached block and all behind it are about to leave the cache: drop what has arrived
        there, and what is on its way to a place behind it."""
        for request_id, load in list(self._loads.items()):
            if first in load.prefix + load.blocks:
                self.drop(request_id)

    def forget(self, request_id: str) -> None:
        """The request gives up its memory: drop its load. The connector, if it was asked about the
        request, forgets what it found, or that it found nothing."""
        self.drop(request_id)
        self._overtakes.pop(request_id, None)
        if self._offers.pop(request_id, None) is not None:
            self.connector.cancel_load(request_id)

    def give_way(self) -> None:
        """Memory is short: what has been loaded for requests that still wait may be evicted."""
        for request_id, load in list(self._loads.items()):
            if self._has_arrived(load):
                self.drop(request_id)

    def begin_anew(self) -> None:
        """After a call that was interrupted: nothing is on its way, and nobody was asked."""
        try:
            for request_id in {*self._loads, *self._offers}:
                self.connector.cancel_load(request_id)
            self.connector.begin_anew()
        except Exception:  # it would be raised again whatever is called next
            logger.exception("the connector failed when it was to begin anew")
        for books in (self._loads, self._offers, self._overtakes):
            books.clear()

    def wait(self) -> None:
        """Until something arrives, but not long."""
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
        most = self.cache.pool.num_usable_blocks * MAX_SHARE_OF_LOADS
        num_held = sum(1 for _ in self.held_blocks())
        assert len(self._loads) <= 1 or num_held <= most, "loads exceed MAX_SHARE_OF_LOADS"
