"""The Chinese pages say what the English ones say, and ways to be out of step are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.translation import ROOT, chinese_pages, differences, sections

PAGES = chinese_pages()


def test_the_chinese_pages_are_in_step_with_the_english_ones() -> None:
    assert PAGES
    found = [fault for page in PAGES for fault in differences(page, ROOT)]
    assert not found, "\n".join(found)


ENGLISH = """# A book

[other](B.md#b-one) ![p](p.svg) `file.py::name` [third](C.md)

| 2,048 |
| --- |

    make demo  # 3 of 4
"""
CHINESE = """# 书
<!-- en: x -->

[另一页](B.zh.md#乙一) ![p](p.svg) `file.py::name` [三](C.md)（英文）

| 2,048 |
| --- |

    make demo  # 4 个里的 3 个
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("# 书", "# 书\n<!-- en: x -->\n\n## 节", "heading 2 is 'missing' in A.md"),
        ("<!-- en: x -->", "", "section '书' (A.md, 'A book') has no digest"),
        ("的 3 个", "的 5 个", "other code blocks"),
        ("2,048", "2,049", "other numbers in tables: '2,048' in English"),
        ("B.zh.md#乙一", "B.md#b-one", "links to B.md, though B.zh.md is there"),
    ],
)
def test_a_fault_of_the_chinese_page_is_found(old, new, message, tmp_path: Path) -> None:
    pages = {"A.md": ENGLISH, "A.zh.md": CHINESE.replace(old, new, 1), "C.md": "# C\n"}
    pages |= {"B.md": "# B\n\n## B one\n", "B.zh.md": "# 乙\n\n## 乙一\n"}
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = differences(tmp_path / "A.zh.md", tmp_path)
    assert [message in fault for fault in found] == [True] * bool(message), found


def test_anchors_are_those_of_github() -> None:
    text = "# 1. `a_b.py::C.d`: it's (x)\n\n## Two\n\n## Two\n\n## 三、读，写\n\n## A - B\n"
    expected = ["1-a_bpycd-its-x", "two", "two-1", "三读写", "a---b"]
    assert [section.anchor for section in sections(text)] == expected
