"""The corpus of the shipped checkpoints: Python's own standard library.

Every Python installation carries the same few megabytes of clean, permissively licensed text: the
source of its standard library. Therefore a model can be trained on it offline, on any machine,
without a download. Files in `HELD_OUT` are not trained on; losses are reported on them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"

# Present in Python 3.10 to 3.13, and spread over the library's kinds of code.
HELD_OUT = (
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
    "asyncio/queues.py",
)

# Tests are not prose; the code pages are 120 near-copies of one table; the prefixes are of
# generated tables.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_uuid_")


def corpus(stdlib: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return `(training files, held-out files)`, each a map from the path inside the standard
    library to the text."""
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(name.parts) or name.name.startswith(_SKIPPED_PREFIXES):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            (held_out if name.as_posix() in HELD_OUT else train)[name.as_posix()] = text
    missing = set(HELD_OUT) - set(held_out)
    if missing:
        raise FileNotFoundError(f"held-out files not in {root}: {sorted(missing)}")
    return train, held_out
