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


def prose_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield offset and text of each docstring and comment, and of each paragraph of a page."""
    if not name.endswith(".py"):
        blank = CODE.sub(lambda match: re.sub("[^\n]", "`", match[0]), source)
        yield from (
            (match.start(), match[0]) for match in re.finditer(r"\S.*?(?:\n\n|\Z)", blank, re.S)
        )
        return
    for match in STRING_OR_COMMENT.finditer(source):
        mark = 3 if match[0].startswith('"""') else 1
        if mark == 3 or match[0][0] == "#":
            text = match[0][mark:].removesuffix('"""')
            yield match.start() + mark, CODE.sub(lambda code: "`" * len(code[0]), text)


def hits(name: str, source: str) -> list[tuple[int, str, str]]:
    """Return line, expression and replacement of each."""
    found = []
    for offset, text in prose_of(name, source):
        line = source.count("\n", 0, offset) + 1
        for row in vocabulary():
            for hit in row.pattern.finditer(text.replace("\n", " ")):
                around = text[max(0, hit.start() - AROUND) : hit.end() + AROUND]
                if not (row.allowed and re.search(row.allowed, around)):
                    at = line + text.count("\n", 0, hit.start())
                    found.append((at, hit[0].strip(), row.instead))
    return sorted(found)


def main(paths: Sequence[str]) -> None:
    house, number = House(ROOT), 0
    for path in (p for p in house.files if p.suffix in (".py", ".md", ".txt")):
        name = house.name(path)
        found = hits(name, path.read_text(encoding="utf-8"))
        number += len(found)
        if any(f"{name}/".startswith(f"{asked.rstrip('/')}/") for asked in paths):
            print("\n".join(f"{name}:{line}: {word!r} -> {new}" for line, word, new in found))
    if not paths:
        print(f"{number} private words; python -m workshop.words PATH lists them")


if __name__ == "__main__":
    main(sys.argv[1:])
