"""What a scheduler asks of a KV memory that may find a request's KV in it before it is computed.

Chapter 2's questions were two: is there room, and take it back. A prefix cache adds:

    before admission   get_computed_blocks   what need not be computed, or why to wait for it
    at admission       allocate_slots        room behind that, and the found blocks in front
    after a step       cache_blocks          what was written may be shared
                       take_block_moves      entries of tables that now name another block

`UncachedKVCacheManager` answers them without a cache, so a scheduler need not know whether there is
one: turning this chapter off is choosing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from block_delta import PagedRunnerState
from block_pool import Block
from kv_cache_manager import BlockMemory, KVCacheManager
from prefix_cache import KeyedRequest, PrefixCache, extra_keys_of
from request import Request
from scheduler_interface import BlockMove, SchedulerOutput, StepOutput

__all__ = [
    "ComputedBlocks",
    "KVMemory",
    "KeyedRequest",
    "NotReady",
    "SharingRunnerState",
    "UncachedKVCacheManager",
    "extra_keys_of",
    "publish",
]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks that hold a request's first `num_tokens` positions already, head first."""

    blocks: list[Block] = field(default_factory=list)
    num_tokens: int = 0


class NotReady(Enum):
    """More of a request's KV will be there soon: admitted now, it would be computed twice."""

    COMPUTED_NOW = auto()  # by another request, in this step
    LOADING = auto()  # it comes from outside


class KVMemory(BlockMemory, Protocol):
    @property
    def cache(self) -> PrefixCache | None: ...

    def get_computed_blocks(self, request: Request) -> ComputedBlocks | NotReady:
        """What need not be computed of a request without memory. At least its last token is left.
        Nothing keeps the blocks: ask again before every attempt to admit it."""
        ...

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        """Ids of the blocks in which a cache has the request's longest known prefix, head first."""
        ...

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        """Make room behind the computed positions, `computed` included, whose blocks come first.
        False: refused, and nothing has changed."""
        ...

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
        ...

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """The forward pass that wrote the first `num_computed_tokens` positions is over: they may
        be shared."""

    def take_block_moves(self) -> list[BlockMove]:
        """Entries of tables that have changed since the last call."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while some are in use."""
        ...


def publish(
    kv_memory: KVMemory, request: Request, start: int, end: int, output: StepOutput
) -> None:
    """Positions `[start, end)` are written: share what is full, unless the step went wrong."""
    is_full = end // kv_memory.block_size > start // kv_memory.block_size
    if is_full and request.request_id not in output.errors:
        kv_memory.cache_blocks(request, end)


class UncachedKVCacheManager(KVCacheManager):
    """Chapter 2's manager as a `KVMemory`: it finds nothing and keeps nothing."""

    cache = None

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        return ComputedBlocks()

    def find_cached_blocks(self, request: Request) -> Sequence[int]:
        return ()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        return super().allocate_slots(request, num_new_tokens, num_reserved_tokens)

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_kept_free: int = 0,
        gone: Request | None = None,
    ) -> bool:
        num_freed = 0 if gone is None else len(self.get_block_ids(gone.request_id))
        num_wanted = self.num_blocks_needed(num_tokens) + num_kept_free
        return num_wanted <= self.pool.num_free_blocks + num_freed

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        pass

    def take_block_moves(self) -> list[BlockMove]:
        return []

    def reset_prefix_cache(self) -> bool:
        return True


class SharingRunnerState(PagedRunnerState):
    """Chapter 2's copies of the requests, whose tables may change in the middle."""

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        for move in plan.block_moves:
            self.tables.ids[self.rows[move.req_id], move.block_index] = move.block_id
