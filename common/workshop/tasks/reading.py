"""What an evening of `COURSE.md` reads and writes, and how long that takes:
`python -m common.workshop.tasks --write`.

A row of a table names a file, or a class or function of it, and says how many lines that has. The
last row adds them up. The numbers are put right from the source; everything else of the row, its
language too, is the page's own:

    | [`block_pool.py`](02_paged_kv/block_pool.py) | 127 | ... |
    | [`request.py::Request`](01_batching/request.py) | 104 | ... |
    | **together** | **231** | |

So are the minutes, from the tasks: of each task, of an evening's tasks together, of the evenings
from the shortest to the longest, and of all parts of an evening together:

    | `make task N=1.1` | When has a request ended? | `Request.append_output_token` | 10 | easy |
    | **together** | | | **65** | |

    | 4 | do | 55–77 | ... |
    | | **together** | **165–187** | |
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from common.workshop.tasks.course import EVENINGS, minutes_of, task_numbered
from common.workshop.tools.path import count_lines
from common.workshop.tools.source_patch import ROOT

PAGES = (ROOT / "COURSE.md", ROOT / "COURSE.zh.md")
_ROW = re.compile(
    r"^(?P<front>\| \[`[\w.]+\.py(?:::(?P<symbol>[\w.]+))?`\]\((?P<path>[\w./]+)\) \| )"
    r"(?P<number>[\d,]+)(?= \|)"
)
_SUM = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| \*\*)(?P<number>[\d,]+)(?=\*\* \|)")


_TASK = re.compile(
    r"^(?P<front>\| `make task N=(?P<task>[\d.]+)` \|[^|]+\|[^|]+\| )(?P<number>\d+)(?= \|)"
)
_TASKS = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| +\| +\| \*\*)(?P<number>\d+)(?=\*\* \|)")
_PART = re.compile(r"^(?P<front>\| \d \| [^|]+ \| )(?P<number>\d+(?P<range>–\d+)?)(?= \|)")
_PARTS = re.compile(r"^(?P<front>\| +\| \*\*[^*|]+\*\* \| \*\*)(?P<number>\d+–\d+)(?=\*\* \|)")


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
    minutes = [minutes_of(evening) for evening in EVENINGS]
    total, least, most, lines = 0, 0, 0, []  # since the last sum
    for line in text.splitlines(keepends=True):
        number = ""
        if row := _ROW.match(line):
            own = lines_of(ROOT / row["path"], row["symbol"])
            total, number = total + own, f"{own:,}"
        elif row := _TASK.match(line):
            task = task_numbered(row["task"])
            assert task is not None, row["task"]
            total, number = total + task.minutes, str(task.minutes)
        elif row := _SUM.match(line) or _TASKS.match(line):
            total, number = 0, f"{total:,}"
        elif row := _PART.match(line):
            number = f"{min(minutes)}–{max(minutes)}" if row["range"] else row["number"]
            least, most = least + int(number.split("–")[0]), most + int(number.split("–")[-1])
        elif row := _PARTS.match(line):
            least, most, number = 0, 0, f"{least}–{most}"
        lines.append(f"{row['front']}{number}{line[row.end() :]}" if row else line)
    return "".join(lines)


def sums(text: str) -> list[int]:
    """Of each evening."""
    rows = (_SUM.match(line) for line in text.splitlines())
    return [int(row["number"].replace(",", "")) for row in rows if row]


def write() -> None:
    for page in PAGES:
        if page.is_file():
            page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
