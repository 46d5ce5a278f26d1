"""List private words with what vLLM and SGLang call it: `python -m workshop.words [PATH ...]`.

`vocabulary.tsv` has the expressions, which are searched in modules, pages and text tables, without
what is in backticks or code blocks. Without a path, prints only their number. Nothing fails because
of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.tests.house import House
from workshop.book.path import ROOT

VOCABULARY = Path(__file__).with_name("vocabulary.tsv")
CODE = re.compile(r"^ *(```|~~~).*?^ *\1 *$|`[^`]*`|\]\([^)]*\)|\w+(?:[._]\w+)+", re.M | re.S)
AROUND = 30  # characters around a hit that can make it an allowed use


def hits(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, expression and replacement of each."""
    prose = CODE.sub(lambda code: re.sub("[^\n]", "`", code[0]), source).replace("\n", " ")
    for line in VOCABULARY.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, pattern, allowed, instead, _ = line.split("\t")
        for hit in re.finditer(pattern, prose, 0 if name.endswith("C") else re.IGNORECASE):
            around = prose[max(0, hit.start() - AROUND) : hit.end() + AROUND]
            if not (allowed and re.search(allowed, around)):
                yield source.count("\n", 0, hit.start()) + 1, hit[0].strip(), instead


def main(paths: Sequence[str]) -> None:
    house = House(ROOT)
    found = [
        f"{house.name(path)}:{line}: {word!r} -> {instead}"
        for path in house.files
        if path.suffix in (".py", ".md", ".txt")
        if house.name(path).startswith(tuple(paths or [""]))
        for line, word, instead in hits(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) if paths else f"{len(found)} private words; with a PATH: which")


if __name__ == "__main__":
    main(sys.argv[1:])
