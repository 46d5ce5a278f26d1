"""Tables of prose: a row is several lines, and each line begins with a word that names its field.

The first names the row; without it, a row is named as the one above. A blank line ends a row, an
indented line continues the one above, and `#` begins a remark. Text from such a table is printed
in Chinese if the terminal's language is Chinese (`is_chinese`)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_CONTINUED = re.compile(r"\n {4,}")


@dataclass(frozen=True, slots=True)
class TextRow:
    head: str  # its name, the first line
    said: defaultdict[str, list[str]]  # word -> the texts after it, line by line

    def text(self, word: str, between: str = "\n") -> str:
        return between.join(self.said[word])


def read_rows(text: str, words: str) -> Iterator[TextRow]:
    """Yield the rows. Raises `ValueError` for a line that begins with none of `words`."""
    head, known = "", words.split()
    for row in re.split(r"\n\s*\n", text.strip()):
        lines = [x for x in _CONTINUED.sub(" ", row).split("\n") if not x.startswith("#")]
        if not lines:
            continue
        if lines[0].partition(" ")[0] not in known:
            head = lines.pop(0)
        said: defaultdict[str, list[str]] = defaultdict(list)
        for line in lines:
            word, _, rest = line.partition(" ")
            if word not in known:
                raise ValueError(f"{line!r} of {head!r} must begin with a known word")
            said[word].append(rest)
        yield TextRow(head, said)


def is_chinese() -> bool:
    """Whether the terminal's language is Chinese, determined as gettext does."""
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    return next(filter(None, map(os.environ.get, names)), "").startswith("zh")
