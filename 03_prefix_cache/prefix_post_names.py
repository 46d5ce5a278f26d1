"""Names that the posts use and this chapter does not, so that what they type works here.

Nothing in the engine calls them."""

from __future__ import annotations

from typing import Any


class CachedBlockPostNames:
    __slots__ = ()
    num_users: int

    @property
    def ref_cnt(self) -> int:
        """`num_users`. The pool's `ref_cnt` of the same block is one more: it counts the cache."""
        return self.num_users


class PrefixCachePostNames:
    stats: Any

    @property
    def cache_hit_rate(self) -> float:
        """`stats.hit_rate`: tokens hit / tokens looked up, over all requests that were admitted."""
        return self.stats.hit_rate
