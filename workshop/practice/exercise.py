"""Exercises: exhibits of the museum and tasks of the course, from one format.

    1.1                                          how it is named; an exhibit: its English title
    example examples_batching endings            a module of `examples/`, and a function in it
    ...                                          see `exhibits.py` and `course.py`
    en 50a411deedc2                              the digest of the English texts when ...
    zh_title ...                                 ... they were translated: as `title`, in Chinese

The example is a small function that uses our module as a caller would and returns the result in a
few lines of text. It imports everything when it is called, so that it gets the swapped module.
Each task has one. A recorded run shows most exhibits, and an example the others.

                                 the module    the example      the named tests
    unchanged                    ours          one text         pass
    a bug or typical mistake     a copy        another text     fail
    a task's blank               a copy                         fail

`test_exercises.py` checks all of this. The Chinese texts are shown if the terminal's language is
Chinese (`LANGUAGE=zh` sets that anywhere). `text_rows.py` reads such tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from workshop.book.text_rows import TextRow, is_chinese, read_rows

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
        return self.chinese if is_chinese() else self.english

    @property
    def digest(self) -> str:
        """The digest of the English texts."""
        said = [[" ".join(text.split()) for text in self.english.said[word]] for word in TEXTS]
        return sha256(repr(said).encode()).hexdigest()[:12]

    @property
    def example(self) -> Callable[[], str]:
        module, _, function = self.english.text("example").partition(" ")
        return getattr(import_module(f"workshop.practice.examples.{module}"), function)


def read_exercises(table: Path, words: str) -> Iterator[tuple[TextRow, TextRow]]:
    """Yield each row of the table, and its Chinese texts. An exhibit's title is its head."""
    chinese = " ".join(f"zh_{word}" for word in TEXTS)
    for row in read_rows(table.read_text(encoding="utf-8"), f"{words} en {chinese}"):
        row.said["title"] = row.said["title"] or [row.head]
        texts = {word: row.said[f"zh_{word}"] for word in TEXTS}
        yield row, TextRow(row.head, defaultdict(list, texts))
