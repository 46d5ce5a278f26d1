"""How many tokens of a request go into one step.

Chapter 6 splits prompts into chunks here. This chapter computes prompts whole: a prompt that does
not fit into the remaining budget waits for the next step.

A preempted request is the exception. It returns with a prompt that fitted into a step, plus the
outputs generated since, and together they can exceed any step's budget. It then takes the whole
remaining budget, in several steps.

See 04_scheduler/README.md#how-many-tokens-of-a-prompt"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

from request import Request


@runtime_checkable
class ChunkPolicy(Protocol):
    def max_prompt_len(self, max_num_batched_tokens: int) -> int:
        """The maximum prompt length in tokens; longer prompts are rejected."""
        ...

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        """Called before a step is planned. The requests in `running` have KV and can be scheduled
        in the same step as prompt chunks; `num_uncomputed_tokens` returns the number of uncomputed
        tokens of each."""

    def can_start(self, request: Request, num_uncomputed_tokens: int) -> bool:
        """Whether a waiting request with `num_uncomputed_tokens` uncomputed tokens can be admitted
        in this step. If not, the scheduler tries the next one. Called at most once per request and
        step; a request for which it returns True counts against the policy's limits."""
        ...

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        """Return how many of the `num_uncomputed_tokens` uncomputed tokens to compute in this step,
        0 for none. `budget` tokens (maybe 0) are left in this step; `max_step_tokens` is the budget
        of a whole step."""
        ...


class Unchunked:
    def max_prompt_len(self, max_num_batched_tokens: int) -> int:
        return max_num_batched_tokens

    def begin_step(
        self, running: Collection[Request], num_uncomputed_tokens: Callable[[Request], int]
    ) -> None:
        pass

    def can_start(self, request: Request, num_uncomputed_tokens: int) -> bool:
        return True

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        if num_uncomputed_tokens <= budget:
            return num_uncomputed_tokens
        is_larger_than_any_step = num_uncomputed_tokens > max_step_tokens
        has_begun = request.num_computed_tokens > 0  # it runs already, so it takes what is left
        return budget if is_larger_than_any_step or has_begun else 0


class ChunkToBudget(Unchunked):
    """Allow prompts longer than a step: each takes the remaining budget."""

    def max_prompt_len(self, max_num_batched_tokens: int) -> int:
        return sys.maxsize

    def num_tokens_to_schedule(
        self, request: Request, num_uncomputed_tokens: int, budget: int, max_step_tokens: int
    ) -> int:
        return min(num_uncomputed_tokens, budget)
