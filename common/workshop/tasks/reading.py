"""What an evening of `COURSE.md` reads, and how long: `python -m common.workshop.tasks --write`.

A row of a table names a file, or a class or function of it, and says how many lines that has. The
last row adds them up. The numbers are put right from the source; everything else of the row, its
language too, is the page's own:

    | [`block_pool.py`](02_paged_kv/block_pool.py) | 127 | ... |
    | [`request.py::Request`](01_batching/request.py) | 104 | ... |
    | **together** | **231** | |
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from common.workshop.tools.path import count_lines
from common.workshop.tools.source_patch import ROOT

PAGES = (ROOT / "COURSE.md", ROOT / "COURSE.zh.md")
_ROW = re.compile(
    r"^(?P<front>\| \[`[\w.]+\.py(?:::(?P<symbol>[\w.]+))?`\]\((?P<path>[\w./]+)\) \| )"
    r"(?P<number>[\d,]+)(?= \|)"
)
_SUM = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| \*\*)(?P<number>[\d,]+)(?=\*\* \|)")


def lines_of(path: Path, symbol: str | None) -> int:
    """Of the file, or of `Class`, `Class.method` or `function` in it. Raises `LookupError`."""
    if symbol is None:
        return count_lines(path)
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for name in symbol.split("."):
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name
        ]
        if not inner:
            raise LookupError(f"{path.name} has no {symbol}")
        node = inner[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return (node.end_lineno or 0) - node.lineno + 1


def counted(text: str) -> str:
    """The page, with the numbers of today."""
    total, lines = 0, []
    for line in text.splitlines(keepends=True):
        if row := _ROW.match(line):
            number = lines_of(ROOT / row["path"], row["symbol"])
            total += number
            line = f"{row['front']}{number:,}{line[row.end() :]}"
        elif row := _SUM.match(line):
            line = f"{row['front']}{total:,}{line[row.end() :]}"
            total = 0
        lines.append(line)
    return "".join(lines)


def sums(text: str) -> list[int]:
    """Of each evening."""
    rows = (_SUM.match(line) for line in text.splitlines())
    return [int(row["number"].replace(",", "")) for row in rows if row]


def write() -> None:
    for page in PAGES:
        if page.is_file():
            page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
