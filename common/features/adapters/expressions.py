"""Regular expressions from a downloaded file, matched in a process that can be ended.

Python's `re` backtracks: an expression of ten characters, such as `(a|a)*b`, can keep it busy for
years. In the meantime it holds the interpreter's lock, so that no other thread runs and no signal
is handled.

See 04_scheduler/beyond/ADAPTERS.md#how-is-a-mixed-batch-computed"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence

TIMEOUT_S = 1  # of processor time
_MAX_WAIT_S = 20.0  # seconds of elapsed time, if the processor is busy with other work
_IS_PLAIN = re.compile(r"[\w.-]*")  # cannot backtrack
_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({TIMEOUT_S}, {TIMEOUT_S}))
method, expressions, names = json.load(sys.stdin)
match = getattr(re, method)
json.dump([[name for name in names if match(e, name)] for e in expressions], sys.stdout)
"""


def matched_by(
    error_prefix: str,
    method: str,
    patterns: Sequence[str],
    names: Collection[str],
    around: tuple[str, str] = ("", ""),  # put around each pattern
) -> list[list[str]]:
    """Return, for each pattern, the names that `re.<method>` matches. Raises `re.error` for an
    invalid pattern, and `ValueError` that begins with `error_prefix` if matching takes too long."""
    expressions = [pattern.join(around) for pattern in patterns]
    for expression in expressions:
        re.compile(expression)
    if all(_IS_PLAIN.fullmatch(pattern) for pattern in patterns):
        match = getattr(re, method)
        return [[name for name in names if match(e, name)] for e in expressions]
    given = json.dumps([method, expressions, list(names)])
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    try:
        done = subprocess.run(
            program, input=given, capture_output=True, text=True, timeout=_MAX_WAIT_S
        )
        has_ended = done.returncode < 0  # the limit ends it by a signal
    except subprocess.TimeoutExpired:
        has_ended = True
    if has_ended:
        shown = ", ".join(repr(p if len(p) <= 200 else f"{p[:200]} ...") for p in patterns[:3])
        raise ValueError(
            f"{error_prefix} must match the names of the model's matrices within {TIMEOUT_S} s, "
            f"got {shown}"
        )
    if done.returncode:
        raise ValueError(f"{error_prefix} cannot be matched: {done.stderr.strip()[-200:]}")
    return json.loads(done.stdout)
