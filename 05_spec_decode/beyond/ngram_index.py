"""All n-grams of a long prompt in one index: the same results as a dictionary, in less time and
memory.

Adding each n-gram of a prompt of 100,000 tokens to a dictionary takes longer than a step.
`BulkNgramProposer` is the engine's n-gram lookup: it indexes a long prompt in bulk, and later
tokens as `NgramProposer` does. An n-gram is numbered by the number of its last n - 1 tokens and the
token before them, so one walk back from the end of a text finds its suffixes of all sizes:

    level 1   the last token                      -> number
    level 2   (number, the token before it)       -> number, and where it was first followed
    level 3   (number, the token before those)    -> ...       until a level does not know the pair

Each level is three arrays, sorted by pair: O(n log n) to make, a binary search to look up, at most
12 bytes a token. Nothing is hashed, so no tokens have to be compared again.

See 05_spec_decode/README.md#where-draft-tokens-come-from"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from input_batch import RunnerRequest
from proposers import History, NgramProposer
from request import require


@dataclass(slots=True)
class _Level:
    """Index i of both arrays is the n-gram with number i. `first`: the index of the token after
    it."""

    pairs: array[int]  # ascending
    first: array[int]


class NgramIndex:
    """Indexes every n-gram of `tokens` [at least 2], of up to `max_ngram` tokens, that a token
    follows."""

    def __init__(self, tokens: Sequence[int], max_ngram: int) -> None:
        ids, token_numbers = np.unique(np.asarray(tokens, dtype=np.int64), return_inverse=True)
        self._token_ids = array("q", ids.tobytes())
        self._levels: list[_Level] = []
        numbers = np.zeros(len(tokens), dtype=np.int64)  # of the n-gram that begins at i
        for n in range(1, min(max_ngram, len(tokens) - 1) + 1):
            # Nothing follows the last n-gram, so there is one fewer of each size.
            pairs = numbers[1:] * len(ids) + token_numbers[: len(numbers) - 1]
            numbers, level = _number(pairs, n)
            self._levels.append(level)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return `(n, index)`: the longest suffix of `tokens` that is indexed, and the token that
        followed its first occurrence. `(0, 0)` if not even the last token is indexed."""
        number = index = 0
        levels = self._levels[: len(tokens)]
        for n, level in enumerate(levels):
            place = token_number = _place(self._token_ids, tokens[-1 - n])
            if token_number >= 0:
                place = _place(level.pairs, number * len(self._token_ids) + token_number)
            if place < 0:
                return n, index
            number, index = place, level.first[place]
        return len(levels), index


def _number(pairs: np.ndarray, n: int) -> tuple[np.ndarray, _Level]:
    """The number of each pair, and the level. Pair i belongs to the n-gram that begins at i."""
    order = np.argsort(pairs)
    ascending = pairs[order]
    is_new = np.append(True, ascending[1:] != ascending[:-1])
    numbers = np.empty_like(pairs)
    numbers[order] = np.cumsum(is_new) - 1
    starts = np.flatnonzero(is_new)
    first = np.minimum.reduceat(order, starts) + n
    level = _Level(
        array("q", ascending[starts].tobytes()), array("i", first.astype(np.int32).tobytes())
    )
    return numbers, level


def _place(values: array[int], value: int) -> int:
    """The index of `value` in the ascending `values`, or -1."""
    place = bisect_left(values, value)
    return place if place < len(values) and values[place] == value else -1


@dataclass(slots=True)
class _BulkHistory(History):
    """`prompt` has the n-grams that come before those in `first`."""

    prompt: NgramIndex = field(kw_only=True)


@dataclass
class BulkNgramProposer(NgramProposer):
    """An `NgramProposer` that indexes a prompt of `bulk_size` tokens or more in bulk."""

    bulk_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bulk_size >= 2, "bulk_size", self.bulk_size, ">= 2")

    def _begin(self, request: RunnerRequest) -> History:
        history, num_tokens = super()._begin(request), request.num_tokens
        if num_tokens >= self.bulk_size:
            prompt = NgramIndex(request.tokens(0, num_tokens), self.max_ngram)
            history = _BulkHistory(history.first, num_tokens, prompt=prompt)
            self._histories[request.req_id] = history
        return history

    def _find(self, history: History, tokens: list[int], shortest: int) -> int | None:
        if not isinstance(history, _BulkHistory):
            return super()._find(history, tokens, shortest)
        n, start = history.prompt.find(tokens)
        longer = super()._find(history, tokens, max(n + 1, shortest))
        return start if longer is None and n >= shortest else longer
