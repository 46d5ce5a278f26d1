"""Each private word of the list is found, in text and not in code."""

from __future__ import annotations

from workshop.book.words import hits, vocabulary


def test_words_are_found_in_text_and_not_in_code() -> None:
    for row in vocabulary():
        assert row.instead in {instead for _, _, instead in hits("a.md", f"{row.example}\n")}
    source = '"""A seat\never."""\n\nx = "anew"  # nobody, but `seats` and nobody.name\n'
    assert [(n, word) for n, word, _ in hits("a.py", source)] == [(1, "seat"), (4, "nobody")]
    page = "# A page\n\n```\nguess\n```\n* [a](anew.md) `rung`\n\nanew\n"
    assert [(n, word) for n, word, _ in hits("a.md", page)] == [(8, "anew")]
