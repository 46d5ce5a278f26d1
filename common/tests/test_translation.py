"""The Chinese pages say what the English ones say."""

from __future__ import annotations

from workshop.book.translation import ROOT, chinese_pages, differences, sections

PAGES = chinese_pages()


def test_the_chinese_pages_are_in_step_with_the_english_ones() -> None:
    assert PAGES
    found = [fault for page in PAGES for fault in differences(page, ROOT)]
    assert not found, "\n".join(found)


def test_anchors_are_those_of_github() -> None:
    text = "# 1. `a_b.py::C.d`: it's (x)\n\n## Two\n\n## Two\n\n## 三、读，写\n\n## A - B\n"
    expected = ["1-a_bpycd-its-x", "two", "two-1", "三读写", "a---b"]
    assert [section.anchor for section in sections(text)] == expected
