"""The lines to read in each evening of `COURSE.md`: `make sync` counts them again.

A row names a file, or a class or function in it, and its number of lines, which stays until it is
wrong by more than `ROOM`; the last row has the sum. All else in the pages is written by hand:

    | [`block_pool.py`](02_paged_kv/block_pool.py) | 127 | ... |
    | **together** | **231** | |"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from workshop.book.path import count_lines
from workshop.practice.source_patch import ROOT, definitions

ROOM = 5
PAGES = (ROOT / "COURSE.md", ROOT / "COURSE.zh.md")
_ROW = re.compile(
    r"^(?P<front>\| \[`[\w.]+\.py(?:::(?P<symbol>[\w.]+))?`\]\((?P<path>[\w./]+)\) \| )"
    r"(?P<number>[\d,]+)(?= \|)"
)
_SUM = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| \*\*)(?P<number>[\d,]+)(?=\*\* \|)")


def lines_of(path: Path, symbol: str | None) -> int:
    """Return the number of lines of a file, or of `Class`, `Class.method` or `function` in it.
    Raises `LookupError`."""
    if symbol is None:
        return count_lines(path)
    for name, node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
        if name == symbol:
            return (node.end_lineno or 0) - node.lineno + 1
    raise LookupError(f"{path.name} has no {symbol}")


def counted(text: str) -> str:
    """Return the page with updated numbers."""
    total, lines = 0, []
    for line in text.splitlines(keepends=True):
        if row := _ROW.match(line):
            said = int(row["number"].replace(",", ""))
            own = lines_of(ROOT / row["path"], row["symbol"])
            own = said if abs(said - own) <= ROOM else own
            total += own
            line = f"{row['front']}{own:,}{line[row.end() :]}"
        elif row := _SUM.match(line):
            line = f"{row['front']}{total:,}{line[row.end() :]}"
            total = 0
        lines.append(line)
    return "".join(lines)


def sums(text: str) -> list[int]:
    """Return the number of lines to read in each evening."""
    rows = (_SUM.match(line) for line in text.splitlines())
    return [int(row["number"].replace(",", "")) for row in rows if row]
