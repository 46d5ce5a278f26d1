"""Proposers: where draft tokens come from.

A proposer sees the known tokens of each request and proposes the next ones. Proposals affect only
speed: a bad draft token costs a little work and changes no output token.

`NgramProposer` has no model. Answers often repeat parts of the prompt (code that is edited, text
that is quoted, names), so it looks up the last few tokens in the text so far, and proposes the
tokens that followed them there:

    ... d e f = a b c ; x = a b        ~ the suffix "= a b" occurred here before
              ~~~~~ +++++ ~~~~~        + so the tokens that followed are proposed: c ; x

The longest suffix wins, from `max_ngram` tokens down to `min_ngram`; among its occurrences the
earliest, which has the most tokens after it. Each n-gram is added to a dictionary once, when a
token follows it (so the suffix never finds itself), and a step costs O(new tokens) however long the
text is.

vLLM calls this lookup `ngram` and searches the text again in each step; the idea is prompt lookup
decoding (A. Saxena, 2023), and LLMA, arXiv 2304.04487.

See 05_spec_decode/README.md#where-draft-tokens-come-from"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from input_batch import RunnerRequest
from request import require


@dataclass(frozen=True, slots=True)
class ProposerInput:
    """A request that the last step computed tokens of, as its runner knows it."""

    request: RunnerRequest  # its tokens include those that the step sampled
    start: int  # first position that the step computed; positions before it did not change
    num_computed_tokens: int  # positions with the target's KV, rejected draft tokens not included


@runtime_checkable
class Proposer(Protocol):
    num_spec_tokens: int  # maximum number of draft tokens per request
    num_lookahead_tokens: int  # KV slots that it may write after the tokens that a step computes

    def propose(
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        """Propose at most `num_drafts[i]` tokens to follow those of `inputs[i]`; requests without
        a proposal can be left out. The requests are those of the last step. Each lags by one
        uncomputed token or, in the middle of its prompt, by more, with 0 drafts."""
        ...

    def draft_probs(self, request_id: str) -> torch.Tensor | None:
        """The distributions `[num_drafts, vocab_size]` that the last proposal was drawn from. None:
        the proposal is deterministic, or was drawn in the target's own way, so it must be verified
        by matching."""
        ...

    def remove_request(self, request_id: str) -> None:
        """Drop the state of a request that has finished or lost its KV. Unknown ids are ignored."""


@dataclass(slots=True)
class History:
    """`first[n]` maps an n-gram to the index of the token that first followed it."""

    first: dict[int, dict[tuple[int, ...], int]]
    num_indexed: int = 0  # n-grams that end before this index are in the dictionary


@dataclass
class NgramProposer:
    """Look up `min_ngram` to `max_ngram` tokens, and propose up to `num_spec_tokens`. Raises
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
        self, inputs: Sequence[ProposerInput], num_drafts: Sequence[int]
    ) -> dict[str, list[int]]:
        drafts = {}
        for request, num in zip((f.request for f in inputs), num_drafts, strict=True):
            history = self._histories.get(request.req_id) or self._begin(request)
            # The new tokens, and as many before them as an n-gram that ends there can include.
            start = max(history.num_indexed - self.max_ngram, 0)
            tokens = request.tokens(start, request.num_tokens)
            self._index(history, tokens, start)
            if num and (found := self._find(history, tokens, self.min_ngram)) is not None:
                stop = min(found + min(num, self.num_spec_tokens), start + len(tokens))
                drafts[request.req_id] = request.tokens(found, stop)
        return drafts

    def draft_probs(self, request_id: str) -> None:
        return None  # a lookup is deterministic

    def remove_request(self, request_id: str) -> None:
        self._histories.pop(request_id, None)

    def _begin(self, request: RunnerRequest) -> History:
        sizes = range(self.min_ngram, self.max_ngram + 1)
        history = self._histories[request.req_id] = History({n: {} for n in sizes})
        return history

    def _index(self, history: History, tokens: list[int], start: int) -> None:
        """Add the n-grams of `tokens`, which start at position `start`."""
        for end in range(max(history.num_indexed, 1) - start, len(tokens)):
            for n, first in history.first.items():
                if n <= end:
                    first.setdefault(tuple(tokens[end - n : end]), start + end)
        history.num_indexed = start + len(tokens)

    def _find(self, history: History, tokens: list[int], shortest: int) -> int | None:
        """The index of the token that first followed the longest suffix of at least `shortest`
        tokens, or None."""
        for n in range(min(self.max_ngram, len(tokens)), shortest - 1, -1):
            start = history.first[n].get(tuple(tokens[-n:]))
            if start is not None:
                return start
        return None
