"""What a scheduler asks of a KV memory that may find a request's KV in it before it is computed.

Chapter 2's questions were two: is there room, and take it back. A prefix cache adds:

    before admission   get_computed_blocks   what need not be computed, or why to wait for it
    at admission       allocate_slots        room behind that, and the found blocks in front
    after a step       cache_blocks          what was written may be shared
                       take_block_moves      entries of tables that now name another block

`KVMemory` answers them without a cache, so a scheduler need not know whether there is one: turning
this chapter off is choosing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from block_delta import PagedRunnerState
from block_pool import Block
from kv_cache_manager import KVCacheManager
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of
from request import Request
from scheduler_interface import BlockMove, PlanMessage

__all__ = ["KeyedRequest", "extra_keys_of"]  # for chapters that need no more of a cache


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks that hold a request's first `num_tokens` positions already, head first."""

    blocks: list[Block] = field(default_factory=list)
    num_tokens: int = 0


class NotReady(Enum):
    """More of a request's KV will be there soon: admitted now, it would be computed twice."""

    COMPUTED_NOW = auto()  # by another request, in this step
    LOADING = auto()  # it comes from outside


class KVMemory(KVCacheManager):
    """Chapter 2's manager: it finds nothing and keeps nothing. With a cache its answers differ."""

    cache: PrefixCache | None = None
    waits_for: str | None = None  # who computes what the last one looked up is not ready for

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        """What need not be computed of a request without memory. At least its last token is left.
        Nothing keeps the blocks: ask again before every attempt to admit it. With
        `wait_for_others` it is not ready while another request computes more of the same prefix."""
        return ComputedBlocks()

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Ids of the blocks in which a cache has the request's longest known prefix, head first."""
        return ()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        """Make room behind the computed positions, `computed` included, whose blocks come first.
        False: refused, and nothing has changed."""
        return super().allocate_slots(request, num_new_tokens, num_reserved_tokens)

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_kept_free: int = 0,
        gone: Request | None = None,
    ) -> bool:
        """Would a request without memory get room for `num_tokens` behind `computed`, and would
        `num_kept_free` blocks be left for others, if `gone` had been freed before? Both requests
        stay as they are."""
        num_blocks = self.num_blocks_needed(computed.num_tokens + num_tokens)
        num_new = num_blocks - len(computed.blocks)
        held = [] if gone is None else self._tables[gone.request_id].blocks
        return num_new + num_kept_free <= self._num_obtainable(num_new, computed.blocks, held)

    def _num_obtainable(self, num_wanted: int, found: list[Block], gone: list[Block]) -> int:
        """Blocks to be had when the table `gone` is freed and `found` is held. What can be done to
        make them more is done, if they are fewer than `num_wanted`."""
        return self.pool.num_free_blocks + len(gone)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The forward pass that wrote the first `num_computed_tokens` positions is over: they may
        be shared."""

    def take_block_moves(self) -> list[BlockMove]:
        """Entries of tables that name the cache's block since the last call, a duplicate before."""
        return []

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while some are in use."""
        return self.cache is None or self.cache.reset()


UncachedKVCacheManager = KVMemory


class SharingRunnerState(PagedRunnerState):
    """Chapter 2's copies of the requests, whose tables may change in the middle."""

    def apply(self, plan: PlanMessage) -> None:
        super().apply(plan)
        for move in plan.block_moves:
            row, group = self.row_of[move.req_id], self.groups[move.group]
            group.block_tables[row, move.block_index] = move.block_id
