"""The reading list, the tasks and the minutes of each evening of `COURSE.md`:
`python -m workshop.tasks --write`.

A row of a table names a file, or a class or function in it, and its number of lines. The last row
has the sum. The numbers are updated from the source where they are wrong by more than `ROOM`
lines; the rest of the row, in either language, is written by hand:

    | [`block_pool.py`](02_paged_kv/block_pool.py) | 127 | ... |
    | [`request.py::Request`](01_batching/request.py) | 104 | ... |
    | **together** | **231** | |

These tables are the only list of files to read, and their order. The head of each chapter follows
that order, with its own words.

The minutes are derived, too, from the tasks: for each task, for an evening's tasks together, for
the evenings from the shortest to the longest, and for all parts of an evening together:

    | `make task N=1.1` | When has a request ended? | `Request.append_output_token` | 10 | easy |
    | **together** | | | **65** | |

    | 4 | do | 55–77 | ... |
    | | **together** | **165–187** | |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from workshop.book.path import count_lines
from workshop.practice.source_patch import ROOT, definitions
from workshop.practice.tasks.course import EVENINGS, minutes_of, task_numbered

ROOM = 5  # a number of lines stays until it is wrong by more
PAGES = (ROOT / "COURSE.md", ROOT / "COURSE.zh.md")
_ROW = re.compile(
    r"^(?P<front>\| \[`[\w.]+\.py(?:::(?P<symbol>[\w.]+))?`\]\((?P<path>[\w./]+)\) \| )"
    r"(?P<number>[\d,]+)(?= \|)"
)
# A chapter: 1. `small_paging.py`: what it is        and of what the evening does not read: * `...`
_ITEM = re.compile(r"^(?:\d+\.|\*) `(\w+\.py)`(.*)\n", re.MULTILINE)
_ITEMS = re.compile(f"(?:{_ITEM.pattern})+", re.MULTILINE)
_SUM = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| \*\*)(?P<number>[\d,]+)(?=\*\* \|)")


_TASK = re.compile(
    r"^(?P<front>\| `make task N=(?P<task>[\d.]+)` \|[^|]+\|[^|]+\| )(?P<number>\d+)(?= \|)"
)
_TASKS = re.compile(r"^(?P<front>\| \*\*[^*|]+\*\* \| +\| +\| \*\*)(?P<number>\d+)(?=\*\* \|)")
_PART = re.compile(r"^(?P<front>\| \d \| [^|]+ \| )(?P<number>\d+(?P<range>–\d+)?)(?= \|)")
_PARTS = re.compile(r"^(?P<front>\| +\| \*\*[^*|]+\*\* \| \*\*)(?P<number>\d+–\d+)(?=\*\* \|)")


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
    minutes = [minutes_of(evening) for evening in EVENINGS]
    total, least, most, lines = 0, 0, 0, []  # since the last sum
    for line in text.splitlines(keepends=True):
        number = ""
        if row := _ROW.match(line):
            said = int(row["number"].replace(",", ""))
            own = lines_of(ROOT / row["path"], row["symbol"])
            if abs(said - own) <= ROOM:
                own = said
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
    """Return the number of lines to read in each evening."""
    rows = (_SUM.match(line) for line in text.splitlines())
    return [int(row["number"].replace(",", "")) for row in rows if row]


def paths_of_evenings() -> dict[int, list[str]]:
    """The paths of files by evening number, each once, in the order of the evening's table."""
    text = PAGES[0].read_text(encoding="utf-8")
    parts = re.split(r"^## Evening (\d).*$", text, flags=re.MULTILINE)
    rows = (map(_ROW.match, part.splitlines()) for part in parts[2::2])
    found = [[row["path"] for row in of_one if row] for of_one in rows]
    return {int(number): list(dict.fromkeys(f)) for number, f in zip(parts[1::2], found)}


def files_of_evenings() -> dict[int, list[str]]:
    """The names of files by evening number, without folders."""
    found = paths_of_evenings().items()
    return {number: [Path(path).name for path in paths] for number, paths in found}


def with_head(text: str, first: list[str]) -> str:
    """Return a chapter's page with the numbered files of its evening, then the rest of its root."""
    head, mark, rest = text.partition("\n## 1.")
    said = dict(_ITEM.findall(head))
    numbered = enumerate((name for name in first if name in said), 1)
    others = [f"* `{name}`{words}\n" for name, words in said.items() if name not in first]
    lists = ["".join(f"{i}. `{name}`{said[name]}\n" for i, name in numbered), "".join(others)]
    places = list(_ITEMS.finditer(head))
    assert len(places) == 2 if others else len(places) >= 1, (
        f"{text[:40]!r} has {len(places)} lists"
    )
    for place, items in reversed(list(zip(places, lists))):
        head = head[: place.start()] + items + head[place.end() :]
    return head + mark + rest


def derived() -> Iterator[tuple[Path, str]]:
    """Yield each page that depends on the tables, with its new text."""
    for page in PAGES:
        if page.is_file():
            yield page, counted(page.read_text(encoding="utf-8"))
    for name in ("README.md", "README.zh.md"):
        for number, files in files_of_evenings().items():
            (page,) = ROOT.glob(f"0{number}_*/{name}")
            yield page, with_head(page.read_text(encoding="utf-8"), files)


def write() -> None:
    for page, text in derived():
        page.write_text(text, encoding="utf-8")
