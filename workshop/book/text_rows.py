"""Tables that are prose: rows of lines, each with a word in front that says what it is.

A blank line ends a row, an indented line continues the one above, and `#` begins a remark. What is
printed from such a table is in Chinese where the terminal is (`is_chinese`)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_CONTINUED = re.compile(r"\n {4,}")


@dataclass(frozen=True, slots=True)
class TextRow:
    head: str  # the first line
    said: defaultdict[str, list[str]]  # word -> what stands behind it, line by line

    def text(self, word: str, between: str = "\n") -> str:
        return between.join(self.said[word])


def read_rows(text: str, words: str) -> Iterator[TextRow]:
    """Raises `ValueError` for a line that begins with none of `words`."""
    for row in re.split(r"\n\s*\n", text.strip()):
        lines = [x for x in _CONTINUED.sub(" ", row).split("\n") if not x.startswith("#")]
        if not lines:
            continue
        said: defaultdict[str, list[str]] = defaultdict(list)
        for line in lines[1:]:
            word, _, rest = line.partition(" ")
            if word not in words.split():
                raise ValueError(f"{line!r} of {lines[0]!r} must begin with a known word")
            said[word].append(rest)
        yield TextRow(lines[0], said)


def is_chinese() -> bool:
    """What the terminal speaks, as gettext finds it out."""
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    return next(filter(None, map(os.environ.get, names)), "").startswith("zh")
