"""Exercises: exhibits of the museum and tasks of the course, from one format.

    1.1 The title                                a task's number, and the title; see `exhibits.py`
    example rectangles                           a function of `examples.py`; or none
    zh 50a411deedc2 ...                          the digest of the English texts when they were
    zh_symptom ...                               translated, the title, and the others in Chinese

An example imports everything when it is called, so that it gets the swapped module. A recorded run
shows most exhibits, and a failing test the others.

                                 the module    the named tests
    unchanged                    ours          pass
    a bug or typical mistake     a copy        fail
    a task's blank               a copy        fail

`test_exercises.py` checks all of this. The Chinese texts are shown if the terminal's language is
Chinese (`LANGUAGE=zh` sets that anywhere). `text_rows.py` reads such tables.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from workshop.book.text_rows import TextRow, is_chinese, read_rows
from workshop.practice import examples
from workshop.practice.renames import renamed_in_words

# The words of a row that have texts, and so a translation.
TEXTS = ("title", "symptom", "cause", "lesson", "watch", "nothing", "write", "hint", "mistake")


@dataclass(frozen=True, slots=True)
class Exercise:
    english: TextRow
    chinese: TextRow

    @property
    def title(self) -> str:
        return self.english.text("title")

    @property
    def words(self) -> TextRow:
        """The texts in the terminal's language."""
        return renamed_row(self.chinese if is_chinese() else self.english, self.names_now())

    def names_now(self) -> dict[str, str]:
        """Return the names of its function that changed since its texts were written."""
        return {}

    @property
    def digest(self) -> str:
        """The digest of the English texts."""
        said = [[" ".join(text.split()) for text in self.english.said[word]] for word in TEXTS]
        return sha256(repr(said).encode()).hexdigest()[:12]

    @property
    def example(self) -> Callable[[], Iterator[str]] | None:
        return getattr(examples, self.english.text("example") or "-", None)


def renamed_row(row: TextRow, names: dict[str, str]) -> TextRow:
    """Return the texts with the new names in backticks, and where a whole text is code."""
    if not names:
        return row
    said = {word: [renamed_in_words(x, names) for x in texts] for word, texts in row.said.items()}
    return TextRow(row.head, defaultdict(list, said))


def read_exercises(table: Path, words: str) -> Iterator[tuple[TextRow, TextRow]]:
    """Yield each row of the table, and its Chinese texts."""
    chinese = " ".join(f"zh_{word}" for word in TEXTS)
    for row in read_rows(table.read_text(encoding="utf-8"), f"{words} zh {chinese}"):
        digest, _, title = row.text("zh").partition(" ")
        row.said.update(title=[re.sub(r"^\d\.\d ", "", row.head)], en=[digest], zh_title=[title])
        for word in ("write", "zh_write"):  # a blank line between two, unless both are indented
            text = "\n\n".join(row.said[word])
            row.said[word] = re.sub(r"(?m)^( .*\n)\n(?= )", r"\1", text).splitlines()
        texts = {word: row.said[f"zh_{word}"] for word in TEXTS}
        yield row, TextRow(row.head, defaultdict(list, texts))
