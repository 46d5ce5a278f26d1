"""Derived text is as `make sync` leaves it, and numbers are carried over."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book import sync
from workshop.book.sync import in_step
from workshop.book.translation import sections


def test_there_is_nothing_to_renew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that can be renewed without running code: quotations, the museum, rooms.
    Tables, notebooks and Chinese pages have their own tests."""
    stale: list[Path] = []

    def compare(page: Path, text: str) -> None:
        if page.read_text(encoding="utf-8") != text:
            stale.append(page)

    monkeypatch.setattr(sync, "_write", compare)
    assert list(sync.renew_pages()) == []
    assert stale == [], "run: make sync"


ENGLISH = """# A page

Words.

```python file=a.py symbol=f
x = {code}
```

| name | tok/s |
|---|---:|
| one | {n} of 20 |
| two | {m}, **8** |

<!-- table:made -->
By `{command}`, 8 of {m} s.
<!-- /table:made -->
"""
CHINESE = """# 一页
<!-- en: {digest} -->

文字。

```python file=a.py symbol=f
x = 1
```

| 名字 | tok/s |
|---|---:|
| 一 | 20 里的 5 |
| 二 | 7，**8** |

由 `make a` 生成，7 秒里的 8 秒。
"""
BEFORE = ENGLISH.format(code=1, n=5, m=7, command="make a")


def chinese(english: str) -> str:
    return CHINESE.format(digest=sections(english)[0].digest)


def test_numbers_are_carried_over_and_the_section_stays_in_step() -> None:
    after = ENGLISH.format(code=2, n=6, m="7.5", command="make a")
    found = in_step(BEFORE, after, chinese(BEFORE))
    expected = chinese(after)
    for old, new in (("的 5", "的 6"), ("7，", "7.5，")):
        expected = expected.replace(old, new)
    assert found == expected
    assert in_step(after, after, found) == found


def test_what_wants_a_reader_is_left_to_one() -> None:
    page = chinese(BEFORE)
    words = BEFORE.replace("Words.", "Other words.").replace("5 of", "6 of")
    assert in_step(BEFORE, words, page) == page.replace("的 5", "的 6")  # the digest is as it was
    assert in_step(BEFORE, f"{BEFORE}\n## More\n", page) == page
