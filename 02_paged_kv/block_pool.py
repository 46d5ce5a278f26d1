"""The pool of KV blocks: reference counts, and the order in which free blocks are reused.

KV memory is divided once, at start, into `num_blocks` equal blocks. No block is ever moved: a
request that needs memory takes any free block, and its block table records the block's id.

    block 0   the null block: never allocated; padding points to it
    ref_cnt   number of references: each table that has the block, and a cache (chapter 3)
    free      ref_cnt == 0; reused in the order in which they were freed

The free order is part of the interface. A caller that frees a request's deepest block first has its
tail reused before its head, so a prefix stays useful for as long as possible.

Invariants: free + held = `num_blocks - 1`; a block is in the free order exactly if its `ref_cnt` is
0. A call that raises or returns None leaves the state unchanged.

vLLM's `BlockPool` also keeps the hashes of cached blocks; here a cache holds a reference to each
block that it keeps. SGLang and FlashInfer say page instead of block. Source: PagedAttention, arXiv
2309.06180.

See 02_paged_kv/README.md#the-pool"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK_ID = 0


@dataclass(slots=True, eq=False)
class Block:
    """One physical block. Only the pool changes `ref_cnt`."""

    block_id: int
    ref_cnt: int = 0


class BlockPool:
    """Reference-counted blocks `1 .. num_blocks - 1`. Every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be >= 2 (the null block and one to use), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        self.blocks = tuple(Block(block_id) for block_id in range(num_blocks))
        # An OrderedDict is a doubly linked list with an index: popping its first entry and deleting
        # one in the middle are both O(1). (A plain dict searches for its first entry.)
        self._free: OrderedDict[int, Block] = OrderedDict(
            (block.block_id, block) for block in self.blocks[1:]
        )

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Allocate the `num_blocks` blocks that have been free for longest, each with one
        reference.

        Returns None, and changes nothing, if fewer are free. Raises `ValueError` below 1.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[1] for _ in range(num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to each of these blocks, which must be held.

        Raises `ValueError` for a free block: it can be allocated and overwritten at any time.
        """
        self._check(blocks, "touch", are_held=True)
        for block in blocks:
            block.ref_cnt += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Drop a reference to each block. Blocks without references become free, in this order:
        pass the deepest block of a request first.

        Raises `ValueError` for a block that is free already, or that occurs twice.
        """
        self._check(blocks, "free", are_held=True)
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._free[block.block_id] = block

    def reclaim(self, blocks: Sequence[Block]) -> None:
        """Take exactly these blocks out of the free order, wherever they are in it, with one
        reference each. Raises `ValueError` for a block that is not free, or that occurs twice."""
        self._check(blocks, "reclaim", are_held=False)
        for block in blocks:
            del self._free[block.block_id]
            block.ref_cnt = 1

    def clear(self) -> None:
        """Free all blocks, after a call that was interrupted."""
        for block in self.blocks[1:]:
            block.ref_cnt = 0
            self._free.setdefault(block.block_id, block)

    def free_order(self) -> Iterable[Block]:
        """The free blocks, the next to be allocated first."""
        return iter(self._free.values())

    def check_invariants(self) -> None:
        """Raise `AssertionError` if free order and reference counts are inconsistent."""
        for block_id, block in enumerate(self.blocks):
            is_free = block.ref_cnt == 0 and block_id != NULL_BLOCK_ID
            is_listed = self._free.get(block_id) is block
            assert block.ref_cnt >= 0 and is_listed == is_free, f"{block}: free is {is_listed}"
        assert self.blocks[NULL_BLOCK_ID].ref_cnt == 0, "the null block is in use"
        num_held = sum(block.ref_cnt > 0 for block in self.blocks)
        assert num_held + self.num_free_blocks == self.num_usable_blocks, "foreign blocks are free"

    def _check(self, blocks: Sequence[Block], verb: str, are_held: bool) -> None:
        if len({block.block_id for block in blocks}) != len(blocks):
            block_ids = [block.block_id for block in blocks]
            raise ValueError(f"cannot {verb} blocks {block_ids}: ids must be unique within a call")
        for block in blocks:
            if not (0 < block.block_id < len(self.blocks) and self.blocks[block.block_id] is block):
                raise ValueError(f"cannot {verb} {block}: not a usable block of this pool")
            if (block.ref_cnt > 0) != are_held:
                state = "free already" if are_held else "held, not free"
                raise ValueError(f"cannot {verb} block {block.block_id}: the block is {state}")
