"""How long prompts are split: at most a given number of a prompt's tokens in one step.

A step that computes a whole prompt of 2,000 tokens takes as long as 2,000 tokens take, and every
decoding request waits for it. If the prompt is split into chunks, the same work is spread over many
steps, and each step has room for one token of every other request:

    whole     | A: 2,000 tokens, B: 1, C: 1          | B: 1, C: 1, A: 1 | ...
    chunks    | A: 254, B: 1, C: 1 | A: 254, B: 1, C: 1 | ... | A: 222, B: 1, C: 1 | ...

No other part of the engine changes. A request has some uncomputed tokens (chapter 1's two
counters), and is scheduled for fewer than that. No token is sampled for it until its prompt is
computed.

`ChunkedPrefill` has three limits; 2 and 3 can be None:

1.  the budget of the step, always;
2.  `long_prefill_token_threshold` limits the tokens of one prompt per step, so that several prompts
    make progress side by side and a short prompt is not stuck after a long one;
3.  `max_long_partial_prefills` limits how many prompts longer than the threshold are prefilled
    concurrently; shorter ones after them in the queue can pass.

Invariants: no request gets more than its uncomputed tokens or than the budget, and a running
request gets at least one token if any budget is left, so every prompt finishes.

vLLM has these names (the last one only in V0). SGLang splits prompts into chunks of a fixed size
and of whole pages, and has one partial prompt at a time (chapter 4's `beyond/prefill_adder.py`).
Source: Sarathi-Serve, arXiv 2403.02310.

See 06_chunked_prefill/README.md#how-a-prompt-is-cut"""

from __future__ import annotations

from collections.abc import Callable, Collection

from request import Request
from unchunked import ChunkToBudget


class ChunkedPrefill(ChunkToBudget):
    """A `ChunkPolicy` (chapter 4)."""

    def __init__(
        self,
        long_prefill_token_threshold: int | None = None,
        max_long_partial_prefills: int | None = None,
    ) -> None:
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_long_partial_prefills = max_long_partial_prefills
        self._num_long = 0  # long prompts being prefilled

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        if self.max_long_partial_prefills is not None:
            # `num_uncomputed_tokens` is 0 for a request that skips this step, although its prompt
            # is partly computed.
            self._num_long = sum(
                self._is_long(request.num_tokens - request.num_computed_tokens)
                for request in running
            )

    def can_start(self, request: Request, num_uncomputed_tokens: int) -> bool:
        if self.max_long_partial_prefills is None or not self._is_long(num_uncomputed_tokens):
            return True
        if self._num_long >= self.max_long_partial_prefills:
            return False
        self._num_long += 1
        return True

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        return min(num_uncomputed_tokens, budget, self.long_prefill_token_threshold or budget)

    def _is_long(self, num_uncomputed_tokens: int) -> bool:
        """Whether the prompt needs more than one step even without other requests, where there is
        a threshold."""
        return num_uncomputed_tokens > (self.long_prefill_token_threshold or 0)
