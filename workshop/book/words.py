"""List private words with what vLLM and SGLang call it: `python -m workshop.words [PATH ...]`.

`vocabulary.tsv` has the expressions, which are searched in docstrings, comments, pages and text
tables, without code. Without a path, prints only their number. Nothing fails because of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from common.tests.house import House
from workshop.book.quoted import ROOT, STRING_OR_COMMENT

VOCABULARY = Path(__file__).with_name("vocabulary.tsv")
CODE = re.compile(r"^ *(```|~~~).*?^ *\1 *$|`[^`]*`|\]\([^)]*\)|\w+(?:[._]\w+)+", re.M | re.S)
PYTHON = re.compile(rf"{STRING_OR_COMMENT.pattern}|[^\n]", re.S)
AROUND = 30  # characters around a hit that can make it an allowed use


class Row(NamedTuple):
    pattern: re.Pattern[str]
    allowed: str
    instead: str
    example: str


@cache
def vocabulary() -> list[Row]:
    lines = VOCABULARY.read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines if not line.startswith("#")]
    flags = [0 if key.endswith("C") else re.IGNORECASE for key, *_ in cells]
    return [Row(re.compile(cell[1], flag), *cell[2:]) for cell, flag in zip(cells, flags)]


def _blank(match: re.Match[str]) -> str:
    return re.sub("[^\n]", "`", match[0])


def _prose(match: re.Match[str]) -> str:
    is_prose = match[0].startswith(("#", '"""'))
    return CODE.sub(_blank, match[0]) if is_prose else _blank(match)


def hits(name: str, source: str) -> list[tuple[int, str, str]]:
    """Return line, expression and replacement of each."""
    blank = PYTHON.sub(_prose, source) if name.endswith(".py") else CODE.sub(_blank, source)
    prose, found = blank.replace("\n", " "), []
    for row in vocabulary():
        for hit in row.pattern.finditer(prose):
            around = prose[max(0, hit.start() - AROUND) : hit.end() + AROUND]
            if not (row.allowed and re.search(row.allowed, around)):
                found.append((source.count("\n", 0, hit.start()) + 1, hit[0].strip(), row.instead))
    return sorted(found)


def main(paths: Sequence[str]) -> None:
    house, found = House(ROOT), list[str]()
    for path in (p for p in house.files if p.suffix in (".py", ".md", ".txt")):
        name = house.name(path)
        if name.startswith(tuple(paths or [""])):
            all_hits = hits(name, path.read_text(encoding="utf-8"))
            found += [f"{name}:{line}: {word!r} -> {new}" for line, word, new in all_hits]
    print("\n".join(found) if paths else f"{len(found)} private words; with a PATH: which")


if __name__ == "__main__":
    main(sys.argv[1:])
