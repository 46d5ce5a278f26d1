"""How a long prompt is cut: at most so many of its tokens in one step.

A step that computes a whole prompt of 2,000 tokens takes as long as 2,000 tokens take, and
everybody who decodes waits for it. Cut into chunks, the same work is spread over many steps, and
each of them has room for a token of everybody else:

    whole     | A: 2,000 tokens, B: 1, C: 1          | B: 1, C: 1, A: 1 | ...
    chunks    | A: 254, B: 1, C: 1 | A: 254, B: 1, C: 1 | ... | A: 222, B: 1, C: 1 | ...

Nothing else has to know. A request is some tokens behind (chapter 1's two counters), and gets fewer
than that. Until it has caught up, no token is sampled for it.

`ChunkedPrefill` has three limits, each of which may be None:

1.  the budget of the step, always;
2.  `long_prefill_token_threshold`: a prompt gets at most so many tokens of a step, so that several
    prompts make progress side by side and a short one is not stuck behind a long one;
3.  `max_long_partial_prefills`: at most so many prompts longer than the threshold are under way at
    once; the short ones behind them in the queue may pass.

Invariants: nobody gets more than it is behind or than the budget, and whoever runs gets at least
one token where the budget has one, so every prompt ends.

vLLM has these names (its V1 scheduler does not enforce the last). SGLang cuts to a fixed size and
to whole pages, and has one prompt under way at a time (chapter 4's `beyond/prefill_adder.py`).
Source: Sarathi-Serve, arXiv 2403.02310.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from request import Request, check_integers
from unchunked import CutPrompts


class ChunkedPrefill(CutPrompts):
    """A `ChunkPolicy` (chapter 4). Raises `ValueError` that names the field."""

    def __init__(
        self,
        long_prefill_token_threshold: int | None = None,
        max_long_partial_prefills: int | None = None,
    ) -> None:
        if long_prefill_token_threshold is not None:
            check_integers(1, long_prefill_token_threshold=long_prefill_token_threshold)
        if max_long_partial_prefills is not None:
            check_integers(1, max_long_partial_prefills=max_long_partial_prefills)
            if long_prefill_token_threshold is None:
                raise ValueError(
                    "max_long_partial_prefills must be None without a "
                    f"long_prefill_token_threshold, got {max_long_partial_prefills}"
                )
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_long_partial_prefills = max_long_partial_prefills
        self._num_long = 0  # under way

    def begin_step(
        self, running: Collection[Request], num_behind: Callable[[Request], int]
    ) -> None:
        if self.max_long_partial_prefills is not None:
            # `num_behind` is 0 for who sits out this step; its prompt is under way all the same.
            self._num_long = sum(
                self._is_long(request.num_tokens - request.num_computed_tokens)
                for request in running
            )

    def may_start(self, request: Request, num_behind: int) -> bool:
        if self.max_long_partial_prefills is None or not self._is_long(num_behind):
            return True
        if self._num_long >= self.max_long_partial_prefills:
            return False
        self._num_long += 1
        return True

    def num_tokens_now(self, request: Request, num_behind: int, budget: int, most: int) -> int:
        return min(num_behind, budget, self.long_prefill_token_threshold or budget)

    def _is_long(self, num_behind: int) -> bool:
        """It needs more than one step even when it is alone."""
        threshold = self.long_prefill_token_threshold
        return threshold is not None and num_behind > threshold
