"""List private words with what vLLM and SGLang call it: `python -m workshop.words [PATH ...]`.

`vocabulary.tsv` has the expressions, which are searched in docstrings, comments, pages and text
tables, without code. Without a path, prints only their number. Nothing fails because of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.tests.house import House
from workshop.book.quoted import ROOT, STRING_OR_COMMENT

VOCABULARY = Path(__file__).with_name("vocabulary.tsv")
CODE = re.compile(r"^ *(```|~~~).*?^ *\1 *$|`[^`]*`|\]\([^)]*\)|\w+(?:[._]\w+)+", re.M | re.S)
AROUND = 30  # characters around a hit that can make it an allowed use


def hits(name: str, source: str) -> Iterator[str]:
    """Yield what is replaced by what in a page, or in a module's docstrings and comments."""
    if name.endswith(".py"):
        found = (match[0] for match in STRING_OR_COMMENT.finditer(source))
        source = "\n\n".join(text for text in found if text.startswith(("#", '"""')))
    prose = CODE.sub("`", source).replace("\n", " ")
    for line in VOCABULARY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            key, pattern, allowed, instead, *_ = line.split("\t")
            flags = 0 if key.endswith("C") else re.IGNORECASE
            for hit in re.finditer(pattern, prose, flags):
                around = prose[max(0, hit.start() - AROUND) : hit.end() + AROUND]
                if not (allowed and re.search(allowed, around)):
                    yield f"{name}: {around!r}: {hit[0].strip()!r} -> {instead}"


def main(paths: Sequence[str]) -> None:
    house = House(ROOT)
    texts = [path for path in house.files if path.suffix in (".py", ".md", ".txt")]
    texts = [path for path in texts if house.name(path).startswith(tuple(paths or [""]))]
    found = [hit for p in texts for hit in hits(house.name(p), p.read_text(encoding="utf-8"))]
    print("\n".join(found) if paths else f"{len(found)} private words; with a PATH: which")


if __name__ == "__main__":
    main(sys.argv[1:])
