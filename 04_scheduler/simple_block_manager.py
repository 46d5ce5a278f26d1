"""`SimpleBlockManager`: the name under which the posts' scheduler counts its blocks. Nothing in the
engine uses it: here a scheduler asks a `KVMemory` (chapter 3)."""

from __future__ import annotations

from collections import Counter

from request import Request


class SimpleBlockManager:
    """`num_blocks` blocks of `block_size` positions, and how many each request has."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_held: Counter[str] = Counter()

    def allocate(self, req_id: str, num_new_blocks: int) -> bool:
        """False: refused, and nothing has changed."""
        if num_new_blocks > self.get_num_free_blocks():
            return False
        self._num_held[req_id] += num_new_blocks
        return True

    def free(self, req_id: str) -> None:
        self._num_held.pop(req_id, None)

    def get_num_free_blocks(self) -> int:
        return self.num_blocks - self._num_held.total()

    def blocks_needed_for_new_tokens(self, req: Request, num_new_tokens: int) -> int:
        """Blocks that are missing for so many tokens behind the computed ones."""
        num_blocks = -(-(req.num_computed_tokens + num_new_tokens) // self.block_size)
        return max(0, num_blocks - self._num_held[req.request_id])
