"""The Chinese pages say what the English ones say, and each way to be out of step is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workshop.book.translation import (
    ROOT,
    chinese_pages,
    differences,
    older,
    sections,
    sections_of,
)

PAGES = chinese_pages()


def test_there_are_chinese_pages() -> None:
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_chinese_page_is_in_step_with_the_english_one(page: Path) -> None:
    found = differences(page)
    assert not found, "\n".join(found)


# -- each way to be out of step is found

ENGLISH = """# A book

[中文](A.zh.md) [part](#the-part) [other](B.md#b-one) [far](https://x.org/#a)

## The `part`

![a picture](figures/p.svg) Words that
are `file.py::name`.

<!-- table:t -->
| n | what |
| --- | --- |
| 2,048 | 3 of 4 |

Made by `make t` in 7 s.
<!-- /table:t -->

```python
x = 1
```

```
make demo  # 3 of 4
```

[A third page](C.md) has no Chinese one.

### The part

    a block of code
"""
CHINESE = """# 书
<!-- en: {0} -->

[English](A.md) [部分](#部分)，[另一页](B.zh.md#乙一)和[远处](https://x.org/#a)

## `部分`
<!-- en: {1} -->

一句话，`file.py::name`。![图](figures/p.svg)

<!-- table:t -->
| n | 是什么 |
| --- | --- |
| 2,048 | 4 个里的 3 个 |

`make t` 用 7 s 做成。
<!-- /table:t -->

```python
x = 1
```

```
make demo  # 4 个里的 3 个
```

[第三页](C.md)（英文）没有中文的。

### 小节
<!-- en: {2} -->

    a block of code
"""


def write_pair(root: Path, english: str = ENGLISH, chinese: str = CHINESE) -> Path:
    (root / "A.md").write_text(english, encoding="utf-8")
    (root / "B.md").write_text("# B\n\n## B one\n", encoding="utf-8")
    (root / "C.md").touch()
    (root / "B.zh.md").write_text("# 乙\n\n## 乙一\n", encoding="utf-8")
    digests = [section.digest for section in sections(ENGLISH)]
    page = root / "A.zh.md"
    page.write_text(chinese.format(*digests), encoding="utf-8")
    return page


def test_a_pair_in_step_has_no_differences(tmp_path: Path) -> None:
    assert differences(write_pair(tmp_path), tmp_path) == []
    assert chinese_pages(tmp_path) == [tmp_path / "A.zh.md", tmp_path / "B.zh.md"]


def test_a_chinese_page_shows_the_picture_with_chinese_words_where_there_is_one(
    tmp_path: Path,
) -> None:
    page = write_pair(tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "p.zh.svg").touch()
    (found,) = differences(page, tmp_path)
    assert "other pictures" in found and "figures/p.zh.svg" in found
    page = write_pair(tmp_path, chinese=CHINESE.replace("figures/p.svg", "figures/p.zh.svg"))
    assert differences(page, tmp_path) == []


CHINESE_FAULTS = {
    "a heading is missing": ("### 小节\n", "", "heading 3 is '### The part' in A.md and 'missing'"),
    "a heading too many": ("### 小节", "### 一\n\n### 小节", "heading 4 is 'missing'"),
    "another level": ("### 小节", "## 小节", "'### The part' in A.md and '## 小节' in A.zh.md"),
    "no digest": ("<!-- en: {2} -->", "", "section '小节' (A.md, 'The part') has no digest"),
    "code": ("x = 1", "x = 2", r"other code blocks: ('python', 'x = 1\n') in English"),
    "a language of code": ("```python", "```", "other code blocks"),
    "indented code": ("    a block", "    b block", "other code blocks"),
    "a command": ("make demo", "make watch", r"other code blocks: ('', 'make demo  # 3 of 4"),
    "a number in words": ("的 3 个\n```", "的 5 个\n```", "other code blocks"),
    "an English page": ("B.zh.md#乙一", "B.md#b-one", "links to B.md, though B.zh.md is there"),
    "a page without a mark": ("（英文）", "", "links to C.md, which is in English"),
    "a number in a table": ("2,048", "2,049", "other numbers in tables: '2,048' in English"),
    "a row of a table": (
        "| 2,048 | 4 个里的 3 个 |\n",
        "",
        "other numbers in tables: 2 in English",
    ),
    "a table": ("| --- | --- |\n", "", "other numbers in tables: 1 in English, 0 in Chinese"),
    "a command that a script wrote": ("`make t`", "`make u`", "a script writes: `make t`"),
    "a number that a script wrote": ("用 7 s", "用 8 s", "a script writes: 7"),
    "a picture": ("figures/p.svg", "figures/q.svg", "other pictures"),
    "a link": ("(https://x.org/#a)", "(https://y.org)", "other links"),
    "the way to the other page": ("[English](A.md)", "[English](A.zh.md)", "other links"),
    "an anchor": ("#乙一", "#乙", "other links"),
    "a name of code": ("`file.py::name`", "`file.py::other`", "other names of code"),
}


@pytest.mark.parametrize("name", CHINESE_FAULTS)
def test_a_fault_of_the_chinese_page_is_found(name: str, tmp_path: Path) -> None:
    old, new, message = CHINESE_FAULTS[name]
    assert CHINESE.count(old) == 1 or name == "indented code"
    found = differences(write_pair(tmp_path, chinese=CHINESE.replace(old, new)), tmp_path)
    assert len(found) == 1 and message in found[0], found


def test_a_page_that_renders_no_english_one_is_compared_in_nothing_but_its_links(
    tmp_path: Path,
) -> None:
    page = write_pair(tmp_path, "# A book\n", CHINESE.replace("{0}", "none"))
    assert differences(page, tmp_path) == []
    page.write_text(page.read_text(encoding="utf-8").replace("（英文）", ""), encoding="utf-8")
    (found,) = differences(page, tmp_path)
    assert "links to C.md, which is in English" in found


def test_a_changed_english_section_is_named_with_its_new_digest_and_is_no_fault(
    tmp_path: Path,
) -> None:
    changed = ENGLISH.replace("Words that", "Other words that")
    page = write_pair(tmp_path, changed)
    found = older(page, tmp_path)
    assert differences(page, tmp_path) == []
    new = sections(changed)[1].digest
    assert len(found) == 1 and "A.zh.md, section '部分' (A.md, 'The part')" in found[0]
    assert f"<!-- en: {new} -->" in found[0]


@pytest.mark.parametrize(
    "same",
    [
        ENGLISH.replace("Words that\nare", "Words\nthat are"),
        ENGLISH.replace("\n\n## The", "\n\n\n## The"),
        ENGLISH.replace("| 2,048 | 3 of 4 |", "| 4,096 | 3 of 4 |"),
    ],
    ids=["a line breaks elsewhere", "an empty line more", "a script writes another number"],
)
def test_what_a_digest_does_not_see(same: str) -> None:
    assert same != ENGLISH
    assert [s.digest for s in sections(same)] == [s.digest for s in sections(ENGLISH)]


@pytest.mark.parametrize("old", ["Words", "x = 1", "`part`", "a picture", "block of code", "far"])
def test_what_a_digest_sees(old: str) -> None:
    changed = sections(ENGLISH.replace(old, "something else"))
    assert [s.digest for s in changed] != [s.digest for s in sections(ENGLISH)]


def test_a_page_without_its_english_one_and_text_before_a_heading(tmp_path: Path) -> None:
    page = tmp_path / "C.zh.md"
    page.write_text("# 丙\n", encoding="utf-8")
    assert differences(page, tmp_path) == ["C.zh.md renders C.md, which does not exist"]
    with pytest.raises(ValueError, match="a page must begin with a heading"):
        sections("Words.\n\n# A\n")


def test_anchors_are_those_of_github() -> None:
    text = "# 1. `a_b.py::C.d`: it's (x)\n\n## Two\n\n## Two\n\n## 三、读，写\n\n## A - B\n"
    expected = ["1-a_bpycd-its-x", "two", "two-1", "三读写", "a---b"]
    assert [section.anchor for section in sections(text)] == expected


def test_the_command_prints_one_digest_and_writes_nothing(tmp_path: Path) -> None:
    page = write_pair(tmp_path)
    before = page.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "workshop.translation", str(tmp_path / "A.md")]
    ran = subprocess.run([*command, "The part"], capture_output=True, text=True, cwd=ROOT)
    expected = [s.digest for s in sections_of(tmp_path / "A.md")][1:]
    assert ran.stdout.split("\n")[:-1] == [f"<!-- en: {digest} -->" for digest in expected]
    ran = subprocess.run([*command, "No part"], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 1 and "has no section 'No part'" in ran.stderr
    assert page.read_text(encoding="utf-8") == before
