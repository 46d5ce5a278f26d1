"""The KV memory interface of a scheduler that can find a request's KV before computing it.

Chapter 2's manager allocates slots and frees them. A prefix cache adds:

    before admission   get_computed_blocks   the cached prefix, or why to wait for it
    at admission       allocate_slots        the cached blocks, and new slots after them
    after a step       cache_blocks          written blocks can be shared from now on
                       pop_table_updates      block table entries that now name another block

`UncachedKVCacheManager` implements the interface without a cache, so a scheduler need not know
whether there is one. Choosing `UncachedKVCacheManager` turns this chapter off.

See 03_prefix_cache/README.md#what-the-scheduler-calls"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from block_delta import PagedRunnerState
from block_pool import Block
from kv_cache_manager import KVCacheManager
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of
from request import Request
from scheduler_interface import BlockTableUpdate, RunnerInput

__all__ = ["KeyedRequest", "extra_keys_of"]  # for chapters that need nothing else of a cache


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks that already hold a request's first `num_tokens` positions, head first."""

    blocks: list[Block] = field(default_factory=list)
    num_tokens: int = 0


class NotReady(Enum):
    """Why a request should wait: part of its prefix is about to become available, and admitting it
    now would compute that part twice."""

    IN_FLIGHT = auto()  # another request computes it in this step
    LOADING = auto()  # it is being loaded from an external pool


class UncachedKVCacheManager(KVCacheManager):
    """Chapter 2's manager: it finds no cached blocks and keeps none. Managers with a cache override
    these methods."""

    cache: PrefixCache | None = None
    # The request that computes the missing prefix, set by the last lookup.
    blocking_req_id: str | None = None

    def get_computed_blocks(
        self, request: Request, wait_for_others: bool = True
    ) -> ComputedBlocks | NotReady:
        """Find the cached prefix of a request that holds no blocks yet. Never covers the last
        token, whose logits are needed. The blocks are not held and can be evicted at any time:
        look them up again before every attempt to admit the request. With `wait_for_others`,
        returns `NotReady` while another request computes more of the same prefix."""
        return ComputedBlocks()

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Ids of the blocks that hold the request's longest cached prefix, head first."""
        return ()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        """Allocate slots after the computed positions. At admission, `computed` are the cached
        blocks, which come first in the block table. Returns False, and changes nothing, if the
        memory is too small."""
        return super().allocate_slots(request, num_new_tokens, num_reserved_tokens)

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_watermark_blocks: int = 0,
        freeing: Request | None = None,
    ) -> bool:
        """Whether a new request could get `num_tokens` slots after `computed` and still leave
        `num_watermark_blocks` blocks free, assuming `freeing` is freed first. Changes neither
        request."""
        num_blocks = self.num_blocks_needed(computed.num_tokens + num_tokens)
        num_new = num_blocks - len(computed.blocks)
        held = [] if freeing is None else self._tables[freeing.request_id].blocks
        return num_new + num_watermark_blocks <= self._num_allocatable(
            num_new, computed.blocks, held
        )

    def _num_allocatable(self, num_wanted: int, found: list[Block], freeing: list[Block]) -> int:
        """How many blocks can be allocated once the table `freeing` is freed and `found` is held.
        If there are fewer than `num_wanted`, a subclass can reclaim some first."""
        return self.pool.num_free_blocks + len(freeing)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Called after the forward pass that wrote the first `num_computed_tokens` positions: they
        can be shared from now on."""

    def pop_table_updates(self) -> list[BlockTableUpdate]:
        """Return block table entries that, since the last call, were changed from a duplicate to
        the cache's block."""
        return []

    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes. Returns False, and changes nothing, while some are in use."""
        return self.cache is None or self.cache.reset()


class SharingRunnerState(PagedRunnerState):
    """Chapter 2's runner-side copies of the requests, with updates to the middle of block
    tables."""

    def apply(self, plan: RunnerInput) -> None:
        super().apply(plan)
        for move in plan.block_moves:
            row = self.row_of[move.req_id]
            self.block_tables[move.group, row, move.block_index] = move.block_id
