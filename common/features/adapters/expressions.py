"""Regular expressions from a downloaded file, matched with a time limit.

An expression of ten characters, such as `(a|aa)+c`, can keep a matcher that backtracks busy for
years. `regex` matches as `re` does, takes a limit, and lets other threads run.

See 04_scheduler/beyond/ADAPTERS.md#how-is-a-mixed-batch-computed"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import regex

TIMEOUT_S = 1.0


def matched_by(
    error_prefix: str,
    method: str,
    patterns: Sequence[str],
    names: Collection[str],
    around: tuple[str, str] = ("", ""),  # put around each pattern
) -> list[list[str]]:
    """Return, for each pattern, the names that `method` ("match" or "fullmatch") matches. Raises
    `regex.error` for an invalid pattern, and `ValueError` that begins with `error_prefix` if
    matching takes longer than `TIMEOUT_S` in all."""
    end = time.monotonic() + TIMEOUT_S
    found: list[list[str]] = []
    for pattern in patterns:
        match = getattr(regex.compile(pattern.join(around)), method)
        try:
            found.append([n for n in names if match(n, timeout=_left(end), concurrent=True)])
        except TimeoutError:
            raise ValueError(
                f"{error_prefix} must match the names of the model's matrices within "
                f"{TIMEOUT_S:g} s, got {pattern[:200]!r}"
            ) from None
    return found


def _left(end: float) -> float:
    return max(end - time.monotonic(), 1e-6)
