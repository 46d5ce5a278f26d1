"""Chunks of the size for which a step has time.

A fixed chunk size is right for one machine, one model and one load. An operator would rather
promise decoding requests that no step takes longer than `target_step_ms`. `AdaptiveChunks` fits a
cost model to the observed steps (`step_cost.py`) and gives prompts the tokens that fit below the
target in addition to the decodes:

    target_step_ms  |#### decodes ####|######## chunk ########|.|
                                       ^ shrinks while its prompt grows: more keys to attend to

Nothing is known at first, so the first chunk is `min_chunk` tokens, and no step is more than twice
as large as the largest that met the target: five steps from 16 tokens to 256. At least `min_chunk`
tokens of one prompt are computed in every step, however long the step is already, so prefill never
stops. If even a step with only these takes longer than the target, the target limits chunks beside
decodes, and no other chunk.

One long prompt gets all the available time; with `long_prefill_token_threshold` it leaves some to
others. Decisions depend on a clock; no token does. vLLM and SGLang have fixed sizes. Sarathi-Serve
(arXiv 2403.02310) chooses its size from a profile made in advance.

See 06_chunked_prefill/beyond/README.md"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from chunk_policy import ChunkedPrefill
from request import Request, check_integers
from step_cost import StepCost, StepWork, count_work


class AdaptiveChunks(ChunkedPrefill):
    """A `ChunkPolicy` (chapter 4) that needs the times of steps: `observe_step`. The other limits
    apply too. Raises `ValueError` that names the field."""

    def __init__(
        self,
        target_step_ms: float,
        long_prefill_token_threshold: int | None = None,
        max_long_partial_prefills: int | None = None,
        min_chunk: int = 16,
    ) -> None:
        super().__init__(long_prefill_token_threshold, max_long_partial_prefills)
        if isinstance(target_step_ms, bool) or not 0 < target_step_ms < math.inf:
            raise ValueError(f"target_step_ms must be > 0, and finite, got {target_step_ms!r}")
        check_integers(1, min_chunk=min_chunk)
        self.target_step_ms = target_step_ms
        self.min_chunk = min_chunk
        self.cost = StepCost()
        self._largest_kept = 0  # tokens of the largest step within the target
        self._planned = StepWork()  # decodes of the step, and its chunks so far
        self._has_chunk = False
        self._has_limit = True

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        super().begin_step(running, num_uncomputed_tokens)
        decodes = [r for r in running if r.num_tokens - r.num_computed_tokens == 1]
        starts = [request.num_computed_tokens for request in decodes]
        self._planned = count_work(starts, [num_uncomputed_tokens(request) for request in decodes])
        self._has_chunk = False
        self._has_limit = bool(decodes) or self._can_meet_target()

    def _can_meet_target(self) -> bool:
        """Whether a step with only `min_chunk` tokens may be within the target."""
        largest = self.cost.largest_chunk(self.target_step_ms, StepWork(), 0)
        return largest >= self.min_chunk or not self.cost.is_known

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        num_tokens = super().num_tokens_to_schedule(
            request, num_uncomputed_tokens, budget, max_step_tokens
        )
        if num_tokens == 0:
            return 0
        start = request.num_tokens - num_uncomputed_tokens
        if self._has_limit:
            num_tokens = min(num_tokens, self._fitting(start))
        self._planned += count_work([start], [num_tokens])
        self._has_chunk = True
        return num_tokens

    def _fitting(self, start: int) -> int:
        min_tokens = 0 if self._has_chunk else self.min_chunk
        max_tokens = max(self.min_chunk, 2 * self._largest_kept)
        num_fitting = max_tokens - self._planned.num_tokens
        if self.cost.is_known:
            largest = self.cost.largest_chunk(self.target_step_ms, self._planned, start)
            num_fitting = min(num_fitting, largest)
        return max(min_tokens, num_fitting)

    def observe_step(
        self, starts: Sequence[int], num_tokens: Sequence[int], step_ms: float
    ) -> None:
        """Record the time of a step, which computed `num_tokens` tokens of each request from
        `starts` on."""
        if step_ms <= self.target_step_ms:
            self._largest_kept = max(self._largest_kept, sum(num_tokens))
        self.cost.observe(count_work(starts, num_tokens), step_ms)
