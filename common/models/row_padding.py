"""Row counts for which oneDNN's packed product takes longer than for a larger row count.

Seen with bfloat16 on AMX: 17 to 32 rows 133 ms, 33 rows 85. Such a step is faster if rows of zeros
are added. The slow counts differ by processor and version, so the matrices of a large model are
timed once, in a fraction of a second, and the result is kept. A busy machine can make one time
longer, but hardly all of `NUM_REPEATS`, and not twice. So a padded count must gain in the median
and in the shortest time, in both timings.

See common/README.md"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from hashlib import blake2b
from itertools import pairwise

import torch

from common.models.linear import Linear
from cpp_library import cache_folder, processor

logger = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65)
NUM_REPEATS = 5
MIN_GAIN = 0.07
TIMED_BYTES = 64 << 20  # more than a cache holds; a model with less is not timed


def pad_slow_counts(matrices: list[Linear], dtype: torch.dtype) -> None:
    """Set `padded_rows` of packed matrices to the result of `find_padding` for the first ones."""
    timed: list[Linear] = []
    num_bytes = 0
    for matrix in matrices:
        matrix.padded_rows = {}
        if num_bytes < TIMED_BYTES:
            timed.append(matrix)
            num_bytes += matrix.packed_memory[1]
    if num_bytes >= TIMED_BYTES:
        padding = find_padding(timed, dtype)
        logger.info("slow numbers of rows in packed products are padded: %s", padding or "none is")
        for matrix in matrices:
            matrix.padded_rows = padding


def find_padding(timed: list[Linear], dtype: torch.dtype) -> dict[int, int]:
    """Return the row count to compute instead of each slow one, from an earlier timing on such a
    machine, or timed now."""
    shapes = [tuple(matrix.shape) for matrix in timed]
    machine = processor(), torch.__version__, torch.get_num_threads()
    key = blake2b(repr((machine, dtype, shapes, COUNTS)).encode(), digest_size=16)
    kept = cache_folder() / f"row-padding-{key.hexdigest()}.json"
    try:
        return {int(n): padded for n, padded in json.loads(kept.read_text()).items()}
    except (OSError, ValueError):
        padding = slow_counts(time_counts(timed, dtype))
        if padding:  # time again: a count must be slow twice
            again = slow_counts(time_counts(timed, dtype))
            padding = {n: padded for n, padded in padding.items() if again.get(n) == padded}
    handle, made = tempfile.mkstemp(dir=kept.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(padding, file)
    os.replace(made, kept)
    return padding


@torch.inference_mode()
def time_counts(matrices: list[Linear], dtype: torch.dtype) -> dict[int, list[float]]:
    """Return the seconds of all products, by row count, timed in turns."""
    widths = {matrix.shape[1] for matrix in matrices}
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(NUM_REPEATS):
        for count, taken in times.items():
            x = {width: torch.ones(count, width, dtype=dtype) for width in widths}
            start = time.perf_counter()
            for matrix in matrices:
                matrix.product(x[matrix.shape[1]])
            taken.append(time.perf_counter() - start)
    return times


def slow_counts(times: dict[int, list[float]]) -> dict[int, int]:
    """Return the larger count for each slow one. A count that was not timed counts as being as fast
    as the faster one of its neighbours."""

    def gains(padded: int, count: int) -> bool:
        one, other, limit = times[padded], times[count], 1 - MIN_GAIN
        is_faster = statistics.median(one) < limit * statistics.median(other)
        return is_faster and min(one) < limit * min(other)

    padding = {}
    for below, above in pairwise(sorted(times)):
        for n in range(below + 1, above + 1):
            peers = {above} if n == above else {below, above}
            larger = [padded for padded in sorted(times) if padded >= n]
            found = (p for p in larger if all(gains(p, count) for count in peers))
            if (padded := next(found, None)) is not None:
                padding[n] = padded
    return padding
