"""How many tokens of a request go into one step.

Chapter 6 cuts prompts into chunks here. This chapter computes them whole: a prompt that does not
fit what is left of the budget waits for the next step.

One kind of work can be larger than any step: a preempted request comes back with a prompt that
fitted and outputs that it has made since. It takes what there is, in several steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

from request import Request


@runtime_checkable
class ChunkPolicy(Protocol):
    def longest_prompt(self, max_num_batched_tokens: int) -> int:
        """Prompts with more tokens than this can never be computed."""
        ...

    def begin_step(
        self, running: Collection[Request], num_behind: Callable[[Request], int]
    ) -> None:
        """A step is going to be planned. These have KV and may share it with pieces of prompts;
        `num_behind` tokens of each are to be computed."""

    def may_start(self, request: Request, num_behind: int) -> bool:
        """May a waiting request with `num_behind` tokens to compute be admitted in this step? If
        not, those behind it are asked. Called at most once for a request in a step, and what is
        granted counts as used."""
        ...

    def num_tokens_now(self, request: Request, num_behind: int, budget: int, most: int) -> int:
        """Of the `num_behind` tokens that are to be computed: how many in this step, of which
        `budget` tokens are left, maybe none; `most` is all that any step may have. 0: not now."""
        ...


class WholePrompts:
    def longest_prompt(self, max_num_batched_tokens: int) -> int:
        return max_num_batched_tokens

    def begin_step(
        self, running: Collection[Request], num_behind: Callable[[Request], int]
    ) -> None:
        pass

    def may_start(self, request: Request, num_behind: int) -> bool:
        return True

    def num_tokens_now(self, request: Request, num_behind: int, budget: int, most: int) -> int:
        if num_behind <= budget:
            return num_behind
        is_larger_than_any_step = num_behind > most
        has_begun = request.num_computed_tokens > 0  # then it runs, and takes what it can get
        return budget if is_larger_than_any_step or has_begun else 0


class CutPrompts(WholePrompts):
    """Prompts may be longer than a step: each takes what there is."""

    def longest_prompt(self, max_num_batched_tokens: int) -> int:
        return sys.maxsize

    def num_tokens_now(self, request: Request, num_behind: int, budget: int, most: int) -> int:
        return min(num_behind, budget)
