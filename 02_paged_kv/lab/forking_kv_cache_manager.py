"""Two requests in one block: `fork`, and copy on write.

Several samples of one prompt need its keys and values once. `fork` gives a second request the first
one's blocks by reference. Full blocks are never written again, so they stay shared. The last,
partly filled one both will write: whoever writes while somebody else still holds the block gets a
copy first. That is decided when slots are asked for, before the step:

    parent  | 1: A B C D | 2: E F . . |      fork       child  | 1: A B C D | 2: E F . . |

    the child writes position 6:  block 2 has two holders, so it is copied to 3
    child   | 1: A B C D | 3: E F g . |      take_block_copies() -> child, place 1, from 2 to 3
    then the parent writes:       block 2 is its own again, and is written in place

The manager moves ids only. The copies are made before the next forward pass, all at once: a block
may be the source of one and, freed in between, the destination of another.

Invariants: chapter 2's, except that a block is in two tables after a fork, at the same place in
each; nobody ever gets slots in a block that somebody else holds.

vLLM's first versions copied on write. It shares samples' prompts through its prefix cache now, as
the engine of this book does (chapter 3): full blocks only, hence no copy. An operating system's
`fork` does what is done here, page by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from block_pool import Block, BlockPool
from kv_cache_manager import BlockTable, KVCacheManager
from paged_attention import PagedKVCache
from request import Request, check_integers


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Entry `block_index` of the request's table is to hold what `src_block_id` holds."""

    request_id: str
    block_index: int
    src_block_id: int
    dst_block_id: int


class ForkingKVCacheManager(KVCacheManager):
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self._copies: dict[int, BlockCopy] = {}  # by destination
        self._families: dict[str, object] = {}  # the same one for all forks of a request

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share the blocks of its first `child.num_computed_tokens` positions.

        Those must be written by the time the step's block copies are made: not merely planned for
        the same step. Blocks the parent has reserved beyond them are not shared. Raises
        `ValueError` if the parent has not computed that many, or the child has a table.
        """
        table = self._tables.get(parent.request_id)
        num_shared = self.num_blocks_needed(child.num_computed_tokens)
        if child.request_id in self._tables:
            raise ValueError(f"request {child.request_id!r} has a block table already")
        if num_shared == 0:
            return
        if table is None or child.num_computed_tokens > parent.num_computed_tokens:
            raise ValueError(
                f"{child.request_id!r} cannot share {child.num_computed_tokens} positions: "
                f"{parent.request_id!r} has computed {parent.num_computed_tokens if table else 0}"
            )
        shared = table.blocks[:num_shared]
        self.pool.touch(shared)
        forked = self._tables[child.request_id] = BlockTable()
        forked.append(shared)
        family = self._families.setdefault(parent.request_id, object())
        self._families[child.request_id] = family

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_reserved_tokens: int = 0
    ) -> bool:
        """Chapter 2's; and a block that somebody else holds, and that these positions are in, is
        exchanged for a copy. New blocks and copies are granted together or not at all."""
        check_integers(0, num_new_tokens=num_new_tokens, num_reserved_tokens=num_reserved_tokens)
        start = request.num_computed_tokens
        end = start + num_new_tokens + num_reserved_tokens
        table = self._tables.get(request.request_id)
        shared = self._shared_with_others(table, start, end)
        if table is None or not shared:
            return self._reach(request.request_id, end)
        num_missing = max(self.num_blocks_needed(end) - len(table.blocks), 0)
        fresh = self._take_blocks(len(shared) + num_missing)
        if fresh is None:
            return False
        for index, block in zip(shared, fresh, strict=False):
            self._copy_on_write(request.request_id, table, index, block)
        table.append(fresh[len(shared) :])
        return True

    def _shared_with_others(self, table: BlockTable | None, start: int, end: int) -> list[int]:
        """Places of the table that hold positions of `[start, end)`, in blocks with two holders."""
        if table is None or start == end:
            return []
        stop = min(self.num_blocks_needed(end), len(table.blocks))
        return [i for i in range(start // self.block_size, stop) if table.blocks[i].ref_cnt > 1]

    def free(self, request: Request) -> None:
        table = self._tables.get(request.request_id)
        super().free(request)
        self._families.pop(request.request_id, None)
        for block in table.blocks if table is not None else ():
            self._disown_copy(request.request_id, block)

    def take_block_copies(self) -> list[BlockCopy]:
        """Copies to make before the next forward pass."""
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    # -- inside

    def _copy_on_write(self, request_id: str, table: BlockTable, index: int, dst: Block) -> None:
        src = table.blocks[index]
        pending = self._copies.get(src.block_id)  # src itself is still to be filled by a copy
        src_id = src.block_id if pending is None else pending.src_block_id
        if src_id != dst.block_id:  # equal: the first source was freed, and is taken again
            self._copies[dst.block_id] = BlockCopy(request_id, index, src_id, dst.block_id)
        table.replace(index, dst)
        self._release([src])
        self._disown_copy(request_id, src)

    def _disown_copy(self, request_id: str, dst: Block) -> None:
        """The request holds `dst` no more. A copy into it that nobody waits for is forgotten; one
        that a fork waits for becomes the fork's."""
        copy = self._copies.get(dst.block_id)
        if copy is None:
            return
        if dst.ref_cnt == 0:
            del self._copies[dst.block_id]
        elif copy.request_id == request_id:
            index = copy.block_index
            heir = next(
                other_id
                for other_id, other in self._tables.items()
                if other.block_ids[index : index + 1] == [dst.block_id]
            )
            self._copies[dst.block_id] = replace(copy, request_id=heir)

    def _check_sharing(self) -> None:
        """A block is in several tables only after a fork, and at the same place in each; and
        whoever waits for a copy has its destination in its table."""
        places: dict[int, tuple[object, int]] = {}
        for request_id, table in self._tables.items():
            family = self._families.get(request_id, request_id)
            for index, block_id in enumerate(table.block_ids):
                place = (family, index)
                assert places.setdefault(block_id, place) == place, (
                    f"block {block_id} stands in the table of {request_id!r} at {index} and "
                    "elsewhere"
                )
        for dst_block_id, copy in self._copies.items():
            block_ids = self.get_block_ids(copy.request_id)
            assert block_ids[copy.block_index] == dst_block_id == copy.dst_block_id, copy
            assert dst_block_id != copy.src_block_id, copy
        assert self._families.keys() <= self._tables.keys(), "a family without a table"


def copy_blocks(kv_cache: PagedKVCache, copies: Sequence[BlockCopy]) -> None:
    """Make the copies in all layers, as if all at once: sources are read first."""
    if not copies:
        return
    pairs = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
    src, dst = torch.tensor(pairs, device=kv_cache.key_cache[0].device).unbind(1)
    for cache in (*kv_cache.key_cache, *kv_cache.value_cache):
        cache[dst] = cache[src]
