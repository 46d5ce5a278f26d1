"""Names that the posts use and this engine does not, so that what they type works here.

Nothing in the engine calls them."""

from __future__ import annotations

POST_BLOCK_SIZE = 16  # the posts' constant; here it is a setting


class RequestPostNames:
    all_token_ids: list[int]
    num_computed_tokens: int

    @property
    def seq_len(self) -> int:
        """`num_tokens`."""
        return len(self.all_token_ids)

    @property
    def remaining_tokens(self) -> int:
        """How far it is behind: tokens that are known and not computed."""
        return len(self.all_token_ids) - self.num_computed_tokens

    @property
    def num_blocks_needed(self) -> int:
        """Blocks of `POST_BLOCK_SIZE` positions that its tokens fill (chapter 2)."""
        return -(-len(self.all_token_ids) // POST_BLOCK_SIZE)


class PlanPostNames:
    num_scheduled_tokens: dict[str, int]

    @property
    def total_tokens(self) -> int:
        """`total_num_scheduled_tokens`."""
        return sum(self.num_scheduled_tokens.values())


class SchedulerPostNames:
    requests: dict[str, object]

    def has_requests(self) -> bool:
        """`has_unfinished_requests`."""
        return bool(self.requests)
