"""The manager of block tables: from a request's positions to slots in the KV memory.

    block_size 4, table [7, 2, 5]      position 6  ->  block table[6 // 4] = 2, offset 6 % 4 = 2
                                                   ->  slot 2 * 4 + 2 = 10

    | written             | new tokens  | reserved  |        positions
    0                     ^ computed    ^           ^ end    the table must reach `end`
    | block 7 | block 2 | block 5 |        ...

Before a step the scheduler allocates slots for the positions that the step writes. Only these
positions and the computed ones decide whether a new block is needed, never `len % block_size`: a
sampled token is known before its keys and values are written.

Invariants: a refused allocation changes nothing; a block is in one table only; `ref_cnt` is the
number of references.

vLLM's `KVCacheManager` does the same. SGLang keeps a table of slots, one entry per token.

See 02_paged_kv/README.md#the-manager"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from block_pool import Block, BlockPool
from request import Request


@dataclass(slots=True)
class BlockTable:
    """A request's blocks and their ids: `block_ids[i]` is `blocks[i].block_id`."""

    blocks: list[Block] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def append(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.blocks.append(block)
            self.block_ids.append(block.block_id)

    def replace(self, index: int, block: Block) -> None:
        self.blocks[index] = block
        self.block_ids[index] = block.block_id


class KVCacheManager:
    """Block tables of all requests over one `BlockPool`: the KV memory, as a scheduler sees it.

    Reads only `request_id` and `num_computed_tokens` of a request, and changes nothing in it.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[str, BlockTable] = {}
        # Requests with new blocks; the code that sends these to the runner removes the id.
        self.req_ids_with_new_blocks: set[str] = set()
        self.current_req_id: str | None = None  # of the current call, for observers of the pool

    def num_blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def capacity(self) -> int:
        """Positions that the whole memory holds."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def num_blocks_in_use(self) -> int:
        return self.pool.num_usable_blocks - self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of the memory that requests hold, 0 to 1."""
        return self.num_blocks_in_use / self.pool.num_usable_blocks

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """The request's block table, empty if it has none. It is a live view: copy it to keep
        it."""
        table = self._tables.get(request_id)
        return () if table is None else table.block_ids

    def get_tables(self, request_id: str) -> tuple[Sequence[int], ...]:
        """A table for each group of layers; here there is one group."""
        return (self.get_block_ids(request_id),)

    def slot_mapping(self, request_id: str, start: int, stop: int) -> list[int]:
        """The slots of positions `[start, stop)`. Raises `ValueError` outside the table."""
        block_ids = self.get_block_ids(request_id)
        size = self.block_size
        end = len(block_ids) * size
        if not 0 <= start <= stop <= end:
            raise ValueError(
                f"cannot look up positions [{start}, {stop}) of request {request_id!r}: its block "
                f"table covers [0, {end})"
            )
        return [block_ids[pos // size] * size + pos % size for pos in range(start, stop)]

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_reserved_tokens: int = 0
    ) -> bool:
        """Allocate slots for `num_new_tokens` after the computed positions, and for
        `num_reserved_tokens` after those. O(new blocks).

        Returns False, and changes nothing, if the memory is too small.
        """
        self.current_req_id = request.request_id
        end = request.num_computed_tokens + num_new_tokens + num_reserved_tokens
        return self._grow_table_to(request.request_id, end)

    def free(self, request: Request) -> None:
        """Free the request's memory. Does nothing if it has none."""
        self.current_req_id = request.request_id
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.req_ids_with_new_blocks.discard(request.request_id)
            self._release(table.blocks)

    def clear(self) -> None:
        """Drop all tables and free all blocks, after a call that was interrupted and may have left
        them inconsistent. O(pool)."""
        self._tables.clear()
        self.req_ids_with_new_blocks.clear()
        self.pool.clear()

    def num_written_slots(self, starts: Collection[int], num_tokens: int) -> int:
        """Slots with KV of requests that compute `num_tokens` together in a step, each from its
        position in `starts` on."""
        return sum(starts) + num_tokens

    # -- internal

    def _grow_table_to(self, request_id: str, end: int) -> bool:
        """Extend the table to position `end`. Returns False, and changes nothing, if the memory is
        too small."""
        num_missing = self.num_blocks_needed(end) - len(self.get_block_ids(request_id))
        if num_missing <= 0:
            return True  # most decode steps
        blocks = self._allocate_blocks(num_missing)
        if blocks is None:
            return False
        if request_id not in self._tables:
            self._tables[request_id] = BlockTable()
        self._tables[request_id].append(blocks)
        self.req_ids_with_new_blocks.add(request_id)
        return True

    def _allocate_blocks(self, num_blocks: int) -> list[Block] | None:
        return self.pool.allocate(num_blocks)

    def _release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to the blocks of one table, given head first. The deepest is freed
        first."""
        self.pool.free(blocks[::-1])

    def _count_holders(self) -> Counter[int]:  # by block id
        return Counter(block_id for table in self._tables.values() for block_id in table.block_ids)

    def _check_sharing(self) -> None:
        """Check that no block is in two tables, or twice in one."""
        for block_id, num_holders in self._count_holders().items():
            assert num_holders == 1, f"block {block_id} is held {num_holders} times"

    def check_invariants(self, requests: Iterable[Request] = ()) -> None:
        """Raise `AssertionError` if tables and pool are inconsistent, or if the table of one of
        `requests` does not reach its computed positions. O(pool)."""
        self.pool.check_invariants()
        holders = self._count_holders()
        for block in self.pool.blocks:
            num_holders = holders[block.block_id]
            assert block.ref_cnt == num_holders, f"{block} is held {num_holders} times"
        for request_id, table in self._tables.items():
            assert table.block_ids == [block.block_id for block in table.blocks], request_id
        self._check_sharing()
        for request in requests:
            num_slots = len(self.get_block_ids(request.request_id)) * self.block_size
            assert num_slots >= request.num_computed_tokens, f"{request!r} has {num_slots} slots"
