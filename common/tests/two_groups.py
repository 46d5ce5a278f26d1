"""Two groups of layers, for tests: what chapters 2 to 4 have of one table, twice, over one pool.

    group 0    every position          5  9  3  8  7
    group 1    what a window reads     0  0  4 11  2      0: given up, the null block

No chapter has a class that knows of both. The composites here show that one can be put in front of
them: chapter 4's `Scheduler` plans with `TwoGroups` and `GroupsDelta`, and a runner computes with
what it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise

import torch

from batch_layout import ComposedBatch, PagedRunnerState, Queries, StepLayout, compose_in_order
from block_delta import BlockDelta
from block_pool import NULL_BLOCK_ID, Block, BlockPool
from kv_memory import ComputedBlocks, KVMemory
from paged_attention import AttentionMetadata, AttentionPlan, PagedPlan, write_kv
from request import Request
from scheduler_interface import BlockMove
from step_plan import PreemptionDelta


class WindowMemory(KVMemory):
    """The tables of group 1. A block that no token to come can see is given up."""

    def __init__(self, pool: BlockPool, block_size: int, window: int) -> None:
        super().__init__(pool, block_size)
        self.window = window
        self._moves: list[BlockMove] = []

    def give_up(self, request: Request) -> None:
        """Before a step: nothing is under way, so what is computed is also accepted."""
        table = self._tables.get(request.request_id)
        if table is None:
            return
        num_unseen = max(0, request.num_computed_tokens - self.window + 1)
        for index in range(num_unseen // self.block_size):
            block = table.blocks[index]
            if block.block_id != NULL_BLOCK_ID:
                table.replace(index, self.pool.blocks[NULL_BLOCK_ID])
                self.pool.free([block])
                self._moves.append(BlockMove(request.request_id, index, NULL_BLOCK_ID, group=1))

    def free(self, request: Request) -> None:
        super().free(request)
        self._moves = [move for move in self._moves if move.req_id != request.request_id]

    def _release(self, blocks: Sequence[Block]) -> None:
        super()._release([block for block in blocks if block.block_id != NULL_BLOCK_ID])

    def _count_holders(self) -> Counter[int]:
        holders = super()._count_holders()
        del holders[NULL_BLOCK_ID]
        return holders

    def take_block_moves(self) -> list[BlockMove]:
        moves, self._moves = self._moves, []
        return moves


class TwoGroups(KVMemory):
    """A memory of two tables a request. It gives room in both groups, or in none."""

    def __init__(self, pool: BlockPool, block_size: int, window: int) -> None:
        super().__init__(pool, block_size)
        self.groups = KVMemory(pool, block_size), WindowMemory(pool, block_size, window)
        for group in self.groups:
            group.grown = self.grown

    @property
    def capacity(self) -> int:
        return self.pool.num_usable_blocks // len(self.groups) * self.block_size

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        return self.groups[0].get_block_ids(request_id)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_reserved_tokens: int = 0,
        computed: ComputedBlocks | None = None,
    ) -> bool:
        self.groups[1].give_up(request)
        end = request.num_computed_tokens + num_new_tokens + num_reserved_tokens
        has = [len(group.get_block_ids(request.request_id)) for group in self.groups]
        num_missing = sum(max(0, self.num_blocks_needed(end) - n) for n in has)
        if num_missing > self.pool.num_free_blocks:
            return False
        asked = request, num_new_tokens, num_reserved_tokens
        return all([group.allocate_slots(*asked) for group in self.groups])

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks,
        num_kept_free: int = 0,
        gone: Request | None = None,
    ) -> bool:
        num_new = len(self.groups) * self.num_blocks_needed(num_tokens)
        held: set[int] = set()
        if gone is not None:
            held.update(*(group.get_block_ids(gone.request_id) for group in self.groups))
        num_free = self.pool.num_free_blocks + len(held - {NULL_BLOCK_ID})
        return num_new + num_kept_free <= num_free

    def free(self, request: Request) -> None:
        for group in self.groups:
            group.free(request)

    def take_block_moves(self) -> list[BlockMove]:
        return [move for group in self.groups for move in group.take_block_moves()]

    def _count_holders(self) -> Counter[int]:
        return sum((group._count_holders() for group in self.groups), Counter())

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        super().check_invariants(requests)
        full, window = ({r: len(t.blocks) for r, t in g._tables.items()} for g in self.groups)
        assert full == window, "a table has an entry for each block of its request, in every group"


class GroupsDelta(PreemptionDelta):
    """Asks a delta of each group what is new in its tables."""

    def __init__(self, memory: TwoGroups) -> None:
        super().__init__(memory)
        self.groups = [BlockDelta(group) for group in memory.groups]

    def new_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(chain(*(group.new_block_ids(request_id) for group in self.groups)))

    def request_preempted(self, request_id: str) -> None:
        super().request_preempted(request_id)
        for group in self.groups:
            group.forget(request_id)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        for group in self.groups:
            group.forget(request_id)


# -- layers that read them


@dataclass(slots=True, eq=False)
class WindowMetadata(AttentionMetadata):
    """Of group 1: a token sees `window` keys, the last of them its own."""

    window: int = 0


def compose_two_groups(
    state: PagedRunnerState, queries: Queries, block_size: int, window: int
) -> StepLayout:
    layout = compose_in_order(state, queries, block_size)

    def compose(*tensors: torch.Tensor) -> ComposedBatch:
        batch = layout.compose(*tensors)
        full, other = batch.attention
        given = {f.name: getattr(other, f.name) for f in fields(AttentionMetadata)}
        return replace(batch, attention=(full, WindowMetadata(**given, window=window)))

    return StepLayout(layout.order, layout.arrays, compose)


class WindowPlan:
    """Token by token, and no other slot is read: not those behind, nor those given up."""

    def __init__(self, where: WindowMetadata) -> None:
        self.where, self.slot_mapping = where, where.slot_mapping

    def write_kv(self, key, value, key_cache, value_cache) -> None:
        write_kv(key, value, key_cache, value_cache, self.slot_mapping)

    def attend(self, query, key_cache, value_cache, scale):
        block_size, num_shared = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
        output, tables = torch.empty_like(query), self.where.block_tables.long()
        ends = self.where.seq_lens.tolist()
        for row, (first, stop) in enumerate(pairwise(self.where.query_start_loc.tolist())):
            for token in range(first, stop):
                end = ends[row] - (stop - token) + 1
                seen = torch.arange(max(0, end - self.where.window), end)
                slots = tables[row, seen // block_size] * block_size + seen % block_size
                keys, values = (
                    cache.flatten(0, 1)[slots].repeat_interleave(num_shared, 1)
                    for cache in (key_cache, value_cache)
                )
                weights = (torch.einsum("hd,nhd->hn", query[token], keys) * scale).softmax(-1)
                output[token] = torch.einsum("hn,nhd->hd", weights, values)
        return output


class TwoGroupsBackend:
    """Chapter 2's attention, and that of a window where the metadata says so."""

    def plan(self, metadata: AttentionMetadata, num_heads: int, key_cache) -> AttentionPlan:
        if isinstance(metadata, WindowMetadata):
            return WindowPlan(metadata)
        return PagedPlan(metadata, num_heads, key_cache)
