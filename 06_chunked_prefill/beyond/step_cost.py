"""The cost of a step's tokens: counted, and learned from the clock.

Every token is multiplied with every weight once, so the linear layers cost the same for a prompt
token and for a decode. Attention depends on the token's position: at position p it attends to p + 1
keys. `count_work` counts both, and keeps the pairs of decodes apart from those of chunks: a chunk
reads each key once for all its tokens, a decode for one.

    request      start  tokens    pairs
    decode         999       1    1,000        read 1,000 keys for 1,000 pairs
    chunk        1,000     100    105,050      read 1,100 keys for 105,050 pairs

`count_bytes_and_flops` converts that into memory traffic and arithmetic. A decode step moves all
weights for a few tokens and is bound by memory; a chunk is bound by arithmetic. So a chunk of
moderate size costs less in a step with decodes than alone, because the weights are read anyway.
Which size is moderate depends on the machine, and `StepCost` learns it:

    milliseconds = c0 + c1 tokens + c2 decode pairs + c3 chunk pairs,    no c below zero

fitted to the last steps, with less weight on old ones. `largest_chunk` inverts the formula.

Invariants: a step is predicted before it is observed; a pause of the machine changes the fit only a
little; every method returns a value before anything was measured.

See 06_chunked_prefill/beyond/README.md"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FADE = 0.98  # an observation counts half after 34 more
NUM_OBSERVATIONS = 4  # before that, the fit is not trusted
NUM_FEATURES = 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step."""

    num_tokens: int = 0
    num_decode_pairs: int = 0  # pairs of a query and a key, where one query reads the keys
    num_chunk_pairs: int = 0  # pairs where several queries share the keys
    num_keys_read: int = 0

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.num_tokens + other.num_tokens,
            self.num_decode_pairs + other.num_decode_pairs,
            self.num_chunk_pairs + other.num_chunk_pairs,
            self.num_keys_read + other.num_keys_read,
        )


def count_work(starts: Sequence[int], query_lens: Sequence[int]) -> StepWork:
    """The work of requests that compute positions `[start, start + query_len)`."""
    num_decode_pairs = num_chunk_pairs = 0
    for start, query_len in zip(starts, query_lens, strict=True):
        num_pairs = query_len * start + query_len * (query_len + 1) // 2
        if query_len == 1:
            num_decode_pairs += num_pairs
        else:
            num_chunk_pairs += num_pairs
    num_keys_read = sum(starts) + sum(query_lens)
    return StepWork(sum(query_lens), num_decode_pairs, num_chunk_pairs, num_keys_read)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model on which its costs depend."""

    num_weights: int  # weights that every token is multiplied with, without the embedding table
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int = 2


@dataclass(frozen=True, slots=True)
class HardwareWork:
    flops: int
    bytes_moved: int

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity: below that of the machine, memory is the limit."""
        return self.flops / self.bytes_moved


def count_bytes_and_flops(work: StepWork, shape: ModelShape) -> HardwareWork:
    """Bytes and FLOPs: weights once, keys and values read and written; two FLOPs per
    multiplication, and two products (scores, weighted values) per pair."""
    width = shape.num_heads * shape.head_dim
    num_pairs = work.num_decode_pairs + work.num_chunk_pairs
    flops = 2 * shape.num_weights * work.num_tokens + 4 * shape.num_layers * width * num_pairs
    kv_values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    num_values = shape.num_weights + kv_values * (work.num_keys_read + work.num_tokens)
    return HardwareWork(flops, num_values * shape.bytes_per_value)


class StepCost:
    """Learns how long steps take."""

    def __init__(self) -> None:
        # Normal equations of a least-squares fit to relative errors: the weight of a step that took
        # far too long is small.
        self._gram = np.zeros((NUM_FEATURES, NUM_FEATURES))
        self._target = np.zeros(NUM_FEATURES)
        self._coefficients: np.ndarray | None = None  # None: outdated
        self.num_observations = 0

    def observe(self, work: StepWork, step_ms: float) -> None:
        """Record the time of a step."""
        if work.num_tokens == 0 or step_ms <= 0:
            return
        features = _features(work) / step_ms
        self._gram = FADE * self._gram + np.outer(features, features)
        self._target = FADE * self._target + features
        self._coefficients = None
        self.num_observations += 1

    @property
    def is_known(self) -> bool:
        return self.num_observations >= NUM_OBSERVATIONS

    def predict_ms(self, work: StepWork) -> float:
        return float(self.coefficients @ _features(work))

    @property
    def coefficients(self) -> np.ndarray:
        if self._coefficients is None:
            self._coefficients = solve_not_negative(self._gram, self._target)
        return self._coefficients

    def largest_chunk(self, target_ms: float, beside: StepWork, start: int) -> int:
        """How many tokens from position `start` on a step can compute next to other work within
        `target_ms`; 0 for none."""
        no_chunk = self.predict_ms(beside)
        _, per_token, _, per_pair = self.coefficients
        # per_pair / 2 n^2 + (per_token + per_pair (start + 1/2)) n <= left
        left = target_ms - no_chunk
        if left <= 0:
            return 0
        square = per_pair / 2
        linear = per_token + per_pair * (start + 0.5)
        if linear <= 0:
            return _NO_LIMIT
        root = (linear * linear + 4 * square * left) ** 0.5
        return int(min(2 * left / (linear + root), _NO_LIMIT))


_NO_LIMIT = 1 << 30


def _features(work: StepWork) -> np.ndarray:
    return np.array(
        [1.0, work.num_tokens, work.num_decode_pairs, work.num_chunk_pairs], dtype=np.float64
    )


def solve_not_negative(gram: np.ndarray, target: np.ndarray, *, ridge: float = 1e-6) -> np.ndarray:
    """Solve least squares from its normal equations, `gram @ coefficients = target`, without
    negative coefficients: while there are any, the most negative one is left out. With a `ridge`,
    features that never varied share their explanation."""
    size = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
    scaled = gram / np.outer(size, size)
    scaled_target = target / size
    kept = list(range(len(target)))
    solution = np.zeros(len(target))
    while kept:
        part = scaled[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
        found = np.linalg.solve(part, scaled_target[kept])
        worst = int(found.argmin())
        if found[worst] >= 0:
            solution[kept] = found
            break
        del kept[worst]
    return solution / size
