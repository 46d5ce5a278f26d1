"""List private words with what vLLM and SGLang call it: `python -m workshop.words [PATH ...]`.

`vocabulary.tsv` has the expressions, which are searched in docstrings, comments, pages and text
tables, without code. Without a path, prints only their number. Nothing fails because of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from common.tests.house import House
from workshop.book.quoted import ROOT, STRING_OR_COMMENT

VOCABULARY = Path(__file__).with_name("vocabulary.tsv")
CODE = re.compile(r"^ *(```|~~~).*?^ *\1 *$|`[^`]*`|\]\([^)]*\)|\w+(?:[._]\w+)+", re.M | re.S)
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


def prose_of(name: str, source: str) -> str:
    """Return a page, or a module's docstrings and comments, in one line: the rest is zeros."""
    if not name.endswith(".py"):
        return _without_code(source)
    parts, end = [], 0
    for match in STRING_OR_COMMENT.finditer(source):
        if match[0].startswith(("#", '"""')):
            parts += ["\0" * (match.start() - end), _without_code(match[0])]
            end = match.end()
    return "".join(parts)


def _without_code(text: str) -> str:
    return CODE.sub(lambda code: "`" * len(code[0]), text).replace("\n", " ")


def hits(name: str, source: str) -> Iterator[str]:
    """Yield place, expression and replacement of each."""
    prose = prose_of(name, source)
    for row in vocabulary():
        for hit in row.pattern.finditer(prose):
            around = prose[max(0, hit.start() - AROUND) : hit.end() + AROUND]
            if not (row.allowed and re.search(row.allowed, around)):
                line = source.count("\n", 0, hit.start()) + 1
                yield f"{name}:{line}: {hit[0].strip()!r} -> {row.instead}"


def main(paths: Sequence[str]) -> None:
    house, number = House(ROOT), 0
    for path in (p for p in house.files if p.suffix in (".py", ".md", ".txt")):
        found = list(hits(house.name(path), path.read_text(encoding="utf-8")))
        number += len(found)
        if house.name(path).startswith(tuple(paths)):
            print("\n".join(found))
    if not paths:
        print(f"{number} private words; python -m workshop.words PATH lists them")


if __name__ == "__main__":
    main(sys.argv[1:])
