"""`SimpleBlockManager`: the name under which the posts' scheduler keeps its blocks.

Here the scheduler asks a `KVMemory` (chapter 3), and nothing in the engine uses this class. It
answers the posts' questions from chapter 2's pool."""

from __future__ import annotations

from block_pool import Block, BlockPool
from request import Request


class SimpleBlockManager:
    """`num_blocks` blocks of `block_size` positions, and a list of them for each request."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.pool = BlockPool(num_blocks + 1)  # the null block is nobody's
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks: dict[str, list[Block]] = {}

    def allocate(self, req_id: str, num_new_blocks: int) -> bool:
        """False: refused, and nothing has changed."""
        if num_new_blocks == 0:
            return True
        blocks = self.pool.allocate(num_new_blocks)
        if blocks is None:
            return False
        self._blocks.setdefault(req_id, []).extend(blocks)
        return True

    def free(self, req_id: str) -> None:
        self.pool.free(self._blocks.pop(req_id, [])[::-1])

    def get_num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def blocks_needed_for_new_tokens(self, req: Request, num_new_tokens: int) -> int:
        """Blocks that are missing for so many tokens behind the computed ones."""
        num_blocks = -(-(req.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, num_blocks - len(self._blocks.get(req.request_id, ())))
