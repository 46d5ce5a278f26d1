"""Several parts can observe one prefix cache: its recorder and its KV events, added and removed in
any order. The cache still has one listener, the tiers or none.

See common/events/README.md"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from block_pool import Block
    from prefix_cache import CacheListener, NormalKeys, PrefixCache


class ListenerChain:
    """Replaces `listener` while the cache has observers. Observers are told of a cached block
    before the listener, which may copy it, and of a removed one after it, even if it raises."""

    def __init__(self, listener: CacheListener | None) -> None:
        self.listener = listener
        self.observers: list[CacheListener] = []

    def block_cached(
        self, block: Block, parent: Block | None, token_ids: tuple[int, ...], extra_keys: NormalKeys
    ) -> None:
        for observer in (*self.observers, self.listener):
            if observer is not None:
                observer.block_cached(block, parent, token_ids, extra_keys)

    def blocks_evicted(self, blocks: Sequence[Block]) -> None:
        with self._telling("blocks_evicted", blocks):
            if self.listener is not None:
                self.listener.blocks_evicted(blocks)

    def blocks_invalidated(self, blocks: Sequence[Block]) -> None:
        with self._telling("blocks_invalidated", blocks):
            if self.listener is not None:
                self.listener.blocks_invalidated(blocks)

    @contextmanager
    def _telling(self, what: str, blocks: Sequence[Block]) -> Iterator[None]:
        try:
            yield
        finally:
            for observer in self.observers:
                getattr(observer, what)(blocks)


def listener_of(cache: PrefixCache) -> CacheListener | None:
    """The cache's own listener, whatever observes the cache."""
    found = cache.listener
    return found.listener if isinstance(found, ListenerChain) else found


def observe(cache: PrefixCache, observer: CacheListener) -> None:
    chain = cache.listener
    if not isinstance(chain, ListenerChain):
        chain = cache.listener = ListenerChain(chain)
    chain.observers.append(observer)


def stop_observing(cache: PrefixCache, observer: CacheListener) -> None:
    chain = cache.listener
    if isinstance(chain, ListenerChain) and observer in chain.observers:
        chain.observers.remove(observer)
        if not chain.observers:
            cache.listener = chain.listener
