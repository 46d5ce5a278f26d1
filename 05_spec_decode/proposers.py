"""Where guesses come from.

A proposer sees what is known of each request and says what may come next. It is only ever a matter
of speed: a bad guess costs a little work and changes no token.

`NgramProposer` has no model. Answers often repeat what stands in the prompt (code that is edited,
text that is quoted, names), so it looks up the last few tokens in what was said before, and
proposes what followed them there:

    ... d e f = a b c ; x = a b        ~ the suffix "= a b" has stood here before
              ~~~~~ +++++ ~~~~~        + so what followed it there is proposed: c ; x

The longest suffix wins, from `max_ngram` tokens down to `min_ngram`; of its places the earliest,
which has the most behind it. Every n-gram is put in a dictionary once, when a token follows it (so
the suffix never finds itself), and a step costs O(new tokens) however long the history is. (The
engine indexes a long prompt in bulk, `beyond/ngram_index.py`: the same, but quicker.)

vLLM calls this look-up `ngram` and searches the history anew in each step; the idea is prompt
lookup decoding (A. Saxena, 2023), and LLMA, arXiv 2304.04487.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from input_batch import RunnerRequest
from request import require


@dataclass(frozen=True, slots=True)
class FollowedRequest:
    """A request after a step that computed something of it, as its runner knows it."""

    request: RunnerRequest  # its tokens, those that the step sampled included
    start: int  # the first position that the step computed: what is before it stays where it is
    num_computed_tokens: int  # positions with the target's KV of its tokens: no rejected drafts


@runtime_checkable
class Proposer(Protocol):
    num_spec_tokens: int  # the most it proposes for a request
    num_lookahead_tokens: int  # KV slots that it may write behind the tokens that a step computes

    def propose(
        self, followed: Sequence[FollowedRequest], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        """At most `num_drafts[i]` tokens to follow those of `followed[i]`; whoever gets none may be
        left out. The requests are those of the last step, each behind by one token or, in the
        middle of its prompt, by more, with 0 drafts."""
        ...

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        """The distributions `[num_drafts, vocab_size]` that the last proposal was drawn from. None:
        it was certain, or drawn in the target's own way, so that it must be matched."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, or its KV was taken away. Unknown ids are ignored."""


@dataclass(slots=True)
class History:
    """`first[n]` maps an n-gram to where it was first followed: the index of the next token."""

    first: dict[int, dict[tuple[int, ...], int]]
    num_indexed: int = 0  # tokens that n-grams may end before


@dataclass
class NgramProposer:
    """`min_ngram` to `max_ngram` tokens are looked up, up to `num_spec_tokens` proposed. Raises
    `ValueError` that names the field."""

    num_spec_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2
    num_lookahead_tokens: int = field(default=0, init=False)
    _histories: dict[str, History] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.num_spec_tokens >= 1, "num_spec_tokens", self.num_spec_tokens, ">= 1")
        allowed = f"in [1, max_ngram], with max_ngram={self.max_ngram!r}"
        require(1 <= self.min_ngram <= self.max_ngram, "min_ngram", self.min_ngram, allowed)

    def propose(
        self, followed: Sequence[FollowedRequest], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        drafts = {}
        for request, num in zip((f.request for f in followed), num_drafts, strict=True):
            history = self._histories.get(request.req_id) or self._begin(request)
            # What is new, and before it as much as an n-gram that ends there reaches back.
            start = max(history.num_indexed - self.max_ngram, 0)
            tokens = request.tokens(start, request.num_tokens)
            self._index(history, tokens, start)
            if num and (found := self._find(history, tokens, self.min_ngram)) is not None:
                stop = min(found + min(num, self.num_spec_tokens), start + len(tokens))
                drafts[request.req_id] = request.tokens(found, stop)
        return drafts

    def draft_probs(self, request_id: str) -> None:
        return None  # a look-up is certain

    def forget(self, request_id: str) -> None:
        self._histories.pop(request_id, None)

    def _begin(self, request: RunnerRequest) -> History:
        sizes = range(self.min_ngram, self.max_ngram + 1)
        history = self._histories[request.req_id] = History({n: {} for n in sizes})
        return history

    def _index(self, history: History, tokens: list[int], start: int) -> None:
        """`tokens` are those from position `start` on."""
        for end in range(max(history.num_indexed, 1) - start, len(tokens)):
            for n, first in history.first.items():
                if n <= end:
                    first.setdefault(tuple(tokens[end - n : end]), start + end)
        history.num_indexed = start + len(tokens)

    def _find(self, history: History, tokens: list[int], shortest: int) -> int | None:
        """Where the longest suffix was first followed, if one of `shortest` tokens was."""
        for n in range(min(self.max_ngram, len(tokens)), shortest - 1, -1):
            start = history.first[n].get(tuple(tokens[-n:]))
            if start is not None:
                return start
        return None
