"""Each private word of the list is found, in text and not in code."""

from __future__ import annotations

import pytest

from workshop.book.words import Row, hits, vocabulary


@pytest.mark.parametrize("row", vocabulary(), ids=lambda row: row.example)
def test_each_expression_finds_its_example(row: Row) -> None:
    assert row.instead in {instead for _, _, instead in hits("a.md", f"{row.example}\n")}


def test_docstrings_comments_and_pages_are_searched_without_their_code() -> None:
    source = (
        '"""A seat is free for\never."""\n\nx = "anew"  # nobody, but `seats` and nobody.name\n'
    )
    assert hits("a.py", source) == [
        (1, "for ever", "forever"),
        (1, "seat", hits("a.md", "seat")[0][2]),
        (4, "nobody", hits("a.md", "nobody")[0][2]),
    ]
    page = (
        "# A page\n\n```\nguess\n```\n* [a](anew.md) `rung`\n* A server behind a proxy.\n\nanew\n"
    )
    assert [(line, word) for line, word, _ in hits("a.md", page)] == [(9, "anew")]
