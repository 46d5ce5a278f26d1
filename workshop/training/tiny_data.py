"""Text that the shipped checkpoints have not seen.

They were trained on the source of Python's own standard library: every installation carries these
few megabytes of clean, permissively licensed text. The files in `HELD_OUT` were left out: prompts
come from them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Present in Python 3.10 to 3.13, and spread over the library's kinds of code.
HELD_OUT = (
    "asyncio/queues.py",
    "bisect.py",
    "cmd.py",
    "contextlib.py",
    "csv.py",
    "graphlib.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)


def held_out() -> list[str]:
    """Return the texts of the files in `HELD_OUT`. Raises `FileNotFoundError`."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    return [(stdlib / name).read_text(encoding="utf-8") for name in HELD_OUT]
