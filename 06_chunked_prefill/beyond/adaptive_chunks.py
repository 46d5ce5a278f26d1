"""Chunks of the size for which a step has time.

A fixed chunk size is right for one machine, one model and one load. An operator would rather
promise decoding requests that no step takes longer than `target_step_ms`. `AdaptiveChunks` limits
the tokens of a step, and steers by the times of the last steps:

    target_step_ms  |#### decodes ####|######## chunk ########|.|
                                       ^ shrinks while its prompt grows: more keys to attend to

A step of n tokens that took half the target shows that 2 n fit, or a little fewer, because part of
its time does not depend on n. So the limit is n * target / time, and goes up or down by at most a
factor of 2 a step: five steps from 16 tokens to 256. While a prompt grows, its chunks are a little
too large, until the next step corrects that. At least `min_chunk` tokens of one prompt are computed
in every step, however long the step is already, so prefill never stops. If even a step with only
these takes longer than the target, the target limits chunks beside decodes, and no other chunk.

One long prompt gets all the available time; with `long_prefill_token_threshold` it leaves some to
others. Decisions depend on a clock; no token does. vLLM and SGLang have fixed sizes. Sarathi-Serve
(arXiv 2403.02310) chooses its size from a profile made in advance.

See 06_chunked_prefill/beyond/README.md"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from chunk_policy import ChunkedPrefill
from request import Request


class AdaptiveChunks(ChunkedPrefill):
    """A `ChunkPolicy` (chapter 4) that needs the times of steps: `observe_step`. The other limits
    apply too."""

    def __init__(
        self,
        target_step_ms: float,
        long_prefill_token_threshold: int | None = None,
        max_long_partial_prefills: int | None = None,
        min_chunk: int = 16,
    ) -> None:
        super().__init__(long_prefill_token_threshold, max_long_partial_prefills)
        self.target_step_ms = target_step_ms
        self.min_chunk = min_chunk
        self.max_tokens = min_chunk  # of a step, decodes included
        self._num_left = 0  # tokens that this step may still get
        self._has_chunk = False
        self._has_limit = True

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        super().begin_step(running, num_uncomputed_tokens)
        decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1]
        self._num_left = self.max_tokens - sum(map(num_uncomputed_tokens, decodes))
        self._has_chunk = False
        self._has_limit = bool(decodes) or self.max_tokens >= self.min_chunk

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        num_tokens = super().num_tokens_to_schedule(
            request, num_uncomputed_tokens, budget, max_step_tokens
        )
        if num_tokens and self._has_limit:
            least = 0 if self._has_chunk else self.min_chunk
            num_tokens = min(num_tokens, max(least, self._num_left))
        self._num_left -= num_tokens
        self._has_chunk = self._has_chunk or num_tokens > 0
        return num_tokens

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None:
        """Record the time of a step, which computed `num_tokens` tokens of each request from
        `starts` on."""
        num_total = sum(num_tokens)
        if num_total == 0 or step_ms <= 0:
            return
        num_fitting = int(num_total * min(self.target_step_ms / step_ms, 2))
        if step_ms <= self.target_step_ms:
            self.max_tokens = max(self.max_tokens, num_fitting)
        else:
            self.max_tokens = min(self.max_tokens, max(num_fitting, self.max_tokens // 2))
